package client_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/magnetar-io/magnetar/bookie"
	"github.com/magnetar-io/magnetar/bookie/client"
	"github.com/magnetar-io/magnetar/internal/handshake"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/metadata/metadatatest"
	"github.com/magnetar-io/magnetar/raftlog"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ledgerGroups = 2

// testCluster is three bookies in this process, as a program would assemble
// them, with short timers.
type testCluster struct {
	t     *testing.T
	dir   string
	meta  metadata.Store
	addrs []string

	mu      sync.Mutex
	running map[int]*testBookie
}

type testBookie struct {
	node   *raftlog.Node
	store  *bookie.Store
	server *grpc.Server
	ledger *bookie.Service
	served sync.WaitGroup
}

func newCluster(t *testing.T) *testCluster {
	t.Helper()
	c := &testCluster{t: t, dir: t.TempDir(), meta: metadatatest.NewMemory(t), running: map[int]*testBookie{}}
	t.Cleanup(func() {
		for i := range c.addrs {
			c.kill(i)
		}
	})
	var listeners []net.Listener
	for range 3 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		listeners = append(listeners, l)
		c.addrs = append(c.addrs, l.Addr().String())
	}
	_, err := raftlog.Format(c.dirOf(0), "test", name(0), ledgerGroups)
	must(t, err)
	for i, l := range listeners {
		c.start(i, l)
	}
	eventually(t, "three voters everywhere and a leader", func() bool {
		for _, b := range c.all() {
			for _, g := range b.node.Groups() {
				if _, addr := g.Leader(); addr == "" || g.Voters() != 3 {
					return false
				}
			}
		}
		return true
	})
	return c
}

func name(i int) string                   { return fmt.Sprintf("bookie-%d", i+1) }
func (c *testCluster) dirOf(i int) string { return filepath.Join(c.dir, name(i)) }
func (c *testCluster) log(who string) *slog.Logger {
	return slog.New(slog.NewTextHandler(c.t.Output(), nil)).With("who", who)
}

func (c *testCluster) all() []*testBookie {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []*testBookie
	for _, b := range c.running {
		all = append(all, b)
	}
	return all
}

// start starts bookie i; a nil listener takes the port it had.
func (c *testCluster) start(i int, l net.Listener) {
	c.t.Helper()
	if l == nil {
		eventually(c.t, "the port of "+name(i), func() (ok bool) {
			var err error
			l, err = net.Listen("tcp", c.addrs[i])
			return err == nil
		})
	}
	b := &testBookie{}
	log := c.log(name(i))
	fatal := func(err error) { c.t.Errorf("%s: %v", name(i), err) }
	ctx, cancel := context.WithTimeout(c.t.Context(), 30*time.Second)
	defer cancel()
	node, err := raftlog.Open(ctx, raftlog.Config{
		Dir: c.dirOf(i), Cluster: "test", Name: name(i), Advertised: c.addrs[i], Bookies: c.addrs, ExpectedBookies: 3,
		Timing: timing(), Log: log, Fatal: fatal,
		Machine: func(g raftlog.GroupID, _ raftlog.Identity) (raftlog.Machine, error) {
			if b.store == nil {
				store, err := bookie.NewStore(filepath.Join(c.dirOf(i), "ledgers"), bookie.StoreConfig{SegmentBytes: 256 << 10, Log: log, Fatal: fatal})
				if err != nil {
					return nil, err
				}
				b.store = store
			}
			return b.store.Machine(g)
		},
		JoinVia: func(ctx context.Context, addr string, r raftlog.JoinRequest) (raftlog.JoinReply, error) {
			pool := rpc.NewPool(handshake.Self{Cluster: r.Cluster, ClusterID: r.ClusterID, Node: r.Node}, nil, log)
			defer pool.Close()
			conn, err := pool.Conn(addr)
			if err != nil {
				return raftlog.JoinReply{}, err
			}
			return bookie.Join(ctx, conn, r)
		},
	}, l)
	must(c.t, err)
	b.node, b.server = node, rpc.NewServer()
	b.ledger, err = bookie.Register(b.server, node, b.store, log)
	must(c.t, err)
	b.served.Go(func() { b.server.Serve(node.Mux().Listener(handshake.Storage, 0)) })
	c.mu.Lock()
	c.running[i] = b
	c.mu.Unlock()
}

// kill stops bookie i without handing anything over.
func (c *testCluster) kill(i int) {
	c.mu.Lock()
	b := c.running[i]
	delete(c.running, i)
	c.mu.Unlock()
	if b == nil {
		return
	}
	b.server.Stop()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := b.node.Close(ctx); err != nil {
		c.t.Errorf("close %s: %v", name(i), err)
	}
	b.ledger.Close()
	b.served.Wait()
	if err := b.store.Close(); err != nil {
		c.t.Errorf("close store of %s: %v", name(i), err)
	}
}

// leader returns the bookie that leads a group.
func (c *testCluster) leader(group uint32) int {
	c.t.Helper()
	leader := -1
	eventually(c.t, fmt.Sprintf("a leader of group %d", group), func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		for i, b := range c.running {
			if b.node.Group(raftlog.GroupID(group)).IsLeader() {
				leader = i
			}
		}
		return leader >= 0
	})
	return leader
}

// client returns a new client that knows every bookie.
func (c *testCluster) client() *client.Client {
	pool := rpc.NewPool(handshake.Self{Cluster: "test", Node: "broker-1"}, c.addrs, c.log("client"))
	cl := client.New(pool, c.meta, c.log("client"), nil)
	c.t.Cleanup(func() {
		cl.Close()
		pool.Close()
	})
	return cl
}

func timing() raftlog.Timing {
	t := raftlog.DefaultTiming(3)
	t.Heartbeat, t.Election, t.Lease, t.Commit = 300*time.Millisecond, 300*time.Millisecond, 200*time.Millisecond, 50*time.Millisecond
	t.SnapshotInterval, t.SnapshotThreshold, t.TrailingLogs = 300*time.Millisecond, 64, 32
	t.Join, t.Balance = 50*time.Millisecond, time.Hour
	return t
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits until what holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !holds(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after 30 s still not: %s", what)
		}
	}
}
