package metadata

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// renewals is how many renewals are tried within one TTL.
	renewals = 3

	// driftPart is the part of a TTL that a session gives up, because two
	// machines' clocks do not run equally fast: 1 %.
	driftPart = 100

	// over is a session's deadline once it is lost.
	over = math.MinInt64
)

// Session is a lease that is renewed in the background.
//
// What it promises is [Session.Valid]: while that is true, the lease has not
// ended at the store, whatever happened to this process or its network. It holds
// because the deadline is counted on this machine's monotonic clock from when the
// last granted renewal was sent, and the store counts from when it received it,
// or later. A process that was stopped and runs again finds its session over
// before it does anything on its strength, if it asks first.
//
// A lost session stays lost; make a new one.
type Session struct {
	store Store
	id    LeaseID
	ttl   time.Duration
	log   *slog.Logger

	start    time.Time    // what deadline counts from; has a monotonic reading
	deadline atomic.Int64 // nanoseconds after start; over = lost; changed only by compare-and-swap
	lost     chan struct{}
	losing   sync.Once

	cancel context.CancelFunc // ends renew
	done   chan struct{}      // closed once renew has returned
}

// NewSession grants a lease with ttl and begins to renew it every third of ttl.
// ctx bounds only the granting. Close the session to end it.
func NewSession(ctx context.Context, store Store, ttl time.Duration, log *slog.Logger) (*Session, error) {
	id, sent, err := grant(ctx, store, ttl)
	if err != nil {
		return nil, fmt.Errorf("new session: %w", err)
	}
	s := &Session{
		store: store, id: id, ttl: ttl, log: log.With("component", "session", "lease", int64(id)),
		start: sent, lost: make(chan struct{}), done: make(chan struct{}),
	}
	s.deadline.Store(int64(s.reach()))
	renewCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.cancel = cancel
	go s.renew(renewCtx, sent)
	return s, nil
}

// grant makes a lease and returns when its last grant or renewal was sent. A
// grant that took long to answer has used much of its time up, so it is renewed
// before anybody relies on it.
func grant(ctx context.Context, store Store, ttl time.Duration) (LeaseID, time.Time, error) {
	for {
		sent := time.Now()
		id, err := store.GrantLease(ctx, ttl)
		if err != nil {
			return 0, sent, err
		}
		for time.Since(sent) > ttl/renewals {
			sent = time.Now()
			if err = store.KeepAlive(ctx, id); err != nil {
				break
			}
		}
		if err == nil {
			return id, sent, nil
		}
		if !errors.Is(err, ErrLeaseExpired) {
			return 0, sent, err
		}
	}
}

// reach is how long one renewal carries, on this machine's clock.
func (s *Session) reach() time.Duration { return s.ttl - s.ttl/driftPart }

// Lease returns the id of the session's lease.
func (s *Session) Lease() LeaseID { return s.id }

// Valid reports whether the lease certainly still exists. Ask right before
// acting on it. Once false it is false for ever. It never blocks and costs about
// as much as reading the clock.
func (s *Session) Valid() bool {
	for {
		deadline := s.deadline.Load()
		if deadline == over {
			return false
		}
		if int64(time.Since(s.start)) < deadline {
			return true
		}
		// Nobody may see true after this false: it counts only if no renewal
		// slipped in between.
		if s.deadline.CompareAndSwap(deadline, over) {
			s.announce("the deadline passed without a renewal", nil)
			return false
		}
	}
}

// Lost is closed once the session is over, by loss or by Close.
func (s *Session) Lost() <-chan struct{} { return s.lost }

// Close ends the session: it is over at once, and the lease is revoked with its
// keys, within ctx. An error means that the lease may live until its TTL passes.
// Close waits for the session's goroutine and may be called again.
func (s *Session) Close(ctx context.Context) error {
	held := s.deadline.Swap(over) != over
	s.losing.Do(func() { close(s.lost) })
	s.cancel()
	<-s.done
	if !held {
		return nil // closed before, or lost: then renew has revoked it
	}
	if err := s.store.RevokeLease(ctx, s.id); err != nil {
		return fmt.Errorf("close session with lease %d: %w", s.id, err)
	}
	return nil
}

func (s *Session) announce(why string, err error) {
	s.losing.Do(func() {
		close(s.lost)
		s.log.Warn("session lost; its holder must make a new one", "reason", why, "ttl", s.ttl, "err", err)
	})
}

// lose ends the session unless it is over already.
func (s *Session) lose(why string, err error) {
	s.deadline.Store(over)
	s.announce(why, err)
}

// renew keeps the lease until it is lost or ctx ends. sent is when the last
// granted renewal was sent.
func (s *Session) renew(ctx context.Context, sent time.Time) {
	defer close(s.done)
	defer s.revokeIfLost(ctx)
	for {
		if !s.sleepUntil(ctx, sent.Add(s.ttl/renewals)) {
			return
		}
		now := time.Now()
		err := s.keepAlive(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, ErrLeaseExpired):
			s.lose("the store ended the lease", err)
			return
		case err != nil:
			if !s.Valid() {
				return
			}
			s.log.Warn("session not renewed; will try again", "left", s.left(), "err", err)
			// Not at once: a store that refuses quickly must not be hammered.
			if !s.sleepUntil(ctx, time.Now().Add(s.ttl/(10*renewals))) {
				return
			}
		default:
			if !s.extend(now) {
				return
			}
			sent = now
		}
	}
}

// keepAlive tries one renewal, for a third of the TTL at most, so that a new one
// with a later start follows.
func (s *Session) keepAlive(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, min(s.ttl/renewals, s.left()))
	defer cancel()
	return s.store.KeepAlive(ctx, s.id)
}

// left is how long the session is valid without another renewal.
func (s *Session) left() time.Duration {
	deadline := s.deadline.Load()
	if deadline == over {
		return 0
	}
	return time.Duration(deadline) - time.Since(s.start)
}

// extend counts a granted renewal that was sent at sent. It reports false if the
// session was over before the grant arrived.
func (s *Session) extend(sent time.Time) bool {
	reached := int64(sent.Sub(s.start) + s.reach())
	for s.Valid() {
		deadline := s.deadline.Load()
		if deadline == over {
			return false
		}
		if s.deadline.CompareAndSwap(deadline, max(deadline, reached)) {
			return true
		}
	}
	return false
}

// sleepUntil waits for t, watching the deadline. It reports false if ctx ended
// or the session is over.
func (s *Session) sleepUntil(ctx context.Context, t time.Time) bool {
	timer := time.NewTimer(max(0, min(time.Until(t), s.left())))
	defer timer.Stop()
	select {
	case <-timer.C:
		return s.Valid()
	case <-ctx.Done():
		return false
	}
}

// revokeIfLost gives the keys of a session that is lost back early: its holder
// has stopped, so nobody needs to wait for the TTL to pass.
func (s *Session) revokeIfLost(ctx context.Context) {
	if ctx.Err() != nil || s.Valid() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, s.ttl)
	defer cancel()
	if err := s.store.RevokeLease(ctx, s.id); err != nil {
		s.log.Debug("lost session's lease not revoked; its TTL will end it", "err", err)
	}
}
