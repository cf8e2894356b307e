package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"

	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/managedledger"
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// Deps are what a broker is built on. All but Registerer must be set.
type Deps struct {
	Factory    *managedledger.Factory
	Ownership  *ownership.Service
	Namespaces *ownership.Namespaces
	Log        *slog.Logger
	Registerer prometheus.Registerer // nil = metrics that nobody scrapes
}

// Broker serves topics to clients. It is safe for concurrent use.
type Broker struct {
	cfg        Config
	factory    *managedledger.Factory
	ownership  *ownership.Service
	namespaces *ownership.Namespaces
	log        *slog.Logger
	metrics    *metrics

	ctx    context.Context // of everything the broker runs; cancelled by Close
	cancel context.CancelCauseFunc

	publishBytes *semaphore.Weighted // maxMessagePublishBufferSizeInMB
	publishLimit int64
	nameBase     string // of producer names made up here; different after each start
	nameCount    atomic.Int64
	connecting   atomic.Int64 // connections that have not introduced themselves

	topics registry

	mu        sync.Mutex // guards the following
	closed    bool
	listeners map[net.Listener]struct{}
	conns     map[*conn]struct{}
	perIP     map[string]int

	running sync.WaitGroup // connections, the ticker
}

// New wires a broker. It registers its metrics and its hook on ownership, and
// does no I/O. Call Close in any case.
func New(cfg Config, deps Deps) *Broker {
	ctx, cancel := context.WithCancelCause(context.Background())
	limit := int64(cfg.MaxMessagePublishBufferMB) << 20
	b := &Broker{
		cfg: cfg, factory: deps.Factory, ownership: deps.Ownership, namespaces: deps.Namespaces,
		log: deps.Log.With("component", "broker"), ctx: ctx, cancel: cancel,
		publishBytes: semaphore.NewWeighted(limit), publishLimit: limit,
		nameBase:  deps.Ownership.Self().ID + "-" + strconv.FormatInt(time.Now().UnixMilli(), 36),
		listeners: map[net.Listener]struct{}{}, conns: map[*conn]struct{}{}, perIP: map[string]int{},
	}
	b.topics.open = map[string]*opening{}
	b.metrics = newMetrics(b, deps.Registerer)
	deps.Ownership.OnRelease(b.releaseBundle)
	b.running.Go(b.tick)
	return b
}

// Serve accepts clients from l until Close, which closes l. It returns nil after
// Close, or why accepting failed.
func (b *Broker) Serve(l net.Listener) error {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		_ = l.Close() // nothing was ever accepted from it
		return fmt.Errorf("broker: %w", ErrClosed)
	}
	b.listeners[l] = struct{}{}
	b.mu.Unlock()
	for wait := time.Duration(0); ; {
		nc, err := l.Accept()
		if err == nil {
			wait = 0
			b.accept(nc)
			continue
		}
		if b.isClosed() {
			return nil
		}
		// Out of file descriptors and the like: it may pass, and the clients that
		// are connected are worth waiting for.
		if wait = min(max(2*wait, 5*time.Millisecond), time.Second); errors.Is(err, net.ErrClosed) {
			return fmt.Errorf("accept from %v: %w", l.Addr(), err)
		}
		b.log.Warn("connection not accepted; will retry", "in", wait, "err", err)
		select {
		case <-time.After(wait):
		case <-b.ctx.Done():
			return nil
		}
	}
}

func (b *Broker) isClosed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.closed
}

// accept starts serving a connection, or turns it away.
func (b *Broker) accept(nc net.Conn) {
	b.metrics.created.Inc()
	c := newConn(b, nc)
	ip := hostOf(c.address)
	if err := b.admit(c, ip); err != nil {
		b.metrics.failed.Inc()
		c.fail(noRequest, pulsarpb.ServerError_TooManyRequests, err)
		turnAway(c)
		return
	}
	b.metrics.succeeded.Inc()
	go func() {
		defer b.running.Done()
		c.serve()
		b.mu.Lock()
		delete(b.conns, c)
		if b.perIP[ip]--; b.perIP[ip] == 0 {
			delete(b.perIP, ip)
		}
		b.mu.Unlock()
		b.metrics.closed.Inc()
	}()
}

// admit counts a connection in, or says which bound is reached. Close waits for
// whoever was admitted.
func (b *Broker) admit(c *conn, ip string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closed:
		return errShutdown
	case b.cfg.MaxConnections > 0 && len(b.conns) >= b.cfg.MaxConnections:
		return fmt.Errorf("%d connections are open, which is brokerMaxConnections: %w", len(b.conns), ErrTooMany)
	case b.cfg.MaxConnectionsPerIP > 0 && b.perIP[ip] >= b.cfg.MaxConnectionsPerIP:
		return fmt.Errorf("%d connections are open from %s, which is brokerMaxConnectionsPerIp: %w", b.perIP[ip], ip, ErrTooMany)
	case b.connecting.Load() >= maxConnecting:
		return fmt.Errorf("%d connections have not sent CONNECT yet, which is the limit: %w", maxConnecting, ErrTooMany)
	}
	b.running.Add(1)
	b.connecting.Add(1)
	b.conns[c] = struct{}{}
	b.perIP[ip]++
	return nil
}

// turnAway writes what is queued for a connection that was not admitted, and
// closes it. A new socket's buffer has room for it, so this does not wait.
func turnAway(c *conn) {
	c.out.close(false)
	if c.nc.SetWriteDeadline(time.Now().Add(100*time.Millisecond)) == nil {
		_ = c.out.write(c.nc) // who is turned away may not care to hear why
	}
	c.close(ErrTooMany)
}

func hostOf(address string) string {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	return host
}

// Close stops accepting, sends producers and consumers away, closes all topics
// (their cursors are flushed) and then all connections, and waits for it. After
// ctx ends it cuts short what can be cut. It may be called more than once.
func (b *Broker) Close(ctx context.Context) error {
	b.mu.Lock()
	b.closed = true
	listeners := b.listeners
	b.listeners = map[net.Listener]struct{}{}
	b.mu.Unlock()
	for l := range listeners {
		_ = l.Close() // Serve returns; there is nothing else to learn
	}
	err := b.topics.closeAll(ctx, b)

	b.mu.Lock()
	conns := make([]*conn, 0, len(b.conns))
	for c := range b.conns {
		conns = append(conns, c)
	}
	b.mu.Unlock()
	for _, c := range conns {
		c.shutdown()
	}
	b.cancel(errShutdown)
	b.running.Wait()
	return err
}

// tick closes the periods over which rates are taken.
func (b *Broker) tick() {
	period := time.Duration(b.cfg.StatsUpdateFrequencySeconds) * time.Second
	t := time.NewTicker(period)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			for _, topic := range b.topics.all() {
				topic.tick(period)
			}
		case <-b.ctx.Done():
			return
		}
	}
}

// CreateTopic creates a topic that does not exist yet, on this broker, which
// must be able to own it. It returns ownership.ErrExists if it does exist.
func (b *Broker) CreateTopic(ctx context.Context, name protocol.TopicName) error {
	if !name.Persistent {
		return fmt.Errorf("topic %s: this broker serves persistent:// topics only: %w", name, ErrUnsupported)
	}
	if err := b.needNamespace(ctx, name); err != nil {
		return err
	}
	exists, err := b.factory.Exists(ctx, name.ManagedLedgerName())
	if err != nil {
		return err
	}
	if exists {
		return fmt.Errorf("topic %s: %w", name, ownership.ErrExists)
	}
	_, err = b.topic(ctx, name, createForced)
	return err
}

// DeleteTopic deletes a topic with its subscriptions and messages. Unless forced
// it refuses with ErrTopicInUse while clients are connected. It returns
// ErrTopicNotFound if there is no such topic, and *ownership.NotOwnerError if
// another broker serves it.
func (b *Broker) DeleteTopic(ctx context.Context, name protocol.TopicName, force bool) error {
	for {
		t, err := b.topic(ctx, name, createNever)
		if err != nil {
			return err
		}
		if n := t.clients(); n > 0 && !force {
			return fmt.Errorf("delete topic %s: %d producers and consumers are connected: %w", name, n, ErrTopicInUse)
		}
		err = b.topics.close(ctx, b, t, func(ctx context.Context) error {
			return b.factory.Delete(ctx, name.ManagedLedgerName())
		})
		if !errors.Is(err, errOvertaken) {
			return err
		}
	}
}

// Unload closes a topic on this broker. Its clients look it up again, and the
// next one opens it. A topic that is not open is no error.
func (b *Broker) Unload(ctx context.Context, name protocol.TopicName) error {
	t, err := b.topics.loaded(ctx, name.String())
	if t == nil {
		return err
	}
	return b.topics.close(ctx, b, t, nil)
}
