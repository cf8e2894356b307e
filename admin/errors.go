package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/magnetar-io/magnetar/broker"
	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/protocol"
)

// statusError is an answer that is decided already.
type statusError struct {
	code   int
	reason string
}

func (e *statusError) Error() string { return fmt.Sprintf("status %d: %s", e.code, e.reason) }

func refuse(code int, format string, args ...any) error {
	return &statusError{code, fmt.Sprintf(format, args...)}
}

// statuses says how each sentinel is told over HTTP; the first match counts. A
// reason is Pulsar's text where its clients compare it, else the error's own.
var statuses = []struct {
	err    error
	code   int
	reason string
}{
	{ownership.ErrNoSuchTenant, http.StatusNotFound, "Tenant does not exist"},
	{ownership.ErrNoSuchNamespace, http.StatusNotFound, "Namespace does not exist"},
	{ownership.ErrNotPartitioned, http.StatusNotFound, ""},
	{ownership.ErrExists, http.StatusConflict, ""},
	{ownership.ErrNotEmpty, http.StatusConflict, ""},
	{ownership.ErrInvalid, http.StatusPreconditionFailed, ""},
	{ownership.ErrNotReady, http.StatusServiceUnavailable, ""},
	{ownership.ErrClosed, http.StatusServiceUnavailable, ""},

	{broker.ErrTopicNotFound, http.StatusNotFound, "Topic not found"},
	{broker.ErrSubscriptionNotFound, http.StatusNotFound, "Subscription not found"},
	{broker.ErrConsumerNotFound, http.StatusNotFound, ""},
	{broker.ErrTopicInUse, http.StatusPreconditionFailed, ""},
	{broker.ErrConsumerBusy, http.StatusPreconditionFailed, ""},
	{broker.ErrProducerBusy, http.StatusPreconditionFailed, ""},
	{broker.ErrInvalidName, http.StatusPreconditionFailed, ""},
	{broker.ErrNotAllowed, http.StatusMethodNotAllowed, ""},
	{broker.ErrUnsupported, http.StatusMethodNotAllowed, ""},
	{broker.ErrTooMany, http.StatusTooManyRequests, ""},
	{broker.ErrBusy, http.StatusServiceUnavailable, ""},
	{broker.ErrClosed, http.StatusServiceUnavailable, ""},

	{protocol.ErrTopicName, http.StatusPreconditionFailed, ""},

	{ledger.ErrUnavailable, http.StatusServiceUnavailable, ""},
	{ledger.ErrUnknownOutcome, http.StatusServiceUnavailable, ""},
	{ledger.ErrFenced, http.StatusServiceUnavailable, ""},
	{context.DeadlineExceeded, http.StatusGatewayTimeout, ""},
	{context.Canceled, http.StatusServiceUnavailable, ""},
}

// status returns the code and the reason that tell of err.
func status(err error) (code int, reason string) {
	if decided, ok := errors.AsType[*statusError](err); ok {
		return decided.code, decided.reason
	}
	if tooLarge, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return http.StatusRequestEntityTooLarge, fmt.Sprintf("the body has more than %d bytes", tooLarge.Limit)
	}
	if _, elsewhere := errors.AsType[*ownership.NotOwnerError](err); elsewhere {
		return http.StatusServiceUnavailable, err.Error()
	}
	for _, s := range statuses {
		if errors.Is(err, s.err) {
			if s.reason != "" {
				return s.code, s.reason
			}
			return s.code, err.Error()
		}
	}
	return http.StatusInternalServerError, err.Error()
}

// reasonBody is the body of every error.
type reasonBody struct {
	Reason string `json:"reason"`
}

func writeReason(w http.ResponseWriter, code int, reason string) {
	writeJSON(w, code, reasonBody{reason})
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		code, body = http.StatusInternalServerError, []byte(`{"reason":"the answer cannot be written as JSON"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(body) // the client has gone; nobody is left to tell
}
