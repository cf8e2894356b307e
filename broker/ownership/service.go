package ownership

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/magnetar-io/magnetar/metadata"
)

const (
	// releaseLimit bounds how long the hooks of one bundle may take. After it the
	// bundle is given up whether or not they are done.
	releaseLimit = 10 * time.Second

	// releaseAtOnce is how many bundles Close hands over side by side.
	releaseAtOnce = 8

	// retryInterval is the pause between two attempts at something that metadata
	// did not answer or that waits for a lease to run out.
	retryInterval = 200 * time.Millisecond
)

// BrokerInfo is how a broker is known to others. It is what a registration and
// an owner key hold.
type BrokerInfo struct {
	ID            string `json:"id"`
	ServiceURL    string `json:"serviceUrl"`    // pulsar://host:port
	WebServiceURL string `json:"webServiceUrl"` // http://host:port
}

// Hook closes what the broker has open of a bundle. It returns once nothing of
// the bundle will touch storage any more, at the latest when ctx ends.
type Hook func(ctx context.Context, bundle string)

// Service keeps one broker registered and owns bundles in its name.
//
// One goroutine, begun by Start and ended by Close, makes one session after
// another. Two more feed the caches.
type Service struct {
	cfg     Config
	store   metadata.Store
	self    BrokerInfo
	log     *slog.Logger
	metrics *metrics
	brokers *cache
	owners  *cache
	reach   reach

	cancel  context.CancelFunc // ends the goroutines; set by Start
	running sync.WaitGroup     // session loop, watches, hooks of lost bundles, audits
	former  []metadata.LeaseID // of lost sessions, yet to be revoked; session loop only

	mu      sync.Mutex // guards what follows; never held over I/O or a hook
	session *metadata.Session
	slots   map[string]*slot // by bundle
	hooks   []Hook
	closed  bool
	closing sync.Once
	endErr  error // Close's answer
}

// slot is a bundle that this broker has, or is about to have or lose. A slot is
// either busy or holds a claim.
type slot struct {
	claim *Claim
	busy  chan struct{} // not nil while somebody acquires or releases; closed when done
}

// New wires a Service. It does no I/O and starts nothing.
func New(cfg Config, store metadata.Store, self BrokerInfo, log *slog.Logger) *Service {
	cfg = cfg.withDefaults()
	s := &Service{
		cfg: cfg, store: store, self: self,
		log:     log.With("component", "ownership"),
		metrics: newMetrics(cfg.Registerer),
		slots:   map[string]*slot{},
		reach:   reach{listens: cfg.Listens},
	}
	s.brokers = newCache(brokersPrefix, nil)
	s.owners = newCache(ownersPrefix, s.audit)
	return s
}

// OnRelease adds a hook. Add hooks before Start.
func (s *Service) OnRelease(hook func(ctx context.Context, bundle string)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hooks = append(s.hooks, hook)
}

// Start registers this broker and returns once it can answer lookups. It waits,
// as long as ctx allows, for metadata to answer and for the lease of a killed
// process of the same id to run out; ctx bounds only the start. An id that
// somebody else keeps alive is an error. Call Start once; after an error, Close.
func (s *Service) Start(ctx context.Context) error {
	session, err := s.openSession(ctx)
	if err != nil {
		return err
	}
	loop, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.mu.Lock()
	s.session, s.cancel = session, cancel
	s.mu.Unlock()
	s.metrics.valid.Set(1)
	s.running.Go(func() { s.keepSession(loop, session) })
	s.running.Go(func() { s.brokers.follow(loop, s.store, s.log) })
	s.running.Go(func() { s.owners.follow(loop, s.store, s.log) })
	for _, c := range []*cache{s.brokers, s.owners} {
		select {
		case <-c.ready:
		case <-ctx.Done():
			return fmt.Errorf("read %s from metadata: %w", c.prefix, ctx.Err())
		}
	}
	s.log.Info("broker registered", "broker", s.self.ID, "serviceUrl", s.self.ServiceURL)
	return nil
}

// Close withdraws the registration, so that others stop sending clients here,
// releases every bundle, revokes the lease and waits for all goroutines. ctx
// bounds the talk with metadata; if that fails the lease runs out by itself. It is
// safe to call more than once and from several goroutines.
func (s *Service) Close(ctx context.Context) error {
	s.closing.Do(func() { s.endErr = s.close(ctx) })
	return s.endErr
}

func (s *Service) close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	session, cancel := s.session, s.cancel
	bundles := make([]string, 0, len(s.slots))
	for b := range s.slots {
		bundles = append(bundles, b)
	}
	s.mu.Unlock()

	var errs []error
	if session != nil && session.Valid() {
		if err := s.store.Delete(ctx, brokerKey(s.self.ID), metadata.AnyVersion); err != nil && !errors.Is(err, metadata.ErrNotFound) {
			errs = append(errs, fmt.Errorf("withdraw broker %s: %w", s.self.ID, err))
		}
	}
	var g errgroup.Group
	g.SetLimit(releaseAtOnce)
	for _, b := range bundles {
		g.Go(func() error { return s.Release(ctx, b) })
	}
	errs = append(errs, g.Wait())
	if cancel != nil {
		cancel()
	}
	s.running.Wait()

	s.mu.Lock()
	session, s.session = s.session, nil
	s.mu.Unlock()
	if session != nil {
		if err := session.Close(ctx); err != nil {
			errs = append(errs, fmt.Errorf("revoke the lease of broker %s: %w", s.self.ID, err))
		}
	}
	s.metrics.valid.Set(0)
	return errors.Join(errs...)
}

// Brokers lists the registered brokers by id.
func (s *Service) Brokers(context.Context) ([]BrokerInfo, error) {
	select {
	case <-s.brokers.ready:
		return s.brokers.all(), nil
	default:
		return nil, fmt.Errorf("%w: the list of brokers has not been read yet", ErrNotReady)
	}
}

// Self returns this broker as others know it.
func (s *Service) Self() BrokerInfo { return s.self }

// Check reports why this broker should get no traffic, or nil: its session is
// valid, and metadata answers and still holds its registration.
func (s *Service) Check(ctx context.Context) error {
	session, err := s.validSession()
	if err != nil {
		return err
	}
	kv, err := s.store.Get(ctx, brokerKey(s.self.ID))
	switch {
	case errors.Is(err, metadata.ErrNotFound) || err == nil && kv.Lease != session.Lease():
		return fmt.Errorf("%w: broker %s is not registered in metadata", ErrNotReady, s.self.ID)
	case err != nil:
		return fmt.Errorf("metadata does not answer: %w", err)
	case !session.Valid():
		return fmt.Errorf("%w: the session ran out", ErrNotReady)
	}
	return nil
}

// validSession returns the present session if nothing is wrong with it.
func (s *Service) validSession() (*metadata.Session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.validSessionLocked()
}

func (s *Service) validSessionLocked() (*metadata.Session, error) {
	switch {
	case s.closed:
		return nil, fmt.Errorf("broker %s: %w", s.self.ID, ErrClosed)
	case s.session == nil || !s.session.Valid():
		return nil, fmt.Errorf("%w: broker %s has no valid session with metadata", ErrNotReady, s.self.ID)
	}
	return s.session, nil
}
