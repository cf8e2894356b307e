package raftlog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/magnetar-io/magnetar/ledger"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// logStore is the kind of log that the tests of this package run on.
func logStore() LogStore { return LogStore(os.Getenv("RAFTLOG_STORE")) }

func testTiming() Timing {
	return Timing{
		Heartbeat: 250 * time.Millisecond, Election: 250 * time.Millisecond, Lease: 200 * time.Millisecond, Commit: 20 * time.Millisecond,
		SnapshotInterval: time.Hour, SnapshotThreshold: 1, TrailingLogs: 4,
		RPC: 5 * time.Second, Dial: time.Second, Probe: 500 * time.Millisecond, StoreHang: 5 * time.Minute,
		Join: 20 * time.Millisecond, JoinSettled: 50 * time.Millisecond,
		Balance: 50 * time.Millisecond, StableLeader: time.Hour, TransferBackoff: time.Second,
	}
}

// cluster is bookies in this process. A bookie is known by its name; its
// directory and its port outlive it.
type cluster struct {
	t      *testing.T
	dir    string
	name   string
	groups int
	timing Timing
	tune   func(name string, c *Config) // may change a bookie's Config

	mu    sync.Mutex
	nodes map[string]*bookie
	ports map[string]string // host:port by name
	seeds []string
}

type bookie struct {
	*Node
	name     string
	machines map[GroupID]*listMachine
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: t.TempDir(), name: "test", groups: 1, timing: testTiming(), nodes: map[string]*bookie{}, ports: map[string]string{}}
	t.Cleanup(c.stopAll)
	return c
}

func (c *cluster) stopAll() {
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // no handing over
	var all sync.WaitGroup
	c.mu.Lock()
	nodes := c.nodes
	c.nodes = map[string]*bookie{}
	c.mu.Unlock()
	for _, b := range nodes {
		all.Go(func() { c.closed(b, b.Close(ctx)) })
	}
	all.Wait()
}

func (c *cluster) closed(b *bookie, err error) {
	c.t.Helper()
	if err != nil {
		c.t.Errorf("close %s: %v", b.name, err)
	}
	for _, m := range b.machines {
		m.check(c.t)
	}
}

func (c *cluster) dirOf(name string) string { return filepath.Join(c.dir, name) }

// listen opens the bookie's port, the same each time.
func (c *cluster) listen(name string) net.Listener {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	addr, ok := c.ports[name]
	if !ok {
		addr = "127.0.0.1:0"
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		c.t.Fatal(err)
	}
	if !ok {
		c.ports[name] = l.Addr().String()
		c.seeds = append(c.seeds, l.Addr().String())
	}
	return l
}

// joinVia is the wire of these tests: it finds the node that listens at addr.
func (c *cluster) joinVia(ctx context.Context, addr string, req JoinRequest) (JoinReply, error) {
	c.mu.Lock()
	var to *bookie
	for _, b := range c.nodes {
		if b.cfg.Advertised == addr {
			to = b
		}
	}
	c.mu.Unlock()
	if to == nil {
		return JoinReply{}, fmt.Errorf("nobody listens at %s", addr)
	}
	return to.HandleJoin(ctx, req)
}

func (c *cluster) format(name string) {
	c.t.Helper()
	if _, err := Format(c.dirOf(name), c.name, name, c.groups); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) open(name string) (*bookie, error) {
	l := c.listen(name)
	b := &bookie{name: name, machines: map[GroupID]*listMachine{}}
	c.mu.Lock()
	seeds := slices.Clone(c.seeds)
	c.mu.Unlock()
	cfg := Config{
		LogStore: logStore(), segmentBytes: 16 << 20,
		Dir: c.dirOf(name), Cluster: c.name, Name: name, Advertised: l.Addr().String(), Bookies: seeds, ExpectedBookies: 3, Timing: c.timing,
		Log: slog.New(slog.NewTextHandler(c.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})).With("bookie", name),
		Machine: func(g GroupID, _ Identity) (Machine, error) {
			m, err := openListMachine(filepath.Join(c.dirOf(name), "list", fmt.Sprint(g)))
			b.machines[g] = m
			return m, err
		},
		JoinVia: c.joinVia,
		Fatal:   func(err error) { c.t.Errorf("bookie %s: fatal: %v", name, err) },
	}
	if c.tune != nil {
		c.tune(name, &cfg)
	}
	ctx, cancel := context.WithTimeout(c.t.Context(), 10*time.Second)
	defer cancel()
	n, err := Open(ctx, cfg, l)
	if err != nil {
		return nil, err
	}
	b.Node = n
	c.mu.Lock()
	c.nodes[name] = b
	c.mu.Unlock()
	return b, nil
}

func (c *cluster) start(name string) *bookie {
	c.t.Helper()
	b, err := c.open(name)
	if err != nil {
		c.t.Fatal(err)
	}
	return b
}

// startAll forms a cluster: a is formatted, the others join.
func (c *cluster) startAll(names ...string) []*bookie {
	c.t.Helper()
	c.format(names[0])
	var all []*bookie
	for _, name := range names {
		all = append(all, c.start(name))
	}
	c.awaitVoters(len(names))
	return all
}

func (c *cluster) stop(b *bookie, handOver bool) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if !handOver {
		cancel()
	}
	err := b.Close(ctx)
	c.mu.Lock()
	delete(c.nodes, b.name)
	c.mu.Unlock()
	c.closed(b, err)
}

func (c *cluster) wipe(name string) {
	c.t.Helper()
	if err := os.RemoveAll(c.dirOf(name)); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) live() []*bookie {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []*bookie
	for _, b := range c.nodes {
		all = append(all, b)
	}
	slices.SortFunc(all, func(a, b *bookie) int { return slices.Compare([]byte(a.name), []byte(b.name)) })
	return all
}

// eventually polls until ok is true.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; {
		if ok() {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("never happened: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (c *cluster) awaitVoters(n int) {
	c.t.Helper()
	eventually(c.t, fmt.Sprintf("%d voters and no other member, seen by all", n), func() bool {
		for _, b := range c.live() {
			for _, g := range b.Groups() {
				if g.Voters() != n || len(g.Status().Members) != n || !g.settled() {
					return false
				}
			}
		}
		return true
	})
}

// leader waits until a bookie leads the group and is ready.
func (c *cluster) leader(g GroupID) *bookie {
	c.t.Helper()
	var l *bookie
	eventually(c.t, fmt.Sprintf("group %d has a leader", g), func() bool {
		for _, b := range c.live() {
			if b.Group(g).IsLeader() {
				l = b
				return true
			}
		}
		return false
	})
	return l
}

type outcome struct {
	result any
	err    error
}

func propose(g *Group, data string) outcome {
	c := make(chan outcome, 1)
	g.Propose([]byte(data), func(r any, err error) { c <- outcome{r, err} })
	return <-c
}

// put proposes until the command was applied. Tests use commands that differ.
func (c *cluster) put(g GroupID, data string) {
	c.t.Helper()
	eventually(c.t, "command "+data+" is applied", func() bool {
		o := propose(c.leader(g).Group(g), data)
		if errors.Is(o.err, ledger.ErrUnknownOutcome) { // as a client would: look before sending again
			l := c.leader(g)
			return l.Group(g).ReadBarrier(c.t.Context()) == nil && slices.Contains(l.machines[g].list(), data)
		}
		return o.err == nil
	})
}

func numbered(prefix string, n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = fmt.Sprintf("%s%d", prefix, i)
	}
	return all
}

func (c *cluster) putAll(g GroupID, data []string) {
	c.t.Helper()
	for _, d := range data {
		c.put(g, d)
	}
}

// awaitList waits until every live bookie's machine holds want.
func (c *cluster) awaitList(g GroupID, want []string) {
	c.t.Helper()
	for _, b := range c.live() {
		c.awaitListOn(b, g, want)
	}
}

func (c *cluster) awaitListOn(b *bookie, g GroupID, want []string) {
	c.t.Helper()
	var got []string
	defer func() {
		if c.t.Failed() {
			c.t.Logf("%s group %d holds %d commands %q, want %d", b.name, g, len(got), got, len(want))
		}
	}()
	eventually(c.t, fmt.Sprintf("%s has the commands of group %d", b.name, g), func() bool {
		got = b.machines[g].list()
		return slices.Equal(got, want)
	})
}

// snapshot makes a bookie write a pointer and cut its log.
func (c *cluster) snapshot(b *bookie, g GroupID) {
	c.t.Helper()
	if err := b.Group(g).instance().raft.Snapshot().Error(); err != nil {
		c.t.Fatalf("snapshot of %s group %d: %v", b.name, g, err)
	}
}
