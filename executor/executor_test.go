package executor

import (
	"errors"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func quiet() *Guard { return NewGuard(slog.New(slog.DiscardHandler), nil) }

// await fails the test if ch is not closed soon.
func await(t *testing.T, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(20 * time.Second):
		t.Fatalf("timed out waiting for %s", what)
	}
}

func TestStrandKeepsEachSubmittersOrder(t *testing.T) {
	s := NewStrand(quiet())
	const submitters, each = 8, 5000
	var seen [submitters][]int // appended to by tasks only: no two run at once
	var wg sync.WaitGroup
	for k := range submitters {
		wg.Go(func() {
			for i := range each {
				if err := s.Submit(Func(func() { seen[k] = append(seen[k], i) })); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	s.Close()
	for k := range seen {
		if len(seen[k]) != each {
			t.Fatalf("submitter %d: %d of %d tasks ran", k, len(seen[k]), each)
		}
		for i, got := range seen[k] {
			if got != i {
				t.Fatalf("submitter %d: task %d ran in place %d", k, got, i)
			}
		}
	}
}

func TestSubmitAllIsContiguous(t *testing.T) {
	s := NewStrand(quiet())
	var seen []int
	var wg sync.WaitGroup
	for k := range 4 {
		wg.Go(func() {
			for range 200 {
				batch := make([]Task, 16)
				for i := range batch {
					batch[i] = Func(func() { seen = append(seen, k) })
				}
				if err := s.SubmitAll(batch); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	s.Close()
	if len(seen) != 4*200*16 {
		t.Fatalf("%d tasks ran, want %d", len(seen), 4*200*16)
	}
	for i := range seen {
		if seen[i] != seen[i/16*16] {
			t.Fatalf("task %d of another submitter stands inside a batch", i)
		}
	}
}

func TestTaskMaySubmitToItsOwnStrand(t *testing.T) {
	s := NewStrand(quiet())
	done := make(chan struct{})
	var step func(n int) Func
	step = func(n int) Func {
		return func() {
			if n == 0 {
				close(done)
				return
			}
			if err := s.Submit(step(n - 1)); err != nil {
				t.Error(err)
			}
		}
	}
	if err := s.Submit(step(10_000)); err != nil {
		t.Fatal(err)
	}
	await(t, "the chain", done)
	s.Close()
}

func TestPanicsAreCountedAndTheWorkerGoesOn(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	g := NewGuard(slog.New(slog.DiscardHandler), reg)
	s, p := NewStrand(g), NewPool(2, g)
	var ran atomic.Int64
	const n = 8000
	for i := range n {
		task := Func(func() {
			ran.Add(1)
			if i%1000 == 0 {
				panic("planned")
			}
		})
		if err := errors.Join(s.Submit(task), p.Submit(task)); err != nil {
			t.Fatal(err)
		}
	}
	s.Close()
	p.Close()
	if got := ran.Load(); got != 2*n {
		t.Errorf("%d tasks ran, want %d", got, 2*n)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if got := families[0].GetMetric()[0].GetCounter().GetValue(); got != 16 {
		t.Errorf("counted %v panics, want 16", got)
	}
}

func TestGoexitLosesNoTask(t *testing.T) {
	g := quiet()
	s, p := NewStrand(g), NewPool(1, g)
	var strand, pool atomic.Int64
	for i := range 100 {
		task := func(ran *atomic.Int64) Func {
			return func() {
				ran.Add(1)
				if i%10 == 0 {
					runtime.Goexit()
				}
			}
		}
		if err := errors.Join(s.Submit(task(&strand)), p.Submit(task(&pool))); err != nil {
			t.Fatal(err)
		}
	}
	s.Close()
	p.Close()
	if strand.Load() != 100 || pool.Load() != 100 {
		t.Errorf("ran %d on the strand and %d on the pool, want 100 each", strand.Load(), pool.Load())
	}
}

// TestCloseRunsOrRefusesEveryTask races submitters with Close: whatever was
// admitted has run when Close returns, and the rest was told so.
func TestCloseRunsOrRefusesEveryTask(t *testing.T) {
	type closer interface {
		Submit(Task) error
		Close()
	}
	kinds := map[string]func(*Guard) closer{
		"strand": func(g *Guard) closer { return NewStrand(g) },
		"pool":   func(g *Guard) closer { return NewPool(2, g) },
	}
	for name, start := range kinds {
		t.Run(name, func(t *testing.T) {
			for range 300 {
				e := start(quiet())
				var admitted, ran atomic.Int64
				var wg sync.WaitGroup
				for range 4 {
					wg.Go(func() {
						for e.Submit(Func(func() { ran.Add(1) })) == nil {
							admitted.Add(1)
						}
					})
				}
				for admitted.Load() < 20 {
					runtime.Gosched()
				}
				e.Close()
				wg.Wait()
				if admitted.Load() != ran.Load() {
					t.Fatalf("%d admitted, %d ran", admitted.Load(), ran.Load())
				}
				if err := e.Submit(Func(func() {})); !errors.Is(err, ErrShutdown) {
					t.Fatalf("Submit after Close = %v, want ErrShutdown", err)
				}
				e.Close() // a second Close is harmless
			}
		})
	}
}

func TestIdleStrandHasNoGoroutine(t *testing.T) {
	strands := make([]*Strand, 100)
	var wg sync.WaitGroup
	for i := range strands {
		strands[i] = NewStrand(quiet())
		wg.Add(1)
		if err := strands[i].Submit(Func(wg.Done)); err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
	if err := goleak.Find(); err != nil { // polls until the runners are gone
		t.Error(err)
	}
}

func TestStrandGivesTheMemoryOfABurstBack(t *testing.T) {
	s := NewStrand(quiet())
	hold := make(chan struct{})
	s.Submit(Func(func() { <-hold }))
	for range 100_000 {
		s.Submit(Func(func() {}))
	}
	close(hold)
	for range 20 * shrinkAfter { // one drain at a time
		done := make(chan struct{})
		s.Submit(Func(func() { close(done) }))
		await(t, "a task", done)
	}
	s.Close()
	if got := max(cap(s.queue), cap(s.batch)); got > keepSlots {
		t.Errorf("the queue keeps %d slots after the burst, want at most %d", got, keepSlots)
	}
}

type counter struct{ wg *sync.WaitGroup }

func (c *counter) Run() { c.wg.Done() }

// TestSteadyStateAllocatesNothingPerTask allows for the goroutine that starts
// with a batch, not for anything per task.
func TestSteadyStateAllocatesNothingPerTask(t *testing.T) {
	g := quiet()
	s, p := NewStrand(g), NewPool(1, g)
	defer s.Close()
	defer p.Close()
	var wg sync.WaitGroup
	var task Task = &counter{&wg}
	const batch = 1000
	round := func(submit func(Task) error) func() {
		return func() {
			wg.Add(batch)
			for range batch {
				submit(task)
			}
			wg.Wait()
		}
	}
	for name, submit := range map[string]func(Task) error{"strand": s.Submit, "pool": p.Submit} {
		for range 20 {
			round(submit)()
		}
		if perTask := testing.AllocsPerRun(50, round(submit)) / batch; perTask > 0.05 {
			t.Errorf("%s: %.3f allocations a task, want 0", name, perTask)
		}
	}
}

func BenchmarkStrand(b *testing.B) {
	s := NewStrand(quiet())
	defer s.Close()
	var wg sync.WaitGroup
	var task Task = &counter{&wg}
	b.ReportAllocs()
	for b.Loop() {
		wg.Add(256)
		for range 256 {
			s.Submit(task)
		}
		wg.Wait()
	}
}

func BenchmarkPool(b *testing.B) {
	p := NewPool(2, quiet())
	defer p.Close()
	var wg sync.WaitGroup
	var task Task = &counter{&wg}
	b.ReportAllocs()
	for b.Loop() {
		wg.Add(256)
		for range 256 {
			p.Submit(task)
		}
		wg.Wait()
	}
}
