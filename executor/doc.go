// Package executor runs tasks: in order, one at a time, on a [Strand]; or on
// whoever is free, on a [Pool].
//
// A strand is the ordered worker of one key, such as one ledger of one managed
// ledger. There is no table of workers and no hash: whoever needs an order owns
// a strand. An idle strand has no goroutine, so thousands of them cost only
// their memory.
//
// # Rules that surprise
//
// Admission is unbounded and Submit never blocks. Bound the bytes at the source
// of the work; a queue that blocks would deadlock a task that submits to its own
// strand.
//
// Tasks are interface values, so that an object which already exists (a request,
// a read) can be its own task and submitting it allocates nothing. [Func] adapts
// a closure where an allocation does not matter.
//
// A task that panics is counted and logged, and the next task runs. A task that
// calls runtime.Goexit ends its goroutine; another one takes the rest over.
//
// A task should not block: it delays the tasks behind it on its strand, or takes
// one of the pool's few workers away.
//
// # Concurrency
//
// Everything is safe for concurrent use. A strand's goroutine starts with the
// first task and ends when its queue is empty. A pool's goroutines start in
// [NewPool] and end in [Pool.Close]. Both Close methods wait; call neither from
// a task of the same strand or pool.
//
// # Not here
//
// No timers, no priorities, no results. A task that has an answer delivers it.
package executor
