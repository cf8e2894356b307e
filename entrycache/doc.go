// Package entrycache keeps the newest entries of every managed ledger in memory,
// so that a consumer that is keeping up never reads from a bookie.
//
// A [Cache] is shared by the whole broker and bounded in bytes. Each managed
// ledger has one [Ring] of it: its tail. This is tier 0; it holds only what was
// appended through this broker, never what was read back.
//
// # Ownership
//
// [Ring.Put] copies nothing: the bytes are immutable from then on. [Ring.Get]
// hands out the same bytes; the garbage collector frees them when the last
// holder forgets them, so there is nothing to release.
//
// # Eviction
//
// Entries leave in blocks of a few, and in one of two ways. Those behind every
// cursor leave when the managed ledger says so ([Ring.DropBefore]). When the
// cache is over its budget, the blocks that were begun first go, whichever
// managed ledger they belong to. An entry larger than the whole budget, and any
// entry if the budget is 0, is not kept at all.
//
// # Rules that surprise
//
// A Put is visible to every reader before it returns. So the managed ledger puts
// an entry and then moves its confirmed position, and a reader that looks up to
// that position finds it, unless it was evicted.
//
// A ring is written by one goroutine at a time, in the order of positions.
// Anything else is refused and is simply not cached; gaps are allowed and miss.
//
// # Concurrency
//
// Readers take no lock. One mutex in the Cache orders blocks that come and go; a
// Put holds it for a few pointer writes, plus the evictions that it causes. The
// package starts no goroutine.
//
// # Not here
//
// The cache never fetches. A miss goes back to package managedledger, which
// alone knows where an entry lives.
package entrycache
