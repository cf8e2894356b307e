// Package handshake opens every TCP connection between nodes of a cluster, and
// lets many services share one port.
//
// The side that dials says who it is, whom it wants and for what: a cluster
// name, a cluster id, its own node identity, the identity it expects to reach,
// and a [Service] with a group number. The side that listens answers with its
// own identity, or refuses with a sentence that names both sides, and closes.
// What is left after an accepted hello is a plain [net.Conn] on which no byte
// has been read too far.
//
// This is what keeps a node of another cluster, or a bookie whose disk was
// wiped, from being taken for the member that used to live at the same address.
// It proves nothing: a peer that lies is believed. Proof is the work of TLS or
// of an inter-node secret, below this layer.
//
// # Who is refused
//
//   - a different cluster name;
//   - a different cluster id, when both sides know theirs ("" is "not known yet");
//   - a wanted node that is not the one that listens ("" wants any);
//   - a service or group that the listener does not serve at this moment;
//   - another protocol version.
//
// # Ownership
//
// A [Mux] owns its listener, and each accepted connection until a listener of
// [Mux.Listener] hands it out; from then on the receiver closes it.
//
// # Concurrency
//
// All functions and methods are safe for concurrent use. [Mux.Serve] runs the
// accept loop on its caller and one goroutine per connection in its hello, which
// ends after [HelloTimeout] at the latest. [Mux.Close] waits for them.
//
// # Not here
//
// What is said after the hello: package raftlog speaks hashicorp/raft's
// protocol, package internal/rpc speaks gRPC. The bytes of a hello are drawn in
// docs/formats/hello.md.
package handshake
