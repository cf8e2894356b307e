package managedledger

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata/metadatatest"
)

// uncached is a managed ledger whose n entries "0" to "n-1" are in ledger 1 and
// not in the cache, and its bookies.
func uncached(t *testing.T, n int, cfg Config) (*ManagedLedger, *fakeBookies) {
	t.Helper()
	b, meta := newBookies(), metadatatest.NewMemory(t)
	first := mustOpen(t, testFactory(t, b, meta, cfg), topic)
	for i := range n {
		first.Append([]byte(strconv.Itoa(i)), func(_ ledger.Position, err error) {
			if err != nil {
				t.Error(err)
			}
		})
	}
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	return mustOpen(t, testFactory(t, b, meta, cfg), topic), b
}

// gate holds reads from given positions until they are let go.
type gate struct {
	mu      sync.Mutex
	held    map[ledger.Position]chan struct{}
	arrived map[ledger.Position]chan struct{}
}

func (b *fakeBookies) holdReads(ps ...ledger.Position) *gate {
	g := &gate{held: map[ledger.Position]chan struct{}{}, arrived: map[ledger.Position]chan struct{}{}}
	for _, p := range ps {
		g.held[p], g.arrived[p] = make(chan struct{}), make(chan struct{})
	}
	b.set(func() {
		b.onRead = func(ctx context.Context, p ledger.Position) error {
			g.mu.Lock()
			hold, arrived := g.held[p], g.arrived[p]
			if arrived != nil {
				close(arrived)
				delete(g.arrived, p)
			}
			g.mu.Unlock()
			if hold == nil {
				return nil
			}
			select {
			case <-hold:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	return g
}

func (g *gate) let(p ledger.Position) {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.held[p])
	delete(g.held, p)
}

func await(t *testing.T, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(20 * time.Second):
		t.Fatalf("timed out waiting for %s", what)
	}
}

// eventually waits for a condition that no channel announces.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("timed out waiting for %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// TestNothingWaitsForAHeldMiss: while a read from a bookie hangs, cached reads,
// other misses of the same ledger, and appends go on.
func TestNothingWaitsForAHeldMiss(t *testing.T) {
	m, b := uncached(t, 1000, testConfig())
	g := b.holdReads(at(1, 0))
	arrived := g.arrived[at(1, 0)]
	stuck := m.NewReader("stuck", at(1, 0))
	if _, err := stuck.TryRead(Limit{Entries: 10}); !errors.Is(err, ErrWouldBlock) {
		t.Fatalf("TryRead of an uncached entry = %v, want ErrWouldBlock", err)
	}
	await(t, "the held read", arrived)

	other := m.NewReader("other", at(1, 500))
	if got := readAll(t, other, 10, Limit{Entries: 10}); string(got[0].Data) != "500" {
		t.Errorf("the second miss read %q", got[0].Data)
	}
	tail := m.NewReader("tail", at(math.MaxInt64, 0))
	ps := appendAll(t, m, "new")
	batch, err := tail.TryRead(Limit{Entries: 10})
	if err != nil || batch.Entries[0].Position != ps[0] {
		t.Fatalf("a cached read = %v, %v", batch, err)
	}
	batch.Release()
	called := false
	tail.Rewind()
	if err := tail.Seek(t.Context(), ps[0]); err != nil {
		t.Fatal(err)
	}
	tail.m.cfg.ReadCallbackInline = true
	tail.ReadEntries(0, Limit{Entries: 1}, func(_ int, b *Batch, err error) {
		called = err == nil && b.Entries[0].Position == ps[0]
		b.Release()
	})
	if !called {
		t.Error("a cached ReadEntries did not complete before it returned")
	}
	g.let(at(1, 0))
	if got := readAll(t, stuck, 10, Limit{Entries: 10}); string(got[0].Data) != "0" {
		t.Errorf("the held read brought %q", got[0].Data)
	}
	noneLeft(t, m, stuck, other, tail)
}

// noneLeft closes readers and checks that every permit came back.
func noneLeft(t *testing.T, m *ManagedLedger, readers ...*Reader) {
	t.Helper()
	for _, r := range readers {
		if err := r.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	noReadsInFlight(t, m.f)
}

func TestEqualReadsAreMerged(t *testing.T) {
	m, b := uncached(t, 100, testConfig())
	g := b.holdReads(at(1, 0))
	readers := make([]*Reader, 8)
	for i := range readers {
		readers[i] = m.NewReader(strconv.Itoa(i), at(1, ledger.EntryID(i)))
		if _, err := readers[i].TryRead(Limit{Entries: 10}); !errors.Is(err, ErrWouldBlock) {
			t.Fatal(err)
		}
	}
	eventually(t, "all to join", func() bool {
		var n int
		done := make(chan struct{})
		m.sources.mu.Lock()
		strand := m.sources.byID[1].strand
		m.sources.mu.Unlock()
		strand.Submit(taskFunc(func() {
			src := m.sources.byID[1]
			src.mu.Lock()
			defer src.mu.Unlock()
			for _, f := range src.flights {
				n += len(f.wants)
			}
			close(done)
		}))
		<-done
		return n == len(readers)
	})
	g.let(at(1, 0))
	for i, r := range readers {
		if got := readAll(t, r, 10, Limit{Entries: 10}); got[0].Position != at(1, ledger.EntryID(i)) {
			t.Errorf("reader %d got %v", i, got[0].Position)
		}
	}
	b.mu.Lock()
	reads := b.reads
	b.mu.Unlock()
	if reads != 1 {
		t.Errorf("%d reads from the bookies for 8 equal ones, want 1", reads)
	}
	noneLeft(t, m, readers...)
}

type taskFunc func()

func (f taskFunc) Run() { f() }

// TestReadFailureShowsOnce: the error comes from one TryRead, the read position
// stays, and the next try reads.
func TestReadFailureShowsOnce(t *testing.T) {
	m, b := uncached(t, 10, testConfig())
	var broken atomic.Bool
	broken.Store(true)
	b.set(func() {
		b.onRead = func(context.Context, ledger.Position) error {
			if broken.Load() {
				return errPlanned
			}
			return nil
		}
	})
	r := m.NewReader("r", at(1, 3))
	if _, err := r.TryRead(Limit{Entries: 2}); !errors.Is(err, ErrWouldBlock) {
		t.Fatal(err)
	}
	await(t, "Ready", r.Ready())
	if _, err := r.TryRead(Limit{Entries: 2}); !errors.Is(err, errPlanned) {
		t.Fatalf("TryRead = %v, want the failure", err)
	}
	if r.ReadPosition() != at(1, 3) {
		t.Errorf("read position %v after a failure, want 1:3", r.ReadPosition())
	}
	broken.Store(false)
	if got := readAll(t, r, 2, Limit{Entries: 2}); string(got[0].Data) != "3" {
		t.Errorf("after the failure %q", got[0].Data)
	}
	noneLeft(t, m, r)
}

// TestAnswerComesBetweenConfirmedAndWoken: in an add's callback the entry is
// confirmed and readable from the cache, and no reader has been woken yet.
func TestAnswerComesBetweenConfirmedAndWoken(t *testing.T) {
	b := newBookies()
	m := mustOpen(t, testFactory(t, b, metadatatest.NewMemory(t), testConfig()), topic)
	r, idle := m.NewReader("r", at(0, 0)), m.NewReader("idle", at(0, 0))
	if _, err := idle.TryRead(Limit{}); !errors.Is(err, ErrWouldBlock) {
		t.Fatal(err)
	}
	answered := make(chan struct{})
	m.Append([]byte("x"), func(p ledger.Position, _ error) {
		defer close(answered)
		if m.LastConfirmed() != p {
			t.Errorf("answered %v while %v is confirmed", p, m.LastConfirmed())
		}
		batch, err := r.TryRead(Limit{})
		if err != nil || batch.Entries[0].Position != p {
			t.Errorf("in the callback TryRead = %v, %v", batch, err)
			return
		}
		batch.Release()
		select {
		case <-idle.Ready():
			t.Error("a reader was woken before the add was answered")
		default:
		}
	})
	await(t, "the answer", answered)
	await(t, "the idle reader", idle.Ready())
	noneLeft(t, m, r, idle)
}

// TestTailIsNeverFetched: a reader that follows the writer finds every entry in
// the cache, because an entry is there before it is confirmed.
func TestTailIsNeverFetched(t *testing.T) {
	b := newBookies()
	m := mustOpen(t, testFactory(t, b, metadatatest.NewMemory(t), testConfig()), topic)
	r := m.NewReader("r", at(0, 0))
	const n = 5000
	var wg sync.WaitGroup
	wg.Go(func() { readAll(t, r, n, Limit{Entries: 4}) })
	for range n {
		m.Append([]byte("x"), func(ledger.Position, error) {})
	}
	wg.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.reads != 0 {
		t.Errorf("%d reads from the bookies by a reader that keeps up", b.reads)
	}
}

// TestNoLostWakeUp races one append against a reader that looks and then waits,
// thousands of times. If a wake-up got lost, the reader would sleep for ever.
func TestNoLostWakeUp(t *testing.T) {
	for name, cacheMB := range map[string]int{"cached": 64, "uncached": 0} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig()
			cfg.CacheSizeMB = cacheMB
			cfg.MaxEntriesPerLedger = 500
			m := mustOpen(t, testFactory(t, newBookies(), metadatatest.NewMemory(t), cfg), topic)
			rounds := 4000
			if cacheMB == 0 {
				rounds = 1500
			}
			const readers = 3
			var wg sync.WaitGroup
			read := make(chan int, readers)
			stop := make(chan struct{})
			for k := range readers {
				r := m.NewReader(strconv.Itoa(k), at(0, 0))
				wg.Go(func() {
					defer r.Close(context.Background())
					for n := 0; n < rounds; {
						b, err := r.TryRead(Limit{Entries: 1})
						if errors.Is(err, ErrWouldBlock) {
							select {
							case <-r.Ready():
							case <-stop:
								return
							}
							continue
						}
						if err != nil {
							t.Error(err)
							return
						}
						b.Release()
						n++
						read <- n
					}
				})
			}
			timeout := time.After(60 * time.Second)
			for i := range rounds {
				m.Append([]byte("x"), func(ledger.Position, error) {})
				for range readers {
					select {
					case <-read:
					case <-timeout:
						close(stop)
						t.Fatalf("round %d: a reader sleeps although there is an entry; %+v", i, m.Stats())
					}
				}
			}
			wg.Wait()
			noReadsInFlight(t, m.f)
		})
	}
}

func TestTryReplay(t *testing.T) {
	cfg := testConfig()
	cfg.MaxEntriesPerLedger = 10
	m, b := uncached(t, 30, cfg)
	sub, err := m.OpenCursor(t.Context(), "sub", Earliest)
	if err != nil {
		t.Fatal(err)
	}
	ps := appendAll(t, m, "tail")
	readAll(t, sub, 31, Limit{Entries: 100})
	if err := sub.Ack([]ledger.Position{at(1, 5), at(1, 0)}); err != nil {
		t.Fatal(err)
	}
	ask := []ledger.Position{at(2, 3), at(1, 5), at(1, 7), at(1, 8), at(9, 9), ps[0], at(1, 2)}
	replay := func(positions []ledger.Position, limit Limit) []ledger.Entry {
		t.Helper()
		var all []ledger.Entry
		for {
			batch, err := sub.TryReplay(positions, limit)
			switch {
			case errors.Is(err, ErrWouldBlock):
				await(t, "Ready", sub.Ready())
				continue
			case err != nil:
				t.Fatal(err)
			case len(batch.Entries) == 0:
				return all
			}
			all = append(all, batch.Entries...)
			batch.Release()
			last := batch.Entries[len(batch.Entries)-1].Position
			for len(positions) > 0 && positions[0] != last {
				positions = positions[1:]
			}
			positions = positions[1:]
		}
	}
	var got []string
	for _, e := range replay(ask, Limit{Entries: 3}) {
		got = append(got, fmt.Sprintf("%v=%s", e.Position, e.Data))
	}
	if want := fmt.Sprint([]string{"2:3=13", "1:7=7", "1:8=8", fmt.Sprintf("%v=tail", ps[0]), "1:2=2"}); fmt.Sprint(got) != want {
		t.Errorf("replayed %v, want %v: the order asked for, without 1:5 (acknowledged) and 9:9 (not there)", got, want)
	}
	if sub.ReadPosition() != ps[0].Next() {
		t.Errorf("read position %v, want %v: a replay does not move it", sub.ReadPosition(), ps[0].Next())
	}
	// A failure shows once.
	sub.Rewind()
	b.set(func() { b.onRead = func(context.Context, ledger.Position) error { return errPlanned } })
	if _, err := sub.TryReplay(ask, Limit{}); !errors.Is(err, ErrWouldBlock) {
		t.Fatal(err)
	}
	eventually(t, "the failure", func() bool {
		_, err := sub.TryReplay(ask, Limit{})
		return errors.Is(err, errPlanned)
	})
	b.set(func() { b.onRead = nil })
	// A replayed entry that would be read next is not read again.
	if sub.ReadPosition() != at(1, 1) {
		t.Fatalf("read position %v, want 1:1", sub.ReadPosition())
	}
	replay([]ledger.Position{at(1, 1)}, Limit{Entries: 1})
	if got := readAll(t, sub, 1, Limit{Entries: 1}); got[0].Position != at(1, 2) {
		t.Errorf("read %v after replaying 1:1, want 1:2", got[0].Position)
	}
	noneLeft(t, m, sub)
}

func TestReaderStartsWhereAsked(t *testing.T) {
	cfg := testConfig()
	cfg.MaxEntriesPerLedger = 10
	m, _ := uncached(t, 25, cfg)
	tests := []struct {
		name  string
		start ledger.Position
		want  ledger.Position
	}{
		{"earliest", at(-1, -1), at(1, 0)},
		{"inclusive", at(1, 4), at(1, 4)},
		{"before-a-ledger", at(2, -1), at(2, 0)},
		{"past-a-ledger", at(1, 10), at(2, 0)},
		{"latest", at(math.MaxInt64, math.MaxInt64), at(4, 0)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := m.NewReader(tt.name, tt.start)
			if got := r.ReadPosition(); got != tt.want {
				t.Errorf("NewReader(%v) reads at %v, want %v", tt.start, got, tt.want)
			}
			if r.Durable() {
				t.Error("it is durable")
			}
			noneLeft(t, m, r)
		})
	}
}

func TestSeekTime(t *testing.T) {
	cfg := testConfig()
	cfg.MaxEntriesPerLedger = 7
	m, _ := uncached(t, 50, cfg)
	r := m.NewReader("r", at(0, 0))
	published := func(entry []byte) (int64, error) {
		n, err := strconv.ParseInt(string(entry), 10, 64)
		return 1000 + n/2*10, err // two entries share a time
	}
	for _, tt := range []struct{ at, want int64 }{
		{0, 0}, {1000, 0}, {1001, 2}, {1010, 2}, {1100, 20}, {1239, 48}, {1240, 48},
	} {
		if err := r.SeekTime(t.Context(), published, tt.at); err != nil {
			t.Fatal(err)
		}
		if got := readAll(t, r, 1, Limit{}); string(got[0].Data) != strconv.FormatInt(tt.want, 10) {
			t.Errorf("SeekTime(%d) leads to %q, want %d", tt.at, got[0].Data, tt.want)
		}
	}
	if err := r.SeekTime(t.Context(), published, 5000); err != nil {
		t.Fatal(err)
	}
	if r.Backlog() != 0 {
		t.Errorf("after a seek beyond all times the backlog is %d", r.Backlog())
	}
	noneLeft(t, m, r)
}

func TestReadEntry(t *testing.T) {
	m, b := uncached(t, 5, testConfig())
	data, err := m.ReadEntry(t.Context(), at(1, 3))
	if err != nil || string(data) != "3" {
		t.Errorf("ReadEntry(1:3) = %q, %v", data, err)
	}
	for _, p := range []ledger.Position{at(1, 5), at(1, -1), at(7, 0)} {
		if _, err := m.ReadEntry(t.Context(), p); !errors.Is(err, ledger.ErrNoSuchEntry) {
			t.Errorf("ReadEntry(%v) = %v, want ErrNoSuchEntry", p, err)
		}
	}
	b.set(func() { b.onRead = func(context.Context, ledger.Position) error { return errPlanned } })
	if _, err := m.ReadEntry(t.Context(), at(1, 2)); !errors.Is(err, errPlanned) {
		t.Errorf("ReadEntry of a broken bookie = %v", err)
	}
	noReadsInFlight(t, m.f)
}

func TestDurableReaderCloses(t *testing.T) {
	cfg := testConfig()
	cfg.MaxEntriesPerLedger = 2
	m := mustOpen(t, testFactory(t, newBookies(), metadatatest.NewMemory(t), cfg), topic)
	sub, err := m.OpenCursor(t.Context(), "sub", Earliest)
	if err != nil {
		t.Fatal(err)
	}
	ps := appendAll(t, m, "a", "b", "c", "d", "e")
	readAll(t, sub, 5, Limit{Entries: 5})
	if err := sub.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := sub.TryRead(Limit{}); !errors.Is(err, ErrClosed) {
		t.Errorf("TryRead after Close = %v, want ErrClosed", err)
	}
	// The cursor still holds its data, and comes back where it was.
	again, err := m.OpenCursor(t.Context(), "sub", Latest)
	if err != nil || again != sub {
		t.Fatalf("OpenCursor = %p, %v, want %p", again, err, sub)
	}
	if got := readAll(t, again, 5, Limit{Entries: 5}); got[0].Position != ps[0] {
		t.Errorf("it reads from %v, want %v", got[0].Position, ps[0])
	}
	if err := m.DeleteCursor(t.Context(), "sub"); err != nil {
		t.Fatal(err)
	}
	if err := m.DeleteCursor(t.Context(), "sub"); !errors.Is(err, ErrNotFound) {
		t.Errorf("deleting it again = %v, want ErrNotFound", err)
	}
	noReadsInFlight(t, m.f)
}

// A cursor whose deletion failed is still there, and can be used again.
func TestCursorOutlivesItsFailedDeletion(t *testing.T) {
	meta := &slowMeta{Store: metadatatest.NewMemory(t)}
	bookies := newBookies()
	m := mustOpen(t, testFactory(t, bookies, meta, testConfig()), topic)
	if _, err := m.OpenCursor(t.Context(), "sub", Earliest); err != nil {
		t.Fatal(err)
	}
	ps := appendAll(t, m, "a", "b")
	meta.set(func(op, _ string) error {
		if op == "delete" {
			return errPlanned
		}
		return nil
	}, nil)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := m.DeleteCursor(short, "sub"); !errors.Is(err, errPlanned) {
		t.Fatalf("DeleteCursor = %v, want the planned failure", err)
	}
	meta.set(nil, nil)

	again, err := m.OpenCursor(t.Context(), "sub", Latest)
	if err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, again, 2, Limit{Entries: 2}); got[0].Position != ps[0] {
		t.Errorf("it reads from %v, want %v", got[0].Position, ps[0])
	}
	if err := again.Ack(ps[:1]); err != nil {
		t.Errorf("acknowledge: %v", err)
	}
	if err := m.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	m = mustOpen(t, testFactory(t, bookies, meta, testConfig()), topic)
	if got := m.Cursors(); len(got) != 1 || got[0].MarkDeleted() != ps[0] {
		t.Errorf("after reopening the cursors are %v, want one with %v acknowledged", got, ps[0])
	}
	if err := m.DeleteCursor(t.Context(), "sub"); err != nil {
		t.Error(err)
	}
}

// lateReads hands out what it has read only when a test lets it.
type lateReads struct {
	Storage
	reading chan struct{} // receives a value for each read
	gate    chan struct{} // closed to let them return
}

func (s *lateReads) Read(ctx context.Context, id ledger.ID, first, last ledger.EntryID, maxBytes int) ([]ledger.Entry, error) {
	entries, err := s.Storage.Read(ctx, id, first, last, maxBytes)
	s.reading <- struct{}{}
	<-s.gate
	return entries, err
}

// A reader whose read was cut short while its ledger was trimmed goes on behind
// the ledger.
func TestTrimmedDuringAReadThatWasCutShort(t *testing.T) {
	cfg := testConfig()
	cfg.CacheSizeMB, cfg.MaxEntriesPerLedger = 0, 8
	storage := &lateReads{Storage: newBookies(), reading: make(chan struct{}, 16), gate: make(chan struct{})}
	m := mustOpen(t, testFactory(t, storage, metadatatest.NewMemory(t), cfg), topic)
	durable, err := m.OpenCursor(t.Context(), "durable", Earliest)
	if err != nil {
		t.Fatal(err)
	}
	big := strings.Repeat("x", 600<<10)
	ps := appendAll(t, m, big, big, big, big, big, big, big, big)
	eventually(t, "the ledger is full", func() bool { return len(m.layout().Closed()) == 1 })
	ps = append(ps, appendAll(t, m, "next")...)

	first, second := m.NewReader("first", ps[0]), m.NewReader("second", ps[5])
	if _, err := first.TryRead(Limit{Entries: 8, Bytes: 1}); !errors.Is(err, ErrWouldBlock) {
		t.Fatal(err)
	}
	await(t, "the read", storage.reading)
	if _, err := second.TryRead(Limit{Entries: 1}); !errors.Is(err, ErrWouldBlock) {
		t.Fatal(err)
	}
	m.sources.mu.Lock()
	source := m.sources.byID[ps[0].Ledger]
	m.sources.mu.Unlock()
	eventually(t, "the second joins", func() bool {
		source.mu.Lock()
		defer source.mu.Unlock()
		return len(source.flights) == 1 && len(source.flights[0].wants) == 2
	})
	if err := durable.AckCumulative(ps[7]); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the ledger's worker ends", func() bool { return source.strand.Submit(taskFunc(func() {})) != nil })
	close(storage.gate)
	eventually(t, "the read settles", func() bool {
		source.mu.Lock()
		defer source.mu.Unlock()
		return len(source.flights) == 0
	})
	if got := readAll(t, second, 1, Limit{Entries: 1}); got[0].Position != ps[8] {
		t.Errorf("it reads %v, want %v", got[0].Position, ps[8])
	}
}
