// Package bookiepb is what crosses the wire between a bookie and its clients:
// the generated messages of service Ledgers, and entry frames.
//
// A frame is one entry's bytes behind its length and CRC32C. A list of frames
// has the same form in a request, in a Raft command, in a segment record and in
// a ledger stream (docs/formats/segment.md), so that an entry is copied from
// one to the next in one piece and checked anywhere.
//
// # Ownership
//
// [Next] and [Check] borrow their input; the data they hand out is a part of it.
//
// # Concurrency
//
// Everything here is a value or a function of its arguments.
package bookiepb

//go:generate go run -C ../../tools ./protogen bookie/bookiepb/bookie.proto
