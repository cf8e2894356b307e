package broker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/internal/config"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/managedledger"
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// waitFor polls until ok, and fails the test with what after 5 s.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 5s: %s", what)
		}
	}
}

func testConfig(t testing.TB, overrides ...string) Config {
	t.Helper()
	var c Config
	s := config.NewSet()
	c.Register(s)
	if err := s.Load("", overrides); err != nil {
		t.Fatal(err)
	}
	return c
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// payload is an entry of n messages that says text.
func payload(text string, n int) []byte {
	name, seq, now := "p", uint64(1), uint64(time.Now().UnixMilli())
	meta := &pulsarpb.MessageMetadata{ProducerName: &name, SequenceId: &seq, PublishTime: &now}
	if n > 1 {
		count := int32(n)
		meta.NumMessagesInBatch = &count
	}
	return protocol.BuildPayload(meta, []byte(text))
}

func text(data []byte) string {
	_, body, err := protocol.ParseMetadata(data)
	if err != nil {
		return err.Error()
	}
	return string(body)
}

// fakeReader is a managed ledger and its reader in memory.
type fakeReader struct {
	ready   chan struct{}
	durable bool

	mu      sync.Mutex
	entries [][]byte // of ledger 1
	next    int
	mark    int // entries below are acknowledged
	acked   map[int]bool
	fail    error // of the next reads
	reads   int
}

func newFakeReader() *fakeReader {
	return &fakeReader{ready: make(chan struct{}, 1), acked: map[int]bool{}, durable: true}
}

func at(n int) ledger.Position { return ledger.Position{Ledger: 1, Entry: ledger.EntryID(n)} }

func (r *fakeReader) poke() {
	select {
	case r.ready <- struct{}{}:
	default:
	}
}

// publish adds entries named by their number.
func (r *fakeReader) publish(n, messages int) {
	r.mu.Lock()
	for range n {
		r.entries = append(r.entries, payload(strconv.Itoa(len(r.entries)), messages))
	}
	r.mu.Unlock()
	r.poke()
}

func (r *fakeReader) failing(err error) {
	r.mu.Lock()
	r.fail = err
	r.mu.Unlock()
	r.poke()
}

func (r *fakeReader) TryRead(l managedledger.Limit) (*managedledger.Batch, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reads++
	if r.fail != nil {
		return nil, r.fail
	}
	var b managedledger.Batch
	size := int64(0)
	for r.next < len(r.entries) && len(b.Entries) < l.Entries && (size < l.Bytes || size == 0) {
		if !r.isAcked(r.next) {
			b.Entries = append(b.Entries, ledger.Entry{Position: at(r.next), Data: r.entries[r.next]})
			size += int64(len(r.entries[r.next]))
		}
		r.next++
	}
	if len(b.Entries) == 0 {
		return nil, managedledger.ErrWouldBlock
	}
	return &b, nil
}

func (r *fakeReader) TryReplay(ps []ledger.Position, l managedledger.Limit) (*managedledger.Batch, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fail != nil {
		return nil, r.fail
	}
	var b managedledger.Batch
	for _, p := range ps {
		if len(b.Entries) < l.Entries && !r.isAcked(int(p.Entry)) {
			b.Entries = append(b.Entries, ledger.Entry{Position: p, Data: r.entries[p.Entry]})
		}
	}
	return &b, nil
}

func (r *fakeReader) Ready() <-chan struct{} { return r.ready }

func (r *fakeReader) Ack(ps []ledger.Position) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range ps {
		if int(p.Entry) >= len(r.entries) {
			return fmt.Errorf("%v is beyond the end", p)
		}
		r.acked[int(p.Entry)] = true
	}
	for r.acked[r.mark] {
		delete(r.acked, r.mark)
		r.mark++
	}
	return nil
}

func (r *fakeReader) AckCumulative(p ledger.Position) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mark = max(r.mark, int(p.Entry)+1)
	return nil
}

func (r *fakeReader) isAcked(n int) bool { return n < r.mark || r.acked[n] }

func (r *fakeReader) IsAcked(p ledger.Position) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.isAcked(int(p.Entry))
}

func (r *fakeReader) Rewind() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.next = r.mark
}

func (r *fakeReader) Seek(_ context.Context, p ledger.Position) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mark, r.next = int(p.Entry), int(p.Entry)
	clear(r.acked)
	return nil
}

func (r *fakeReader) SeekTime(context.Context, func([]byte) (int64, error), int64) error {
	return errors.ErrUnsupported
}

func (r *fakeReader) ClearBacklog(context.Context) error {
	return r.AckCumulative(r.last())
}

func (r *fakeReader) Backlog() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return int64(len(r.entries) - r.mark - len(r.acked))
}

func (r *fakeReader) MarkDeleted() ledger.Position {
	r.mu.Lock()
	defer r.mu.Unlock()
	return at(r.mark - 1)
}

func (r *fakeReader) ReadPosition() ledger.Position {
	r.mu.Lock()
	defer r.mu.Unlock()
	return at(r.next)
}

func (r *fakeReader) last() ledger.Position {
	r.mu.Lock()
	defer r.mu.Unlock()
	return at(len(r.entries) - 1)
}

func (r *fakeReader) Durable() bool               { return r.durable }
func (r *fakeReader) Close(context.Context) error { return nil }

// fakeSink is a client that notes what it gets.
type fakeSink struct {
	mu     sync.Mutex
	got    []string // texts, in order
	counts []int    // redelivery counts
	active []bool
	closed bool
	limit  int // bytes it takes before it is full
	waker  waker
}

func newFakeSink() *fakeSink { return &fakeSink{limit: 1 << 30} }

func (s *fakeSink) room(w waker) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.limit <= 0 {
		s.waker = w
	}
	return s.limit
}

func (s *fakeSink) deliver(_ *consumer, e ledger.Entry, redeliveries int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.got = append(s.got, text(e.Data))
	s.counts = append(s.counts, redeliveries)
	s.limit -= len(e.Data)
}

// drain makes room.
func (s *fakeSink) drain(n int) {
	s.mu.Lock()
	s.limit = n
	w := s.waker
	s.waker = nil
	s.mu.Unlock()
	if w != nil {
		w.poke()
	}
}

func (s *fakeSink) tellActive(_ *consumer, active bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active = append(s.active, active)
}

func (s *fakeSink) disconnect(*consumer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}

func (s *fakeSink) alive(context.Context) bool { return true }

// take returns what came since the last take.
func (s *fakeSink) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	got := s.got
	s.got = nil
	return got
}

// rig is a subscription over fakes.
type rig struct {
	t     *testing.T
	r     *fakeReader
	s     *subscription
	owned atomic.Bool
}

func newRig(t *testing.T, cfg Config) *rig {
	return newRigOn(t, cfg, "persistent://public/default/t", -1)
}

func newRigOn(t *testing.T, cfg Config, topic string, partition int) *rig {
	g := &rig{t: t, r: newFakeReader()}
	g.owned.Store(true)
	g.s = newSubscription("sub", subscriptionHome{
		name: topic, partition: partition, cfg: &cfg,
		owned: g.owned.Load,
		last:  g.r.last,
		ended: func(*subscription) {}, log: quiet(),
	}, g.r)
	t.Cleanup(g.s.stop)
	return g
}

// join adds a consumer and returns it with its sink.
func (g *rig) join(name string, kind subType, permits int, change ...func(*consumer)) (*consumer, *fakeSink) {
	g.t.Helper()
	sink := newFakeSink()
	c := &consumer{id: 1, name: name, sink: sink, holder: sink, epoch: -1}
	for _, f := range change {
		f(c)
	}
	if err := g.tryJoin(c, kind); err != nil {
		g.t.Fatal(err)
	}
	g.flow(c, permits)
	return c, sink
}

func (g *rig) tryJoin(c *consumer, kind subType) error {
	done := make(chan error, 1)
	g.s.add(g.t.Context(), c, kind, func(err error) { done <- err })
	return <-done
}

func (g *rig) flow(c *consumer, permits int) {
	g.t.Helper()
	if permits > 0 {
		if err := g.s.flow(g.t.Context(), c, permits); err != nil {
			g.t.Fatal(err)
		}
	}
}

func (g *rig) ack(c *consumer, entries ...int) error {
	ps := make([]ledger.Position, 0, len(entries))
	for _, n := range entries {
		ps = append(ps, at(n))
	}
	done := make(chan error, 1)
	g.s.ack(g.t.Context(), c, ps, func(err error) { done <- err })
	return <-done
}

func (g *rig) leave(c *consumer) {
	done := make(chan struct{})
	g.s.remove(c, func() { close(done) })
	<-done
}

// settled waits until the loop is idle for a reason, with nothing in its mailbox.
func (g *rig) settled() WhyIdle {
	g.t.Helper()
	var why WhyIdle
	// Two turns: the first may have found work, the second saw it done.
	for range 2 {
		st, err := g.s.stats(g.t.Context())
		if err != nil {
			g.t.Fatal(err)
		}
		why = st.WhyIdle
	}
	return why
}

// idle waits until the loop gives this reason.
func (g *rig) idle(want WhyIdle) {
	g.t.Helper()
	waitFor(g.t, fmt.Sprintf("whyIdle = %q", want), func() bool { return *g.s.why.Load() == want })
}

func (g *rig) expect(sink *fakeSink, want ...string) {
	g.t.Helper()
	var got []string
	waitFor(g.t, fmt.Sprintf("%v delivered", want), func() bool {
		got = append(got, sink.take()...)
		return len(got) >= len(want)
	})
	if !slices.Equal(got, want) {
		g.t.Fatalf("got %v, want %v", got, want)
	}
}

func texts(from, to int) []string {
	var s []string
	for i := from; i < to; i++ {
		s = append(s, strconv.Itoa(i))
	}
	return s
}

// numerically sorts texts that are numbers.
func numerically(s []string) []string {
	s = slices.Clone(s)
	slices.SortFunc(s, func(a, b string) int {
		x, _ := strconv.Atoi(a)
		y, _ := strconv.Atoi(b)
		return cmp.Compare(x, y)
	})
	return s
}
