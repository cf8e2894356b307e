// Package raftlog replicates commands to a fixed set of state machines: one
// Raft group per state machine, many groups in one process and on one port.
//
// A [Node] is one bookie's membership in all groups of its cluster. It is opened
// on a directory that carries an [Identity]; [Format] makes the first one of a
// cluster, every other bookie starts on an empty directory and joins through a
// seed. A [Group] takes commands with [Group.Propose] on the node that leads it,
// and gives them, committed and in order, to its [Machine] on every node.
//
// # Identity, and why a wiped disk is somebody else
//
// Raft stays correct only as long as a member remembers what it promised. A
// disk that was wiped forgot, so it gets a new UUID, and with it a new Raft
// ServerID (name@diskUUID) and a new address: it joins as a non-voter, becomes a
// voter once it has caught up, and only then is its former self removed. A
// connection to the former self is refused by package internal/handshake. A
// laggard therefore never finds a quorum among members with no memory.
//
// # What is durable when
//
// A command is answered once a quorum has it on disk in its log, and this node
// applied it. A machine need not be durable at each Apply: its own durable
// index may trail, and after a restart raftlog replays the log from there. A
// snapshot is only a pointer, {index, term, configuration}, written after
// Machine.Checkpoint; behind it the log is cut. A member whose log was cut away
// under it gets the machine's own stream, which is staged in a file, synced,
// and only then installed; a crash in between is finished at the next open,
// before Raft starts. Commands that a machine already holds are dropped by
// raftlog, not by the machine.
//
// # Disk failures
//
// A failed or hanging write of the log or of term and vote ends the process
// through Config.Fatal: a hanging disk keeps its leadership otherwise, and a
// failed sync may have lost more than the write that failed. Nothing is retried.
//
// # Ownership
//
// Bytes given to Propose are immutable from then on; raftlog, the log cache and
// the senders share them. Command.Data is borrowed by the machine and immutable
// too; it may be kept.
//
// # Concurrency
//
// All methods of Node and Group are safe for concurrent use. Every goroutine is
// started by Open, or by a restart of a group, and ends before [Node.Close]
// returns: the mux and its hellos, one joiner, one balancer and one pause guard
// per node; per group one supervisor, one notifier, and per Raft instance a
// proposer, a completer, a leadership loop and Raft's own. Callbacks of Propose
// run on the completer, callbacks of Watch on the notifier: they must not block.
//
// Lock order: Group.mu, then pipeline.mu. Neither is held while a callback runs
// or while hashicorp/raft is called in a way that can wait.
//
// # Not here
//
// What a command means: package bookie (ledgers) and package metadata/server
// (keys) decide that in their machines. The wire service that carries a
// [JoinRequest] is in package internal/rpc. The formats of identity, snapshot
// pointer and stream are drawn in docs/formats/identity.md and snapshot.md.
package raftlog
