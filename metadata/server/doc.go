// Package server keeps the metadata store: the state machine of Raft group 0 and
// the gRPC service in front of it.
//
// [Machine] is what raftlog drives: it decides each command when it is applied,
// keeps the whole state in memory, and writes it to one file at a checkpoint.
// [Engine] is the leader's side: it proposes changes, reads after a read barrier,
// feeds watches, and ends leases whose time is up. [Register] puts an Engine
// behind gRPC.
//
// # Determinism
//
// Applying reads no clock, draws no random number and iterates over no map. Time
// enters only through commands: the leader proposes to expire a lease, naming
// its id and revision, when the lease's deadline passed on the leader's own
// clock. A new leader gives every lease its whole TTL again.
//
// # Ownership
//
// The state is an immutable value; Apply makes the next one, sharing what did
// not change. Whoever holds one may read it for ever without a lock, so reads,
// checkpoints and transfers run beside Apply. Values of keys are shared by
// everybody and never changed.
//
// # Watches
//
// Applied changes enter a ring bounded in bytes. Each watch is a goroutine of its
// caller that copies from the ring; one that falls behind the ring starts over
// from the state. Apply never waits for a watch.
//
// # Concurrency
//
// Machine's Apply runs on the group's apply goroutine; everything else may run
// beside it. An Engine has one goroutine for leases, which ends with Close. Locks
// are never held across I/O, a channel or another room's call.
//
// # Not here
//
// Which replica leads and how commands are replicated is package raftlog. What
// the keys mean is unknown here.
package server
