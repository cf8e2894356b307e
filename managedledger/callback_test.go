package managedledger

import (
	"bytes"
	"errors"
	"log/slog"
	"math"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/executor"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata/metadatatest"
)

// cached is a managed ledger with n entries in the cache and a reader before
// them.
func cached(t *testing.T, n int, change func(*Config)) (*ManagedLedger, *Reader) {
	t.Helper()
	cfg := testConfig()
	cfg.ReadCallbackInline = true
	if change != nil {
		change(&cfg)
	}
	m := mustOpen(t, testFactory(t, newBookies(), metadatatest.NewMemory(t), cfg), topic)
	r := m.NewReader("r", at(0, 0))
	entries := make([]string, n)
	for i := range entries {
		entries[i] = "x"
	}
	appendAll(t, m, entries...)
	return m, r
}

// goroutine names the goroutine that calls it.
func goroutine() string {
	buf := make([]byte, 64)
	name, _, _ := strings.Cut(string(buf[:runtime.Stack(buf, false)]), " [")
	return name
}

// chain reads n entries one by one, each read from inside the callback of the one
// before, and returns where each callback ran and the stack depth there. pass
// says whether the callback hands its depth on.
func chain(t *testing.T, r *Reader, n int, pass bool) (where []string, frames []int) {
	t.Helper()
	done := make(chan struct{})
	var next func(depth int)
	next = func(depth int) {
		r.ReadEntries(depth, Limit{Entries: 1}, func(depth int, b *Batch, err error) {
			if err != nil {
				t.Error(err)
				close(done)
				return
			}
			b.Release()
			where = append(where, goroutine())
			var pcs [4096]uintptr
			frames = append(frames, runtime.Callers(0, pcs[:]))
			if len(where) == n {
				close(done)
				return
			}
			if !pass {
				depth = 0
			}
			next(depth)
		})
	}
	next(0)
	await(t, "the chain", done)
	return where, frames
}

// TestNestedReadsCompleteInlineUpToTheLimit: rules R1, R7 and R10.
func TestNestedReadsCompleteInlineUpToTheLimit(t *testing.T) {
	for name, pass := range map[string]bool{"depth-passed": true, "depth-dropped": false} {
		t.Run(name, func(t *testing.T) {
			_, r := cached(t, 11, nil)
			where, _ := chain(t, r, 11, pass)
			for i, g := range where[:10] {
				if g != goroutine() {
					t.Errorf("callback %d ran on %s, want the caller's", i, g)
				}
			}
			if where[10] == goroutine() {
				t.Error("callback 10 ran on the caller, beyond the limit of 10")
			}
		})
	}
}

// TestLimitOne: every completion after the first of a nested chain is queued.
func TestLimitOne(t *testing.T) {
	for _, limit := range []int{1, 0, -5} {
		_, r := cached(t, 3, func(c *Config) { c.MaxReadCompletionDepth = limit })
		where, _ := chain(t, r, 3, true)
		if where[0] != goroutine() || where[1] == goroutine() {
			t.Errorf("limit %d: callbacks ran on %v, the caller is %s", limit, where, goroutine())
		}
	}
}

// TestDepthBelowOneIsClampedWithAWarning: the warning is the operator's only hint.
func TestDepthBelowOneIsClampedWithAWarning(t *testing.T) {
	var log bytes.Buffer
	cfg := testConfig()
	cfg.MaxReadCompletionDepth = 0
	got := cfg.normalized(slog.New(slog.NewTextHandler(&log, nil)))
	if got.MaxReadCompletionDepth != 1 || !strings.Contains(log.String(), "managedLedgerMaxReadCompletionDepth") {
		t.Errorf("depth %d, log %q", got.MaxReadCompletionDepth, log.String())
	}
}

// TestSequentialReadsStayInline: rule R8.
func TestSequentialReadsStayInline(t *testing.T) {
	_, r := cached(t, 30, nil)
	for i := range 30 {
		where := ""
		r.ReadEntries(0, Limit{Entries: 1}, func(depth int, b *Batch, err error) {
			if err != nil || depth != 1 {
				t.Errorf("read %d: depth %d, %v", i, depth, err)
			}
			b.Release()
			where = goroutine()
		})
		if where != goroutine() {
			t.Fatalf("read %d ran on %q", i, where)
		}
	}
}

// TestLongChainKeepsItsStack: rule R13.
func TestLongChainKeepsItsStack(t *testing.T) {
	for name, pass := range map[string]bool{"depth-passed": true, "depth-dropped": false} {
		t.Run(name, func(t *testing.T) {
			m, r := cached(t, 1000, nil)
			where, frames := chain(t, r, 1000, pass)
			if len(where) != 1000 {
				t.Errorf("%d callbacks", len(where))
			}
			for i, n := range frames {
				if n > 10*40 {
					t.Fatalf("callback %d has %d frames below it, want at most 400", i, n)
				}
			}
			noneLeft(t, m, r)
		})
	}
}

// TestLegacyCallbacksRunOnTheStrand: rules R2 and R3. While the strand is held,
// no legacy callback runs; inline ones do.
func TestLegacyCallbacksRunOnTheStrand(t *testing.T) {
	for name, inline := range map[string]bool{"inline": true, "legacy": false} {
		t.Run(name, func(t *testing.T) {
			m, r := cached(t, 5, func(c *Config) { c.ReadCallbackInline = inline })
			hold := make(chan struct{})
			m.strand.Submit(executor.Func(func() { <-hold }))
			ran := make(chan string, 1)
			r.ReadEntries(0, Limit{Entries: 1}, func(_ int, b *Batch, _ error) {
				b.Release()
				ran <- goroutine()
			})
			select {
			case where := <-ran:
				if !inline || where != goroutine() {
					t.Errorf("the callback ran on %s while the strand was held", where)
				}
			default:
				if inline {
					t.Error("a cached read waits for the strand")
				}
			}
			close(hold)
			if !inline {
				where, _ := chain(t, r, 4, true)
				for _, g := range where {
					if g != where[0] || g == goroutine() {
						t.Errorf("legacy callbacks ran on %v, want one goroutine, the strand's", where)
					}
				}
			}
			noneLeft(t, m, r)
		})
	}
}

// TestIndependentReadOvertakesAStalledContinuation: rule R11.
func TestIndependentReadOvertakesAStalledContinuation(t *testing.T) {
	m, r := cached(t, 20, nil)
	hold := make(chan struct{})
	for range max(2, runtime.GOMAXPROCS(0)) {
		m.f.pool.Submit(executor.Func(func() { <-hold }))
	}
	other := m.NewReader("other", at(0, 0))
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		chain(t, r, 12, true)
	}()
	eventually(t, "ten inline callbacks", func() bool { return r.ReadPosition() == at(1, 11) })
	ran := false
	other.ReadEntries(0, Limit{Entries: 1}, func(_ int, b *Batch, err error) { ran = err == nil; b.Release() })
	if !ran {
		t.Error("a read of another reader waits for the stalled continuation")
	}
	close(hold)
	await(t, "the chain", finished)
	noneLeft(t, m, r, other)
}

// TestWaitingReadIsAnsweredByAnAppend, and a second one is refused meanwhile.
func TestWaitingReadIsAnsweredByAnAppend(t *testing.T) {
	for name, inline := range map[string]bool{"inline": true, "legacy": false} {
		t.Run(name, func(t *testing.T) {
			m, _ := cached(t, 1, func(c *Config) { c.ReadCallbackInline = inline })
			r := m.NewReader("tail", at(math.MaxInt64, 0))
			answers := make(chan *Batch, 1)
			r.ReadEntries(0, Limit{Entries: 5}, func(_ int, b *Batch, err error) {
				if err != nil {
					t.Error(err)
				}
				answers <- b
			})
			var second error
			r.ReadEntries(0, Limit{Entries: 5}, func(_ int, _ *Batch, err error) { second = err })
			if !errors.Is(second, ErrReadPending) {
				t.Errorf("a second read = %v, want ErrReadPending", second)
			}
			ps := appendAll(t, m, "new")
			select {
			case b := <-answers:
				if b.Entries[0].Position != ps[0] {
					t.Errorf("it got %v", b.Entries[0].Position)
				}
				b.Release()
			case <-time.After(10 * time.Second):
				t.Fatal("the waiting read was not answered")
			}
			noneLeft(t, m, r)
		})
	}
}

// TestReadEntriesOfUncachedEntries brings every entry, whatever had to be fetched.
func TestReadEntriesOfUncachedEntries(t *testing.T) {
	for name, inline := range map[string]bool{"inline": true, "legacy": false} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig()
			cfg.MaxEntriesPerLedger = 100
			cfg.ReadCallbackInline = inline
			m, _ := uncached(t, 1000, cfg)
			r := m.NewReader("r", at(0, 0))
			if where, _ := chain(t, r, 1000, true); len(where) != 1000 {
				t.Errorf("%d callbacks", len(where))
			}
			noneLeft(t, m, r)
		})
	}
}

// TestRefusedHandOffFailsOnceAndReleases: rules R16 and R17.
func TestRefusedHandOffFailsOnceAndReleases(t *testing.T) {
	m, r := cached(t, 20, nil)
	closedPool := executor.NewPool(1, m.f.guard)
	closedPool.Close()
	open := m.f.pool
	m.f.pool = closedPool
	defer func() { m.f.pool = open }()

	succeeded, failed := 0, 0
	var next func(depth int)
	next = func(depth int) {
		r.ReadEntries(depth, Limit{Entries: 1}, func(depth int, b *Batch, err error) {
			if err != nil {
				failed++
				if !errors.Is(err, ErrClosed) {
					t.Errorf("the refusal is %v", err)
				}
				return
			}
			b.Release()
			succeeded++
			next(depth)
		})
	}
	next(0)
	if succeeded != 10 || failed != 1 {
		t.Errorf("%d succeeded and %d failed, want 10 and 1", succeeded, failed)
	}
	if r.ReadPosition() != at(1, 11) {
		t.Errorf("read position %v, want 1:11, behind the entry that was lost", r.ReadPosition())
	}
	r.Rewind()
	if got := readAll(t, r, 1, Limit{Entries: 1}); got[0].Position != at(1, 0) {
		t.Errorf("after a rewind it reads %v", got[0].Position)
	}
	noneLeft(t, m, r)
}

// TestPanicInACallbackLeaksNothing: rule R25.
func TestPanicInACallbackLeaksNothing(t *testing.T) {
	m, r := cached(t, 20, nil)
	for range 15 {
		func() {
			defer func() { recover() }()
			r.ReadEntries(0, Limit{Entries: 1}, func(_ int, b *Batch, _ error) {
				b.Release()
				panic("planned")
			})
		}()
	}
	if got := r.depth.Load(); got != 0 {
		t.Errorf("depth %d after panics, want 0", got)
	}
	noneLeft(t, m, r)
}

// TestManyReadersOneWriter is the shape of the workload that this design is for:
// nothing is lost or out of order for any reader, and every permit comes back.
func TestManyReadersOneWriter(t *testing.T) {
	m, first := cached(t, 0, func(c *Config) { c.MaxEntriesPerLedger = 300; c.CacheSizeMB = 1 })
	const n, readers = 2000, 10
	var wg sync.WaitGroup
	all := []*Reader{first}
	for range readers - 1 {
		all = append(all, m.NewReader("r", at(0, 0)))
	}
	for _, r := range all {
		wg.Go(func() {
			last := ledger.Position{}
			for _, e := range readAll(t, r, n, Limit{Entries: 16}) {
				if !e.Position.After(last) {
					t.Errorf("%v after %v", e.Position, last)
				}
				last = e.Position
			}
		})
	}
	for range n {
		m.Append(make([]byte, 500), func(_ ledger.Position, err error) {
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	noneLeft(t, m, all...)
}

// BenchmarkTryRead reads cached entries in batches.
func BenchmarkTryRead(b *testing.B) {
	cfg := testConfig()
	f := NewFactory(newBookies(), metadatatest.NewMemory(b), cfg, quietLog(), nil)
	defer f.Close(b.Context())
	m, err := f.Open(b.Context(), topic)
	if err != nil {
		b.Fatal(err)
	}
	r := m.NewReader("r", at(0, 0))
	var wg sync.WaitGroup
	for range 20_000 {
		wg.Add(1)
		m.Append(make([]byte, 100), func(ledger.Position, error) { wg.Done() })
	}
	wg.Wait()
	b.ReportAllocs()
	for b.Loop() {
		batch, err := r.TryRead(Limit{Entries: 16})
		if err != nil {
			r.Rewind()
			continue
		}
		batch.Release()
	}
}
