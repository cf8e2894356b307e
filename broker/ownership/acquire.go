package ownership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/protocol"
)

// takeAttempts bounds how often Acquire tries for a key that changes hands
// between its attempt and its look at who has it.
const takeAttempts = 5

// Answer says where a topic is served.
type Answer struct {
	Broker BrokerInfo
	Mine   bool // this broker owns the topic's bundle
}

// Lookup returns the owner of the topic's bundle or, if it has none, the broker
// that should take it. If that is this broker, it has taken it when Lookup
// returns. Errors wrap ErrNoSuchNamespace, ErrNotReady or ErrClosed, or are
// metadata's.
func (s *Service) Lookup(ctx context.Context, topic protocol.TopicName) (Answer, error) {
	bundle, err := s.bundleOf(ctx, topic)
	if err != nil {
		return Answer{}, err
	}
	if c := s.held(bundle); c != nil {
		return Answer{s.self, true}, nil
	}
	chosen, err := s.candidate(bundle)
	if err != nil {
		return Answer{}, err
	}
	if chosen.ID != s.self.ID {
		return s.elsewhere(ctx, chosen)
	}
	_, err = s.acquire(ctx, topic.NamespaceName(), bundle)
	if other, ok := errors.AsType[*NotOwnerError](err); ok {
		return s.elsewhere(ctx, other.Broker)
	}
	return Answer{s.self, err == nil}, err
}

// elsewhere sends the client to another broker, unless that is gone: clients would
// be refused there, wait longer with each attempt, and come back late.
func (s *Service) elsewhere(ctx context.Context, b BrokerInfo) (Answer, error) {
	if err := s.reach.check(ctx, b); err != nil {
		return Answer{}, err
	}
	return Answer{Broker: b}, nil
}

// candidate returns the owner of a bundle that we do not hold as far as the cache
// knows, or else whom to send.
func (s *Service) candidate(bundle string) (BrokerInfo, error) {
	_, sessionErr := s.validSession()
	owner, owned := s.owners.get(ownerKey(bundle))
	switch {
	case owned && owner.ID != s.self.ID:
		return owner, nil
	case owned && sessionErr != nil:
		// A key of a lost session. Until it is gone, anybody else would send the client
		// back to us, and clients give up after some rounds.
		return BrokerInfo{}, sessionErr
	case owned:
		// Ours by an attempt whose answer was lost, or a former session's, which fails
		// as not ready until it is gone.
		return s.self, nil
	}
	live := s.brokers.all()
	if sessionErr != nil { // we can take nothing; is there anybody else?
		live = without(live, s.self.ID)
	}
	if chosen, ok := choose(bundle, live); ok {
		return chosen, nil
	}
	if sessionErr != nil {
		return BrokerInfo{}, sessionErr
	}
	return s.self, nil // our registration has not come back to us yet
}

// Acquire returns a claim on the topic's bundle, taking the bundle if nobody has
// it, whichever broker would be advised. Errors: *NotOwnerError, or one that wraps
// ErrNoSuchNamespace, ErrNotReady or ErrClosed, or metadata's.
func (s *Service) Acquire(ctx context.Context, topic protocol.TopicName) (*Claim, error) {
	// First, because without a session metadata may not answer either.
	if _, err := s.validSession(); err != nil {
		return nil, err
	}
	bundle, err := s.bundleOf(ctx, topic)
	if err != nil {
		return nil, err
	}
	return s.acquire(ctx, topic.NamespaceName(), bundle)
}

// Bundle returns the range of the bundle that holds topic, as Pulsar spells it:
// "0x00000000_0x40000000".
func (s *Service) Bundle(ctx context.Context, topic protocol.TopicName) (string, error) {
	bundle, err := s.bundleOf(ctx, topic)
	if err != nil {
		return "", err
	}
	return bundle[len(topic.NamespaceName())+1:], nil
}

// bundleOf returns the full name of the topic's bundle. It always asks metadata
// for the namespace: a remembered number of bundles could be that of a namespace
// since deleted and made anew, and two brokers that split differently would both
// own the topic.
func (s *Service) bundleOf(ctx context.Context, topic protocol.TopicName) (string, error) {
	ns := topic.NamespaceName()
	record, _, err := readNamespace(ctx, s.store, ns)
	if err != nil {
		return "", err
	}
	return ns + "/" + bundleRange(topicHash(topic.String()), record.Bundles), nil
}

// held returns our claim on bundle if it is valid.
func (s *Service) held(bundle string) *Claim {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sl := s.slots[bundle]; sl != nil && sl.busy == nil && sl.claim.Valid() && !s.closed {
		return sl.claim
	}
	return nil
}

func (s *Service) acquire(ctx context.Context, ns, bundle string) (*Claim, error) {
	for {
		s.mu.Lock()
		session, err := s.validSessionLocked()
		if err != nil {
			s.mu.Unlock()
			return nil, err
		}
		sl := s.slots[bundle]
		if sl == nil {
			sl = &slot{busy: make(chan struct{})}
			s.slots[bundle] = sl
			s.mu.Unlock()
			return s.take(ctx, ns, bundle, sl, session)
		}
		busy, claim := sl.busy, sl.claim
		s.mu.Unlock()
		if busy == nil && claim.Valid() {
			return claim, nil
		}
		if busy == nil {
			busy = claim.lost // out of date; the session loop is about to say so
		}
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: bundle %s is changing hands: %w", ErrNotReady, bundle, ctx.Err())
		}
	}
}

// take writes the owner key and settles sl, which the caller made busy.
func (s *Service) take(ctx context.Context, ns, bundle string, sl *slot, session *metadata.Session) (*Claim, error) {
	version, err := s.writeOwner(ctx, bundle, session.Lease())
	var claim *Claim
	s.mu.Lock()
	if err == nil {
		// The session may have been replaced, or Close begun, while we wrote.
		if _, err = s.validSessionLocked(); err == nil && s.session != session {
			err = fmt.Errorf("%w: the session was lost while bundle %s was acquired", ErrNotReady, bundle)
		}
	}
	if err == nil {
		claim = &Claim{bundle: bundle, session: session, version: version, lost: make(chan struct{})}
		close(sl.busy)
		sl.busy, sl.claim = nil, claim
	} else {
		s.freeLocked(bundle, sl)
	}
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	s.metrics.bundles.Inc()
	s.metrics.acquired.Inc()
	s.log.Info("bundle acquired", "bundle", bundle, "namespace", ns)
	return claim, nil
}

// writeOwner puts our owner key on bundle under lease and returns its version.
func (s *Service) writeOwner(ctx context.Context, bundle string, lease metadata.LeaseID) (metadata.Version, error) {
	key, value := ownerKey(bundle), encode(s.self)
	for range takeAttempts {
		version, err := s.store.Put(ctx, key, value, 0, lease)
		switch {
		case err == nil:
			return version, nil
		case errors.Is(err, metadata.ErrLeaseExpired):
			return 0, fmt.Errorf("%w: the session ran out while bundle %s was acquired: %w", ErrNotReady, bundle, err)
		case !errors.Is(err, metadata.ErrBadVersion):
			return 0, fmt.Errorf("acquire bundle %s: %w", bundle, err)
		}
		kv, err := s.store.Get(ctx, key)
		switch {
		case errors.Is(err, metadata.ErrNotFound):
			continue // released since
		case err != nil:
			return 0, fmt.Errorf("acquire bundle %s: %w", bundle, err)
		case kv.Lease == lease:
			return kv.Version, nil // an earlier attempt whose answer was lost
		}
		var owner BrokerInfo
		if err := json.Unmarshal(kv.Value, &owner); err != nil {
			return 0, fmt.Errorf("owner record of bundle %s: %w", bundle, err)
		}
		if owner.ID == s.self.ID {
			return 0, fmt.Errorf("%w: bundle %s still belongs to a former session of this broker", ErrNotReady, bundle)
		}
		return 0, &NotOwnerError{Bundle: bundle, Broker: owner}
	}
	return 0, fmt.Errorf("%w: bundle %s changed hands %d times while it was acquired", ErrNotReady, bundle, takeAttempts)
}

// freeLocked forgets a busy slot and wakes who waits for it.
func (s *Service) freeLocked(bundle string, sl *slot) {
	delete(s.slots, bundle)
	close(sl.busy)
}

func without(brokers []BrokerInfo, id string) []BrokerInfo {
	kept := make([]BrokerInfo, 0, len(brokers))
	for _, b := range brokers {
		if b.ID != id {
			kept = append(kept, b)
		}
	}
	return kept
}
