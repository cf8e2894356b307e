package server_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/magnetar-io/magnetar/internal/handshake"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/metadata/server"
	"github.com/magnetar-io/magnetar/raftlog"
)

const patience = 30 * time.Second

// cluster is bookies in this process that keep nothing but metadata, over real
// connections.
type cluster struct {
	t    *testing.T
	dir  string
	wrap func(server.Group) server.Group // puts faults between service and group

	mu    sync.Mutex
	nodes map[string]*bookie
	ports map[string]string // host:port by name
	seeds []string
}

type bookie struct {
	name    string
	addr    string
	node    *raftlog.Node
	machine *server.Machine
	service *server.Service
	grpc    *grpc.Server
	serving sync.WaitGroup
}

func quickTiming() raftlog.Timing {
	return raftlog.Timing{
		Heartbeat: 200 * time.Millisecond, Election: 200 * time.Millisecond, Lease: 150 * time.Millisecond, Commit: 20 * time.Millisecond,
		SnapshotInterval: time.Second, SnapshotThreshold: 50, TrailingLogs: 20,
		RPC: 5 * time.Second, Dial: time.Second, Probe: 500 * time.Millisecond, StoreHang: 10 * time.Second,
		Join: 20 * time.Millisecond, JoinSettled: 50 * time.Millisecond,
		Balance: 50 * time.Millisecond, StableLeader: time.Hour, TransferBackoff: time.Second,
	}
}

// newCluster starts the named bookies: the first is formatted, the others join.
func newCluster(t *testing.T, wrap func(server.Group) server.Group, names ...string) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: t.TempDir(), wrap: wrap, nodes: map[string]*bookie{}, ports: map[string]string{}}
	t.Cleanup(func() {
		for _, name := range names {
			c.stop(name)
		}
	})
	if _, err := raftlog.Format(filepath.Join(c.dir, names[0]), "test", names[0], 1); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		c.start(name)
	}
	c.eventually("all are voters", func() bool {
		for _, b := range c.live() {
			if b.node.Group(0).Voters() != len(names) {
				return false
			}
		}
		return true
	})
	return c
}

func (c *cluster) eventually(what string, ok func() bool) {
	c.t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			c.t.Fatalf("never happened: %s", what)
		}
	}
}

func (c *cluster) live() []*bookie {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []*bookie
	for _, b := range c.nodes {
		all = append(all, b)
	}
	return all
}

func (c *cluster) listen(name string) net.Listener {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	addr, again := c.ports[name]
	if !again {
		addr = "127.0.0.1:0"
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		c.t.Fatal(err)
	}
	if !again {
		c.ports[name] = l.Addr().String()
		c.seeds = append(c.seeds, l.Addr().String())
	}
	return l
}

func (c *cluster) joinVia(ctx context.Context, addr string, r raftlog.JoinRequest) (raftlog.JoinReply, error) {
	for _, b := range c.live() {
		if b.addr == addr {
			return b.node.HandleJoin(ctx, r)
		}
	}
	return raftlog.JoinReply{}, fmt.Errorf("nobody listens at %s", addr)
}

func (c *cluster) start(name string) {
	c.t.Helper()
	l := c.listen(name)
	log := slog.New(slog.NewTextHandler(c.t.Output(), &slog.HandlerOptions{Level: slog.LevelError})).With("bookie", name)
	b := &bookie{name: name, addr: l.Addr().String()}
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	var err error
	b.node, err = raftlog.Open(ctx, raftlog.Config{
		Dir: filepath.Join(c.dir, name), Cluster: "test", Name: name, Advertised: b.addr,
		Bookies: slices.Clone(c.seeds), ExpectedBookies: 3, Timing: quickTiming(), Log: log, JoinVia: c.joinVia,
		Machine: func(g raftlog.GroupID, _ raftlog.Identity) (raftlog.Machine, error) {
			if g != raftlog.Metadata {
				return server.NewVolatileMachine(log), nil // of no use here
			}
			b.machine, err = server.NewMachine(filepath.Join(c.dir, name, "metadata"), log)
			return b.machine, err
		},
	}, l)
	if err != nil {
		c.t.Fatal(err)
	}
	var group server.Group = b.node.Group(0)
	if c.wrap != nil {
		group = c.wrap(group)
	}
	b.grpc = rpc.NewServer()
	b.service = server.Register(b.grpc, group, b.machine, log)
	rpc.RegisterClusterServer(b.grpc, &status{node: b.node})
	b.serving.Go(func() { _ = b.grpc.Serve(b.node.Mux().Listener(handshake.Storage, 0)) })
	c.mu.Lock()
	c.nodes[name] = b
	c.mu.Unlock()
}

// stop ends a bookie without handing its leadership over.
func (c *cluster) stop(name string) {
	c.t.Helper()
	c.mu.Lock()
	b := c.nodes[name]
	delete(c.nodes, name)
	c.mu.Unlock()
	if b == nil {
		return
	}
	b.grpc.Stop()
	b.service.Close()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := b.node.Close(ctx); err != nil {
		c.t.Errorf("close %s: %v", name, err)
	}
	b.serving.Wait()
}

func (c *cluster) leader() (name string) {
	c.t.Helper()
	c.eventually("the group has a leader", func() bool {
		for _, b := range c.live() {
			if b.node.Group(0).IsLeader() {
				name = b.name
				return true
			}
		}
		return false
	})
	return name
}

// client returns a store on connections of its own.
func (c *cluster) client() *metadata.Client {
	pool := rpc.NewPool(handshake.Self{Cluster: "test", Node: "broker"}, c.seeds, slog.New(slog.DiscardHandler))
	c.t.Cleanup(func() { _ = pool.Close() })
	return metadata.NewClient(pool)
}

// status is the part of the bookies' Cluster service that finds leaders.
type status struct {
	rpc.UnimplementedClusterServer
	node *raftlog.Node
}

func (s *status) Status(context.Context, *rpc.StatusRequest) (*rpc.StatusReply, error) {
	g := s.node.Group(0).Status()
	group := &rpc.GroupStatus{State: g.State, LeaderNode: g.Leader, LeaderAddress: g.LeaderAddr, Term: uint64(g.Term)}
	for _, m := range g.Members {
		group.Members = append(group.Members, &rpc.Member{Node: m.Node, Address: m.Addr, Voter: m.Voter})
	}
	return &rpc.StatusReply{Groups: []*rpc.GroupStatus{group}}, nil
}

// lossy forgets the answers to some proposals after, and the proposals before,
// they took effect.
type lossy struct {
	server.Group
	mu  *sync.Mutex // guards rng
	rng *rand.Rand
}

var errLost = fmt.Errorf("answer lost by the test: %w", ledger.ErrUnknownOutcome)

func (l lossy) Propose(data []byte, done func(any, error)) {
	l.mu.Lock()
	fate := l.rng.IntN(4)
	l.mu.Unlock()
	switch fate {
	case 0:
		l.Group.Propose(data, func(any, error) { done(nil, errLost) })
	case 1:
		go done(nil, errLost)
	default:
		l.Group.Propose(data, done)
	}
}

// watched follows a watch and keeps what it tells.
type watched struct {
	mu     sync.Mutex
	keys   map[string]metadata.Version
	synced bool
	resets int
}

func watch(ctx context.Context, t *testing.T, s metadata.Store, prefix string) *watched {
	t.Helper()
	events, err := s.Watch(ctx, prefix)
	if err != nil {
		t.Fatal(err)
	}
	w := &watched{keys: map[string]metadata.Version{}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e := range events {
			w.take(t, e)
		}
	}()
	t.Cleanup(func() { <-done })
	return w
}

func (w *watched) take(t *testing.T, e metadata.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch e.Type {
	case metadata.EventReset:
		w.resets++
		clear(w.keys)
		w.synced = false
	case metadata.EventSynced:
		w.synced = true
	case metadata.EventPut:
		if w.keys[e.KV.Key] > e.KV.Version {
			t.Errorf("watch told %q at version %d after %d", e.KV.Key, e.KV.Version, w.keys[e.KV.Key])
		}
		w.keys[e.KV.Key] = e.KV.Version
	case metadata.EventDelete:
		delete(w.keys, e.KV.Key)
	}
}

func (w *watched) equals(kvs []metadata.KV) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, kv := range kvs {
		if w.keys[kv.Key] != kv.Version {
			return false
		}
	}
	return w.synced && len(w.keys) == len(kvs)
}

// ended reports whether an error only says that there was no time for an answer.
func ended(err error) bool {
	return errors.Is(err, metadata.ErrUnknownOutcome) || errors.Is(err, metadata.ErrUnavailable)
}
