// Package protocoltest is an in-memory broker for tests of clients: it keeps
// entries in a slice, forgets everything at the end, and breaks on demand.
//
// A [Cluster] is what its [Broker]s share: topics, subscriptions, and which
// broker owns a topic. It is as simple as a client's tests allow and no measure of
// what Pulsar or Magnetar do.
//
// # Concurrency
//
// One lock guards a whole cluster. Each connection has a read and a write
// goroutine, which end when the connection or the broker is closed.
package protocoltest
