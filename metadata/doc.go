// Package metadata is the replicated key-value store that the cluster keeps its
// facts in: which ledgers a topic has, who owns a bundle, which brokers live.
//
// A [Store] offers compare-and-set puts, sequential puts, ranges, watches and
// leases. [NewClient] is the Store over gRPC, kept by Raft group 0; a [Session]
// is a lease that renews itself and knows, without asking anybody, how long it
// may still be relied on.
//
// # Versions
//
// The store has one revision; every applied command raises it by one. A key's
// [Version] is the revision at which it was last written, so it never repeats,
// not even for a key that was deleted and made again.
//
// # Ownership
//
// Values are immutable: a caller may not change the bytes it put after the call
// began, nor those of a [KV] it was given; it may keep either for ever.
//
// # Retries
//
// The client resends a change whose outcome is unknown by itself until its
// context ends: each carries a client id and a sequence number, by which the
// state machine recognises a repeat and answers it as it did the first time.
// Only when the context ends first does the caller see [ErrUnknownOutcome]; it
// then has to read the key to know.
//
// # Concurrency
//
// All methods are safe for concurrent use. A watch has one goroutine, which ends
// with the watch's context; a Session has one, which ends with Close or with the
// loss of the lease.
//
// # Not here
//
// The state machine and its service are package metadata/server. What the keys
// mean is known only to those who write them. metadata/metadatatest holds a
// Store for tests and the suite that every Store must pass.
package metadata
