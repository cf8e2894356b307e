package ownership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/magnetar-io/magnetar/metadata"
)

// keepSession replaces every lost session by a new one until ctx ends. It owns
// s.session.
func (s *Service) keepSession(ctx context.Context, session *metadata.Session) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-session.Lost():
		}
		if ctx.Err() != nil {
			return
		}
		s.metrics.valid.Set(0)
		s.metrics.lost.Inc()
		s.log.Warn("session with metadata lost; every bundle is given up until there is a new one", "broker", s.self.ID)
		s.dropAll(ctx, session)
		if err := session.Close(ctx); err != nil { // waits for its goroutine
			s.log.Debug("lost session not closed cleanly", "err", err)
		}
		if session = s.reopen(ctx, session.Lease()); session == nil {
			return
		}
		s.mu.Lock()
		s.session = session
		s.mu.Unlock()
		s.metrics.valid.Set(1)
		s.log.Info("broker registered again", "broker", s.self.ID)
	}
}

// reopen makes a session, however long it takes; nil once ctx ended.
func (s *Service) reopen(ctx context.Context, lost metadata.LeaseID) *metadata.Session {
	s.former = append(s.former, lost)
	for {
		session, err := s.openSession(ctx)
		if err == nil {
			return session
		}
		if ctx.Err() != nil {
			return nil
		}
		s.log.Warn("no new session with metadata; will retry", "broker", s.self.ID, "err", err)
		if !pause(ctx) {
			return nil
		}
	}
}

// openSession makes a session and registers this broker under it.
func (s *Service) openSession(ctx context.Context) (*metadata.Session, error) {
	session, err := metadata.NewSession(ctx, s.store, s.cfg.sessionTimeout(), s.log)
	if err != nil {
		return nil, fmt.Errorf("session with metadata: %w", err)
	}
	if err := s.register(ctx, session); err != nil {
		// The attempt's lease runs out by itself if this does not reach metadata.
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if closeErr := session.Close(end); closeErr != nil {
			s.log.Debug("lease of a failed registration not revoked", "err", closeErr)
		}
		return nil, fmt.Errorf("register broker %s: %w", s.self.ID, err)
	}
	return session, nil
}

// register puts this broker's key under the session's lease. A key left by a
// former session of ours is revoked; anybody else's has to run out, which takes a
// time to live after the last renewal or election.
func (s *Service) register(ctx context.Context, session *metadata.Session) error {
	key, value := brokerKey(s.self.ID), encode(s.self)
	patience := time.Now().Add(2*s.cfg.sessionTimeout() + 4*time.Second)
	s.revokeFormer(ctx)
	for waited := false; ; waited = true {
		_, err := s.store.Put(ctx, key, value, 0, session.Lease())
		if !errors.Is(err, metadata.ErrBadVersion) {
			return err
		}
		kv, err := s.store.Get(ctx, key)
		switch {
		case errors.Is(err, metadata.ErrNotFound):
			continue
		case err != nil:
			return err
		case kv.Lease == session.Lease():
			return nil // an earlier attempt whose answer was lost
		case s.cfg.SoleHolder:
			if err := s.store.RevokeLease(ctx, kv.Lease); err != nil {
				return err
			}
			continue
		}
		var other BrokerInfo
		_ = json.Unmarshal(kv.Value, &other) // for the message only
		if time.Now().After(patience) {
			return fmt.Errorf("the id is kept alive by a broker at %s: give each broker its own brokerId, or stop that one", other.ServiceURL)
		}
		if !waited {
			s.log.Info("waiting for the lease of a former process with this broker id to run out", "broker", s.self.ID, "serviceUrl", other.ServiceURL)
		}
		if !pause(ctx) {
			return ctx.Err()
		}
	}
}

// revokeFormer ends the leases of sessions that we lost. Nothing of ours relies
// on them, and others need not wait for them.
func (s *Service) revokeFormer(ctx context.Context) {
	for len(s.former) > 0 {
		if err := s.store.RevokeLease(ctx, s.former[0]); err != nil {
			s.log.Debug("former lease not revoked; it will run out", "err", err)
			return
		}
		s.former = s.former[1:]
	}
}

// pause waits one retry interval; false if ctx ended.
func pause(ctx context.Context) bool {
	t := time.NewTimer(retryInterval)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
