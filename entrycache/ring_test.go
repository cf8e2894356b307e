package entrycache

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/magnetar-io/magnetar/ledger"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func at(l ledger.ID, e int) ledger.Position {
	return ledger.Position{Ledger: l, Entry: ledger.EntryID(e)}
}

func payload(p ledger.Position, size int) []byte {
	b := bytes.Repeat([]byte{byte(p.Entry), byte(p.Ledger)}, size/2+1)
	return b[:size]
}

func TestGetReturnsThePrefixThatIsCached(t *testing.T) {
	r := New(1<<20, nil).NewRing()
	for e := range 100 {
		if e != 50 {
			r.Put(at(7, e), payload(at(7, e), 10))
		}
	}
	r.Put(at(9, 0), nil)
	tests := []struct {
		name     string
		first    ledger.Position
		n        int
		maxBytes int64
		want     int
	}{
		{"all-asked-for", at(7, 3), 5, 1000, 5},
		{"over-a-block-end", at(7, 30), 5, 1000, 5},
		{"until-the-gap", at(7, 40), 50, 1000, 10},
		{"the-gap", at(7, 50), 1, 1000, 0},
		{"after-the-gap", at(7, 51), 3, 1000, 3},
		{"until-the-end", at(7, 98), 50, 1000, 2},
		{"beyond-the-end", at(7, 100), 50, 1000, 0},
		{"by-bytes", at(7, 0), 50, 35, 3},
		{"one-at-least", at(7, 0), 50, 1, 1},
		{"empty-entry", at(9, 0), 1, 1000, 1},
		{"unknown-ledger", at(8, 0), 1, 1000, 0},
		{"before-first", at(7, -1), 1, 1000, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := r.Get(nil, tt.first, tt.n, tt.maxBytes)
			if len(got) != tt.want {
				t.Fatalf("Get(%v, %d, %d) returned %d entries, want %d", tt.first, tt.n, tt.maxBytes, len(got), tt.want)
			}
			for i, e := range got {
				want := at(tt.first.Ledger, int(tt.first.Entry)+i)
				if e.Position != want || tt.first.Ledger == 7 && !bytes.Equal(e.Data, payload(want, 10)) {
					t.Errorf("entry %d is %v %q, want %v", i, e.Position, e.Data, want)
				}
			}
			if has := r.Has(tt.first); has != (tt.want > 0) {
				t.Errorf("Has(%v) = %v", tt.first, has)
			}
		})
	}
}

func TestDisorderIsNotCached(t *testing.T) {
	r := New(1<<20, nil).NewRing()
	r.Put(at(7, 5), []byte("five"))
	r.Put(at(7, 4), []byte("late"))
	r.Put(at(7, 5), []byte("again"))
	r.Put(at(6, 9), []byte("older ledger"))
	if r.Has(at(7, 4)) || r.Has(at(6, 9)) {
		t.Error("an entry out of order was cached")
	}
	if got := r.Get(nil, at(7, 5), 1, 100); string(got[0].Data) != "five" {
		t.Errorf("7:5 is %q, want the bytes put first", got[0].Data)
	}
}

func TestBudget(t *testing.T) {
	const budget = 64 << 10
	c := New(budget, nil)
	a, b := c.NewRing(), c.NewRing()
	for e := range 64 { // a's blocks are begun before b's
		a.Put(at(1, e), make([]byte, 200))
	}
	for e := range 1000 {
		b.Put(at(2, e), make([]byte, 200))
		if c.Used() > budget {
			t.Fatalf("after entry %d the cache holds %d bytes, budget %d", e, c.Used(), budget)
		}
		if !b.Has(at(2, e)) {
			t.Fatalf("entry %d is not there right after Put", e)
		}
	}
	if a.Has(at(1, 63)) || b.Has(at(2, 0)) {
		t.Error("old blocks outlived newer ones")
	}
	if c.Used() < budget/2 {
		t.Errorf("the cache holds %d bytes, it evicts too much", c.Used())
	}
	before := c.Entries()
	b.Put(at(2, 1000), make([]byte, budget))
	if b.Has(at(2, 1000)) || c.Entries() != before {
		t.Error("an entry larger than the budget was kept, or drove others out")
	}
	a.Close()
	b.Close()
	if c.Used() != 0 || c.Entries() != 0 {
		t.Errorf("closed rings leave %d bytes and %d entries", c.Used(), c.Entries())
	}
	a.Put(at(3, 0), []byte("late"))
	if c.Entries() != 0 {
		t.Error("a closed ring took an entry")
	}
}

func TestZeroBudgetKeepsNothing(t *testing.T) {
	c := New(0, nil)
	r := c.NewRing()
	r.Put(at(1, 0), []byte("x"))
	if c.Entries() != 0 || r.Has(at(1, 0)) {
		t.Error("a cache of size 0 kept an entry")
	}
}

func TestDropBefore(t *testing.T) {
	c := New(1<<20, nil)
	r := c.NewRing()
	for _, l := range []ledger.ID{3, 5} {
		for e := range 100 {
			r.Put(at(l, e), []byte("x"))
		}
	}
	tests := []struct {
		before ledger.Position
		oldest ledger.Position
		left   int64
	}{
		{at(3, 31), at(3, 0), 200},
		{at(3, 32), at(3, 32), 168},
		{at(3, 99), at(3, 96), 104},
		{at(4, 0), at(5, 0), 100},
		{at(5, 64), at(5, 64), 36},
	}
	for _, tt := range tests {
		r.DropBefore(tt.before)
		oldest, ok := r.Oldest()
		if !ok || oldest != tt.oldest || c.Entries() != tt.left {
			t.Errorf("DropBefore(%v) leaves %d entries from %v on, want %d from %v", tt.before, c.Entries(), oldest, tt.left, tt.oldest)
		}
	}
	r.Forget(5)
	if _, ok := r.Oldest(); ok || c.Used() != 0 {
		t.Errorf("after Forget %d bytes are left", c.Used())
	}
	r.Put(at(5, 100), []byte("x"))
	if !r.Has(at(5, 100)) {
		t.Error("the ring takes nothing after everything has left")
	}
}

// TestLongRunKeepsADirectoryOfItsSize appends far more than fits and checks that
// the bookkeeping follows what is cached, not what was written.
func TestLongRunKeepsADirectoryOfItsSize(t *testing.T) {
	r := New(64<<10, nil).NewRing()
	for e := range 200_000 {
		r.Put(at(1, e), make([]byte, 50))
	}
	if d := (*r.tails.Load())[0].dir.Load(); len(d.slots) > 200 {
		t.Errorf("the directory has %d slots for a few dozen blocks", len(d.slots))
	}
}

// TestReadersSeeWhatIsAnnounced races readers with the writer: whatever is at or
// below the announced position is found with its bytes, or was evicted, and what
// was just announced has not been.
func TestReadersSeeWhatIsAnnounced(t *testing.T) {
	c := New(256<<10, nil)
	r := c.NewRing()
	const n = 30_000
	var announced atomic.Int64
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			var buf []ledger.Entry
			for announced.Load() < n {
				newest := announced.Load()
				if newest == 0 {
					continue
				}
				first := max(newest-40, 0)
				buf = r.Get(buf[:0], at(1, int(first)), 40, 1<<20)
				if len(buf) == 0 && announced.Load()-newest < 500 {
					t.Errorf("%d was announced and is not there", first)
					return
				}
				for _, e := range buf {
					if !bytes.Equal(e.Data, payload(e.Position, 100)) {
						t.Errorf("%v has the bytes of another entry", e.Position)
						return
					}
				}
			}
		})
	}
	for e := range n {
		r.Put(at(1, e), payload(at(1, e), 100))
		announced.Store(int64(e) + 1)
		if e%1000 == 0 {
			r.DropBefore(at(1, e-600))
		}
	}
	wg.Wait()
}

// TestMatchesModel puts, drops and forgets at random on three rings under one
// budget. Whatever is found has the right bytes; counts and bytes add up.
func TestMatchesModel(t *testing.T) {
	seed := rand.Uint64()
	if s := os.Getenv("TEST_SEED"); s != "" {
		seed, _ = strconv.ParseUint(s, 10, 64)
	}
	t.Logf("TEST_SEED=%d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	c := New(100<<10, nil)
	rings := []*Ring{c.NewRing(), c.NewRing(), c.NewRing()}
	next := make([]ledger.Position, len(rings))
	for step := range 20_000 {
		k := rng.IntN(len(rings))
		r, p := rings[k], next[k]
		switch rng.IntN(100) {
		case 0:
			next[k] = at(p.Ledger+1+ledger.ID(rng.IntN(2)), 0)
		case 1:
			r.DropBefore(at(p.Ledger, max(0, int(p.Entry)-rng.IntN(200))))
		case 2:
			r.Forget(p.Ledger - ledger.ID(rng.IntN(2)))
		case 3:
			next[k].Entry += ledger.EntryID(rng.IntN(40))
		default:
			size := rng.IntN(400)
			r.Put(p, payload(p, size))
			if got := r.Get(nil, p, 1, 0); len(got) != 1 || !bytes.Equal(got[0].Data, payload(p, size)) {
				t.Fatalf("step %d: %v is not there right after Put", step, p)
			}
			next[k] = p.Next()
		}
		if step%500 == 0 {
			if err := c.verify(); err != nil {
				t.Fatalf("step %d: %v", step, err)
			}
		}
	}
}

// verify returns the first broken invariant.
func (c *Cache) verify() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var size, entries int64
	for b := c.front; b != nil; b = b.next {
		held, n := int64(blockOverhead), int64(0)
		for _, d := range b.data {
			if d != nil {
				held += int64(len(d))
				n++
			}
		}
		if !b.listed || held != b.bytes || n != b.entries {
			return fmt.Errorf("block counts %d bytes and %d entries, holds %d and %d", b.bytes, b.entries, held, n)
		}
		size, entries = size+held, entries+n
	}
	if size != c.used.Load() || entries != c.count.Load() || size > c.budget {
		return fmt.Errorf("cache counts %d bytes and %d entries, holds %d and %d, budget %d",
			c.used.Load(), c.count.Load(), size, entries, c.budget)
	}
	return nil
}

func TestMetricsUnderPulsarsNames(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	c := New(8<<10, reg)
	r := c.NewRing()
	for e := range 300 {
		r.Put(at(1, e), make([]byte, 100))
	}
	c.Hit(3, 300)
	c.Miss(2, 200)
	time.Sleep(time.Millisecond)
	c.UpdateRates()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		m := f.GetMetric()[0]
		got[f.GetName()] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
	}
	for name, want := range map[string]float64{
		"pulsar_ml_cache_hits_total": 3, "pulsar_ml_cache_misses_total": 2,
		"pulsar_ml_cache_hits_bytes_total": 300, "pulsar_ml_cache_misses_bytes_total": 200,
		"pulsar_ml_cache_inserted_entries_total": 300,
		"pulsar_ml_cache_evicted_entries_total":  float64(300 - c.Entries()),
		"pulsar_ml_cache_entries":                float64(c.Entries()),
		"pulsar_ml_cache_used_size":              float64(c.Used()),
		"pulsar_ml_cache_max_size":               8 << 10,
	} {
		if got[name] != want {
			t.Errorf("%s is %v, want %v", name, got[name], want)
		}
	}
	for _, name := range []string{"hits_rate", "hits_throughput", "misses_rate", "misses_throughput"} {
		if got["pulsar_ml_cache_"+name] <= 0 {
			t.Errorf("pulsar_ml_cache_%s is %v, want a rate", name, got["pulsar_ml_cache_"+name])
		}
	}
}

func BenchmarkPut(b *testing.B) {
	r := New(64<<20, nil).NewRing()
	data := make([]byte, 1024)
	e := 0
	b.ReportAllocs()
	for b.Loop() {
		r.Put(at(1, e), data)
		e++
	}
}

func BenchmarkGet(b *testing.B) {
	for _, n := range []int{1, 16, 100} {
		b.Run(fmt.Sprintf("n=%d", n), func(b *testing.B) {
			r := New(64<<20, nil).NewRing()
			for e := range 10_000 {
				r.Put(at(1, e), make([]byte, 1024))
			}
			buf := make([]ledger.Entry, 0, n)
			e := 0
			b.ReportAllocs()
			for b.Loop() {
				buf = r.Get(buf[:0], at(1, e%9000), n, 1<<30)
				e += n
			}
		})
	}
}
