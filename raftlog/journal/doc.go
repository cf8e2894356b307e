// Package journal keeps the Raft logs of all groups of one bookie in one segment
// log, so that whatever waits to be made durable, of however many groups, costs
// one write and one sync.
//
// [Open] recovers a directory; [Journal.Group] is one group's raft.LogStore. The
// bytes are described in docs/formats/journal.md.
//
// # What an answer means
//
// StoreLogs and DeleteRange return nil once the change is on the disk. An error
// that wraps [ErrFailed] means that the disk failed and that the change may or
// may not be there: the journal takes nothing more, and the caller must end the
// process rather than go on. Any other error means that nothing was written.
//
// # Order and space
//
// The state of every group is what its records say in the order of the journal.
// Segments are given up oldest first and never otherwise, so a record that cuts
// a log lives at least as long as what it cuts. A log that rests in the oldest
// segment and would keep it for long is copied forward in relocation records,
// which carry the original index and term and are no new log.
//
// # Torn or damaged
//
// There is never more than one frame that is not known to be synced. Bytes that
// do not check, with a whole frame of the same use of the file behind them or
// below an offset known to be synced, are damage, and opening fails with a
// [DamageError]; otherwise they are the torn end of a write that was never
// answered, and are cut.
//
// # Concurrency
//
// All methods are safe for concurrent use. One goroutine, the committer, begun by
// Open and ended by Close, does all writing; callers wait for it. Reads run on
// the caller's goroutine and hold no lock during I/O.
//
// # Not here
//
// Term and vote (package raftlog keeps them in raft-boltdb), the cache in front,
// the watchdog over hanging writes, and the state machines' entries.
package journal
