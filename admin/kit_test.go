package admin

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/magnetar-io/magnetar/broker"
	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/metadata/metadatatest"
	"github.com/magnetar-io/magnetar/protocol"
)

// topics is what the brokers of a test cluster have: a broker.Broker's view of
// shared storage.
type topics struct {
	mu   sync.Mutex // guards what follows
	all  map[string]*fakeTopic
	wait chan struct{} // if not nil, Topics waits for it
}

type fakeTopic struct {
	subscriptions []string
	inUse         bool
	createdBy     string
}

// fakeBroker stands for one broker of the cluster. Like the real one it refuses
// topics that it does not own, so that a call sent to the wrong broker fails.
type fakeBroker struct {
	*topics
	owner *ownership.Service
}

func (b *fakeBroker) topic(ctx context.Context, name protocol.TopicName) (*fakeTopic, error) {
	if _, err := b.owner.Acquire(ctx, name); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.all[name.String()]
	if t == nil {
		return nil, fmt.Errorf("topic %s: %w", name, broker.ErrTopicNotFound)
	}
	return t, nil
}

func (b *fakeBroker) CreateTopic(ctx context.Context, name protocol.TopicName) error {
	if _, err := b.owner.Acquire(ctx, name); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.all[name.String()] != nil {
		return fmt.Errorf("topic %s %w", name, ownership.ErrExists)
	}
	b.all[name.String()] = &fakeTopic{createdBy: b.owner.Self().ID}
	return nil
}

func (b *fakeBroker) DeleteTopic(ctx context.Context, name protocol.TopicName, force bool) error {
	t, err := b.topic(ctx, name)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if t.inUse && !force {
		return fmt.Errorf("topic %s: %w", name, broker.ErrTopicInUse)
	}
	delete(b.all, name.String())
	return nil
}

func (b *fakeBroker) Topics(ctx context.Context, ns string) ([]string, error) {
	b.mu.Lock()
	wait := b.wait
	b.mu.Unlock()
	if wait != nil {
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	var names []string
	for name := range b.all {
		if strings.Contains(name, "://"+ns+"/") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

func (b *fakeBroker) Stats(ctx context.Context, name protocol.TopicName) (*broker.TopicStats, error) {
	t, err := b.topic(ctx, name)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	stats := &broker.TopicStats{MsgInCounter: 1, BytesInCounter: 100, OwnerBroker: b.owner.Self().ID, Subscriptions: map[string]*broker.SubscriptionStats{}}
	for _, s := range t.subscriptions {
		stats.Subscriptions[s] = &broker.SubscriptionStats{MsgBacklog: 1}
	}
	return stats, nil
}

func (b *fakeBroker) InternalStats(ctx context.Context, name protocol.TopicName) (*broker.InternalStats, error) {
	if _, err := b.topic(ctx, name); err != nil {
		return nil, err
	}
	return &broker.InternalStats{State: "LedgerOpened"}, nil
}

func (b *fakeBroker) Unload(ctx context.Context, name protocol.TopicName) error {
	_, err := b.topic(ctx, name)
	return err
}

func (b *fakeBroker) DeleteSubscription(ctx context.Context, name protocol.TopicName, subscription string, force bool) error {
	t, err := b.topic(ctx, name)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	i := slices.Index(t.subscriptions, subscription)
	switch {
	case i < 0:
		return fmt.Errorf("topic %s: %w: %s", name, broker.ErrSubscriptionNotFound, subscription)
	case t.inUse && !force:
		return fmt.Errorf("topic %s: %w: %s", name, broker.ErrConsumerBusy, subscription)
	}
	t.subscriptions = slices.Delete(t.subscriptions, i, i+1)
	return nil
}

func (b *fakeBroker) ClearBacklog(ctx context.Context, name protocol.TopicName, subscription string) error {
	t, err := b.topic(ctx, name)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !slices.Contains(t.subscriptions, subscription) {
		return fmt.Errorf("topic %s: %w: %s", name, broker.ErrSubscriptionNotFound, subscription)
	}
	return nil
}

// node is one broker of a test cluster.
type node struct {
	url     string
	owner   *ownership.Service
	handler *Handler
	server  *httptest.Server
}

// cluster is brokers that share metadata and topics.
type cluster struct {
	t      *testing.T
	store  metadata.Store
	topics *topics
	nodes  []node
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func newCluster(t *testing.T, brokers int, cfg Config) *cluster {
	t.Helper()
	c := &cluster{t: t, store: metadatatest.NewMemory(t), topics: &topics{all: map[string]*fakeTopic{}}}
	ownCfg := ownership.Config{Bundles: 4, SessionTimeoutMillis: 6000}
	namespaces := ownership.NewNamespaces(ownCfg, c.store, quiet())
	if err := namespaces.Bootstrap(t.Context()); err != nil {
		t.Fatal(err)
	}
	cfg.ClusterName = "test"
	for i := range brokers {
		server := httptest.NewUnstartedServer(nil)
		self := ownership.BrokerInfo{
			ID:            fmt.Sprintf("broker-%d", i+1),
			ServiceURL:    fmt.Sprintf("pulsar://127.0.0.1:%d", 6650+10*i),
			WebServiceURL: "http://" + server.Listener.Addr().String(),
		}
		owner := ownership.New(ownCfg, c.store, self, quiet())
		if err := owner.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		handler := New(cfg, Deps{
			Broker: &fakeBroker{c.topics, owner}, Ownership: owner, Namespaces: namespaces, Gatherer: newGatherer(),
		}, quiet())
		server.Config.Handler = handler
		server.Start()
		t.Cleanup(func() {
			handler.Close()
			server.Close()
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			if err := owner.Close(ctx); err != nil {
				t.Error(err)
			}
		})
		c.nodes = append(c.nodes, node{self.WebServiceURL, owner, handler, server})
	}
	for _, n := range c.nodes {
		eventually(t, "every broker is known", func() bool {
			all, err := n.owner.Brokers(t.Context())
			return err == nil && len(all) == brokers
		})
	}
	return c
}

func newGatherer() prometheus.Gatherer {
	r := prometheus.NewRegistry()
	g := prometheus.NewGauge(prometheus.GaugeOpts{Name: "test_answer", Help: "What tests look for."})
	g.Set(42)
	r.MustRegister(g)
	return r
}

// reply is an answer, its body read.
type reply struct {
	code   int
	header http.Header
}

// send sends a request without following redirects.
func (c *cluster) send(node int, method, path, body string) (reply, string) {
	c.t.Helper()
	req, err := http.NewRequestWithContext(c.t.Context(), method, c.nodes[node].url+path, strings.NewReader(body))
	if err != nil {
		c.t.Fatal(err)
	}
	resp, err := c.nodes[node].server.Client().Transport.RoundTrip(req)
	if err != nil {
		c.t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		c.t.Fatal(err)
	}
	return reply{resp.StatusCode, resp.Header}, string(answer)
}

// step is one request and what must come back.
type step struct {
	name         string
	method, path string
	body         string
	code         int
	want         string // the whole body, or with a leading "…" a part of it
}

func (c *cluster) run(steps []step) {
	for _, s := range steps {
		c.t.Run(s.name, func(t *testing.T) {
			resp, body := c.send(0, s.method, s.path, s.body)
			if resp.code != s.code {
				t.Fatalf("%s %s = %d %s, want %d", s.method, s.path, resp.code, body, s.code)
			}
			if part, ok := strings.CutPrefix(s.want, "…"); ok {
				if !strings.Contains(body, part) {
					t.Errorf("%s %s = %s, want %s in it", s.method, s.path, body, part)
				}
			} else if body != s.want {
				t.Errorf("%s %s = %s, want %s", s.method, s.path, body, s.want)
			}
			if s.code >= 400 && !strings.HasPrefix(body, `{"reason":"`) {
				t.Errorf("%s %s = %s, want an error as JSON", s.method, s.path, body)
			}
		})
	}
}

// eventually waits until ok, looking every 10 ms, for 10 s at most.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("still not: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
