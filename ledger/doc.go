// Package ledger is the vocabulary of the house: the names of ledgers and
// entries, the order among positions, and the errors that a caller of storage
// must tell apart.
//
// A ledger is an append-only run of entries kept by one Raft group of bookies.
// A topic (a managed ledger) is a list of ledgers; a [Position] is a place in
// that list.
//
// # Ownership
//
// An [Entry]'s bytes are immutable once the entry exists. They belong to the
// garbage collector: everybody may hold them, nobody may change them, and there
// is nothing to release.
//
// # Concurrency
//
// Everything here is a value or a constant and safe for concurrent use.
//
// # Not here
//
// Nothing here reads or writes. Storage is package bookie, reached by brokers
// through bookie/client; topics are package managedledger.
package ledger
