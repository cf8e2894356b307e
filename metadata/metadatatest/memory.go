package metadatatest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/metadata/server"
	"github.com/magnetar-io/magnetar/raftlog"
)

// Memory is a [metadata.Store] in this process: the real state machine, lease
// clock and watches, with a group of one that commits at once.
type Memory struct {
	engine *server.Engine
	group  *group

	closed  chan struct{}  // closed when the test ends
	watches sync.WaitGroup // goroutines of Watch
}

var _ metadata.Store = (*Memory)(nil)

// NewMemory returns an empty store, which ends with the test. Its clock is
// time.Now's, so that leases expire at once in a testing/synctest bubble.
func NewMemory(t testing.TB) *Memory {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	g := &group{machine: server.NewVolatileMachine(log)}
	m := &Memory{engine: server.NewEngine(g, g.machine, log), group: g, closed: make(chan struct{})}
	t.Cleanup(func() {
		close(m.closed)
		m.engine.Close()
		m.watches.Wait()
	})
	return m
}

// ChangeLeader does what an election does: every lease gets its whole TTL again,
// and watches go on.
func (m *Memory) ChangeLeader() {
	m.group.changed(false)
	m.group.changed(true)
}

// Get implements [metadata.Store].
func (m *Memory) Get(ctx context.Context, key string) (metadata.KV, error) {
	return m.engine.Get(ctx, key)
}

// Put implements [metadata.Store].
func (m *Memory) Put(ctx context.Context, key string, value []byte, if_ metadata.Version, lease metadata.LeaseID) (metadata.Version, error) {
	r, err := m.engine.Change(ctx, &server.Command{Kind: server.KindPut, Key: key, Value: value, If: if_, Lease: lease})
	return r.Version, err
}

// PutSequential implements [metadata.Store].
func (m *Memory) PutSequential(ctx context.Context, prefix string, value []byte) (int64, error) {
	r, err := m.engine.Change(ctx, &server.Command{Kind: server.KindSequential, Key: prefix, Value: value})
	return r.Number, err
}

// Delete implements [metadata.Store].
func (m *Memory) Delete(ctx context.Context, key string, if_ metadata.Version) error {
	_, err := m.engine.Change(ctx, &server.Command{Kind: server.KindDelete, Key: key, If: if_})
	return err
}

// Range implements [metadata.Store].
func (m *Memory) Range(ctx context.Context, prefix, after string, limit int) ([]metadata.KV, error) {
	var all []metadata.KV
	for {
		kvs, more, err := m.engine.Range(ctx, prefix, after, limit-len(all))
		if err != nil {
			return nil, err
		}
		all = append(all, kvs...)
		if !more {
			return all, nil
		}
		after = all[len(all)-1].Key
	}
}

// Watch implements [metadata.Store].
func (m *Memory) Watch(ctx context.Context, prefix string) (<-chan metadata.Event, error) {
	if err := metadata.CheckPrefix(prefix); err != nil {
		return nil, err
	}
	w := &watch{memory: m, prefix: prefix, events: make(chan metadata.Event)}
	m.watches.Go(func() { w.run(ctx) })
	return w.events, nil
}

// watch is one Memory.Watch; its goroutine ends with the watch's context or with
// the store.
type watch struct {
	memory  *Memory
	prefix  string
	events  chan metadata.Event // run to the reader; closed by run
	synced  bool
	through metadata.Version
}

var errClosed = errors.New("store closed")

func (w *watch) run(ctx context.Context) {
	defer close(w.events)
	for {
		_ = w.memory.engine.Watch(ctx, w.prefix, w.synced, w.through, func(told server.Told) error { return w.tell(ctx, told) })
		select {
		case <-ctx.Done():
			return
		case <-w.memory.closed:
			return
		case <-time.After(time.Millisecond): // between two leaders
		}
	}
}

func (w *watch) tell(ctx context.Context, told server.Told) error {
	all := told.Events
	if told.Reset {
		w.synced = false
		all = append([]metadata.Event{{Type: metadata.EventReset}}, all...)
	}
	if told.Synced {
		all = append(all, metadata.Event{Type: metadata.EventSynced})
	}
	for _, event := range all {
		select {
		case w.events <- event:
		case <-ctx.Done():
			return ctx.Err()
		case <-w.memory.closed:
			return errClosed
		}
	}
	if w.synced = w.synced || told.Synced; w.synced {
		w.through = told.Through
	}
	return nil
}

// GrantLease implements [metadata.Store].
func (m *Memory) GrantLease(ctx context.Context, ttl time.Duration) (metadata.LeaseID, error) {
	r, err := m.engine.Change(ctx, &server.Command{Kind: server.KindGrant, TTL: ttl})
	return r.Lease, err
}

// KeepAlive implements [metadata.Store].
func (m *Memory) KeepAlive(ctx context.Context, id metadata.LeaseID) error {
	for {
		err := m.engine.KeepAlive(ctx, id)
		if !errors.Is(err, metadata.ErrUnavailable) || ctx.Err() != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Millisecond): // between two leaders
		}
	}
}

// RevokeLease implements [metadata.Store].
func (m *Memory) RevokeLease(ctx context.Context, id metadata.LeaseID) error {
	_, err := m.engine.Change(ctx, &server.Command{Kind: server.KindRevoke, Lease: id})
	return err
}

// group is a group of one member, which commits what it is given.
type group struct {
	machine *server.Machine

	mu      sync.Mutex // guards what follows; held while the machine applies
	index   raftlog.Index
	changed func(leading bool)
}

func (g *group) Propose(data []byte, done func(result any, err error)) {
	g.mu.Lock()
	g.index++
	results := g.machine.Apply([]raftlog.Command{{Index: g.index, Term: 1, Data: data}})
	g.mu.Unlock()
	done(results[0], nil)
}

func (*group) ReadBarrier(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", err, metadata.ErrUnavailable)
	}
	return nil
}

func (g *group) Watch(changed func(leading bool)) {
	g.changed = changed
	changed(true)
}
