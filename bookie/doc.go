// Package bookie is the storage node: the state machine of a ledger group, the
// files its entries rest in, and the gRPC services in front of it.
//
// A [Store] is one bookie's disk: segment files that all groups share and one
// index. [Store.Machine] gives the state machine of one group, which package
// raftlog feeds with committed commands. [Register] puts the services Ledgers
// and Cluster on a gRPC server.
//
// # What is durable when
//
// The Raft log is what makes an append durable. A machine writes the entries of
// applied commands to the current segment without syncing and keeps what it
// learned (ledger facts, and the runs that say where entries are) in memory, as
// a layer over the index. [Machine.Checkpoint] syncs the segments and then
// writes facts, runs and the applied index to the index in one synced batch. So
// the index is always exactly a checkpoint; after a crash the Raft log is
// replayed from there, and what earlier replays left in segments is dead.
//
// # Decisions
//
// Whether a command succeeds is decided when it is applied, from replicated
// state alone, so every replica decides alike. Capacity (a full disk, a full
// queue) is refused before a command is proposed, never at apply. A machine
// that cannot do what its peers do (a failed write, a failed sync, a command of
// an unknown version) calls StoreConfig.Fatal and applies nothing more.
//
// # Absent, damaged, not yet
//
// A read verifies record header, segment, ledger, entry and checksum. What
// fails is [ledger.ErrDamaged], never absent. Only the group's leader, after a
// read barrier, says that an entry or a ledger does not exist.
//
// # Concurrency
//
// Store, Machine and the services are safe for concurrent use, but one goroutine
// per group calls Machine.Apply and Machine.Install. Lock order: a machine's
// checkpoint lock, its state lock, the segments' sync lock, the segments' lock.
// Each proposer is one goroutine per group, each append stream two; Service.Close
// ends and awaits the former, stopping the gRPC server the latter.
//
// # Not here
//
// Consensus, snapshots and membership are package raftlog. Finding a leader and
// sending again are bookie/client. A bookie knows nothing of topics.
package bookie
