package broker

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
)

func TestPositionSetMatchesModel(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var set positionSet
	model := map[ledger.Position]bool{}
	for step := range 20_000 {
		var ps []ledger.Position
		for range rng.IntN(5) {
			ps = append(ps, ledger.Position{Ledger: ledger.ID(rng.IntN(3)), Entry: ledger.EntryID(rng.IntN(50))})
		}
		switch rng.IntN(4) {
		case 0, 1:
			set.add(ps...)
			for _, p := range ps {
				model[p] = true
			}
		case 2:
			set.remove(ps...)
			for _, p := range ps {
				delete(model, p)
			}
		case 3:
			if len(ps) == 0 {
				continue
			}
			set.removeUpTo(ps[0])
			for p := range model {
				if p.Compare(ps[0]) <= 0 {
					delete(model, p)
				}
			}
		}
		var want []ledger.Position
		for p := range model {
			want = append(want, p)
		}
		slices.SortFunc(want, ledger.Position.Compare)
		if got := set.first(1000); !slices.Equal(got, want) || set.len() != len(want) {
			t.Fatalf("step %d: %v, want %v", step, got, want)
		}
		if got := set.first(3); !slices.Equal(got, want[:min(3, len(want))]) {
			t.Fatalf("step %d: first 3 are %v of %v", step, got, want)
		}
	}
}

func TestMailboxHoldsBackWhoCosts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMailbox()
		if err := m.put(t.Context(), maxMailboxBytes, func() {}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := m.put(ctx, 1, func() {}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("put into a full box: %v, want to wait", err)
		}
		if !m.post(func() {}) {
			t.Error("post into a full box must not wait")
		}
		got := make(chan error, 1)
		go func() { got <- m.put(t.Context(), 1, func() {}) }()
		synctest.Wait()
		if n := len(m.take(nil)); n != 2 {
			t.Errorf("took %d, want 2", n)
		}
		if err := <-got; err != nil {
			t.Errorf("put after a take: %v", err)
		}
		if n := len(m.close()); n != 1 {
			t.Errorf("left %d, want 1", n)
		}
		if err := m.put(t.Context(), 1, func() {}); !errors.Is(err, ErrClosed) {
			t.Errorf("put after close: %v, want ErrClosed", err)
		}
		if m.post(func() {}) {
			t.Error("post after close was accepted")
		}
	})
}
