// Package rpc is how nodes talk to each other: connections, group leaders, and
// errors that keep their meaning across the wire.
//
// A [Pool] holds one gRPC connection per bookie and remembers who leads each
// Raft group. [Pool.Call] sends an idempotent request to a group's leader and
// follows the leader around until somebody answers or the context ends.
// [NewServer] makes the matching server.
//
// # Errors
//
// A [Failure] carries an error's kind and message. [Status] turns an error into
// a gRPC status with a Failure in its details, [FromStatus] turns it back into
// an error that errors.Is and errors.As recognise: the sentinels of package
// ledger, those that other rooms added with [RegisterKind], and [NotLeader].
//
// The rule that surprises: a connection that breaks after a request was written
// is an unknown outcome, never "unavailable", because unavailable promises that
// nothing was changed.
//
// # Concurrency
//
// All functions and methods are safe for concurrent use. The package starts
// goroutines only inside a call, and they end before it returns; gRPC's own end
// with [Pool.Close].
//
// # Not here
//
// The hello that opens a connection is package internal/handshake. What is
// asked of a bookie is in packages metadata and bookie/client.
package rpc
