package ownership

import (
	"errors"
	"fmt"
)

// What a caller must tell apart. The error that wraps one says which name or
// bundle it is about.
var (
	// ErrNoSuchTenant: create the tenant first.
	ErrNoSuchTenant = errors.New("tenant does not exist")

	// ErrNoSuchNamespace: create the namespace first.
	ErrNoSuchNamespace = errors.New("namespace does not exist")

	// ErrNotPartitioned: there is no partitioned topic of this name.
	ErrNotPartitioned = errors.New("partitioned topic does not exist")

	// ErrExists reports that what should be created is there already.
	ErrExists = errors.New("already exists")

	// ErrNotEmpty reports that what should be deleted still holds something.
	// Delete that first, or ask with force.
	ErrNotEmpty = errors.New("not empty")

	// ErrInvalid reports a name or a number that can never be right.
	ErrInvalid = errors.New("not valid")

	// ErrNotReady reports that this broker cannot say or take ownership just now:
	// it has no valid session, or a former owner's lease has yet to run out. Try
	// again within a few seconds.
	ErrNotReady = errors.New("broker not ready")

	// ErrClosed reports a call after Close. Ask another broker.
	ErrClosed = errors.New("ownership closed")
)

// NotOwnerError reports that another broker owns the bundle. Go there.
type NotOwnerError struct {
	Bundle string
	Broker BrokerInfo
}

// Error says which broker to ask.
func (e *NotOwnerError) Error() string {
	return fmt.Sprintf("bundle %s is served by broker %s at %s: look the topic up again", e.Bundle, e.Broker.ID, e.Broker.ServiceURL)
}
