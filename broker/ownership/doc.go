// Package ownership decides which broker serves a topic, and keeps the tenants,
// namespaces and partitioned topics that name it.
//
// A namespace's topics are spread by hash over a fixed number of bundles. A
// bundle has at most one owner: the broker whose lease holds the bundle's key in
// metadata. [Service] keeps this broker registered, claims bundles when a client
// needs them, and answers where any topic is served. [Namespaces] is the
// directory: what exists, under whose name, with how many partitions.
//
// # Ownership
//
// [Service.Acquire] hands out a [Claim]. Holding one is not enough: whatever
// changes or shows a topic's state first asks [Claim.Valid], which is false from
// the moment the lease could have run out, by this process' own monotonic clock,
// whether or not anything has noticed yet. A process that was stopped and
// continued therefore sends nothing on an old claim.
//
// # Rules that surprise
//
// The only thing that decides who owns a bundle is the compare-and-set on its
// key. The caches of owners and brokers, fed by watches, only make lookups fast:
// a stale one sends a client to a broker that sends it on.
//
// Which broker should take a free bundle is a rendezvous hash over the
// registered brokers. It is advice for lookups. A client that insists on another
// broker is served there: Acquire takes whatever is free.
//
// A claim ends in one of two orders. On a release the hooks given to OnRelease
// run first, while the claim is still valid, so that topics close cleanly; then
// it becomes invalid and the key goes. On a loss it is invalid first and the
// hooks run after, to throw away what was open. A bundle can be acquired again
// only once its hooks have returned.
//
// # Concurrency
//
// All methods are safe for concurrent use. Start begins one goroutine for the
// session and one for each watch; Close ends them and waits. A hook runs on a
// goroutine of its own for each bundle that was lost. No lock is held over I/O
// or a hook.
//
// # Not here
//
// Topics are package broker; the lease itself is metadata.Session. Bundles are
// never split or moved for load: that is a later room's work.
package ownership
