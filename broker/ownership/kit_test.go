package ownership

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/protocol"
)

const testTTL = 6 * time.Second

// gate is a store that a test can silence, as a network cut or SIGSTOP would:
// a silenced store holds every call until it is opened or the call's context ends.
type gate struct {
	metadata.Store

	mu        sync.Mutex // guards what follows
	silent    chan struct{}
	afterPut  func(key string) error // may replace a successful Put's answer
	beforePut func(key string)
}

func newGate(store metadata.Store) *gate { return &gate{Store: store} }

func (g *gate) silence() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.silent = make(chan struct{})
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.silent != nil {
		close(g.silent)
		g.silent = nil
	}
}

func (g *gate) pass(ctx context.Context) error {
	g.mu.Lock()
	silent := g.silent
	g.mu.Unlock()
	if silent == nil {
		return ctx.Err()
	}
	select {
	case <-silent:
		return ctx.Err()
	case <-ctx.Done():
		return errors.Join(metadata.ErrUnavailable, ctx.Err())
	}
}

func (g *gate) Get(ctx context.Context, key string) (metadata.KV, error) {
	if err := g.pass(ctx); err != nil {
		return metadata.KV{}, err
	}
	return g.Store.Get(ctx, key)
}

func (g *gate) Put(ctx context.Context, key string, value []byte, if_ metadata.Version, lease metadata.LeaseID) (metadata.Version, error) {
	if err := g.pass(ctx); err != nil {
		return 0, err
	}
	g.mu.Lock()
	before, after := g.beforePut, g.afterPut
	g.mu.Unlock()
	if before != nil {
		before(key)
	}
	v, err := g.Store.Put(ctx, key, value, if_, lease)
	if err == nil && after != nil {
		err = after(key)
	}
	return v, err
}

func (g *gate) Delete(ctx context.Context, key string, if_ metadata.Version) error {
	if err := g.pass(ctx); err != nil {
		return err
	}
	return g.Store.Delete(ctx, key, if_)
}

// Watch holds events back while the gate is silent.
func (g *gate) Watch(ctx context.Context, prefix string) (<-chan metadata.Event, error) {
	in, err := g.Store.Watch(ctx, prefix)
	if err != nil {
		return nil, err
	}
	out := make(chan metadata.Event)
	go func() {
		defer close(out)
		for e := range in {
			if g.pass(ctx) != nil {
				continue // the context has ended; in is about to
			}
			select {
			case out <- e:
			case <-ctx.Done():
			}
		}
	}()
	return out, nil
}

func (g *gate) KeepAlive(ctx context.Context, id metadata.LeaseID) error {
	if err := g.pass(ctx); err != nil {
		return err
	}
	return g.Store.KeepAlive(ctx, id)
}

func (g *gate) GrantLease(ctx context.Context, ttl time.Duration) (metadata.LeaseID, error) {
	if err := g.pass(ctx); err != nil {
		return 0, err
	}
	return g.Store.GrantLease(ctx, ttl)
}

func (g *gate) RevokeLease(ctx context.Context, id metadata.LeaseID) error {
	if err := g.pass(ctx); err != nil {
		return err
	}
	return g.Store.RevokeLease(ctx, id)
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func testConfig() Config {
	return Config{Bundles: 4, SessionTimeoutMillis: int(testTTL / time.Millisecond)}
}

// bootstrap makes public/default in store.
func bootstrap(t *testing.T, store metadata.Store) *Namespaces {
	t.Helper()
	n := NewNamespaces(testConfig(), store, quiet())
	if err := n.Bootstrap(t.Context()); err != nil {
		t.Fatal(err)
	}
	return n
}

func info(id string) BrokerInfo {
	return BrokerInfo{ID: id, ServiceURL: "pulsar://" + id + ":6650", WebServiceURL: "http://" + id + ":8080"}
}

// start starts a broker's service, with hook if it is not nil, and closes it at
// the end of the test.
func start(t *testing.T, store metadata.Store, id string, hook Hook) *Service {
	t.Helper()
	s := New(testConfig(), store, info(id), quiet())
	if hook != nil {
		s.OnRelease(hook)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		s.Close(ctx)
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.Start(ctx); err != nil {
		t.Fatal(err)
	}
	return s
}

func topic(t *testing.T, name string) protocol.TopicName {
	t.Helper()
	topic, err := protocol.ParseTopic(name)
	if err != nil {
		t.Fatal(err)
	}
	return topic
}

func acquire(t *testing.T, s *Service, name string) *Claim {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := s.Acquire(ctx, topic(t, name))
	if err != nil {
		t.Fatalf("%s acquires %s: %v", s.self.ID, name, err)
	}
	return c
}

// eventually waits until ok, looking every 10 ms, for a minute at most.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("still not: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
