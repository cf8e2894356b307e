package rpc

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/magnetar-io/magnetar/ledger"
)

// ErrInvalid reports a request that is wrong in itself: no retry can help.
var ErrInvalid = errors.New("invalid request")

// NotLeader reports that the node asked does not lead the group. Nothing was
// changed. Node and Addr name the leader as that node knows it, or are empty.
type NotLeader struct { //nolint:errname // reads rpc.NotLeader at every use
	Group uint32
	Node  string // identity, name@diskUUID
	Addr  string // host:port
}

// Error names the group and the leader, if one is known.
func (e *NotLeader) Error() string {
	if e.Addr == "" {
		return fmt.Sprintf("group %d: asked a node that does not lead it; no leader known", e.Group)
	}
	return fmt.Sprintf("group %d: asked a node that does not lead it; the leader is %s at %s", e.Group, e.Node, e.Addr)
}

// LeaderHint returns the leader's identity and address, "" when unknown.
func (e *NotLeader) LeaderHint() (node, addr string) { return e.Node, e.Addr }

// Unwrap makes a NotLeader an [ledger.ErrUnavailable]: nothing was changed.
func (e *NotLeader) Unwrap() error { return ledger.ErrUnavailable }

// leaderHinter is what any room's not-leader error offers.
type leaderHinter interface {
	error
	LeaderHint() (node, addr string)
}

// kinds pairs each wire kind with the sentinel that stands for it. Order
// matters: the first sentinel that an error wraps decides its kind. Contexts
// come last, because an error that wraps both an unknown outcome and a passed
// deadline must arrive as the former.
var kinds = struct {
	sync.RWMutex // guards all
	all          []kindOf
}{all: []kindOf{
	{Failure_FENCED, ledger.ErrFenced, codes.FailedPrecondition},
	{Failure_CLOSED, ledger.ErrClosed, codes.FailedPrecondition},
	{Failure_NO_SUCH_LEDGER, ledger.ErrNoSuchLedger, codes.NotFound},
	{Failure_NO_SUCH_ENTRY, ledger.ErrNoSuchEntry, codes.NotFound},
	{Failure_NOT_YET, ledger.ErrNotYet, codes.OutOfRange},
	{Failure_DAMAGED, ledger.ErrDamaged, codes.DataLoss},
	{Failure_GAP, ledger.ErrGap, codes.FailedPrecondition},
	{Failure_INVALID, ErrInvalid, codes.InvalidArgument},
	{Failure_UNKNOWN_OUTCOME, ledger.ErrUnknownOutcome, codes.Aborted},
	{Failure_UNAVAILABLE, ledger.ErrUnavailable, codes.Unavailable},
	{Failure_DEADLINE, context.DeadlineExceeded, codes.DeadlineExceeded},
	{Failure_CANCELED, context.Canceled, codes.Canceled},
}}

type kindOf struct {
	kind     Failure_Kind
	sentinel error
	code     codes.Code
}

// RegisterKind makes sentinel cross the wire as kind, with code for those who
// know only gRPC. Rooms call it while the program starts. A kind or a sentinel
// registered twice is a bug and panics.
func RegisterKind(kind Failure_Kind, sentinel error, code codes.Code) {
	kinds.Lock()
	defer kinds.Unlock()
	for _, k := range kinds.all {
		if k.kind == kind || errors.Is(k.sentinel, sentinel) {
			panic(fmt.Sprintf("rpc: kind %v for %q: already registered as %v for %q", kind, sentinel, k.kind, k.sentinel))
		}
	}
	kinds.all = append([]kindOf{{kind, sentinel, code}}, kinds.all...)
}

func lookup(match func(kindOf) bool) (kindOf, bool) {
	kinds.RLock()
	defer kinds.RUnlock()
	for _, k := range kinds.all {
		if match(k) {
			return k, true
		}
	}
	return kindOf{}, false
}

// RemoteError is an error that another node answered. Its text is that node's;
// errors.Is sees the sentinel that the other node's error wrapped.
type RemoteError struct {
	Kind     Failure_Kind
	Message  string
	sentinel error // nil if the kind is unknown here
}

// Error returns the other node's message.
func (e *RemoteError) Error() string { return e.Message }

// Unwrap returns the sentinel of the error's kind.
func (e *RemoteError) Unwrap() error { return e.sentinel }

// ToFailure describes err for the wire; nil for nil.
func ToFailure(err error) *Failure {
	if err == nil {
		return nil
	}
	f := &Failure{Message: err.Error()}
	if notLeader, ok := errors.AsType[*NotLeader](err); ok {
		f.Group = notLeader.Group
	}
	var hint leaderHinter
	// An unknown outcome outranks the lost leadership that often caused it:
	// "not the leader" would promise that nothing was changed.
	if !errors.Is(err, ledger.ErrUnknownOutcome) && errors.As(err, &hint) {
		f.Kind = Failure_NOT_LEADER
		f.LeaderNode, f.LeaderAddress = hint.LeaderHint()
		return f
	}
	if remote, ok := errors.AsType[*RemoteError](err); ok { // passed on: keep even a kind unknown here
		f.Kind = remote.Kind
		return f
	}
	if k, ok := lookup(func(k kindOf) bool { return errors.Is(err, k.sentinel) }); ok {
		f.Kind = k.kind
	}
	return f
}

// Err turns a Failure back into an error; nil for nil.
func (f *Failure) Err() error {
	if f == nil {
		return nil
	}
	if f.GetKind() == Failure_NOT_LEADER {
		return &NotLeader{Group: f.GetGroup(), Node: f.GetLeaderNode(), Addr: f.GetLeaderAddress()}
	}
	e := &RemoteError{Kind: f.GetKind(), Message: f.GetMessage()}
	if k, ok := lookup(func(k kindOf) bool { return k.kind == f.GetKind() }); ok {
		e.sentinel = k.sentinel
	}
	return e
}

// Status turns any error into a gRPC status error with a [Failure] in its
// details. It leaves nil and errors that are already a status alone.
func Status(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	f := ToFailure(err)
	code := codes.Internal
	if f.GetKind() == Failure_NOT_LEADER {
		code = codes.FailedPrecondition
	} else if k, ok := lookup(func(k kindOf) bool { return k.kind == f.GetKind() }); ok {
		code = k.code
	}
	st := status.New(code, f.GetMessage())
	detailed, detailErr := st.WithDetails(f)
	if detailErr != nil {
		return st.Err() // a Failure always marshals; without it the code still tells the class
	}
	return detailed.Err()
}

// FromStatus turns a gRPC status error back into an error that errors.Is and
// errors.As recognise. It leaves nil and errors that are no status alone.
//
// A status without a Failure comes from gRPC itself: a passed deadline and a
// cancelled context wrap the context's errors; Unavailable and Internal wrap
// [ledger.ErrUnknownOutcome], because the request may have arrived (the
// connections of a [Pool] know better and answer [ledger.ErrUnavailable] for
// calls that were never sent).
func FromStatus(err error) error {
	if err == nil {
		return nil
	}
	withStatus, ok := err.(interface{ GRPCStatus() *status.Status })
	if !ok {
		return err
	}
	st := withStatus.GRPCStatus()
	for _, detail := range st.Details() {
		if f, ok := detail.(*Failure); ok {
			return f.Err()
		}
	}
	switch st.Code() {
	case codes.OK:
		return nil
	case codes.DeadlineExceeded:
		return &RemoteError{Failure_DEADLINE, st.Message(), context.DeadlineExceeded}
	case codes.Canceled:
		return &RemoteError{Failure_CANCELED, st.Message(), context.Canceled}
	case codes.Unavailable, codes.Internal, codes.Unknown, codes.Aborted:
		return &RemoteError{Failure_UNKNOWN_OUTCOME, st.Message(), ledger.ErrUnknownOutcome}
	case codes.ResourceExhausted, codes.InvalidArgument, codes.OutOfRange:
		return &RemoteError{Failure_INVALID, st.Message(), ErrInvalid} // such as a message over MaxMessageBytes
	default:
		return &RemoteError{Failure_UNSPECIFIED, fmt.Sprintf("%v: %s", st.Code(), st.Message()), nil}
	}
}
