package broker

import (
	"slices"

	"github.com/magnetar-io/magnetar/ledger"
)

// positionSet is a set of positions that gives out its smallest members: what
// must be delivered again, oldest first.
//
// Members arrive in bulk (a consumer left, a list was refused) and leave from
// the front, so it is a sorted slice plus the unsorted newcomers.
type positionSet struct {
	sorted []ledger.Position // ascending, no doubles
	fresh  []ledger.Position // any order, doubles possible
}

// add puts positions into the set.
func (s *positionSet) add(positions ...ledger.Position) {
	s.fresh = append(s.fresh, positions...)
}

// len returns an upper bound of the number of members, which is 0 exactly when
// the set is empty.
func (s *positionSet) len() int { return len(s.sorted) + len(s.fresh) }

// first returns up to n of the smallest members, which stay in the set. The
// result is valid until the set changes.
func (s *positionSet) first(n int) []ledger.Position {
	s.settle()
	return s.sorted[:min(n, len(s.sorted))]
}

// remove takes positions out of the set, if they are in it.
func (s *positionSet) remove(positions ...ledger.Position) {
	if s.len() == 0 || len(positions) == 0 {
		return
	}
	s.settle()
	if len(positions) == 1 { // the usual acknowledgement
		if i, ok := slices.BinarySearchFunc(s.sorted, positions[0], ledger.Position.Compare); ok {
			s.sorted = slices.Delete(s.sorted, i, i+1)
		}
		return
	}
	gone := make(map[ledger.Position]struct{}, len(positions))
	for _, p := range positions {
		gone[p] = struct{}{}
	}
	s.sorted = slices.DeleteFunc(s.sorted, func(p ledger.Position) bool {
		_, ok := gone[p]
		return ok
	})
}

// removeUpTo takes out every member at or before p.
func (s *positionSet) removeUpTo(p ledger.Position) {
	s.settle()
	i, found := slices.BinarySearchFunc(s.sorted, p, ledger.Position.Compare)
	if found {
		i++
	}
	s.sorted = slices.Delete(s.sorted, 0, i)
}

// clear empties the set.
func (s *positionSet) clear() { *s = positionSet{} }

// settle merges the newcomers in.
func (s *positionSet) settle() {
	if len(s.fresh) == 0 {
		return
	}
	slices.SortFunc(s.fresh, ledger.Position.Compare)
	if len(s.sorted) > 0 && s.sorted[len(s.sorted)-1].Compare(s.fresh[0]) >= 0 {
		s.fresh = append(s.fresh, s.sorted...)
		slices.SortFunc(s.fresh, ledger.Position.Compare)
		s.sorted = s.sorted[:0]
	}
	s.sorted = slices.Compact(append(s.sorted, s.fresh...))
	s.fresh = s.fresh[:0]
}
