// Package cursor is one reader's place in a managed ledger: what it has
// acknowledged, where it reads next, and how much is left.
//
// A [Cursor] holds the mark-delete position (everything at or before it is
// acknowledged), the entries acknowledged beyond it, and the read position. It
// does its arithmetic on a [Layout], an immutable picture of which entries
// exist, so that a position past the end of one ledger means the start of the
// next.
//
// # Ownership
//
// A durable cursor owns its record: it loads it through the [Store] that it is
// given, and nobody else may write it. A save that finds another version there
// means that a newer owner has taken over; the cursor tells so once and saves no
// more.
//
// # Rules that surprise
//
// Acknowledging changes memory at once and the record later: at most once per
// interval, and on [Cursor.Close]. After a crash, acknowledgements older than
// the interval stand and newer entries are delivered again. A position moves
// back only by [Cursor.Reset], which writes the record first.
//
// The backlog is counted, not estimated: entries after the mark-delete position
// less those acknowledged one by one. It cannot drift.
//
// A record holds at most [Options].MaxRanges ranges, those nearest the
// mark-delete position. The rest is kept in memory, counted in
// [Stats].UnsavedRanges, and delivered again after a crash.
//
// # Concurrency
//
// All methods are safe for concurrent use; one mutex guards a cursor and is
// never held across I/O. A goroutine runs only while there is something to save;
// Close waits for it.
//
// # Not here
//
// No bytes and no bookies: reading is package managedledger, which asks for the
// next run of entries with [Cursor.Next] and says with [Cursor.Advance] what it
// delivered.
package cursor
