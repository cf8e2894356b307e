package cursor

import (
	"math"
	"testing"

	"github.com/magnetar-io/magnetar/ledger"
)

func at(l ledger.ID, e ledger.EntryID) ledger.Position { return ledger.Position{Ledger: l, Entry: e} }

var (
	earliest = at(-1, -1)
	latest   = at(math.MaxInt64, math.MaxInt64)
)

// gappy is ledgers 3 (10 entries) and 7 (2), both closed, and 9 (4 confirmed),
// after 100 entries that were trimmed.
func gappy() *Layout {
	open := &Open{ID: 9, Base: 112}
	open.Confirm(3)
	return NewLayout([]Extent{{ID: 3, Entries: 10, Base: 100}, {ID: 7, Entries: 2, Base: 110}}, open, ledger.Position{})
}

func TestLayoutArithmetic(t *testing.T) {
	none := at(-9, -9) // Floor: no entry
	tests := []struct {
		name    string
		p       ledger.Position
		ceil    ledger.Position
		next    ledger.Position
		floor   ledger.Position
		holds   bool
		ordinal int64
	}{
		{"earliest", earliest, at(3, 0), at(3, 0), none, false, 100},
		{"trimmed-ledger", at(2, 5), at(3, 0), at(3, 0), none, false, 100},
		{"before-first-entry", at(3, -1), at(3, 0), at(3, 0), none, false, 100},
		{"first-entry", at(3, 0), at(3, 0), at(3, 1), at(3, 0), true, 101},
		{"last-of-ledger", at(3, 9), at(3, 9), at(7, 0), at(3, 9), true, 110},
		{"past-end-of-ledger", at(3, 10), at(7, 0), at(7, 0), at(3, 9), false, 110},
		{"empty-ledger-between", at(5, 3), at(7, 0), at(7, 0), at(3, 9), false, 110},
		{"before-second-ledger", at(7, -1), at(7, 0), at(7, 0), at(3, 9), false, 110},
		{"last-closed-entry", at(7, 1), at(7, 1), at(9, 0), at(7, 1), true, 112},
		{"before-open-ledger", at(9, -1), at(9, 0), at(9, 0), at(7, 1), false, 112},
		{"last-confirmed", at(9, 3), at(9, 3), at(9, 4), at(9, 3), true, 116},
		{"next-to-be-written", at(9, 4), at(9, 4), at(9, 4), at(9, 3), false, 116},
		{"beyond-the-end", at(9, 40), at(9, 4), at(9, 4), at(9, 3), false, 116},
		{"beyond-the-ledger", at(11, 0), at(9, 4), at(9, 4), at(9, 3), false, 116},
		{"latest", latest, at(9, 4), at(9, 4), at(9, 3), false, 116},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			l := gappy()
			if got := l.Ceil(tt.p); got != tt.ceil {
				t.Errorf("Ceil(%v) = %v, want %v", tt.p, got, tt.ceil)
			}
			if got := l.Next(tt.p); got != tt.next {
				t.Errorf("Next(%v) = %v, want %v", tt.p, got, tt.next)
			}
			got, ok := l.Floor(tt.p)
			if !ok {
				got = none
			}
			if got != tt.floor {
				t.Errorf("Floor(%v) = %v, want %v", tt.p, got, tt.floor)
			}
			if got := l.Holds(tt.p); got != tt.holds {
				t.Errorf("Holds(%v) = %v, want %v", tt.p, got, tt.holds)
			}
			if got := l.Ordinal(tt.p); got != tt.ordinal {
				t.Errorf("Ordinal(%v) = %v, want %v", tt.p, got, tt.ordinal)
			}
			if tt.holds {
				if got, ok := l.At(tt.ordinal); !ok || got != tt.p {
					t.Errorf("At(%d) = %v, %v, want %v", tt.ordinal, got, ok, tt.p)
				}
			}
		})
	}
}

func TestLayoutEnds(t *testing.T) {
	fresh := &Open{ID: 9, Base: 12}
	tests := []struct {
		name        string
		l           *Layout
		first, last ledger.Position
	}{
		{"nothing-written", NewLayout(nil, &Open{ID: 1}, ledger.Position{}), at(1, 0), at(1, -1)},
		{"all-trimmed", NewLayout(nil, fresh, ledger.Position{}), at(9, 0), at(9, -1)},
		{"open-ledger-empty", NewLayout([]Extent{{ID: 7, Entries: 2}}, fresh, ledger.Position{}), at(7, 0), at(7, 1)},
		{"terminated", NewLayout([]Extent{{ID: 7, Entries: 2}}, nil, at(7, 1)), at(7, 0), at(7, 1)},
		{"terminated-and-trimmed", NewLayout(nil, nil, at(7, 1)), at(7, 2), at(7, 1)},
		{"gappy", gappy(), at(3, 0), at(9, 3)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.l.First(); got != tt.first {
				t.Errorf("First() = %v, want %v", got, tt.first)
			}
			if got := tt.l.Last(); got != tt.last {
				t.Errorf("Last() = %v, want %v", got, tt.last)
			}
			if got := tt.l.Ceil(latest); !got.After(tt.last) {
				t.Errorf("Ceil(latest) = %v, want a position after %v", got, tt.last)
			}
			if got := tt.l.Count(earliest, latest); got != tt.l.Ordinal(tt.last)-tt.l.Ordinal(earliest) {
				t.Errorf("Count(everything) = %d", got)
			}
		})
	}
}

func TestLayoutRefusesDisorder(t *testing.T) {
	bad := map[string]func(){
		"empty-ledger":  func() { NewLayout([]Extent{{ID: 1}}, nil, ledger.Position{}) },
		"wrong-order":   func() { NewLayout([]Extent{{ID: 2, Entries: 1}, {ID: 1, Entries: 1, Base: 1}}, nil, ledger.Position{}) },
		"wrong-base":    func() { NewLayout([]Extent{{ID: 1, Entries: 2}, {ID: 2, Entries: 1, Base: 1}}, nil, ledger.Position{}) },
		"open-not-last": func() { NewLayout([]Extent{{ID: 2, Entries: 1}}, &Open{ID: 2}, ledger.Position{}) },
	}
	for name, build := range bad {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("a broken layout was accepted")
				}
			}()
			build()
		})
	}
}
