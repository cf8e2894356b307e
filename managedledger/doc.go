// Package managedledger is one topic's log: a list of ledgers that is appended
// to at one end, read by cursors, and trimmed at the other end.
//
// A [Factory] opens managed ledgers by name. A [ManagedLedger] is appended to
// with [ManagedLedger.Append] and read through a [Reader]: a cursor joined to
// the entry cache and the bookies.
//
// # One owner
//
// Opening takes a managed ledger over. It fences the last ledger, which fixes
// its end; writes the new list under compare-and-set; and writes every cursor's
// record once. Whoever had it open before finds out at the next append, list
// change or cursor save, and is fenced: everything fails with [ErrFenced] and
// [ManagedLedger.Fenced] is closed. An entry is never appended to a ledger that
// this handle did not create.
//
// # Appending
//
// Adds are answered in the order of Append, exactly once. An add is confirmed,
// then answered, then readers are woken. A failed write does not fail its add:
// the ledger is fenced to learn its exact end, the adds up to there are
// answered, the rest is sent in order to a new ledger. If storage cannot be
// reached, adds wait. Bound the bytes at the source: see PendingBytes.
//
// # Reading
//
// [Reader.TryRead] never blocks on I/O. It returns what is in memory from the
// read position on, or [ErrWouldBlock], and then [Reader.Ready] fires. What is
// not in memory is read by the ordered worker of that ledger: the worker decides
// and merges equal reads, the I/O runs beside it, and reads settle in whatever
// order they return. Nothing may rely on that order.
//
// Publishing and cached reading share no queue and no lock.
//
// # Ownership
//
// Entries are immutable and belong to the garbage collector. A [Batch] also
// holds a permit, its share of the bytes that readers may have in flight;
// [Batch.Release] gives it back.
//
// # Lock order
//
// ManagedLedger.metaTurn and then cursorTurn (channels, held over I/O) before
// completing before mu; a source's before Reader.mu before the cursor's, the
// waiters', the sources' and the permits' own. No mutex is held over I/O;
// completing is held over the callbacks of adds, none over those of reads.
//
// # Goroutines
//
// A managed ledger has none of its own while nothing is to be done. Switching
// ledgers, trimming and reading from bookies start some; Close waits for them.
// The factory has one for timers and the shared pool's; its Close ends them.
//
// # Not here
//
// What a position acknowledges is package cursor; what stays in memory is
// package entrycache; who is allowed to own a managed ledger is broker/ownership.
package managedledger
