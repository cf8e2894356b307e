package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/raftlog"
)

// loneGroup commits at once, unless told to fail.
type loneGroup struct {
	machine *Machine

	mu      sync.Mutex
	fail    error // what proposals end with, without being applied
	barrier error // what read barriers end with
	kinds   []Kind
	changed func(bool)
}

func (g *loneGroup) Propose(data []byte, done func(any, error)) {
	g.mu.Lock()
	c, err := DecodeCommand(data)
	if err != nil {
		panic(err)
	}
	g.kinds = append(g.kinds, c.Kind)
	var result any
	if err = g.fail; err == nil {
		result = g.machine.Apply([]raftlog.Command{{Index: g.machine.Applied() + 1, Data: data}})[0]
	}
	g.mu.Unlock()
	done(result, err)
}

func (g *loneGroup) ReadBarrier(ctx context.Context) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return errors.Join(g.barrier, ctx.Err())
}

func (g *loneGroup) Watch(changed func(bool)) {
	g.changed = changed
	changed(true)
}

func (g *loneGroup) failWith(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fail = err
}

func (g *loneGroup) proposed(kind Kind) (n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, k := range g.kinds {
		if k == kind {
			n++
		}
	}
	return n
}

// bubble runs f with an engine on the bubble's clock.
func bubble(t *testing.T, f func(t *testing.T, e *Engine, g *loneGroup)) {
	synctest.Test(t, func(t *testing.T) {
		g := &loneGroup{machine: NewVolatileMachine(discard)}
		e := NewEngine(g, g.machine, discard)
		defer e.Close()
		synctest.Wait()
		f(t, e, g)
	})
}

func grant(t *testing.T, e *Engine, ttl time.Duration) metadata.LeaseID {
	t.Helper()
	r, err := e.Change(t.Context(), &Command{Kind: KindGrant, TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	return r.Lease
}

func wantLease(t *testing.T, e *Engine, id metadata.LeaseID, want bool) {
	t.Helper()
	synctest.Wait()
	if _, _, ok := e.machine.State().Lease(id); ok != want {
		t.Errorf("lease %d exists: %v, want %v", id, ok, want)
	}
}

const sec = time.Second

func TestLeaseEndsExactlyWhenDue(t *testing.T) {
	bubble(t, func(t *testing.T, e *Engine, _ *loneGroup) {
		long, short := grant(t, e, 10*sec), grant(t, e, 3*sec)
		time.Sleep(3*sec - 1)
		wantLease(t, e, short, true)
		time.Sleep(time.Nanosecond)
		wantLease(t, e, short, false)
		time.Sleep(7*sec - 1)
		wantLease(t, e, long, true)
		time.Sleep(time.Nanosecond)
		wantLease(t, e, long, false)
		if err := e.KeepAlive(t.Context(), long); !errors.Is(err, metadata.ErrLeaseExpired) {
			t.Errorf("KeepAlive of an expired lease = %v", err)
		}
	})
}

func TestRenewalCountsFromItsArrival(t *testing.T) {
	bubble(t, func(t *testing.T, e *Engine, g *loneGroup) {
		id := grant(t, e, 6*sec)
		for range 10 {
			time.Sleep(5 * sec)
			if err := e.KeepAlive(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(6*sec - 1)
		wantLease(t, e, id, true)
		if n := g.proposed(KindExpire); n != 0 {
			t.Errorf("%d expiries proposed for a lease that was renewed", n)
		}
		time.Sleep(time.Nanosecond)
		wantLease(t, e, id, false)
	})
}

func TestNewLeaderGivesTheWholeTTL(t *testing.T) {
	bubble(t, func(t *testing.T, e *Engine, g *loneGroup) {
		id := grant(t, e, 6*sec)
		time.Sleep(5 * sec)
		g.changed(false)
		time.Sleep(10 * sec) // nobody leads, so nobody's time runs
		wantLease(t, e, id, true)
		if err := e.KeepAlive(t.Context(), id); !errors.Is(err, metadata.ErrUnavailable) {
			t.Errorf("KeepAlive without a leader = %v, want ErrUnavailable", err)
		}
		g.changed(true)
		time.Sleep(6*sec - 1)
		wantLease(t, e, id, true)
		time.Sleep(time.Nanosecond)
		wantLease(t, e, id, false)
	})
}

// TestExpiryOnceProposedIsFinalHere: if the proposal's outcome is unknown, it may
// still take effect, so no renewal may be granted after it.
func TestExpiryOnceProposedIsFinalHere(t *testing.T) {
	bubble(t, func(t *testing.T, e *Engine, g *loneGroup) {
		id := grant(t, e, 2*sec)
		g.failWith(fmt.Errorf("no quorum: %w", ledger.ErrUnknownOutcome))
		time.Sleep(2 * sec)
		wantLease(t, e, id, true) // not applied
		if err := e.KeepAlive(t.Context(), id); !errors.Is(err, metadata.ErrLeaseExpired) {
			t.Errorf("KeepAlive after the expiry was proposed = %v, want ErrLeaseExpired", err)
		}
		g.failWith(nil)
		_, err := e.Change(t.Context(), &Command{Kind: KindPut, Key: "/a", If: metadata.AnyVersion, Lease: id})
		if !errors.Is(err, metadata.ErrLeaseExpired) {
			t.Errorf("Put after the expiry was proposed = %v, want ErrLeaseExpired", err)
		}
		time.Sleep(expireRetry)
		wantLease(t, e, id, false)
	})
}

// TestAttachBeforeExpiryIsDecidedAnew: the leader decided on a revision of the
// lease that is not the one the command meets.
func TestAttachBeforeExpiryIsDecidedAnew(t *testing.T) {
	bubble(t, func(t *testing.T, e *Engine, g *loneGroup) {
		id := grant(t, e, 2*sec)
		_, revision, _ := g.machine.State().Lease(id)
		put := Command{Kind: KindPut, Key: "/a", If: metadata.AnyVersion, Lease: id}
		if _, err := e.Change(t.Context(), &put); err != nil {
			t.Fatal(err)
		}
		stale := Command{Kind: KindExpire, Lease: id, Revision: revision, Leader: g.machine.State().leader}
		g.Propose(stale.Encode(), func(r any, _ error) {
			if r.(Result).Code != CodeBadVersion {
				t.Errorf("expiry of an older revision: %+v", r)
			}
		})
		wantLease(t, e, id, true)
		time.Sleep(2 * sec)
		wantLease(t, e, id, false)
		if _, ok := g.machine.State().Get("/a"); ok {
			t.Error("the lease's key outlived it")
		}
	})
}

// TestDeposedLeaderEndsNoLease: this node lost its place to another, which
// renewed the lease, and leads again before it heard of either.
func TestDeposedLeaderEndsNoLease(t *testing.T) {
	bubble(t, func(t *testing.T, e *Engine, g *loneGroup) {
		id := grant(t, e, 2*sec)
		time.Sleep(sec)
		other := Command{Kind: KindLead}
		g.Propose(other.Encode(), func(any, error) {}) // the other leader begins
		time.Sleep(10 * sec)
		wantLease(t, e, id, true)
		if n := g.proposed(KindExpire); n != 1 {
			t.Errorf("%d expiries proposed, want one that was refused", n)
		}
		g.changed(false)
		g.changed(true)
		time.Sleep(2 * sec)
		wantLease(t, e, id, false)
	})
}

func TestClockStartsInSpiteOfFailures(t *testing.T) {
	bubble(t, func(t *testing.T, e *Engine, g *loneGroup) {
		id := grant(t, e, 2*sec)
		g.failWith(fmt.Errorf("queue full: %w", ledger.ErrUnavailable))
		g.changed(false)
		g.changed(true)
		time.Sleep(3*sec + expireRetry/2)
		g.failWith(nil)
		time.Sleep(expireRetry)
		if err := e.KeepAlive(t.Context(), id); err != nil {
			t.Errorf("KeepAlive once the clock runs = %v", err)
		}
		time.Sleep(2 * sec)
		wantLease(t, e, id, false)
	})
}

func TestManyLeasesEndTogether(t *testing.T) {
	bubble(t, func(t *testing.T, e *Engine, g *loneGroup) {
		const n = 10 * maxExpiring
		for range n {
			grant(t, e, 2*sec)
		}
		time.Sleep(2 * sec)
		synctest.Wait()
		if left := g.machine.State().leases.count; left != 0 {
			t.Errorf("%d of %d leases left after their time", left, n)
		}
		if got := g.proposed(KindExpire); got != n {
			t.Errorf("%d expiries proposed for %d leases", got, n)
		}
	})
}
