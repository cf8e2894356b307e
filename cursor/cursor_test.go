package cursor

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/magnetar-io/magnetar/ledger"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memStore keeps one record in memory, with versions.
type memStore struct {
	mu      sync.Mutex
	state   State
	version int64
	saves   []State
	fail    error         // the next saves fail with it
	hold    chan struct{} // a save waits for it to be closed
}

func (m *memStore) Load(ctx context.Context) (State, int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.version == 0 {
		return State{}, 0, ErrNotFound
	}
	return m.state, m.version, ctx.Err()
}

func (m *memStore) Save(ctx context.Context, s State, version int64) (int64, error) {
	m.mu.Lock()
	hold := m.hold
	m.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		return 0, ctx.Err()
	case m.fail != nil:
		return 0, m.fail
	case version != m.version:
		return 0, ErrConflict
	}
	m.version++
	m.state = s
	m.saves = append(m.saves, s)
	return m.version, nil
}

func (m *memStore) Remove(_ context.Context, version int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.version != 0 && version != m.version {
		return ErrConflict
	}
	m.version = 0
	return nil
}

func (m *memStore) set(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change()
}

func (m *memStore) mark() (p ledger.Position) {
	m.set(func() { p = m.state.MarkDeleted })
	return p
}

func options(s Store) Options {
	return Options{Store: s, Interval: time.Second, Timeout: 10 * time.Second, MaxRanges: 3, Log: slog.New(slog.DiscardHandler)}
}

// ten is one open ledger with ten entries.
func ten() *Layout {
	open := &Open{ID: 7}
	open.Confirm(9)
	return NewLayout(nil, open, ledger.Position{})
}

func open(t *testing.T, s Store) *Cursor {
	t.Helper()
	l := ten()
	c, err := Create(t.Context(), "sub", func() *Layout { return l }, at(7, -1), options(s))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestSavesOncePerIntervalAndOnClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &memStore{}
		c := open(t, store)
		for i := range 9 {
			if err := c.Ack([]ledger.Position{at(7, ledger.EntryID(i))}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(410 * time.Millisecond)
		}
		time.Sleep(3 * time.Second)
		// Created at 0; acknowledged at 0, 0.41 ... 3.28; saved at 1, 2, 3 and 4 seconds.
		var marks []ledger.EntryID
		store.set(func() {
			for _, s := range store.saves {
				marks = append(marks, s.MarkDeleted.Entry)
			}
		})
		if want := []ledger.EntryID{-1, 2, 4, 7, 8}; !slices.Equal(marks, want) {
			t.Errorf("saved mark-delete entries %v, want %v", marks, want)
		}
		if err := c.AckCumulative(at(7, 9)); err != nil {
			t.Fatal(err)
		}
		if !c.Stats().Dirty {
			t.Error("an unsaved acknowledgement does not show as dirty")
		}
		if err := c.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := store.mark(); got != at(7, 9) {
			t.Errorf("after Close the record says %v, want 7:9", got)
		}
		if err := c.AckCumulative(at(7, 9)); !errors.Is(err, ErrClosed) {
			t.Errorf("AckCumulative after Close = %v, want ErrClosed", err)
		}
	})
}

func TestAckErrors(t *testing.T) {
	l := ten()
	c := New("sub", func() *Layout { return l }, at(7, -1))
	if err := c.AckCumulative(at(7, 4)); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		err  error
		want error
	}{
		{"cumulative-beyond-end", c.AckCumulative(at(7, 10)), ErrBeyondEnd},
		{"cumulative-latest", c.AckCumulative(latest), ErrBeyondEnd},
		{"cumulative-behind", c.AckCumulative(at(7, 3)), ErrBehind},
		{"cumulative-same", c.AckCumulative(at(7, 4)), nil},
		{"single-beyond-end", c.Ack([]ledger.Position{at(7, 6), at(7, 10)}), ErrBeyondEnd},
		{"single-again", c.Ack([]ledger.Position{at(7, 1)}), nil},
		{"single-never-there", c.Ack([]ledger.Position{at(3, 1), at(7, -1)}), nil},
	}
	for _, tt := range tests {
		if !errors.Is(tt.err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, tt.err, tt.want)
		}
	}
	if c.IsAcked(at(7, 6)) {
		t.Error("a refused call acknowledged 7:6")
	}
	if c.MarkDeleted() != at(7, 4) || c.Backlog() != 5 {
		t.Errorf("mark-delete %v backlog %d, want 7:4 and 5", c.MarkDeleted(), c.Backlog())
	}
}

func TestRecordHoldsABoundedNumberOfRanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &memStore{}
		c := open(t, store)
		if err := c.Ack([]ledger.Position{at(7, 1), at(7, 3), at(7, 5), at(7, 6), at(7, 8)}); err != nil {
			t.Fatal(err)
		}
		if err := c.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		want := []Range{{7, 1, 1}, {7, 3, 3}, {7, 5, 6}}
		if !slices.Equal(store.state.Acked, want) {
			t.Errorf("record has %v, want %v", store.state.Acked, want)
		}
		if got := c.Stats().UnsavedRanges; got != 1 {
			t.Errorf("%d unsaved ranges, want 1", got)
		}
		if !c.IsAcked(at(7, 8)) {
			t.Error("the range that had no room was forgotten in memory")
		}
		c.Close(t.Context())
	})
}

// TestLoadAfterATrim: the former owner trimmed what it had acknowledged and not
// yet saved. The cursor starts at what is left.
func TestLoadAfterATrim(t *testing.T) {
	store := &memStore{state: State{MarkDeleted: at(3, 1), Acked: []Range{{3, 5, 6}, {9, 0, 1}}}, version: 4}
	open := &Open{ID: 9, Base: 20}
	open.Confirm(4)
	l := NewLayout(nil, open, ledger.Position{})
	c, err := Load(t.Context(), "sub", func() *Layout { return l }, options(store))
	if err != nil {
		t.Fatal(err)
	}
	if !c.IsAcked(at(3, 4)) || c.MarkDeleted() != at(9, 1) || c.Backlog() != 3 || c.ReadPosition() != at(9, 2) {
		t.Errorf("loaded %+v, want mark-delete 9:1, backlog 3", c.Stats())
	}
	if err := c.verify(); err != nil {
		t.Error(err)
	}
}

func TestLoadRestoresAndTakesOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &memStore{}
		var mu sync.Mutex
		var lost error
		l := ten()
		o := options(store)
		o.Lost = func(err error) {
			mu.Lock()
			defer mu.Unlock()
			lost = err
		}
		old, err := Create(t.Context(), "sub", func() *Layout { return l }, at(7, -1), o)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(old.AckCumulative(at(7, 2)), old.Ack([]ledger.Position{at(7, 5)}), old.Flush(t.Context())); err != nil {
			t.Fatal(err)
		}
		next, err := Load(t.Context(), "sub", func() *Layout { return l }, options(store))
		if err != nil {
			t.Fatal(err)
		}
		if next.MarkDeleted() != at(7, 2) || !next.IsAcked(at(7, 5)) || next.Backlog() != 6 {
			t.Errorf("loaded %+v, want mark-delete 7:2, 7:5 acknowledged, backlog 6", next.Stats())
		}
		if next.ReadPosition() != at(7, 3) {
			t.Errorf("read position %v, want 7:3", next.ReadPosition())
		}
		// The old owner acknowledges on; its save must not win over the new one.
		if err := old.AckCumulative(at(7, 9)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		if !errors.Is(lost, ErrConflict) {
			t.Errorf("the old owner was told %v, want ErrConflict", lost)
		}
		if store.mark() != at(7, 2) {
			t.Errorf("the record says %v, the old owner overwrote it", store.mark())
		}
		if err := old.Close(t.Context()); err != nil {
			t.Errorf("closing the old one: %v", err)
		}
		if err := next.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestFailedSaveIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &memStore{}
		c := open(t, store)
		store.set(func() { store.fail = errors.New("no leader") })
		if err := c.AckCumulative(at(7, 3)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(4 * time.Second)
		store.set(func() { store.fail = nil })
		time.Sleep(1100 * time.Millisecond)
		if store.mark() != at(7, 3) || c.Stats().Dirty {
			t.Errorf("the record says %v (dirty %v), want 7:3 saved", store.mark(), c.Stats().Dirty)
		}
		c.Close(t.Context())
	})
}

func TestResetWritesFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &memStore{}
		c := open(t, store)
		if err := errors.Join(c.AckCumulative(at(7, 6)), c.Ack([]ledger.Position{at(7, 8)}), c.Flush(t.Context())); err != nil {
			t.Fatal(err)
		}
		hold := make(chan struct{})
		store.set(func() { store.hold = hold })
		result := make(chan error, 1)
		go func() { result <- c.Reset(t.Context(), at(7, 2)) }()
		synctest.Wait()
		if c.MarkDeleted() != at(7, 6) {
			t.Errorf("mark-delete %v before the record was written, want 7:6", c.MarkDeleted())
		}
		if err := c.Ack([]ledger.Position{at(7, 9)}); !errors.Is(err, ErrResetting) {
			t.Errorf("Ack during a reset = %v, want ErrResetting", err)
		}
		store.set(func() { store.hold = nil })
		close(hold)
		if err := <-result; err != nil {
			t.Fatal(err)
		}
		if c.MarkDeleted() != at(7, 1) || c.ReadPosition() != at(7, 2) || c.Backlog() != 8 {
			t.Errorf("after the reset %+v, want mark-delete 7:1, read 7:2, backlog 8", c.Stats())
		}
		if store.mark() != at(7, 1) || len(store.state.Acked) != 0 {
			t.Errorf("the record says %+v", store.state)
		}

		store.set(func() { store.fail = errors.New("no leader") })
		if err := c.Reset(t.Context(), at(7, 0)); err == nil {
			t.Error("a reset that could not be written succeeded")
		}
		if c.MarkDeleted() != at(7, 1) {
			t.Errorf("a failed reset moved mark-delete to %v", c.MarkDeleted())
		}
		store.set(func() { store.fail = nil })
		if err := c.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if store.mark() != at(7, 1) {
			t.Errorf("the record says %v after a failed reset and Close, want 7:1", store.mark())
		}
	})
}

// TestAdvanceAfterAResetDoesNothing: a read that was going on during a reset must
// not carry the cursor over what is to be delivered again.
func TestAdvanceAfterAResetDoesNothing(t *testing.T) {
	l := ten()
	c := New("sub", func() *Layout { return l }, at(7, -1))
	moves := map[string]func(){
		"reset":  func() { c.Reset(t.Context(), at(7, 0)) },
		"rewind": c.Rewind,
	}
	for name, move := range moves {
		_, epoch := c.Begin()
		first, n := c.Next(10)
		move()
		c.Advance(at(first.Ledger, first.Entry+ledger.EntryID(n)-1), epoch)
		if got := c.ReadPosition(); got != at(7, 0) {
			t.Errorf("%s: read position %v, want 7:0", name, got)
		}
	}
}

func TestDeleteRemovesTheRecordForGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &memStore{}
		c := open(t, store)
		if err := c.AckCumulative(at(7, 3)); err != nil {
			t.Fatal(err)
		}
		if err := c.Delete(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		if _, _, err := store.Load(t.Context()); !errors.Is(err, ErrNotFound) {
			t.Errorf("a late save brought the record back: %v", err)
		}
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// TestBacklogIsExactUnderConcurrency acknowledges from many goroutines while
// entries arrive; in the end nothing is over or missing, and meanwhile the
// number is never impossible.
func TestBacklogIsExactUnderConcurrency(t *testing.T) {
	o := &Open{ID: 1}
	l := NewLayout(nil, o, ledger.Position{})
	c := New("sub", func() *Layout { return l }, at(1, -1))
	const n, workers = 20_000, 4
	var wg sync.WaitGroup
	wg.Go(func() {
		for e := range n {
			o.Confirm(ledger.EntryID(e))
		}
	})
	for w := range workers {
		wg.Go(func() {
			for e := w; e < n-10; e += workers {
				for errors.Is(c.Ack([]ledger.Position{at(1, ledger.EntryID(e))}), ErrBeyondEnd) {
					time.Sleep(time.Microsecond)
				}
				if got := c.Backlog(); got < 0 || got > n {
					t.Errorf("backlog %d", got)
				}
			}
		})
	}
	wg.Wait()
	if got := c.Backlog(); got != 10 {
		t.Errorf("backlog %d, want 10", got)
	}
	if c.MarkDeleted() != at(1, n-11) {
		t.Errorf("mark-delete %v, want 1:%d", c.MarkDeleted(), n-11)
	}
}

func BenchmarkAckOutOfOrder(b *testing.B) {
	o := &Open{ID: 1}
	o.Confirm(1 << 40)
	l := NewLayout(nil, o, ledger.Position{})
	c := New("sub", func() *Layout { return l }, at(1, -1))
	ps := make([]ledger.Position, 1)
	i := ledger.EntryID(0)
	b.ReportAllocs()
	for b.Loop() {
		ps[0] = at(1, i^7)
		i++
		c.Ack(ps)
	}
}
