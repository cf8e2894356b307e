package rpc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/magnetar-io/magnetar/internal/handshake"
	"github.com/magnetar-io/magnetar/ledger"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var discard = slog.New(slog.DiscardHandler)

// node is a bookie that answers Cluster.Status as it is told to.
type node struct {
	UnimplementedClusterServer
	addr   string
	asked  atomic.Int64
	mux    *handshake.Mux
	server *grpc.Server
	ends   sync.WaitGroup

	mu     sync.Mutex
	reply  *StatusReply
	status func(ctx context.Context) error // runs before the answer
	join   func(ctx context.Context) error
}

func (n *node) Status(ctx context.Context, _ *StatusRequest) (*StatusReply, error) {
	n.asked.Add(1)
	n.mu.Lock()
	reply, status := n.reply, n.status
	n.mu.Unlock()
	if status != nil {
		if err := status(ctx); err != nil {
			return nil, err
		}
	}
	return reply, nil
}

// Join stands for a call that only a leader answers.
func (n *node) Join(ctx context.Context, r *JoinRequest) (*JoinReply, error) {
	n.mu.Lock()
	join := n.join
	n.mu.Unlock()
	if join != nil {
		if err := join(ctx); err != nil {
			return nil, err
		}
	}
	return &JoinReply{ClusterId: n.addr, LeaderNode: r.GetNode()}, nil
}

func (n *node) set(change func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change()
}

// leads is the answer of a node that names a leader.
func leads(state, addr string, term uint64, members ...string) *StatusReply {
	g := &GroupStatus{Id: 1, State: state, LeaderNode: "leader", LeaderAddress: addr, Term: term}
	for _, m := range members {
		g.Members = append(g.Members, &Member{Address: m})
	}
	return &StatusReply{Groups: []*GroupStatus{{Id: 0}, g, {Id: 2}, {Id: 3}}}
}

func startNode(t *testing.T, id handshake.Self) *node {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n := &node{addr: l.Addr().String(), reply: leads("follower", "", 1)}
	n.mux = handshake.NewMux(l, func() handshake.Self { return id }, discard)
	n.server = NewServer()
	RegisterClusterServer(n.server, n)
	n.ends.Go(func() { _ = n.mux.Serve() })
	n.ends.Go(func() { _ = n.server.Serve(n.mux.Listener(handshake.Storage, 0)) })
	t.Cleanup(n.stop)
	return n
}

func (n *node) stop() {
	n.server.Stop()
	_ = n.mux.Close()
	n.ends.Wait()
}

func self(node string) handshake.Self {
	return handshake.Self{Cluster: "test", ClusterID: "3f0c6d6e-7c39-4d43-9a39-0f4d1d9b7e11", Node: node}
}

func startNodes(t *testing.T, count int) (nodes []*node, addrs []string) {
	t.Helper()
	for i := range count {
		n := startNode(t, self(fmt.Sprintf("bookie-%d@1", i)))
		nodes, addrs = append(nodes, n), append(addrs, n.addr)
	}
	return nodes, addrs
}

func newTestPool(t *testing.T, seeds ...string) *Pool {
	t.Helper()
	p := NewPool(handshake.Self{Cluster: "test", Node: "broker"}, seeds, discard)
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// join is the call of these tests; it returns who answered.
func join(answered *string) func(context.Context, *grpc.ClientConn) error {
	return func(ctx context.Context, conn *grpc.ClientConn) error {
		reply, err := NewClusterClient(conn).Join(ctx, &JoinRequest{})
		*answered = reply.GetClusterId()
		return err
	}
}

func TestLeaderByItsOwnWord(t *testing.T) {
	nodes, addrs := startNodes(t, 3)
	silent := make(chan struct{}) // one node hangs: nobody may wait for it
	t.Cleanup(func() { close(silent) })
	nodes[0].set(func() { nodes[0].status = func(context.Context) error { <-silent; return nil } })
	nodes[1].set(func() { nodes[1].reply = leads("follower", addrs[0], 9) })
	nodes[2].set(func() { nodes[2].reply = leads("leader", addrs[2], 8) })
	p := newTestPool(t, addrs...)
	start := time.Now()
	addr, err := p.Leader(within(t, 10*time.Second), 1)
	if err != nil || addr != addrs[2] {
		t.Errorf("Leader = %q, %v, want the one that says so itself, %q", addr, err, addrs[2])
	}
	if took := time.Since(start); took >= statusTimeout {
		t.Errorf("took %v because of a node that hangs", took)
	}
	asked := nodes[2].asked.Load()
	if again, err := p.Leader(t.Context(), 1); err != nil || again != addr || nodes[2].asked.Load() != asked {
		t.Errorf("a known leader was asked for again: %q, %v", again, err)
	}
	p.Forget(1, addrs[1]) // not the leader: no effect
	if again, _ := p.Leader(t.Context(), 1); again != addr {
		t.Error("forgetting another node forgot the leader")
	}
}

func TestLeaderByTheHighestTerm(t *testing.T) {
	nodes, addrs := startNodes(t, 2)
	nodes[0].set(func() { nodes[0].reply = leads("follower", "127.0.0.1:1", 3) })
	nodes[1].set(func() { nodes[1].reply = leads("candidate", "127.0.0.1:2", 4) })
	p := newTestPool(t, addrs...)
	if addr, err := p.Leader(within(t, 10*time.Second), 1); err != nil || addr != "127.0.0.1:2" {
		t.Errorf("Leader = %q, %v, want the one of term 4", addr, err)
	}
}

func TestLeaderAppearsLater(t *testing.T) {
	nodes, addrs := startNodes(t, 1)
	p := newTestPool(t, addrs...)
	time.AfterFunc(50*time.Millisecond, func() {
		nodes[0].set(func() { nodes[0].reply = leads("leader", addrs[0], 1) })
	})
	var callers sync.WaitGroup
	for range 20 { // they share the rounds of questions
		callers.Go(func() {
			if addr, err := p.Leader(within(t, 10*time.Second), 1); err != nil || addr != addrs[0] {
				t.Errorf("Leader = %q, %v", addr, err)
			}
		})
	}
	callers.Wait()
	if asked := nodes[0].asked.Load(); asked > 40 {
		t.Errorf("20 callers asked %d times", asked)
	}
}

func TestNoLeader(t *testing.T) {
	p := newTestPool(t, "127.0.0.1:1")
	_, err := p.Leader(within(t, 100*time.Millisecond), 1)
	if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, ledger.ErrUnavailable) {
		t.Errorf("Leader = %v", err)
	}
	for _, want := range []string{"group 1", "127.0.0.1:1"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not name %q", err, want)
		}
	}
}

func TestCallFollowsTheLeader(t *testing.T) {
	nodes, addrs := startNodes(t, 3)
	p := newTestPool(t, addrs[0])
	nodes[0].set(func() {
		nodes[0].reply = leads("follower", addrs[1], 1)
		nodes[0].join = func(context.Context) error { return errors.New("asked in vain") }
	})
	nodes[1].set(func() {
		nodes[1].join = func(context.Context) error { return &NotLeader{Group: 1, Node: "c", Addr: addrs[2]} }
	})
	var answered string
	if err := p.Call(within(t, 10*time.Second), 1, join(&answered)); err != nil || answered != addrs[2] {
		t.Errorf("Call answered by %q, %v, want %q", answered, err, addrs[2])
	}
	if addr, _ := p.Leader(t.Context(), 1); addr != addrs[2] {
		t.Errorf("leader remembered is %q", addr)
	}
}

// TestCallSurvivesNodesThatNameEachOther must neither spin nor give up.
func TestCallSurvivesNodesThatNameEachOther(t *testing.T) {
	nodes, addrs := startNodes(t, 2)
	var calls atomic.Int64
	for i, n := range nodes {
		other := addrs[1-i]
		n.set(func() {
			n.reply = leads("follower", other, 1)
			n.join = func(context.Context) error {
				calls.Add(1)
				return &NotLeader{Addr: other}
			}
		})
	}
	p := newTestPool(t, addrs...)
	time.AfterFunc(300*time.Millisecond, func() { nodes[0].set(func() { nodes[0].join = nil }) })
	var answered string
	if err := p.Call(within(t, 10*time.Second), 1, join(&answered)); err != nil || answered != addrs[0] {
		t.Errorf("Call answered by %q, %v", answered, err)
	}
	if n := calls.Load(); n > 60 {
		t.Errorf("%d calls in 300 ms", n)
	}
}

func TestCallOutcomes(t *testing.T) {
	nodes, addrs := startNodes(t, 1)
	nodes[0].set(func() { nodes[0].reply = leads("leader", addrs[0], 1) })
	p := newTestPool(t, addrs...)
	hang := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	tests := []struct {
		name      string
		join      func(context.Context) error
		want, not error
		retried   bool
	}{
		{"refused-for-good", func(context.Context) error { return ledger.ErrFenced }, ledger.ErrFenced, context.DeadlineExceeded, false},
		{"invalid", func(context.Context) error { return ErrInvalid }, ErrInvalid, context.DeadlineExceeded, false},
		{"no-sentinel", func(context.Context) error { return errors.New("odd") }, nil, context.DeadlineExceeded, false},
		{"unavailable", func(context.Context) error { return ledger.ErrUnavailable }, ledger.ErrUnavailable, ledger.ErrUnknownOutcome, true},
		{"not-leader", func(context.Context) error { return &NotLeader{} }, ledger.ErrUnavailable, ledger.ErrUnknownOutcome, true},
		{"unknown", func(context.Context) error { return ledger.ErrUnknownOutcome }, ledger.ErrUnknownOutcome, ledger.ErrUnavailable, true},
		{"hangs", hang, ledger.ErrUnknownOutcome, ledger.ErrUnavailable, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			nodes[0].set(func() { nodes[0].join = tt.join })
			var answered string
			attempts := 0
			err := p.CallWithin(within(t, 500*time.Millisecond), 1, 100*time.Millisecond, func(ctx context.Context, conn *grpc.ClientConn) error {
				attempts++
				return join(&answered)(ctx, conn)
			})
			if err == nil || tt.want != nil && !errors.Is(err, tt.want) || errors.Is(err, tt.not) {
				t.Errorf("Call = %v, want %v and not %v", err, tt.want, tt.not)
			}
			if (attempts > 1) != tt.retried || errors.Is(err, context.DeadlineExceeded) != tt.retried {
				t.Errorf("%d attempts, then %v; want retries: %v", attempts, err, tt.retried)
			}
		})
	}
}

// TestNeverSentIsUnavailable: only a call that may have arrived is unknown.
func TestNeverSentIsUnavailable(t *testing.T) {
	p := newTestPool(t)
	p.SetLeader(1, "127.0.0.1:1")
	var answered string
	err := p.Call(within(t, 200*time.Millisecond), 1, func(ctx context.Context, conn *grpc.ClientConn) error {
		p.SetLeader(1, "127.0.0.1:1")
		return join(&answered)(ctx, conn)
	})
	if !errors.Is(err, ledger.ErrUnavailable) || errors.Is(err, ledger.ErrUnknownOutcome) {
		t.Errorf("call to nobody = %v, want ErrUnavailable", err)
	}
}

// TestCutConnectionIsUnknown stops a server while it works on a call.
func TestCutConnectionIsUnknown(t *testing.T) {
	nodes, addrs := startNodes(t, 1)
	p := newTestPool(t, addrs...)
	working := make(chan struct{})
	nodes[0].set(func() {
		nodes[0].join = func(ctx context.Context) error {
			close(working)
			<-ctx.Done()
			return ctx.Err()
		}
	})
	conn, err := p.Conn(addrs[0])
	if err != nil {
		t.Fatal(err)
	}
	cut := make(chan struct{})
	go func() {
		<-working
		nodes[0].server.Stop()
		close(cut)
	}()
	_, err = NewClusterClient(conn).Join(within(t, 10*time.Second), &JoinRequest{})
	<-cut
	if !errors.Is(err, ledger.ErrUnknownOutcome) {
		t.Errorf("call whose server went = %v, want ErrUnknownOutcome", err)
	}
}

func TestPoolLearns(t *testing.T) {
	nodes, addrs := startNodes(t, 1)
	p := newTestPool(t, addrs...)
	if got, want := p.Addrs(), addrs; !slices.Equal(got, want) {
		t.Errorf("Addrs = %v, want %v", got, want)
	}
	nodes[0].set(func() { nodes[0].reply = leads("leader", addrs[0], 1, addrs[0], "127.0.0.1:7", "127.0.0.1:8") })
	groups, err := p.Groups(within(t, 10*time.Second))
	if err != nil || groups != 3 {
		t.Errorf("Groups = %d, %v, want 3", groups, err)
	}
	if got, want := p.Addrs(), []string{addrs[0], "127.0.0.1:7", "127.0.0.1:8"}; !slices.Equal(got, want) {
		t.Errorf("Addrs = %v, want %v", got, want)
	}
	for id, want := range map[ledger.ID]uint32{1: 1, 2: 2, 3: 3, 4: 1, 9: 3} {
		if got := p.GroupOf(id); got != want {
			t.Errorf("GroupOf(%d) = %d, want %d", id, got, want)
		}
	}
}

// TestPoolKeepsToOneCluster: a pool without a cluster id takes the first it
// meets.
func TestPoolKeepsToOneCluster(t *testing.T) {
	ours := startNode(t, self("bookie-1@1"))
	other := self("bookie-2@1")
	other.ClusterID = "b1b5a1a0-0000-4000-8000-000000000000"
	theirs := startNode(t, other)
	p := newTestPool(t, ours.addr, theirs.addr)
	ask := func(addr string) error {
		_, err := p.status(within(t, 5*time.Second), addr)
		return err
	}
	if err := ask(ours.addr); err != nil {
		t.Fatal(err)
	}
	err := ask(theirs.addr)
	if !errors.Is(err, ledger.ErrUnavailable) || !strings.Contains(err.Error(), other.ClusterID) {
		t.Errorf("bookie of another cluster = %v, want a refusal that names its id", err)
	}
}

func TestPoolReconnects(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close() // nobody is there yet
	p := newTestPool(t, addr)
	ctx := within(t, 20*time.Second)
	found := make(chan error, 1)
	go func() {
		_, err := p.Groups(ctx)
		found <- err
	}()
	time.Sleep(300 * time.Millisecond) // let it fail a few times
	if l, err = net.Listen("tcp", addr); err != nil {
		t.Fatal(err)
	}
	n := &node{addr: addr, reply: leads("leader", addr, 1)}
	n.mux = handshake.NewMux(l, func() handshake.Self { return self("bookie-1@1") }, discard)
	n.server = NewServer()
	RegisterClusterServer(n.server, n)
	n.ends.Go(func() { _ = n.mux.Serve() })
	n.ends.Go(func() { _ = n.server.Serve(n.mux.Listener(handshake.Storage, 0)) })
	t.Cleanup(n.stop)
	start := time.Now()
	if err := <-found; err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("connected %v after the server came", took)
	}
}

func TestClosedPool(t *testing.T) {
	p := newTestPool(t, "127.0.0.1:1")
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	var answered string
	_, conn := p.Conn("127.0.0.1:1")
	_, leader := p.Leader(t.Context(), 1)
	_, groups := p.Groups(t.Context())
	for name, err := range map[string]error{
		"Conn": conn, "Leader": leader, "Groups": groups, "Call": p.Call(t.Context(), 1, join(&answered)),
	} {
		if !errors.Is(err, ledger.ErrUnavailable) {
			t.Errorf("%s of a closed pool = %v", name, err)
		}
	}
}

func TestLargeMessages(t *testing.T) {
	_, addrs := startNodes(t, 1)
	p := newTestPool(t, addrs...)
	conn, err := p.Conn(addrs[0])
	if err != nil {
		t.Fatal(err)
	}
	ctx := within(t, 20*time.Second)
	for _, size := range []int{0, 100, 100_000, MaxMessageBytes - 1000} {
		text := strings.Repeat("x", size)
		reply, err := NewClusterClient(conn).Join(ctx, &JoinRequest{Node: text})
		if err != nil || reply.GetLeaderNode() != text {
			t.Errorf("message of %d bytes: %v", size, err)
		}
	}
	if _, err := NewClusterClient(conn).Join(ctx, &JoinRequest{Node: strings.Repeat("x", MaxMessageBytes+1)}); !errors.Is(err, ErrInvalid) {
		t.Errorf("message over the limit: %v, want ErrInvalid", err)
	}
}

// TestCodecIsProtobuf compares the codec with the standard one.
func TestCodecIsProtobuf(t *testing.T) {
	for _, size := range []int{0, 10, 5000} {
		in := &StatusReply{Cluster: strings.Repeat("c", size), Groups: []*GroupStatus{{Id: 7, Members: []*Member{{Node: "n", Voter: true}}}}}
		data, err := codec{}.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(data.Reader())
		if err != nil {
			t.Fatal(err)
		}
		var standard StatusReply
		if err := proto.Unmarshal(got, &standard); err != nil || !proto.Equal(in, &standard) {
			t.Errorf("%d bytes: the standard codec reads %v, %v", size, &standard, err)
		}
		var ours StatusReply
		want, _ := proto.Marshal(in)
		split := mem.BufferSlice{mem.SliceBuffer(want[:len(want)/2]), mem.SliceBuffer(want[len(want)/2:])}
		if err := (codec{}).Unmarshal(split, &ours); err != nil || !proto.Equal(in, &ours) {
			t.Errorf("%d bytes: our codec reads %v, %v", size, &ours, err)
		}
		if again, _ := proto.Marshal(&ours); !bytes.Equal(again, want) {
			t.Errorf("%d bytes: changed on the way", size)
		}
	}
	if _, err := (codec{}).Marshal("text"); err == nil {
		t.Error("a string was encoded")
	}
}

// slowHello holds the first welcome back, as a slow network would.
type slowHello struct {
	net.Listener
	release <-chan struct{}
}

func (l slowHello) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return slowConn{conn, l.release}, nil
}

type slowConn struct {
	net.Conn
	release <-chan struct{}
}

func (c slowConn) Write(b []byte) (int, error) {
	<-c.release
	return c.Conn.Write(b)
}

// A pool that does not know its cluster's id yet dials many bookies at once; the
// first to answer decides, also for those whose hello is under way.
func TestFirstClusterReachedIsTheOnlyOne(t *testing.T) {
	ours := startNode(t, self("bookie-1@1"))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	release := make(chan struct{})
	other := self("bookie-1@2")
	other.ClusterID = "another cluster of this name"
	mux := handshake.NewMux(slowHello{l, release}, func() handshake.Self { return other }, discard)
	served := make(chan error, 1)
	go func() { served <- mux.Serve() }()
	theirs := mux.Listener(handshake.Storage, 0)
	defer func() {
		_ = theirs.Close()
		_ = mux.Close()
		<-served
	}()
	p := NewPool(handshake.Self{Cluster: "test", Node: "broker-1"}, []string{ours.addr, l.Addr().String()}, discard)
	defer p.Close()
	late := make(chan error, 1)
	go func() {
		conn, err := p.dial(t.Context(), l.Addr().String())
		if err == nil {
			_ = conn.Close()
		}
		late <- err
	}()
	time.Sleep(50 * time.Millisecond) // its hello has left
	conn, err := p.dial(t.Context(), ours.addr)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	close(release)
	if _, refused := errors.AsType[*handshake.RefusedError](<-late); !refused {
		t.Error("the pool has connections to two clusters")
	}
}
