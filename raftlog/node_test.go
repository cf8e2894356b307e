package raftlog

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/magnetar-io/magnetar/internal/handshake"
)

func TestThreeNodesFormAndReplicate(t *testing.T) {
	c := newCluster(t)
	c.groups = 2
	all := c.startAll("a", "b", "c")
	for g := range GroupID(3) {
		c.putAll(g, numbered("x", 5))
		c.awaitList(g, numbered("x", 5))
	}
	for _, b := range all {
		if id := b.Identity(); id.ClusterID != all[0].Identity().ClusterID || id.Groups != 2 {
			t.Errorf("%s is %+v, want the cluster of %+v", b.name, id, all[0].Identity())
		}
	}
}

func TestLeaderDiesAndNothingIsLost(t *testing.T) {
	c := newCluster(t)
	c.startAll("a", "b", "c")
	want := numbered("before", 20)
	c.putAll(1, want)
	old := c.leader(1)
	c.stop(old, false)
	for _, d := range numbered("after", 5) {
		c.put(1, d)
	}
	want = append(want, numbered("after", 5)...)
	c.awaitList(1, want)
	c.start(old.name)
	c.awaitList(1, want)
}

func TestRestartReplaysTheLog(t *testing.T) {
	c := newCluster(t)
	c.startAll("a")
	want := numbered("x", 10)
	c.putAll(1, want)
	b := c.leader(1)
	c.stop(b, false) // the machine never made a checkpoint
	b = c.start("a")
	c.awaitList(1, want)
	c.snapshot(b, 1)
	want = append(want, "y", "z")
	c.put(1, "y")
	if err := b.machines[1].Checkpoint(); err != nil { // the state is ahead of the pointer
		t.Fatal(err)
	}
	c.put(1, "z")
	c.stop(b, false)
	c.start("a") // part from the checkpoint, part from the log, nothing twice
	c.awaitList(1, want)
}

func TestWipedNodeRejoinsThroughAStream(t *testing.T) {
	c := newCluster(t)
	c.startAll("a", "b", "c")
	want := numbered("x", 40)
	c.putAll(1, want)
	var victim *bookie
	leader := c.leader(1)
	for _, b := range c.live() {
		if b != leader {
			victim = b
		}
	}
	oldNode := victim.Identity().Node()
	c.stop(victim, true)
	for _, b := range c.live() {
		c.snapshot(b, 1) // the log is cut: a new member cannot have it all from there
	}
	c.wipe(victim.name)
	again := c.start(victim.name)
	c.put(1, "y")
	want = append(want, "y")
	c.awaitVoters(3)
	c.awaitList(1, want)
	if again.Identity().Node() == oldNode {
		t.Errorf("a wiped disk kept its identity %s", oldNode)
	}
	if m := again.machines[1]; m.installs == 0 {
		t.Error("the state came without a stream; the test shows nothing")
	}
	for _, m := range leader.Group(1).Status().Members {
		if m.Node == oldNode {
			t.Errorf("former self %s is still a member", oldNode)
		}
	}
	var refused *handshake.RefusedError
	if _, err := handshake.Probe(t.Context(), c.ports[victim.name], leader.self(), oldNode); !errors.As(err, &refused) {
		t.Errorf("the former identity answers: %v", err)
	}
}

// A is up to date, B lags, C was wiped while A was down: C has forgotten what it
// acknowledged, so B and C together must not elect B.
func TestLaggardNeverWins(t *testing.T) {
	c := newCluster(t)
	c.startAll("a", "b", "c")
	want := numbered("x", 5)
	c.putAll(1, want)
	c.awaitList(1, want)
	nodes := map[string]*bookie{}
	for _, b := range c.live() {
		nodes[b.name] = b
	}
	c.stop(nodes["b"], true) // b lags from here
	c.putAll(1, []string{"only-a-and-c"})
	want = append(want, "only-a-and-c")
	c.stop(nodes["a"], false)
	c.stop(nodes["c"], false)
	c.wipe("c")
	b := c.start("b")
	cc := c.start("c") // learns the cluster from b
	deadline := time.Now().Add(20 * testTiming().Election)
	for time.Now().Before(deadline) {
		for _, n := range []*bookie{b, cc} {
			if s := n.Group(1).Status(); s.State == "leader" {
				t.Fatalf("%s leads with last log %d: the laggard won", n.name, s.LastLog)
			}
		}
		time.Sleep(time.Millisecond)
	}
	c.start("a")
	c.put(1, "later")
	want = append(want, "later")
	c.awaitVoters(3)
	c.awaitList(1, want)
}

func TestForeignNodesAreRefused(t *testing.T) {
	c := newCluster(t)
	c.startAll("a")
	foreign := newCluster(t)
	foreign.seeds = c.seeds
	foreign.tune = func(_ string, cfg *Config) { cfg.JoinVia = c.joinVia }

	foreign.name = "other"
	_, err := foreign.open("z")
	wantRefusal(t, "another cluster name", err, `"other"`, `"test"`, "z@", "a@")

	foreign.name = "test"
	foreign.format("y")
	y := foreign.start("y")
	req := JoinRequest{Cluster: "test", ClusterID: y.Identity().ClusterID, Node: y.Identity().Node(), Addr: foreign.ports["y"], Group: 1}
	_, err = c.leader(1).HandleJoin(t.Context(), req)
	wantRefusal(t, "another cluster id", err, y.Identity().ClusterID, c.leader(1).Identity().ClusterID, "formatted apart")

	_, _, err = handshake.Dial(t.Context(), c.ports["a"], y.self(), handshake.Target{Service: handshake.Raft, Group: 1})
	if err == nil || !strings.Contains(err.Error(), "formatted apart") {
		t.Errorf("hello of another cluster id = %v, want a refusal", err)
	}
}

func wantRefusal(t *testing.T, what string, err error, parts ...string) {
	t.Helper()
	if _, ok := errors.AsType[*JoinRefusedError](err); !ok {
		t.Fatalf("%s: %v, want a JoinRefusedError", what, err)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("%s: refusal %q does not name %s", what, err, p)
		}
	}
}

func TestNameOfALivingMemberIsRefused(t *testing.T) {
	c := newCluster(t)
	c.startAll("a", "b")
	twin := newCluster(t)
	twin.seeds = c.seeds
	twin.tune = func(_ string, cfg *Config) { cfg.JoinVia = c.joinVia }
	for _, name := range []string{"a", "b"} {
		_, err := twin.open(name)
		wantRefusal(t, "name "+name, err, c.ports[name], "alive", name+"@")
	}
	// The former self's refusal must not depend on the joiner asking first.
	l := c.leader(1)
	_, err := l.HandleJoin(t.Context(), JoinRequest{Cluster: "test", ClusterID: l.Identity().ClusterID, Node: "b@another", Addr: "127.0.0.1:1", Group: 1})
	wantRefusal(t, "name b without a question", err, "alive")
}

func TestMovedBookieIsFoundAgain(t *testing.T) {
	c := newCluster(t)
	all := c.startAll("a", "b", "c")
	for _, b := range all {
		if b == c.leader(1) {
			continue
		}
		c.stop(b, true)
		delete(c.ports, b.name) // another port from now on
		moved := c.start(b.name)
		c.put(1, "moved")
		eventually(t, "the members know the new address", func() bool {
			return slices.ContainsFunc(c.leader(1).Group(1).Status().Members, func(m Member) bool {
				return m.Node == moved.Identity().Node() && m.Addr == c.ports[b.name] && m.Voter
			})
		})
		c.awaitList(1, []string{"moved"})
		return
	}
}

func TestReadBarrier(t *testing.T) {
	c := newCluster(t)
	c.startAll("a", "b", "c")
	c.put(1, "x")
	for _, b := range c.live() {
		err := b.Group(1).ReadBarrier(t.Context())
		var elsewhere *NotLeaderError
		switch {
		case err == nil:
			if got := b.machines[1].list(); !slices.Equal(got, []string{"x"}) {
				t.Errorf("%s after its barrier holds %q", b.name, got)
			}
		case !errors.As(err, &elsewhere):
			t.Errorf("%s: barrier: %v, want nil or a NotLeaderError", b.name, err)
		case elsewhere.Addr != c.ports[c.leader(1).name]:
			t.Errorf("%s names leader %s at %s, want %s", b.name, elsewhere.Leader, elsewhere.Addr, c.ports[c.leader(1).name])
		}
	}
	// A leader that lost its quorum must not answer.
	l := c.leader(1)
	for _, b := range c.live() {
		if b != l {
			c.stop(b, false)
		}
	}
	time.Sleep(20 * time.Millisecond) // an answer from just before the stop still counts when it is read
	if err := l.Group(1).ReadBarrier(t.Context()); err == nil {
		t.Error("a leader without a quorum passed a read barrier")
	}
}

func TestReadBarrierCountsVotersOnly(t *testing.T) {
	c := newCluster(t)
	// The lease must not be what saves a leader that lost its quorum.
	c.timing.Heartbeat, c.timing.Election, c.timing.Lease = 4*time.Second, 4*time.Second, 4*time.Second
	c.tune = func(name string, cfg *Config) {
		if name == "d" {
			cfg.Timing.Join = time.Hour // asked once: it stays a non-voter
		}
	}
	c.startAll("a", "b", "c")
	c.put(1, "x")
	leader := c.leader(1)
	c.start("d")
	g := leader.Group(1)
	eventually(t, "d is a non-voter", func() bool { return len(g.Status().Members) == 4 && g.Voters() == 3 })
	if err := g.ReadBarrier(t.Context()); err != nil {
		t.Errorf("with every voter there: %v", err)
	}
	for _, b := range c.live() {
		if b != leader && b.name != "d" {
			c.stop(b, false)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := g.ReadBarrier(ctx); err == nil {
		t.Error("a leader without another voter confirmed itself with the answer of a non-voter")
	}
}

func TestReadBarrierWritesNothing(t *testing.T) {
	c := newCluster(t)
	c.startAll("a")
	c.put(1, "x")
	g := c.leader(1).Group(1)
	before := g.Status().LastLog
	for range 100 {
		if err := g.ReadBarrier(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if after := g.Status().LastLog; after != before {
		t.Errorf("100 read barriers moved the log from %d to %d", before, after)
	}
}

func TestBalancerMovesLeadership(t *testing.T) {
	c := newCluster(t)
	c.groups = 3
	c.timing.StableLeader = 200 * time.Millisecond
	names := []string{"a", "b", "c"}
	c.startAll(names...)
	eventually(t, "each group is led by its preferred bookie", func() bool {
		for g := range GroupID(4) {
			if !slices.ContainsFunc(c.live(), func(b *bookie) bool { return b.name == names[int(g)%3] && b.Group(g).IsLeader() }) {
				return false
			}
		}
		return true
	})
	for g := range GroupID(4) {
		c.put(g, "x")
		c.awaitList(g, []string{"x"})
	}
}

// A new leader of the metadata group gives every lease its whole time again.
func TestBalancerLeavesTheMetadataGroupAlone(t *testing.T) {
	c := newCluster(t)
	c.groups = 3
	c.timing.StableLeader = 200 * time.Millisecond
	c.startAll("a", "b", "c")
	c.stop(c.leader(Metadata), true)
	metadata := c.leader(Metadata)
	c.start("a")
	c.awaitVoters(3)
	eventually(t, "group 3 is led by a again", func() bool { return c.leader(3).name == "a" })
	if now := c.leader(Metadata); now != metadata {
		t.Errorf("the metadata group was moved from %s to %s", metadata.name, now.name)
	}
}

func TestPreferredLeader(t *testing.T) {
	servers := []raft.Server{
		{ID: "b-1@2", Suffrage: raft.Voter}, {ID: "b@1", Suffrage: raft.Voter}, {ID: "a@9", Suffrage: raft.Nonvoter}, {ID: "c@3", Suffrage: raft.Voter},
	}
	for g, want := range []raft.ServerID{"b@1", "b-1@2", "c@3", "b@1"} {
		if got := preferredLeader(GroupID(g), servers); got == nil || got.ID != want {
			t.Errorf("group %d prefers %v, want %s", g, got, want)
		}
	}
	if got := preferredLeader(0, append(servers, raft.Server{ID: "c@4", Suffrage: raft.Voter})); got != nil {
		t.Errorf("with two voters of one name, %s is preferred, want nobody", got.ID)
	}
}

func TestCloseHandsLeadershipOver(t *testing.T) {
	c := newCluster(t)
	c.timing.Heartbeat, c.timing.Election = 5*time.Second, 5*time.Second
	c.startAll("a", "b", "c")
	c.awaitList(1, nil)
	c.put(1, "x")
	old := c.leader(1)
	c.stop(old, true)
	start := time.Now()
	c.leader(1)
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("a leader came after %v: it was elected for lack of heartbeats, not handed over", took)
	}
	c.awaitList(1, []string{"x"})
}

func TestWatchSeesEveryChange(t *testing.T) {
	c := newCluster(t)
	c.startAll("a")
	g := c.leader(1).Group(1)
	seen := make(chan bool, 10)
	g.Watch(func(leading bool) { seen <- leading })
	if !<-seen {
		t.Error("a watcher of a leader heard false first")
	}
	g.requestRestart("test")
	if <-seen {
		t.Error("a restart was not told as a loss")
	}
	if !<-seen {
		t.Error("the next term was not told")
	}
	c.put(1, "x")
	c.awaitList(1, []string{"x"})
}

// A leadership that is announced while the instance closes must be told as
// lost too: watchers would go on leading a group that is closed.
func TestWatchersHearTheEndOfALeadershipTakenWhileClosing(t *testing.T) {
	c := newCluster(t)
	c.startAll("a")
	g := c.leader(1).Group(1)
	seen := make(chan bool, 10)
	g.Watch(func(leading bool) { seen <- leading })
	if !<-seen {
		t.Fatal("a watcher of a leader heard false first")
	}
	in := g.instance()
	g.mu.Lock() // close and lead must wait here, in this order
	closing := make(chan struct{})
	go func() {
		defer close(closing)
		in.close()
	}()
	time.Sleep(100 * time.Millisecond)
	select {
	case in.notify <- true: // raft tells of another term
	default:
	}
	time.Sleep(300 * time.Millisecond)
	g.mu.Unlock()
	<-closing
	last := true
	for told := true; told; {
		select {
		case last = <-seen:
		case <-time.After(200 * time.Millisecond):
			told = false
		}
	}
	if last || g.lead.Load() != nil {
		t.Errorf("after close watchers heard %v last, and the leadership is %v", last, g.lead.Load())
	}
}
