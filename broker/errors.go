package broker

import (
	"context"
	"errors"

	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/managedledger"
	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// What a caller must tell apart. Each says what to do next; the error that wraps
// it says which topic, subscription or client it is about.
var (
	// ErrClosed reports that the broker, or the topic on it, is going away. Look
	// the topic up again.
	ErrClosed = errors.New("closed on this broker")

	// ErrTopicNotFound reports a topic that does not exist and was not to be
	// created.
	ErrTopicNotFound = errors.New("topic not found")

	// ErrSubscriptionNotFound reports a subscription that does not exist and was
	// not to be created.
	ErrSubscriptionNotFound = errors.New("subscription not found")

	// ErrConsumerNotFound reports a consumer id that this connection has not
	// subscribed, or no longer has. Subscribe first.
	ErrConsumerNotFound = errors.New("consumer not found")

	// ErrConsumerBusy reports a subscription that others use in a way that leaves
	// no place. Close their consumers first.
	ErrConsumerBusy = errors.New("subscription in use")

	// ErrProducerBusy reports a producer name that a living producer has. Choose
	// another name, or none.
	ErrProducerBusy = errors.New("producer name in use")

	// ErrTopicInUse reports a topic that cannot be deleted because clients are
	// connected. Disconnect them, or delete with force.
	ErrTopicInUse = errors.New("topic in use")

	// ErrNotAllowed reports a request that makes no sense here, whenever it is
	// repeated.
	ErrNotAllowed = errors.New("not allowed")

	// ErrUnsupported reports a part of Pulsar's protocol that this broker does not
	// serve.
	ErrUnsupported = errors.New("not supported by this broker")

	// ErrTooMany reports a bound that the peer has reached. Close something first.
	ErrTooMany = errors.New("too many")

	// ErrBusy reports a passing state, such as a seek under way. Try again.
	ErrBusy = errors.New("busy, try again")

	// ErrInvalidName reports a name of a producer, consumer or subscription that
	// can never be right.
	ErrInvalidName = errors.New("invalid name")
)

// serverErrors says how each sentinel is told to a client; the first match
// counts. Clients stop for good on some codes (TopicNotFound, ConsumerBusy,
// NotAllowedError and others), so those are never used for passing states.
var serverErrors = []struct {
	err  error
	code pulsarpb.ServerError
}{
	// This room's.
	{ErrTopicNotFound, pulsarpb.ServerError_TopicNotFound},
	{ErrSubscriptionNotFound, pulsarpb.ServerError_SubscriptionNotFound},
	{ErrConsumerNotFound, pulsarpb.ServerError_ConsumerNotFound},
	{ErrConsumerBusy, pulsarpb.ServerError_ConsumerBusy},
	{ErrProducerBusy, pulsarpb.ServerError_ProducerBusy},
	{ErrTopicInUse, pulsarpb.ServerError_NotAllowedError},
	{ErrNotAllowed, pulsarpb.ServerError_NotAllowedError},
	{ErrUnsupported, pulsarpb.ServerError_NotAllowedError},
	{ErrInvalidName, pulsarpb.ServerError_NotAllowedError},
	{ErrTooMany, pulsarpb.ServerError_TooManyRequests},
	{ErrBusy, pulsarpb.ServerError_ServiceNotReady},
	{ErrClosed, pulsarpb.ServerError_ServiceNotReady},

	// The wire's.
	{protocol.ErrTopicName, pulsarpb.ServerError_InvalidTopicName},
	{protocol.ErrChecksum, pulsarpb.ServerError_ChecksumError},
	{protocol.ErrMalformed, pulsarpb.ServerError_UnsupportedVersionError},

	// Ownership's.
	{ownership.ErrNoSuchTenant, pulsarpb.ServerError_TopicNotFound},
	{ownership.ErrNoSuchNamespace, pulsarpb.ServerError_TopicNotFound},
	{ownership.ErrNotPartitioned, pulsarpb.ServerError_TopicNotFound},
	{ownership.ErrExists, pulsarpb.ServerError_NotAllowedError},
	{ownership.ErrNotEmpty, pulsarpb.ServerError_NotAllowedError},
	{ownership.ErrInvalid, pulsarpb.ServerError_InvalidTopicName},
	{ownership.ErrNotReady, pulsarpb.ServerError_ServiceNotReady},
	{ownership.ErrClosed, pulsarpb.ServerError_ServiceNotReady},

	// The managed ledger's.
	{managedledger.ErrClosed, pulsarpb.ServerError_ServiceNotReady},
	{managedledger.ErrTerminated, pulsarpb.ServerError_TopicTerminatedError},
	{managedledger.ErrFenced, pulsarpb.ServerError_ServiceNotReady},
	{managedledger.ErrWouldBlock, pulsarpb.ServerError_ServiceNotReady},
	{managedledger.ErrReadPending, pulsarpb.ServerError_ServiceNotReady},
	{managedledger.ErrNotFound, pulsarpb.ServerError_TopicNotFound},
	{managedledger.ErrTooLarge, pulsarpb.ServerError_NotAllowedError},
	{managedledger.ErrTooManyReads, pulsarpb.ServerError_TooManyRequests},
	{managedledger.ErrBeyondEnd, pulsarpb.ServerError_NotAllowedError},
	{managedledger.ErrBehind, pulsarpb.ServerError_NotAllowedError},
	{managedledger.ErrResetting, pulsarpb.ServerError_ServiceNotReady},

	// Metadata's.
	{metadata.ErrNotFound, pulsarpb.ServerError_MetadataError},
	{metadata.ErrBadVersion, pulsarpb.ServerError_MetadataError},
	{metadata.ErrLeaseExpired, pulsarpb.ServerError_MetadataError},
	{metadata.ErrInvalid, pulsarpb.ServerError_MetadataError},

	// Storage's.
	{ledger.ErrFenced, pulsarpb.ServerError_ServiceNotReady},
	{ledger.ErrClosed, pulsarpb.ServerError_ServiceNotReady},
	{ledger.ErrNoSuchLedger, pulsarpb.ServerError_PersistenceError},
	{ledger.ErrNoSuchEntry, pulsarpb.ServerError_PersistenceError},
	{ledger.ErrNotYet, pulsarpb.ServerError_PersistenceError},
	{ledger.ErrDamaged, pulsarpb.ServerError_PersistenceError},
	{ledger.ErrUnknownOutcome, pulsarpb.ServerError_PersistenceError},
	{ledger.ErrGap, pulsarpb.ServerError_PersistenceError},
	{ledger.ErrUnavailable, pulsarpb.ServerError_PersistenceError},

	// Time ran out while metadata or storage was asked.
	{context.DeadlineExceeded, pulsarpb.ServerError_MetadataError},
	{context.Canceled, pulsarpb.ServerError_ServiceNotReady},
}

// serverError returns the code under which a client is told of err.
func serverError(err error) pulsarpb.ServerError {
	if _, elsewhere := errors.AsType[*ownership.NotOwnerError](err); elsewhere {
		return pulsarpb.ServerError_ServiceNotReady
	}
	for _, e := range serverErrors {
		if errors.Is(err, e.err) {
			return e.code
		}
	}
	return pulsarpb.ServerError_UnknownError
}

// lookupError is [serverError] for answers to lookups, in which ServiceNotReady
// would cost the client its connection.
func lookupError(err error) pulsarpb.ServerError {
	if code := serverError(err); code != pulsarpb.ServerError_ServiceNotReady {
		return code
	}
	return pulsarpb.ServerError_MetadataError
}

// passing reports whether err may be gone after a moment.
func passing(err error) bool {
	switch serverError(err) {
	case pulsarpb.ServerError_ServiceNotReady, pulsarpb.ServerError_MetadataError, pulsarpb.ServerError_PersistenceError:
		return true
	default:
		return false
	}
}
