package managedledger

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/magnetar-io/magnetar/entrycache"
	"github.com/magnetar-io/magnetar/executor"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata"
)

// closeAtOnce is how many managed ledgers Factory.Close closes at a time.
const closeAtOnce = 64

// Factory opens managed ledgers and holds what they share: the entry cache, the
// permits for reads in flight, and the pool for completions.
type Factory struct {
	storage Storage
	meta    metadata.Store
	cfg     Config
	log     *slog.Logger
	metrics *metrics
	cache   *entrycache.Cache
	guard   *executor.Guard
	pool    *executor.Pool
	reads   *permits

	ctx        context.Context // ends the housekeeper and openings
	cancel     context.CancelFunc
	background sync.WaitGroup

	mu     sync.Mutex
	open   map[string]*slot // guarded by mu: one per name, being opened or open
	closed bool             // guarded by mu
}

// slot is one name's place in the factory. ledger and err are read after ready.
type slot struct {
	ready  chan struct{} // closed once opening has ended
	ledger *ManagedLedger
	err    error
}

// NewFactory wires a Factory and starts its housekeeper and pool. It does no
// I/O. reg may be nil. Close ends it.
func NewFactory(storage Storage, meta metadata.Store, cfg Config, log *slog.Logger, reg prometheus.Registerer) *Factory {
	log = log.With("component", "managedledger")
	cfg = cfg.normalized(log)
	guard := executor.NewGuard(log, reg)
	f := &Factory{
		storage: storage, meta: meta, cfg: cfg, log: log,
		cache: entrycache.New(int64(cfg.CacheSizeMB)<<20, reg),
		guard: guard,
		pool:  executor.NewPool(max(2, runtime.GOMAXPROCS(0)), guard),
		open:  map[string]*slot{},
	}
	f.metrics = newMetrics(f, reg)
	f.reads = newPermits(int64(cfg.MaxReadsInFlightMB)<<20, cfg.ReadPermitQueueSize,
		time.Duration(cfg.ReadPermitTimeoutMillis)*time.Millisecond, f.dropIdleWindows)
	f.ctx, f.cancel = context.WithCancel(context.Background())
	f.background.Go(f.housekeeper)
	log.Debug("read completion", "inline", cfg.ReadCallbackInline, "maxDepth", cfg.MaxReadCompletionDepth)
	return f
}

// Open opens the managed ledger of that name, taking it over from whoever had it
// before, and creates it if there is none. Opening a name that is open here
// returns the same handle. A name is "tenant/namespace/persistent/topic" with the
// topic escaped for a path.
//
// The opening goes on if ctx ends first, for the next caller to find.
func (f *Factory) Open(ctx context.Context, name string) (*ManagedLedger, error) {
	if name == "" || strings.HasPrefix(name, "/") || strings.HasSuffix(name, "/") {
		return nil, fmt.Errorf(`managed ledger name %q: want "tenant/namespace/persistent/topic"`, name)
	}
	for {
		s, err := f.slotFor(name) //nolint:contextcheck // an opening outlives its first caller, for the next one to find
		if err != nil {
			return nil, err
		}
		select {
		case <-s.ready:
		case <-ctx.Done():
			return nil, fmt.Errorf("open managed ledger %q: %w", name, ctx.Err())
		}
		if s.err != nil {
			return nil, s.err
		}
		if s.ledger.usable() {
			return s.ledger, nil
		}
		// Fenced, or being closed: let it go entirely, then open it anew.
		if err := s.ledger.Close(ctx); err != nil && ctx.Err() != nil {
			return nil, fmt.Errorf("open managed ledger %q: close the former handle: %w", name, err)
		}
		f.forget(name, s)
	}
}

// slotFor returns name's slot, starting the opening if there is none.
func (f *Factory) slotFor(name string) (*slot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, fmt.Errorf("open managed ledger %q: %w", name, ErrClosed)
	}
	if s := f.open[name]; s != nil {
		return s, nil
	}
	s := &slot{ready: make(chan struct{})}
	f.open[name] = s
	f.background.Go(func() {
		ctx, cancel := context.WithTimeout(f.ctx, f.cfg.metadataTimeout())
		defer cancel()
		start := time.Now()
		s.ledger, s.err = f.takeOver(ctx, name)
		if s.err != nil {
			s.err = fmt.Errorf("open managed ledger %q: %w", name, s.err)
			f.forget(name, s)
		} else {
			f.log.Info("managed ledger opened", "managedLedger", name, "last", s.ledger.LastConfirmed(), "took", time.Since(start))
		}
		close(s.ready)
	})
	return s, nil
}

// forget takes s out of the table, if it is still there.
func (f *Factory) forget(name string, s *slot) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.open[name] == s {
		delete(f.open, name)
	}
}

// forgetLedger takes m out of the table, if it is still there.
func (f *Factory) forgetLedger(m *ManagedLedger) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.open[m.name]
	if s == nil {
		return
	}
	select {
	case <-s.ready:
		if s.ledger == m {
			delete(f.open, m.name)
		}
	default: // another opening has begun
	}
}

// handles returns the managed ledgers that are open.
func (f *Factory) handles() []*ManagedLedger {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := make([]*ManagedLedger, 0, len(f.open))
	for _, s := range f.open {
		select {
		case <-s.ready:
			if s.ledger != nil {
				all = append(all, s.ledger)
			}
		default:
		}
	}
	return all
}

// Exists reports whether there is a managed ledger of that name.
func (f *Factory) Exists(ctx context.Context, name string) (bool, error) {
	kv, err := f.meta.Get(ctx, ledgerKey(name))
	if errors.Is(err, metadata.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look up managed ledger %q: %w", name, err)
	}
	r, err := parseRecord(name, kv.Value)
	if err != nil {
		return false, err
	}
	return !r.deleting, nil
}

// List returns the names that begin with prefix, such as
// "tenant/namespace/persistent/", in order.
func (f *Factory) List(ctx context.Context, prefix string) ([]string, error) {
	all, err := metadata.List(ctx, f.meta, ledgerKey(prefix))
	if err != nil {
		return nil, fmt.Errorf("list managed ledgers %q: %w", prefix, err)
	}
	names := make([]string, 0, len(all))
	for _, kv := range all {
		name := strings.TrimPrefix(kv.Key, ledgersPrefix)
		if r, err := parseRecord(name, kv.Value); err == nil && r.deleting {
			continue
		}
		names = append(names, name)
	}
	return names, nil
}

// Delete removes a managed ledger with its cursors and ledgers, whoever has it
// open. It returns [ErrNotFound] if there is none. If it fails half way, or the
// process dies, the managed ledger no longer exists for Exists and List, and the
// next Delete or Open goes on with the deletion.
func (f *Factory) Delete(ctx context.Context, name string) error {
	f.mu.Lock()
	s := f.open[name]
	f.mu.Unlock()
	if s != nil {
		select {
		case <-s.ready:
		case <-ctx.Done():
			return fmt.Errorf("delete managed ledger %q: %w", name, ctx.Err())
		}
		if s.ledger != nil {
			s.ledger.fence(fmt.Errorf("managed ledger %q is being deleted: %w", name, ErrClosed))
			if err := s.ledger.Close(ctx); err != nil && ctx.Err() != nil {
				return fmt.Errorf("delete managed ledger %q: %w", name, err)
			}
			f.forget(name, s)
		}
	}
	if err := f.remove(ctx, name); err != nil {
		return fmt.Errorf("delete managed ledger %q: %w", name, err)
	}
	f.log.Info("managed ledger deleted", "managedLedger", name)
	return nil
}

// remove marks the record, which fences any owner, then deletes cursors,
// ledgers and the record, in this order.
func (f *Factory) remove(ctx context.Context, name string) error {
	kv, err := f.meta.Get(ctx, ledgerKey(name))
	if errors.Is(err, metadata.ErrNotFound) {
		return ErrNotFound
	}
	if err != nil {
		return err
	}
	r, err := parseRecord(name, kv.Value)
	if err != nil {
		return err
	}
	r.owner, r.deleting = newOwner(), true
	for _, l := range r.ledgers {
		r.unlisted = append(r.unlisted, l.ID)
	}
	r.ledgers = nil
	version, err := putIf(ctx, f.meta, ledgerKey(name), r.marshal(), kv.Version, r.owner, recordOwner, f.backoff())
	if err != nil {
		return err
	}
	cursors, err := metadata.List(ctx, f.meta, cursorPrefix(name))
	if err != nil {
		return err
	}
	for _, kv := range cursors {
		if err := f.meta.Delete(ctx, kv.Key, metadata.AnyVersion); err != nil && !errors.Is(err, metadata.ErrNotFound) {
			return err
		}
	}
	for _, id := range r.unlisted {
		if err := f.deleteLedger(ctx, id); err != nil {
			return err
		}
	}
	if err := f.meta.Delete(ctx, ledgerKey(name), version); err != nil && !errors.Is(err, metadata.ErrNotFound) {
		return err
	}
	return nil
}

// deleteLedger deletes a ledger that is on no list any more.
func (f *Factory) deleteLedger(ctx context.Context, id ledger.ID) error {
	if err := f.storage.Delete(ctx, id); err != nil && !errors.Is(err, ledger.ErrNoSuchLedger) {
		return fmt.Errorf("delete ledger %d: %w", id, err)
	}
	f.metrics.deleted.Inc()
	return nil
}

// Close closes every managed ledger and ends what the factory started. It may be
// called more than once.
func (f *Factory) Close(ctx context.Context) error {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.cancel()
	f.background.Wait() // openings end; what they opened is in the table

	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		errs []error
		room = make(chan struct{}, closeAtOnce)
	)
	for _, m := range f.handles() {
		wg.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			if err := m.Close(ctx); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		})
	}
	wg.Wait()
	f.reads.close()
	f.pool.Close()
	return errors.Join(errs...)
}

func (f *Factory) backoff() backoff {
	return backoff{first: f.cfg.retryBackoff, most: f.cfg.maxBackoff}
}

// housekeeper looks after ages: rollover, trimming, rates.
func (f *Factory) housekeeper() {
	tick := time.NewTicker(f.cfg.housekeeping)
	defer tick.Stop()
	trimmed := time.Now()
	for {
		select {
		case <-f.ctx.Done():
			return
		case <-tick.C:
		}
		f.cache.UpdateRates()
		trim := time.Since(trimmed) >= time.Duration(f.cfg.RetentionCheckPeriod)*time.Second
		if trim {
			trimmed = time.Now()
		}
		for _, m := range f.handles() {
			m.maybeRollover(time.Now())
			if trim {
				m.trimSoon(true)
			}
		}
	}
}

// dropIdleWindows makes readers that hold entries without reading on give them
// up, because other reads wait for permits.
func (f *Factory) dropIdleWindows() {
	for _, m := range f.handles() {
		for _, r := range m.registry.all() {
			r.dropIdleWindow()
		}
	}
}
