package ownership

import (
	"context"
	"errors"
	"fmt"

	"github.com/magnetar-io/magnetar/metadata"
)

// Release hands a bundle back: it runs the hooks while the claim is still valid,
// ends the claim, and deletes the owner key, so that anybody may take the bundle.
// A bundle that this broker does not have is no error. After an error from
// metadata the bundle stays ours by name until the lease ends or somebody
// acquires it here.
func (s *Service) Release(ctx context.Context, bundle string) error {
	for {
		s.mu.Lock()
		sl := s.slots[bundle]
		if sl == nil {
			s.mu.Unlock()
			return nil
		}
		if sl.busy == nil {
			claim := s.beginReleaseLocked(sl)
			s.mu.Unlock()
			return s.handOver(ctx, bundle, sl, claim)
		}
		busy := sl.busy
		s.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return fmt.Errorf("release bundle %s: %w", bundle, ctx.Err())
		}
	}
}

// beginReleaseLocked makes a held slot busy and returns the claim that ends.
func (s *Service) beginReleaseLocked(sl *slot) *Claim {
	claim := sl.claim
	sl.claim, sl.busy = nil, make(chan struct{})
	return claim
}

// handOver finishes a release that the caller began.
func (s *Service) handOver(ctx context.Context, bundle string, sl *slot, claim *Claim) error {
	s.runHooks(ctx, bundle)
	owned := claim.Valid()
	claim.end()
	var err error
	if owned {
		err = s.store.Delete(ctx, ownerKey(bundle), claim.version)
	}
	s.settle(bundle, sl)
	if err != nil && !errors.Is(err, metadata.ErrNotFound) && !errors.Is(err, metadata.ErrBadVersion) {
		return fmt.Errorf("release bundle %s: %w", bundle, err)
	}
	s.log.Info("bundle released", "bundle", bundle)
	return nil
}

// dropAll ends every claim of a lost session and runs the hooks on goroutines of
// their own: one topic that closes slowly must not delay the new session. Slots
// stay busy until their hooks are done.
func (s *Service) dropAll(ctx context.Context, session *metadata.Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.session = nil
	for bundle, sl := range s.slots {
		if sl.busy == nil && sl.claim.session == session {
			s.dropLocked(ctx, bundle, sl)
		}
	}
}

func (s *Service) dropLocked(ctx context.Context, bundle string, sl *slot) {
	s.beginReleaseLocked(sl).end()
	s.running.Go(func() {
		s.runHooks(context.WithoutCancel(ctx), bundle)
		s.settle(bundle, sl)
		s.log.Warn("bundle lost", "bundle", bundle)
	})
}

func (s *Service) settle(bundle string, sl *slot) {
	s.mu.Lock()
	s.freeLocked(bundle, sl)
	s.mu.Unlock()
	s.metrics.bundles.Dec()
}

func (s *Service) runHooks(ctx context.Context, bundle string) {
	s.mu.Lock()
	hooks := s.hooks
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, releaseLimit)
	defer cancel()
	for _, hook := range hooks {
		hook(ctx, bundle)
	}
}

// audit is called by the owners' cache after any change of an owner key, with its
// lease, or 0 once the key is gone. If it contradicts a claim of ours, which takes
// an operator's hand or a lease that ran out, metadata is asked, and the claim
// ends unless it confirms it.
func (s *Service) audit(ctx context.Context, key string, lease metadata.LeaseID) {
	bundle := key[len(ownersPrefix):]
	s.mu.Lock()
	defer s.mu.Unlock()
	sl := s.slots[bundle]
	if sl == nil || sl.busy != nil || sl.claim.session.Lease() == lease {
		return
	}
	claim := sl.claim
	s.running.Go(func() { s.confirm(ctx, bundle, claim) })
}

// confirm ends claim unless metadata says that it still stands.
func (s *Service) confirm(ctx context.Context, bundle string, claim *Claim) {
	for claim.Valid() {
		kv, err := s.store.Get(ctx, ownerKey(bundle))
		if err == nil && kv.Lease == claim.session.Lease() && kv.Version == claim.version {
			return
		}
		if err == nil || errors.Is(err, metadata.ErrNotFound) {
			break
		}
		if !pause(ctx) {
			return
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if sl := s.slots[bundle]; sl != nil && sl.busy == nil && sl.claim == claim && claim.session == s.session {
		s.dropLocked(ctx, bundle, sl)
	}
}
