package cursor

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/magnetar-io/magnetar/ledger"
)

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

// TestAckSetMatchesModel compares the set with a map, over several pages.
func TestAckSetMatchesModel(t *testing.T) {
	rng := testRand(t)
	var set ackSet
	model := map[ledger.Position]bool{}
	somewhere := func() ledger.Position {
		return at(ledger.ID(1+rng.IntN(3)), ledger.EntryID(rng.IntN(3*pageBits)))
	}
	for step := range 3_000 {
		switch p := somewhere(); rng.IntN(10) {
		case 0: // a long run, so that pages fill up
			end := p.Entry + ledger.EntryID(rng.IntN(2*pageBits))
			for e := p.Entry; e < end; e++ {
				q := at(p.Ledger, e)
				if set.add(q) == model[q] {
					t.Fatalf("step %d: add(%v) disagrees", step, q)
				}
				model[q] = true
			}
		case 1:
			if rng.IntN(4) == 0 {
				set.dropThrough(p)
				for q := range model {
					if !q.After(p) {
						delete(model, q)
					}
				}
			}
		default:
			if set.add(p) == model[p] {
				t.Fatalf("step %d: add(%v) disagrees", step, p)
			}
			model[p] = true
		}
		p := somewhere()
		if set.has(p) != model[p] {
			t.Fatalf("step %d: has(%v) = %v", step, p, set.has(p))
		}
		end := p
		for model[end] {
			end = end.Next()
		}
		if got := set.runEnd(p); got != end.Entry {
			t.Fatalf("step %d: runEnd(%v) = %d, want %d", step, p, got, end.Entry)
		}
		stop := p
		for limit := p.Entry + 100; stop.Entry < limit && !model[stop]; {
			stop = stop.Next()
		}
		if got := set.nextAcked(p, p.Entry+100); got != stop.Entry {
			t.Fatalf("step %d: nextAcked(%v) = %d, want %d", step, p, got, stop.Entry)
		}
		if step%50 == 0 {
			checkRanges(t, &set, model)
		}
		if set.n != int64(len(model)) {
			t.Fatalf("step %d: %d positions, want %d", step, set.n, len(model))
		}
	}
}

func checkRanges(t *testing.T, set *ackSet, model map[ledger.Position]bool) {
	t.Helper()
	if err := set.verify(); err != nil {
		t.Fatal(err)
	}
	runs, more := set.ranges(1 << 30)
	n := 0
	for i, r := range runs {
		for e := r.First; e <= r.Last; e++ {
			if !model[at(r.Ledger, e)] {
				t.Fatalf("range %v holds %d, the model does not", r, e)
			}
			n++
		}
		if i > 0 && runs[i-1].Ledger == r.Ledger && runs[i-1].Last+1 >= r.First {
			t.Fatalf("ranges %v and %v touch", runs[i-1], r)
		}
	}
	if n != len(model) || more != 0 {
		t.Fatalf("ranges cover %d positions and leave %d ranges out, want %d and 0", n, more, len(model))
	}
	few, left := set.ranges(3)
	if len(few)+left != len(runs) || !slices.Equal(few, runs[:len(few)]) {
		t.Fatalf("3 of %d ranges: %v and %d more", len(runs), few, left)
	}
}

// world is a managed ledger's layout that grows and rolls over at random, and
// the dumbest possible cursor on it.
type world struct {
	rng    *rand.Rand
	layout *Layout
	acked  map[ledger.Position]bool
	read   int // index into entries of the next delivery
}

func (w *world) entries() []ledger.Position {
	var all []ledger.Position
	for _, e := range w.layout.Closed() {
		for i := range e.Entries {
			all = append(all, at(e.ID, ledger.EntryID(i)))
		}
	}
	for i := range w.layout.Open().Entries() {
		all = append(all, at(w.layout.Open().ID, ledger.EntryID(i)))
	}
	return all
}

func (w *world) grow() {
	o := w.layout.Open()
	if w.rng.IntN(4) > 0 {
		o.Confirm(ledger.EntryID(o.Entries() + int64(w.rng.IntN(3))))
		return
	}
	closed := slices.Clone(w.layout.Closed())
	if o.Entries() > 0 {
		closed = append(closed, Extent{ID: o.ID, Entries: o.Entries(), Base: o.Base})
	}
	next := &Open{ID: o.ID + 1 + ledger.ID(w.rng.IntN(3)), Base: o.Base + o.Entries()}
	w.layout = NewLayout(closed, next, ledger.Position{})
}

// TestCursorMatchesModel acknowledges, reads, rewinds, skips and resets at random
// while the managed ledger grows, and compares with a plain set of positions.
func TestCursorMatchesModel(t *testing.T) {
	rng := testRand(t)
	for round := range 30 {
		w := &world{
			rng: rng, acked: map[ledger.Position]bool{},
			layout: NewLayout(nil, &Open{ID: 5}, ledger.Position{}),
		}
		c := New("model", func() *Layout { return w.layout }, at(5, -1))
		for step := range 400 {
			what := w.step(t, c)
			if err := w.check(c); err != nil {
				t.Fatalf("round %d step %d, after %s: %v", round, step, what, err)
			}
		}
	}
}

func (w *world) step(t *testing.T, c *Cursor) string {
	all := w.entries()
	if len(all) == 0 || w.rng.IntN(4) == 0 {
		w.grow()
		return "grow"
	}
	i := w.rng.IntN(len(all))
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	switch w.rng.IntN(20) {
	case 0:
		if all[i].Before(c.MarkDeleted()) {
			return "nothing"
		}
		must(c.AckCumulative(all[i]))
		for _, p := range all[:i+1] {
			w.acked[p] = true
		}
		return fmt.Sprint("cumulative ", all[i])
	case 1:
		c.Rewind()
		w.read = 0
		return "rewind"
	case 2:
		n := w.rng.Int64N(5)
		must(c.Skip(n))
		for _, p := range all {
			if n > 0 && !w.acked[p] {
				w.acked[p] = true
				n--
			}
		}
		return "skip"
	case 3:
		must(c.Reset(t.Context(), all[i]))
		clear(w.acked)
		for _, p := range all[:i] {
			w.acked[p] = true
		}
		w.read = i
		return fmt.Sprint("reset ", all[i])
	case 4, 5, 6, 7, 8, 9:
		return w.deliver(t, c, all)
	default:
		ps := []ledger.Position{all[i], all[w.rng.IntN(len(all))]}
		must(c.Ack(ps))
		w.acked[ps[0]], w.acked[ps[1]] = true, true
		return fmt.Sprint("ack ", ps)
	}
}

// deliver takes the next run and compares it with the next unacknowledged ones.
func (w *world) deliver(t *testing.T, c *Cursor, all []ledger.Position) string {
	limit := 1 + w.rng.IntN(4)
	_, epoch := c.Begin()
	first, n := c.Next(limit)
	for w.read < len(all) && w.acked[all[w.read]] {
		w.read++
	}
	if n == 0 {
		if w.read < len(all) {
			t.Fatalf("Next delivers nothing, the model has %v", all[w.read])
		}
		return "at the end"
	}
	if n > limit || w.read == len(all) || all[w.read] != first {
		t.Fatalf("Next(%d) = %v, %d; the model is at %d of %v", limit, first, n, w.read, all)
	}
	for i := range n {
		p := at(first.Ledger, first.Entry+ledger.EntryID(i))
		if all[w.read] != p || w.acked[p] {
			t.Fatalf("Next(%d) = %v, %d holds %v, which is acknowledged or out of order", limit, first, n, p)
		}
		w.read++
		c.Advance(p, epoch)
	}
	return fmt.Sprintf("deliver %v, %d", first, n)
}

func (w *world) check(c *Cursor) error {
	if err := c.verify(); err != nil {
		return err
	}
	all := w.entries()
	var left int64
	prefix := true
	for _, p := range all {
		if c.IsAcked(p) != w.acked[p] {
			return fmt.Errorf("IsAcked(%v) = %v", p, c.IsAcked(p))
		}
		if !w.acked[p] {
			left++
			prefix = false
		}
		if prefix && p.After(c.MarkDeleted()) {
			return fmt.Errorf("mark-delete is %v, everything up to %v is acknowledged", c.MarkDeleted(), p)
		}
	}
	if got := c.Backlog(); got != left {
		return fmt.Errorf("backlog %d, want %d", got, left)
	}
	return nil
}
