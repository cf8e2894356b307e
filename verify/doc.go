// Package verify records what was published and what was delivered, and judges
// whether a messaging system kept its promises in between.
//
// A test or a load tool makes numbered, checksummed payloads with [Payload] and
// tells a [History] of each send, acknowledgement and delivery. [History.Judge]
// then gives exact counts and examples of every broken promise.
//
// # What is judged
//
//	lost          acknowledged, and never delivered
//	invented      delivered or acknowledged, and never sent
//	corrupt       delivered with other bytes than were sent
//	out of order  delivered for the first time after a later message of the same producer
//	duplicates    delivered again; counted apart, a violation only if asked
//
// A message that was sent and never acknowledged may be delivered or not. So may
// one whose send failed: after a broken connection the sender cannot know.
//
// A resend after a broken connection may store a message twice, and the second
// copy comes after later messages. That is a duplicate, not a reordering: only
// first deliveries have an order.
//
// # Ownership
//
// Nothing passed in is kept; payloads are reduced to a checksum. A message costs
// about 5 bytes, and one bit for each subscription that is judged.
//
// # Concurrency
//
// A History is safe for concurrent use and starts no goroutine. Call Send before
// the message is handed to the client, and the Delivered of one subscription in
// the order of receipt; else a judgement of order means nothing.
//
// # Not here
//
// Nothing here talks to a broker. Histories of a key-value store (metadata) are
// judged by Porcupine in that room's tests.
package verify
