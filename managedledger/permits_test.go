package managedledger

import (
	"bytes"
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata/metadatatest"
)

// TestBatchReturnsItsPermitOnce counts bytes, for entries of the cache, of a
// bookie, and of a replay.
func TestBatchReturnsItsPermitOnce(t *testing.T) {
	m, _ := uncached(t, 10, testConfig())
	sub, err := m.OpenCursor(t.Context(), "sub", Earliest)
	if err != nil {
		t.Fatal(err)
	}
	appendAll(t, m, "eleven")
	var batches []*Batch
	var held int64
	for n := 0; n < 11; {
		b, err := sub.TryRead(Limit{Entries: 4})
		if errors.Is(err, ErrWouldBlock) {
			await(t, "Ready", sub.Ready())
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		n += len(b.Entries)
		held += b.Bytes()
		batches = append(batches, b)
	}
	for {
		b, err := sub.TryReplay([]ledger.Position{at(1, 2), at(1, 3)}, Limit{Entries: 2})
		if errors.Is(err, ErrWouldBlock) {
			await(t, "Ready", sub.Ready())
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		batches, held = append(batches, b), held+b.Bytes()
		break
	}
	eventually(t, "only the batches to hold permits", func() bool {
		used, _ := m.f.reads.inUse()
		return used == held
	})
	for _, b := range batches {
		n := b.Bytes()
		for range 3 {
			b.Release()
		}
		held -= n
		if used, _ := m.f.reads.inUse(); used != held {
			t.Fatalf("%d bytes in flight after a release, want %d", used, held)
		}
	}
	noneLeft(t, m, sub)
}

// TestReadsWaitForPermits: beyond the limit fetches wait, cached reads do not,
// and fetched entries that nobody takes are given up for others.
func TestReadsWaitForPermits(t *testing.T) {
	cfg := testConfig()
	cfg.MaxReadsInFlightMB = 1
	b, meta := newBookies(), metadatatest.NewMemory(t)
	first := mustOpen(t, testFactory(t, b, meta, cfg), topic)
	big := bytes.Repeat([]byte("x"), 600<<10)
	appendAll(t, first, string(big), string(big), string(big), string(big))
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	m := mustOpen(t, testFactory(t, b, meta, cfg), topic)
	holder := m.NewReader("holder", at(1, 0))
	var held *Batch
	eventually(t, "the first batch", func() (ok bool) {
		batch, err := holder.TryRead(Limit{Entries: 1})
		if err == nil {
			held = batch
		}
		return err == nil
	})
	// Besides the batch, holder's prefetch may lie around; it is reclaimed.
	waiter := m.NewReader("waiter", at(1, 2))
	if _, err := waiter.TryRead(Limit{Entries: 1}); !errors.Is(err, ErrWouldBlock) {
		t.Fatal(err)
	}
	tail := m.NewReader("tail", at(math.MaxInt64, 0))
	appendAll(t, m, "cached")
	if batch, err := tail.TryRead(Limit{}); err != nil {
		t.Errorf("a cached read waits for permits: %v", err)
	} else {
		batch.Release()
	}
	eventually(t, "the fetch to wait in line", func() bool {
		_, waiting := m.f.reads.inUse()
		return waiting > 0
	})
	held.Release()
	if got := readAll(t, waiter, 1, Limit{Entries: 1}); got[0].Position != at(1, 2) {
		t.Errorf("read %v", got[0].Position)
	}
	noneLeft(t, m, holder, waiter, tail)
}

// TestPermitTimeout: a fetch that waits too long fails with ErrTooManyReads, and
// so does one that finds the line full.
func TestPermitTimeout(t *testing.T) {
	p := newPermits(100, 1, 50*time.Millisecond, func() {})
	defer p.close()
	answers := make(chan error, 3)
	grant := func(err error) { answers <- err }
	p.acquire(t.Context(), 100, grant)
	if err := <-answers; err != nil {
		t.Fatal(err)
	}
	p.acquire(t.Context(), 1, grant)
	p.acquire(t.Context(), 1, grant)
	for range 2 {
		if err := <-answers; !errors.Is(err, ErrTooManyReads) {
			t.Errorf("%v, want ErrTooManyReads", err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	p.acquire(ctx, 1, grant)
	cancel()
	if err := <-answers; !errors.Is(err, ErrClosed) {
		t.Errorf("%v after its context ended, want ErrClosed", err)
	}
	p.release(100)
	if used, waiting := p.inUse(); used != 0 || waiting != 0 {
		t.Errorf("%d in use, %d waiting", used, waiting)
	}
}

// TestCloseWhileReadsHang: closing ends reads that wait for a bookie or a permit.
func TestCloseWhileReadsHang(t *testing.T) {
	m, b := uncached(t, 10, testConfig())
	b.holdReads(at(1, 0))
	r := m.NewReader("r", at(1, 0))
	answers := make(chan error, 2)
	r.ReadEntries(0, Limit{Entries: 1}, func(_ int, _ *Batch, err error) { answers <- err })
	go func() {
		_, err := m.ReadEntry(context.Background(), at(1, 0))
		answers <- err
	}()
	eventually(t, "both reads", func() bool { return m.sources.isBusy() })
	if err := m.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		select {
		case err := <-answers:
			if !errors.Is(err, ErrClosed) {
				t.Errorf("a read = %v, want ErrClosed", err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("a read was not answered")
		}
	}
	noReadsInFlight(t, m.f)
}

func (s *sources) isBusy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.byID) > 0
}

// TestMetricsAreThere: the names that operators watch, each registered once.
func TestMetricsAreThere(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	f := NewFactory(newBookies(), metadatatest.NewMemory(t), testConfig(), quietLog(), reg)
	defer f.Close(t.Context())
	appendAll(t, mustOpen(t, f, topic), "a", "b")
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, family := range families {
		m := family.GetMetric()[0]
		got[family.GetName()] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
	}
	for name, want := range map[string]float64{
		"pulsar_ml_count": 1, "managedledger_added_entries_total": 2, "managedledger_pending_add_bytes": 0,
		"pulsar_ml_reads_inflight_bytes": 0, "pulsar_ml_reads_available_inflight_bytes": 64 << 20,
		"managedledger_fenced_total": 0, "managedledger_switches_total": 0, "executor_task_panics_total": 0,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v (there: %v), want %v", name, v, ok, want)
		}
	}
}
