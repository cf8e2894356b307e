// Package admin serves HTTP: Pulsar's REST interface (v2 paths), lookups,
// health, and metrics.
//
// A call about one topic is answered by the broker that owns it; any other
// broker answers 307 with that broker's address, as Pulsar does. A call about a
// partitioned topic is answered where it arrives, which asks the partitions'
// owners over the same interface. docs/rest.md lists the paths.
//
// # Rules that surprise
//
// Topic names come percent-encoded in one path segment; routing happens on the
// escaped path, so that a name may hold anything. Repeated slashes count as one,
// because Pulsar's own clients write them.
//
// Errors are {"reason": "..."} with Pulsar's status codes and, for what clients
// compare, Pulsar's words.
//
// # Bounds
//
// A request's body, its duration, its headers and the number of requests under
// way are bounded; see [Config] and the constants in server.go.
//
// # Concurrency
//
// [Handler] is safe for concurrent use. It starts goroutines only for the
// duration of a request, and [Handler.Close] drops idle connections to other
// brokers.
//
// # Not here
//
// Nothing is decided here. What exists is package broker/ownership, what happens
// to a topic is package broker. There is no authentication yet: programs bind
// this to loopback unless told otherwise.
package admin
