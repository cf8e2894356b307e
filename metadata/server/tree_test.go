package server

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"testing"
)

func TestTreeMatchesMap(t *testing.T) {
	rng := seeded(t)
	tr, model := newTree[string, int](byString), map[string]int{}
	type snapshot struct {
		tree  tree[string, int]
		model map[string]int
	}
	var old []snapshot
	for step := range 5000 {
		key := strconv.Itoa(rng.IntN(300))
		if rng.IntN(3) == 0 {
			tr = tr.without(key)
			delete(model, key)
		} else {
			tr = tr.with(key, step)
			model[key] = step
		}
		if step%500 == 0 {
			old = append(old, snapshot{tr, maps.Clone(model)})
		}
		from := strconv.Itoa(rng.IntN(300))
		var want, got []string
		for _, k := range slices.Sorted(maps.Keys(model)) {
			if k >= from {
				want = append(want, k)
			}
		}
		for k, v := range tr.from(from) {
			if v != model[k] {
				t.Fatalf("step %d: from(%q) gives %q=%d, model says %d", step, from, k, v, model[k])
			}
			got = append(got, k)
		}
		if !slices.Equal(got, want) || tr.count != len(model) {
			t.Fatalf("step %d: from(%q) = %q, want %q; count %d, want %d", step, from, got, want, tr.count, len(model))
		}
	}
	for _, s := range old { // later changes left the snapshots alone
		if got := maps.Collect(s.tree.all()); !maps.Equal(got, s.model) {
			t.Errorf("snapshot changed: %v, want %v", got, s.model)
		}
	}
}

func TestTreeStaysFlat(t *testing.T) {
	const n = 100_000
	tr := newTree[string, int](byString)
	for i := range n {
		tr = tr.with(fmt.Sprintf("/ledgers/%019d", i), i)
	}
	var depth func(*node[string, int]) int
	depth = func(n *node[string, int]) int {
		if n == nil {
			return 0
		}
		return 1 + max(depth(n.left), depth(n.right))
	}
	if got, limit := depth(tr.root), int(4*math.Log2(n)); got > limit {
		t.Errorf("%d keys in order make a tree of depth %d, want at most %d", n, got, limit)
	}
}

func BenchmarkTreeWith(b *testing.B) {
	for _, n := range []int{1000, 100_000} {
		b.Run(fmt.Sprintf("keys=%d", n), func(b *testing.B) {
			tr := newTree[string, int](byString)
			keys := make([]string, n)
			for i := range n {
				keys[i] = fmt.Sprintf("/ledgers/%019d", i)
				tr = tr.with(keys[i], i)
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				tr = tr.with(keys[i%n], i)
				i += 7919
			}
		})
	}
}
