package wireclient

import (
	"errors"

	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

var (
	// ErrClosed reports use of a client, producer or consumer after its Close.
	ErrClosed = errors.New("closed")

	// ErrTimeout reports a message without a receipt within the send timeout. It
	// may have been stored.
	ErrTimeout = errors.New("no receipt in time")

	// ErrDisconnected reports a request that was cut off, or that would have needed
	// a connection when there was none. It may have been carried out.
	ErrDisconnected = errors.New("not connected to the broker")

	// ErrMessageTooLarge reports a message that the broker or the producer's own
	// bound can never take.
	ErrMessageTooLarge = errors.New("message too large")

	// ErrEndOfTopic reports that the topic is terminated and read to its end.
	ErrEndOfTopic = errors.New("end of topic")
)

// ServerError is a broker's refusal.
type ServerError struct {
	Code    pulsarpb.ServerError
	Message string
	Broker  string // address
}

// Error names the code as Pulsar spells it.
func (e *ServerError) Error() string {
	return "broker " + e.Broker + " answers " + e.Code.String() + ": " + e.Message
}

// Permanent reports whether asking again cannot help, while nobody changes
// anything else.
func (e *ServerError) Permanent() bool {
	switch e.Code {
	case pulsarpb.ServerError_AuthenticationError, pulsarpb.ServerError_AuthorizationError,
		pulsarpb.ServerError_ConsumerBusy, pulsarpb.ServerError_ProducerBusy,
		pulsarpb.ServerError_ProducerBlockedQuotaExceededError, pulsarpb.ServerError_ProducerBlockedQuotaExceededException,
		pulsarpb.ServerError_UnsupportedVersionError, pulsarpb.ServerError_TopicNotFound,
		pulsarpb.ServerError_SubscriptionNotFound, pulsarpb.ServerError_TopicTerminatedError,
		pulsarpb.ServerError_InvalidTopicName, pulsarpb.ServerError_IncompatibleSchema,
		pulsarpb.ServerError_ConsumerAssignError, pulsarpb.ServerError_NotAllowedError,
		pulsarpb.ServerError_ProducerFenced:
		return true
	default:
		return false
	}
}

// lasting reports whether a reconnecting producer or consumer should give up. A
// name that is still taken is often our own connection's, not noticed dead yet.
func lasting(err error) bool {
	var s *ServerError
	if !errors.As(err, &s) {
		return errors.Is(err, ErrClosed)
	}
	switch s.Code {
	case pulsarpb.ServerError_ConsumerBusy, pulsarpb.ServerError_ProducerBusy,
		pulsarpb.ServerError_ProducerBlockedQuotaExceededError, pulsarpb.ServerError_ProducerBlockedQuotaExceededException:
		return false
	default:
		return s.Permanent()
	}
}

// permanent is lasting for the first attempt, whose caller waits for an answer.
func permanent(err error) bool {
	if s, ok := errors.AsType[*ServerError](err); ok {
		return s.Permanent()
	}
	return errors.Is(err, ErrClosed)
}
