// Package broker serves topics to clients that speak Pulsar's binary protocol.
//
// A [Broker] accepts connections, opens topics that this node owns, stores what
// producers send and delivers it to consumers. A topic is a managed ledger with
// its producers and subscriptions; it is opened when a client first needs it and
// closed when this broker may no longer serve it.
//
// # The life of a publish
//
// The connection's reader checks the payload's checksum, takes room for it (see
// conn.reserve, which is how producers are slowed down) and appends it to the
// managed ledger, untouched. When the entry is stored, the receipt goes out if
// this broker still owns the topic. If it does not, or the append failed, the
// producer is closed instead and its client sends again where it finds the topic:
// what is in doubt is never answered.
//
// # The life of a delivery
//
// Each subscription has one owner loop. What happens to it (a consumer came, a
// FLOW, an ACK, a connection drained) is work in its mailbox; the loop does that,
// then reads what its consumers have room for, hands over the whole batch, and
// reads again. It never waits for a connection or for storage. Whatever it waits
// for is one [WhyIdle], each of which ends by a poke that cannot be lost or at a
// time that the loop's timer knows.
//
// # Slow clients
//
// What waits to be written to one connection is bounded in bytes. Over the bound
// its consumers get nothing more until it drained to half; others go on. Replies
// have a bound of their own, at which the connection is not read any more.
//
// # Ownership
//
// Entries are immutable: the bytes that came from a producer's socket are those
// that are stored, cached and sent. A connection's reader goroutine ends the
// connection and waits for its writer and its slow requests. Broker.Close waits
// for all connections, loops and openings.
//
// # Lock order
//
// producer.mu before topic.mu, conn.mu and outgoing.mu, each of which is held
// over nothing that locks. A subscription has no lock: its loop owns it.
//
// # Not here
//
// Who owns a topic is broker/ownership; where entries are and what is
// acknowledged is managedledger; frames are protocol; HTTP is admin.
package broker
