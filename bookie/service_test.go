package bookie

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

// fakeGroup commits and applies what is proposed, in order, on one goroutine,
// unless a test holds it or takes its leadership.
type fakeGroup struct {
	machine *Machine
	work    chan func()
	ended   chan struct{}

	mu       sync.Mutex
	follower bool
	held     chan struct{} // applying waits for it; nil = does not
	commands []int         // their sizes
	inFlight int
	most     int // highest inFlight
}

func newFakeGroup(t *testing.T, m *Machine) *fakeGroup {
	g := &fakeGroup{machine: m, work: make(chan func(), 64), ended: make(chan struct{})}
	go func() {
		defer close(g.ended)
		for fn := range g.work {
			fn()
		}
	}()
	t.Cleanup(func() {
		close(g.work)
		<-g.ended
	})
	return g
}

func (g *fakeGroup) Propose(data []byte, done func(any, error)) {
	g.mu.Lock()
	follower, held := g.follower, g.held
	g.commands = append(g.commands, len(data))
	g.inFlight++
	g.most = max(g.most, g.inFlight)
	g.mu.Unlock()
	finish := func(result any, err error) {
		g.mu.Lock()
		g.inFlight--
		g.mu.Unlock()
		done(result, err)
	}
	if follower {
		finish(nil, &raftlog.NotLeaderError{Group: testGroup, Leader: "bookie-2@x", Addr: "127.0.0.1:2"})
		return
	}
	g.work <- func() {
		if held != nil {
			<-held
		}
		finish(g.machine.Apply([]raftlog.Command{{Index: g.machine.Applied() + 1, Term: 1, Data: data}})[0], nil)
	}
}

func (g *fakeGroup) ReadBarrier(context.Context) error {
	if !g.IsLeader() {
		return &raftlog.NotLeaderError{Group: testGroup}
	}
	return nil
}

func (g *fakeGroup) IsLeader() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.follower
}

func (g *fakeGroup) set(follower bool, held chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.follower, g.held = follower, held
}

// serving is a Ledgers service on a connection in memory.
type serving struct {
	*disk
	group  *fakeGroup
	server *ledgersServer
	client bookiepb.LedgersClient
}

func newServing(t *testing.T) *serving {
	d := newDisk(t, 1<<20)
	s := &serving{disk: d, group: newFakeGroup(t, d.m)}
	s.server = newLedgersServer([]served{{raft: s.group, machine: d.m}}, d.store, slog.New(slog.DiscardHandler))
	l := bufconn.Listen(1 << 20)
	g := rpc.NewServer()
	bookiepb.RegisterLedgersServer(g, s.server)
	var running sync.WaitGroup
	running.Go(func() { g.Serve(l) })
	conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return l.Dial() }),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(rpc.MaxMessageBytes)))
	must(t, err)
	s.client = bookiepb.NewLedgersClient(conn)
	t.Cleanup(func() {
		conn.Close()
		g.Stop()
		s.server.shutdown()
		running.Wait()
	})
	return s
}

func (s *serving) createLedger(id int64) {
	s.t.Helper()
	_, err := s.client.Create(s.t.Context(), &bookiepb.CreateRequest{Ledger: id, Epoch: 1, Owner: "a topic"})
	must(s.t, err)
}

func one(id, first int64, entries ...[]byte) *bookiepb.LedgerAppend {
	return &bookiepb.LedgerAppend{Ledger: id, Epoch: 1, First: first, Entries: frame(entries...)}
}

// answers receives n answers.
func answers(t *testing.T, stream bookiepb.Ledgers_AppendClient, n int) (all []*bookiepb.AppendAnswer) {
	t.Helper()
	for len(all) < n {
		reply, err := stream.Recv()
		must(t, err)
		all = append(all, reply.GetAnswers()...)
	}
	return all
}

func TestAppendStreamAnswersInOrder(t *testing.T) {
	s := newServing(t)
	s.createLedger(1)
	s.createLedger(2)
	held := make(chan struct{})
	s.group.set(false, held)
	stream, err := s.client.Append(t.Context())
	must(t, err)
	bad := one(2, 0, []byte("x"))
	bad.Entries[4] ^= 1 // refused on sight, and still answered in its turn
	must(t, stream.Send(&bookiepb.AppendRequest{Appends: []*bookiepb.LedgerAppend{
		one(1, 0, []byte("a"), []byte("b")), bad, one(1, 2, []byte("c")), one(1, 7, []byte("d")), one(3, 0, []byte("e")),
	}}))
	close(held)
	got := answers(t, stream, 5)
	want := []struct {
		ledger, first, last int64
		kind                rpc.Failure_Kind
	}{
		{1, 0, 1, 0}, {2, 0, 0, rpc.Failure_INVALID}, {1, 2, 2, 0}, {1, 7, 0, rpc.Failure_GAP}, {3, 0, 0, rpc.Failure_NO_SUCH_LEDGER},
	}
	for i, w := range want {
		a := got[i]
		if a.GetLedger() != w.ledger || a.GetFirst() != w.first || a.GetFailure().GetKind() != w.kind || (w.kind == 0 && a.GetLast() != w.last) {
			t.Errorf("answer %d is %v, want %+v", i, a, w)
		}
	}
	must(t, stream.CloseSend())
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after everything is answered: %v, want EOF", err)
	}
}

// TestAnswersWaitForOlderOnes has a second append undecided while the first is
// answered.
func TestAnswersWaitForOlderOnes(t *testing.T) {
	s := newServing(t)
	s.createLedger(1)
	held := make(chan struct{})
	s.group.set(false, held)
	stream, err := s.client.Append(t.Context())
	must(t, err)
	for i := range int64(2) {
		must(t, stream.Send(&bookiepb.AppendRequest{Appends: []*bookiepb.LedgerAppend{one(1, i, []byte("x"))}}))
		eventually(t, "the append is proposed", func() bool {
			s.group.mu.Lock()
			defer s.group.mu.Unlock()
			return s.group.inFlight == int(i)+1
		})
	}
	for i := range int64(2) {
		held <- struct{}{} // lets one command through
		reply, err := stream.Recv()
		must(t, err)
		if a := reply.GetAnswers(); len(a) != 1 || a[0].GetFirst() != i || a[0].GetLast() != i || a[0].GetFailure() != nil {
			t.Errorf("answers %v, want one for entry %d", a, i)
		}
	}
}

func TestProposerMergesWhatWaits(t *testing.T) {
	s := newServing(t)
	s.createLedger(1)
	s.createLedger(2)
	held := make(chan struct{})
	s.group.set(false, held)
	s.group.commands = nil
	stream, err := s.client.Append(t.Context())
	must(t, err)
	const n = 400
	for i := range int64(n) {
		must(t, stream.Send(&bookiepb.AppendRequest{Appends: []*bookiepb.LedgerAppend{one(1+i%2, i/2, make([]byte, 100))}}))
	}
	must(t, stream.CloseSend())
	eventually(t, "everything is queued", func() bool {
		return len(s.server.groups[0].proposer.snapshot()) >= n-maxCommandsInFlight*maxOps
	})
	close(held)
	for _, a := range answers(t, stream, n) {
		must(t, a.GetFailure().Err())
	}
	s.group.mu.Lock()
	defer s.group.mu.Unlock()
	if c := len(s.group.commands); c > 20 {
		t.Errorf("%d appends took %d commands, want about %d", n, c, n/maxOps)
	}
	if s.group.most > maxCommandsInFlight {
		t.Errorf("%d commands in flight, want at most %d", s.group.most, maxCommandsInFlight)
	}
	for _, size := range s.group.commands {
		if size > bookiepb.BatchBytes+maxOps*opHeaderBytes+commandHeaderBytes+commandSumBytes {
			t.Errorf("a command of %d bytes", size)
		}
	}
}

func TestFullQueueStopsTheStream(t *testing.T) {
	s := newServing(t)
	s.createLedger(1)
	held := make(chan struct{})
	s.group.set(false, held)
	stream, err := s.client.Append(t.Context())
	must(t, err)
	const size, n = 1 << 20, 40 // more than the queue and the stream's window hold
	sent := make(chan int64, n)
	var sending sync.WaitGroup
	sending.Go(func() {
		for i := range int64(n) {
			if stream.Send(&bookiepb.AppendRequest{Appends: []*bookiepb.LedgerAppend{one(1, i, make([]byte, size))}}) != nil {
				return
			}
			sent <- i
		}
	})
	p := s.server.groups[0].proposer
	eventually(t, "the queue is full", func() bool { return !p.room.TryAcquire(size) || p.giveBack(size) })
	if queued := value(t, s.store.metrics.queueBytes); queued > queueBytes {
		t.Errorf("%v bytes queued, bound %d", queued, queueBytes)
	}
	if len(sent) == n {
		t.Error("a full queue did not stop the sender")
	}
	close(held)
	for _, a := range answers(t, stream, n) {
		must(t, a.GetFailure().Err())
	}
	sending.Wait()
	if queued := value(t, s.store.metrics.queueBytes); queued != 0 {
		t.Errorf("%v bytes queued after everything is answered", queued)
	}
}

func TestAppendsAreRefusedBeforeProposing(t *testing.T) {
	s := newServing(t)
	s.createLedger(1)
	s.group.set(true, nil)
	stream, err := s.client.Append(t.Context())
	must(t, err)
	must(t, stream.Send(&bookiepb.AppendRequest{Appends: []*bookiepb.LedgerAppend{one(1, 0, []byte("a"))}}))
	f := answers(t, stream, 1)[0].GetFailure()
	if f.GetKind() != rpc.Failure_NOT_LEADER || f.GetLeaderAddress() != "127.0.0.1:2" {
		t.Errorf("a follower answers %v, want NOT_LEADER and the leader's address", f)
	}
	s.group.set(false, nil)
	s.fs.SetFree(0)
	s.store.asked = time.Time{}
	must(t, stream.Send(&bookiepb.AppendRequest{Appends: []*bookiepb.LedgerAppend{one(1, 0, []byte("a"))}}))
	if f := answers(t, stream, 1)[0].GetFailure(); f.GetKind() != rpc.Failure_UNAVAILABLE {
		t.Errorf("a full disk answers %v, want UNAVAILABLE", f)
	}
	if _, err := s.client.Fence(t.Context(), &bookiepb.FenceRequest{Ledger: 1, Epoch: 2}); err != nil {
		t.Errorf("a full disk refuses a fence: %v", err)
	}
}

func TestOnlyALeaderSaysAbsent(t *testing.T) {
	s := newServing(t)
	s.createLedger(1)
	read := func(id, first int64) error {
		_, err := s.client.Read(t.Context(), &bookiepb.ReadRequest{Ledger: id, First: first, Last: first, MaxBytes: 1})
		return rpc.FromStatus(err)
	}
	if err := read(1, 0); !errors.Is(err, ledger.ErrNoSuchEntry) {
		t.Errorf("leader, no entry: %v", err)
	}
	if err := read(2, 0); !errors.Is(err, ledger.ErrNoSuchLedger) {
		t.Errorf("leader, no ledger: %v", err)
	}
	if _, err := s.client.Info(t.Context(), &bookiepb.InfoRequest{Ledger: 2}); !errors.Is(rpc.FromStatus(err), ledger.ErrNoSuchLedger) {
		t.Errorf("leader, info of no ledger: %v", err)
	}
	s.group.set(true, nil)
	for _, id := range []int64{1, 2} {
		if err := read(id, 0); !errors.Is(err, ledger.ErrNotYet) {
			t.Errorf("follower, ledger %d: %v, want ErrNotYet", id, err)
		}
	}
	var notLeader *rpc.NotLeader
	if _, err := s.client.Info(t.Context(), &bookiepb.InfoRequest{Ledger: 1}); !errors.As(rpc.FromStatus(err), &notLeader) {
		t.Errorf("follower, info: %v, want NotLeader", err)
	}
}

func TestUnaryCalls(t *testing.T) {
	s := newServing(t)
	s.createLedger(1)
	s.createLedger(1) // again, by the same owner
	if _, err := s.client.Create(t.Context(), &bookiepb.CreateRequest{Ledger: 1, Epoch: 1, Owner: "another"}); !errors.Is(rpc.FromStatus(err), rpc.ErrInvalid) {
		t.Errorf("create for another owner: %v", err)
	}
	stream, err := s.client.Append(t.Context())
	must(t, err)
	must(t, stream.Send(&bookiepb.AppendRequest{Appends: []*bookiepb.LedgerAppend{one(1, 0, []byte("abc"), []byte("de"))}}))
	answers(t, stream, 1)
	end, err := s.client.Fence(t.Context(), &bookiepb.FenceRequest{Ledger: 1, Epoch: math.MaxUint64})
	if err != nil || end.GetLast() != 1 || end.GetBytes() != 5 {
		t.Errorf("Fence = %v, %v, want entry 1 and 5 bytes", end, err)
	}
	if _, err := s.client.Close(t.Context(), &bookiepb.CloseRequest{Ledger: 1, Epoch: 1}); !errors.Is(rpc.FromStatus(err), ledger.ErrFenced) {
		t.Errorf("Close of a fenced ledger: %v", err)
	}
	info, err := s.client.Info(t.Context(), &bookiepb.InfoRequest{Ledger: 1})
	if err != nil || info.GetState() != bookiepb.InfoReply_FENCED || info.GetLast() != 1 || info.GetOwner() != "a topic" {
		t.Errorf("Info = %v, %v", info, err)
	}
	reply, err := s.client.Read(t.Context(), &bookiepb.ReadRequest{Ledger: 1, First: 1, Last: 9, MaxBytes: 100})
	if err != nil || !bytes.Equal(reply.GetEntries(), frame([]byte("de"))) {
		t.Errorf("Read = %v, %v", reply, err)
	}
	for _, id := range []int64{0, -1} {
		if _, err := s.client.Fence(t.Context(), &bookiepb.FenceRequest{Ledger: id, Epoch: 2}); !errors.Is(rpc.FromStatus(err), rpc.ErrInvalid) {
			t.Errorf("Fence of ledger %d: %v", id, err)
		}
	}
	if _, err := s.client.Fence(t.Context(), &bookiepb.FenceRequest{Ledger: 1}); !errors.Is(rpc.FromStatus(err), rpc.ErrInvalid) {
		t.Errorf("Fence with epoch 0: %v", err)
	}
}

func TestShutdownEndsStreams(t *testing.T) {
	s := newServing(t)
	stream, err := s.client.Append(t.Context())
	must(t, err)
	must(t, stream.Send(&bookiepb.AppendRequest{}))
	var ended sync.WaitGroup
	ended.Go(s.server.shutdown)
	if _, err := stream.Recv(); !errors.Is(rpc.FromStatus(err), ledger.ErrUnavailable) {
		t.Errorf("open stream: %v, want ErrUnavailable", err)
	}
	ended.Wait()
	if _, err := s.client.Delete(t.Context(), &bookiepb.DeleteRequest{Ledger: 1}); !errors.Is(rpc.FromStatus(err), ledger.ErrUnavailable) {
		t.Errorf("a call after shutdown: %v, want ErrUnavailable", err)
	}
}

func TestMetricsAreConsistent(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	newMetrics(reg)
	families, err := reg.Gather()
	must(t, err)
	if len(families) < 10 {
		t.Errorf("%d metrics at the start, want every one", len(families))
	}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "bookie_") || f.GetHelp() == "" {
			t.Errorf("metric %s, help %q", f.GetName(), f.GetHelp())
		}
	}
}

// value reads a gauge.
func value(t *testing.T, g prometheus.Collector) float64 {
	t.Helper()
	reg := prometheus.NewRegistry()
	must(t, reg.Register(g))
	families, err := reg.Gather()
	must(t, err)
	return families[0].GetMetric()[0].GetGauge().GetValue()
}

// snapshot returns the tasks that wait.
func (p *proposer) snapshot() []task {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]task(nil), p.queue...)
}

// giveBack undoes a TryAcquire and returns false.
func (p *proposer) giveBack(n int64) bool {
	p.room.Release(n)
	return false
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after 20 s still not: %s", what)
		}
	}
}
