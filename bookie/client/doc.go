// Package client is how a broker uses bookies: create, append, read, recover
// and delete ledgers. It finds leaders, sends again, and hides elections.
//
// # Appending
//
// [Client.Create] makes a ledger and returns its only [Writer]. Writers of one
// group share a stream to the group's leader. What waits is sent together; when
// the stream breaks or its leader steps down, everything unanswered is sent
// again to the next leader, in order, with the same epoch and entry ids. A bookie
// recognises what it has, so nothing is stored twice.
//
// An append ends as stored, or with an error that is final for its writer:
// [ledger.ErrFenced], [ledger.ErrClosed] and the like are certain,
// [ledger.ErrUnknownOutcome] says that the entry may be stored. Recover the ledger
// to learn its exact end.
//
// # Ownership
//
// Data handed to [Writer.Append] must not change afterwards. Data returned by
// [Client.Read] is immutable; entries of one read share memory.
//
// # Concurrency
//
// Client and Writer are safe for concurrent use. A client has one goroutine per
// group it appends to, one more while a stream is open, and one per writer while
// answers are being delivered. [Client.Close] ends and awaits them.
//
// # Not here
//
// What ledgers are for is the caller's business: package managedledger makes
// topics of them. How appended bytes in flight are bounded, too.
package client
