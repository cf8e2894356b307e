// Package assemble builds the programs out of the rooms: it listens, opens things
// in order, and closes them in reverse. cmd/bookie and cmd/broker use one half
// each; cmd/magnetar's standalone uses both in one process, so that it runs the
// same code as a cluster.
//
// # Order
//
// Ports are opened first, because a port in use is the commonest mistake and the
// cheapest to report. The HTTP server answers from then on, so that whoever waits
// for a program can read on /health what it waits for itself.
//
//	bookie:  HTTP, inter-node port, identity, store, Raft groups, gRPC services
//	broker:  HTTP, Pulsar port, connections to bookies, metadata, ownership, topics
//
// A broker that finds no metadata leader waits for one: programs may be started in
// any order.
//
// # Concurrency
//
// [StartBookie] and [StartBroker] return once the program serves; Close may be
// called once, from any goroutine, and waits for everything that was started.
//
// # Not here
//
// What the keys mean belongs to the rooms that register them. Flags and exit codes
// are cmd/bookie's, cmd/broker's and cmd/magnetar's.
package assemble
