// Package wireclient is a lean client of the binary protocol: it publishes to a
// topic, reads through a subscription, and survives lost connections.
//
// A [Client] holds the connections, one to each broker by default, shared by its
// [Producer]s and [Consumer]s. Each of them works on one topic (or one
// partition), finds the broker that owns it, and finds it again, with backoff,
// when the broker or the connection goes.
//
// # Ownership
//
// Bytes passed to Send belong to the client until the callback; bytes of a
// received [Message] belong to the caller.
//
// # Rules that surprise
//
// A producer keeps each message until its receipt and sends all that it holds
// again, in order, after a reconnection. The broker may then hold a message
// twice. A message that failed by timeout or Close may have been stored.
//
// A consumer forgets its queue when its connection goes: the broker delivers
// again whatever was not acknowledged. Acknowledgements are not kept for later.
//
// Callbacks run on the connection's read goroutine: they must not block, and
// must not call a method that waits for the broker.
//
// # Bounds
//
// A producer holds at most MaxPending messages and MaxPendingBytes; SendAsync
// waits for room. A consumer has at most QueueSize messages on their way or
// waiting (a batch may exceed that by its size). A connection's write queue holds
// what its producers hold, and small commands; a broker that stops reading is cut
// off by the keep-alive.
//
// # Concurrency
//
// All methods are safe for concurrent use. Each connection has a read and a write
// goroutine, each producer and consumer one or two of its own. Close of the client
// ends and awaits them all. A lock is never held while waiting; where two are
// taken, the producer's or consumer's comes before the connection's.
//
// # Not here
//
// No compression, no partition routing, no schema: the command line and package
// geo add what they need. Compressed messages arrive as they are, marked.
package wireclient
