package managedledger

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/bookie/client"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The client's writer is a Writer, and the limits agree.
var (
	_ Writer = (*client.Writer)(nil)
	_        = [1]int{}[MaxEntryBytes-bookiepb.MaxEntryBytes]
)

var errPlanned = errors.New("planned failure")

// bookies is a Storage in memory whose every step a test can hold or break.
type fakeBookies struct {
	mu      sync.Mutex
	last    ledger.ID
	ledgers map[ledger.ID]*fakeLedger

	held      bool                                               // appends wait for let
	allowed   int                                                // appends that may go on although held
	breakAt   map[ledger.ID]breakage                             // what happens at an entry
	createErr error                                              // Create fails
	fenceErr  error                                              // Recover fails
	deleteErr error                                              // Delete fails
	onRead    func(ctx context.Context, p ledger.Position) error // runs before each Read
	reads     int
	writers   []*fakeWriter
}

// breakage is a writer's end: from entry on everything fails; stored says that
// entry itself reaches the disk all the same.
type breakage struct {
	entry  ledger.EntryID
	stored bool
}

type fakeLedger struct {
	owner          string
	entries        [][]byte
	fenced, closed bool
}

func newBookies() *fakeBookies {
	return &fakeBookies{ledgers: map[ledger.ID]*fakeLedger{}, breakAt: map[ledger.ID]breakage{}}
}

func (b *fakeBookies) set(change func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change()
}

// ids returns the ledgers that exist.
func (b *fakeBookies) ids() []ledger.ID {
	b.mu.Lock()
	defer b.mu.Unlock()
	var ids []ledger.ID
	for id := range b.ledgers {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

func (b *fakeBookies) Create(ctx context.Context, owner string) (Writer, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := errors.Join(ctx.Err(), b.createErr); err != nil {
		return nil, err
	}
	b.last++
	b.ledgers[b.last] = &fakeLedger{owner: owner}
	w := &fakeWriter{b: b, id: b.last, wake: make(chan struct{}, 1)}
	b.writers = append(b.writers, w)
	return w, nil
}

func (b *fakeBookies) Recover(ctx context.Context, id ledger.ID) (Closed, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := errors.Join(ctx.Err(), b.fenceErr); err != nil {
		return Closed{}, err
	}
	l := b.ledgers[id]
	if l == nil {
		return Closed{}, ledger.ErrNoSuchLedger
	}
	l.fenced = true
	return Closed{Last: ledger.EntryID(len(l.entries) - 1), Bytes: l.size()}, nil
}

func (l *fakeLedger) size() (sum int64) {
	for _, e := range l.entries {
		sum += int64(len(e))
	}
	return sum
}

func (b *fakeBookies) Read(ctx context.Context, id ledger.ID, first, last ledger.EntryID, maxBytes int) ([]ledger.Entry, error) {
	b.mu.Lock()
	onRead := b.onRead
	b.reads++
	b.mu.Unlock()
	if onRead != nil {
		if err := onRead(ctx, ledger.Position{Ledger: id, Entry: first}); err != nil {
			return nil, err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.ledgers[id]
	if l == nil {
		return nil, ledger.ErrNoSuchLedger
	}
	var out []ledger.Entry
	for e := first; e <= last && int(e) < len(l.entries); e++ {
		data := l.entries[e]
		if maxBytes -= len(data); maxBytes < 0 && len(out) > 0 {
			break
		}
		out = append(out, ledger.Entry{Position: ledger.Position{Ledger: id, Entry: e}, Data: data})
	}
	if len(out) == 0 {
		return nil, ledger.ErrNoSuchEntry
	}
	return out, ctx.Err()
}

func (b *fakeBookies) Delete(_ context.Context, id ledger.ID) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.deleteErr != nil {
		return b.deleteErr
	}
	delete(b.ledgers, id)
	return nil
}

// fakeWriter answers from a goroutine that lives while there is something to
// answer.
type fakeWriter struct {
	b    *fakeBookies
	id   ledger.ID
	wake chan struct{}

	// Guarded by b.mu.
	queue   []fakeAppend
	next    ledger.EntryID
	running bool
	failure error
}

type fakeAppend struct {
	entry ledger.EntryID
	data  []byte
	done  func(ledger.EntryID, error)
}

func (w *fakeWriter) ID() ledger.ID { return w.id }

func (w *fakeWriter) Append(data []byte, done func(ledger.EntryID, error)) {
	w.b.mu.Lock()
	defer w.b.mu.Unlock()
	w.queue = append(w.queue, fakeAppend{w.next, data, done})
	w.next++
	if !w.running {
		w.running = true
		go w.run()
	}
}

func (w *fakeWriter) run() {
	for {
		w.b.mu.Lock()
		if len(w.queue) == 0 {
			w.running = false
			w.b.mu.Unlock()
			return
		}
		if w.failure == nil && w.b.held && w.b.allowed == 0 {
			w.b.mu.Unlock()
			<-w.wake
			continue
		}
		if w.b.held && w.failure == nil {
			w.b.allowed--
		}
		a := w.queue[0]
		w.queue = w.queue[1:]
		err := w.storeLocked(a)
		w.b.mu.Unlock()
		a.done(a.entry, err)
	}
}

func (w *fakeWriter) storeLocked(a fakeAppend) error {
	if w.failure != nil {
		return w.failure
	}
	l := w.b.ledgers[w.id]
	at, broken := w.b.breakAt[w.id]
	switch {
	case l == nil:
		w.failure = ledger.ErrNoSuchLedger
	case l.fenced:
		w.failure = ledger.ErrFenced
	case l.closed:
		w.failure = ledger.ErrClosed
	case broken && a.entry >= at.entry:
		w.failure = fmt.Errorf("%w: %w", ledger.ErrUnknownOutcome, errPlanned)
		if at.stored {
			l.entries = append(l.entries, a.data)
		}
	case int(a.entry) != len(l.entries):
		w.failure = ledger.ErrGap
	default:
		l.entries = append(l.entries, a.data)
	}
	return w.failure
}

func (w *fakeWriter) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *fakeWriter) Close(ctx context.Context) (ledger.EntryID, error) {
	w.b.mu.Lock()
	defer w.b.mu.Unlock()
	l := w.b.ledgers[w.id]
	switch {
	case ctx.Err() != nil:
		return 0, ctx.Err()
	case w.failure != nil:
		return 0, w.failure
	case l == nil:
		return 0, ledger.ErrNoSuchLedger
	case l.fenced:
		return 0, ledger.ErrFenced
	}
	l.closed = true
	w.failure = ledger.ErrClosed
	return ledger.EntryID(len(l.entries) - 1), nil
}

func (w *fakeWriter) Abandon() {
	w.b.mu.Lock()
	if w.failure == nil {
		w.failure = fmt.Errorf("abandoned: %w", ledger.ErrUnknownOutcome)
	}
	w.b.mu.Unlock()
	w.poke()
}

// testConfig rolls over by count at once and keeps the cache small.
func testConfig() Config {
	c := DefaultConfig()
	c.MinRolloverMinutes = 0
	return c
}

// slowMeta lets a test break single operations of a metadata store.
type slowMeta struct {
	metadata.Store
	mu     sync.Mutex
	before func(op, key string) error // returns an error in place of doing it
	after  func(op, key string) error // does it and then returns the error
}

func (s *slowMeta) set(before, after func(op, key string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before, s.after = before, after
}

func (s *slowMeta) Put(ctx context.Context, key string, value []byte, if_ metadata.Version, lease metadata.LeaseID) (metadata.Version, error) {
	s.mu.Lock()
	before, after := s.before, s.after
	s.mu.Unlock()
	if before != nil {
		if err := before("put", key); err != nil {
			return 0, err
		}
	}
	v, err := s.Store.Put(ctx, key, value, if_, lease)
	if err == nil && after != nil {
		if err := after("put", key); err != nil {
			return 0, err
		}
	}
	return v, err
}

func (s *slowMeta) Delete(ctx context.Context, key string, if_ metadata.Version) error {
	s.mu.Lock()
	before := s.before
	s.mu.Unlock()
	if before != nil {
		if err := before("delete", key); err != nil {
			return err
		}
	}
	return s.Store.Delete(ctx, key, if_)
}

func quietLog() *slog.Logger { return slog.New(slog.DiscardHandler) }

func testFactory(t *testing.T, b Storage, meta metadata.Store, cfg Config) *Factory {
	t.Helper()
	f := NewFactory(b, meta, cfg, quietLog(), nil)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		f.Close(ctx)
	})
	return f
}

func mustOpen(t *testing.T, f *Factory, name string) *ManagedLedger {
	t.Helper()
	m, err := f.Open(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// appendAll adds entries and waits for their answers.
func appendAll(t *testing.T, m *ManagedLedger, entries ...string) []ledger.Position {
	t.Helper()
	type answer struct {
		p   ledger.Position
		err error
	}
	answers := make(chan answer, len(entries))
	for _, e := range entries {
		m.Append([]byte(e), func(p ledger.Position, err error) { answers <- answer{p, err} })
	}
	var ps []ledger.Position
	for range entries {
		select {
		case a := <-answers:
			if a.err != nil {
				t.Fatal(a.err)
			}
			ps = append(ps, a.p)
		case <-time.After(20 * time.Second):
			t.Fatalf("adds not answered; state %+v", m.Stats())
		}
	}
	return ps
}

// readAll reads n entries and releases the batches.
func readAll(t *testing.T, r *Reader, n int, limit Limit) []ledger.Entry {
	t.Helper()
	var all []ledger.Entry
	deadline := time.After(20 * time.Second)
	for len(all) < n {
		b, err := r.TryRead(limit)
		switch {
		case err == nil:
			all = append(all, b.Entries...)
			b.Release()
		case errors.Is(err, ErrWouldBlock):
			select {
			case <-r.Ready():
			case <-deadline:
				t.Fatalf("read %d of %d entries; cursor %+v", len(all), n, r.Stats())
			}
		default:
			t.Fatal(err)
		}
	}
	return all
}

func at(l ledger.ID, e ledger.EntryID) ledger.Position { return ledger.Position{Ledger: l, Entry: e} }

func testRand(t *testing.T) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	if s := os.Getenv("TEST_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("TEST_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

func noReadsInFlight(t *testing.T, f *Factory) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for {
		used, waiting := f.reads.inUse()
		if used == 0 && waiting == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes of permits not returned, %d waiting", used, waiting)
		}
		time.Sleep(time.Millisecond)
	}
}
