package rpc

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/magnetar-io/magnetar/ledger"
)

// hinting is another room's not-leader error.
type hinting struct{}

func (hinting) Error() string                { return "ask elsewhere" }
func (hinting) LeaderHint() (string, string) { return "b@2", "host:1" }

func TestErrorsCrossTheWire(t *testing.T) {
	sentinels := []error{
		ledger.ErrFenced, ledger.ErrClosed, ledger.ErrNoSuchLedger, ledger.ErrNoSuchEntry, ledger.ErrNotYet, ledger.ErrDamaged,
		ledger.ErrUnknownOutcome, ledger.ErrGap, ledger.ErrUnavailable, ErrInvalid, context.Canceled, context.DeadlineExceeded,
	}
	for _, want := range sentinels {
		err := fmt.Errorf("ledger 7: %w", want)
		for name, got := range map[string]error{
			"status":  FromStatus(Status(err)),
			"failure": ToFailure(err).Err(),
			"twice":   FromStatus(Status(FromStatus(Status(err)))),
			"passed":  FromStatus(Status(fmt.Errorf("relay: %w", FromStatus(Status(err))))),
		} {
			for _, s := range sentinels {
				if errors.Is(got, s) != errors.Is(want, s) {
					t.Errorf("%s: %v came back as %v; is %v: %v", name, err, got, s, errors.Is(got, s))
				}
			}
			if !strings.Contains(got.Error(), "ledger 7: ") {
				t.Errorf("%s: %q lost its words: %q", name, err, got)
			}
		}
		if st, ok := status.FromError(Status(err)); !ok || st.Code() == codes.Unknown || st.Code() == codes.OK {
			t.Errorf("%v has code %v", err, st.Code())
		}
	}
}

func TestEverySentinelOfLedgerIsRegistered(t *testing.T) {
	for kind := range Failure_Kind_name {
		switch k := Failure_Kind(kind); k {
		case Failure_UNSPECIFIED, Failure_NOT_LEADER: // no sentinel
		case Failure_KEY_NOT_FOUND, Failure_BAD_VERSION, Failure_LEASE_EXPIRED: // package metadata's
		default:
			if _, ok := lookup(func(o kindOf) bool { return o.kind == k }); !ok {
				t.Errorf("kind %v has no sentinel", k)
			}
		}
	}
}

func TestNotLeaderCrossesTheWire(t *testing.T) {
	for _, err := range []error{&NotLeader{Group: 3, Node: "b@2", Addr: "host:1"}, hinting{}, fmt.Errorf("read: %w", hinting{})} {
		got := FromStatus(Status(err))
		var notLeader *NotLeader
		if !errors.As(got, &notLeader) || notLeader.Node != "b@2" || notLeader.Addr != "host:1" {
			t.Errorf("%v came back as %v", err, got)
		}
		if !errors.Is(got, ledger.ErrUnavailable) {
			t.Errorf("%v does not say that nothing was changed", got)
		}
	}
}

// TestUnknownOutcomeOutranks: losing the leadership is how an outcome becomes
// unknown; "not the leader" would promise that nothing was changed.
func TestUnknownOutcomeOutranks(t *testing.T) {
	for _, other := range []error{&NotLeader{Addr: "host:1"}, hinting{}, context.DeadlineExceeded, ledger.ErrUnavailable} {
		for _, err := range []error{errors.Join(other, ledger.ErrUnknownOutcome), errors.Join(ledger.ErrUnknownOutcome, other)} {
			if got := FromStatus(Status(err)); !errors.Is(got, ledger.ErrUnknownOutcome) || errors.Is(got, ledger.ErrUnavailable) {
				t.Errorf("%q came back as %v", err, got)
			}
		}
	}
}

func TestErrorsWithoutAFailure(t *testing.T) {
	tests := []struct {
		code codes.Code
		want error
	}{
		{codes.Unavailable, ledger.ErrUnknownOutcome}, // the request may have arrived
		{codes.Internal, ledger.ErrUnknownOutcome},
		{codes.Unknown, ledger.ErrUnknownOutcome},
		{codes.Canceled, context.Canceled},
		{codes.DeadlineExceeded, context.DeadlineExceeded},
		{codes.ResourceExhausted, ErrInvalid}, // a message over the limit
	}
	for _, tt := range tests {
		if got := FromStatus(status.Error(tt.code, "by gRPC")); !errors.Is(got, tt.want) || !strings.Contains(got.Error(), "by gRPC") {
			t.Errorf("code %v becomes %v, want %v", tt.code, got, tt.want)
		}
	}
	plain := errors.New("not from a call")
	if got := FromStatus(plain); !errors.Is(got, plain) || got.Error() != plain.Error() || FromStatus(nil) != nil || Status(nil) != nil || ToFailure(nil).Err() != nil {
		t.Error("an error that is no status, or nil, is changed")
	}
}

func TestUnknownKindKeepsItsMessage(t *testing.T) {
	f := &Failure{Kind: 999, Message: "from a newer node"}
	err := f.Err()
	if err == nil || err.Error() != f.GetMessage() || errors.Unwrap(err) != nil {
		t.Errorf("unknown kind became %v", err)
	}
	if again := ToFailure(err); again.GetKind() != 999 {
		t.Errorf("passed on as kind %v", again.GetKind())
	}
}

func TestRegisterTwicePanics(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	RegisterKind(Failure_GAP, errors.New("another"), codes.Internal)
}
