package cursor

import (
	"fmt"
	"sort"
	"sync/atomic"

	"github.com/magnetar-io/magnetar/ledger"
)

// Extent is a closed ledger that holds entries 0 to Entries-1.
type Extent struct {
	ID      ledger.ID
	Entries int64 // at least 1: empty ledgers are not part of a layout
	Base    int64 // how many entries of the managed ledger came before it
}

// Last returns the position of the extent's last entry.
func (e Extent) Last() ledger.Position {
	return ledger.Position{Ledger: e.ID, Entry: ledger.EntryID(e.Entries - 1)}
}

// Open is the ledger that is being written. Its end moves; everything else in a
// layout is fixed.
type Open struct {
	ID        ledger.ID
	Base      int64
	confirmed atomic.Int64 // entries confirmed: last confirmed entry id + 1
}

// Confirm makes entry the last confirmed one. Entries are confirmed in order.
func (o *Open) Confirm(entry ledger.EntryID) { o.confirmed.Store(int64(entry) + 1) }

// Entries returns how many entries are confirmed.
func (o *Open) Entries() int64 { return o.confirmed.Load() }

// Layout is which entries of a managed ledger exist: its closed ledgers, oldest
// first, and the one being written, whose id is above all of them. A Layout
// never changes apart from the end of its open ledger; a ledger that is closed,
// added or trimmed makes a new Layout. Everybody may hold one.
//
// Positions of ledgers that do not exist (empty, trimmed or never there) are
// legal everywhere: they lie between the entries that do exist.
type Layout struct {
	closed []Extent
	open   *Open // nil when nothing will ever be written again
	floor  ledger.Position
}

// NewLayout makes a Layout of closed extents in ascending order and an open
// ledger, which is nil for a managed ledger that is terminated or closed. empty
// is the position that stands for "the end" when there is no entry at all and no
// open ledger. The slice belongs to the Layout from then on.
func NewLayout(closed []Extent, open *Open, empty ledger.Position) *Layout {
	l := &Layout{closed: closed, open: open, floor: empty}
	if err := l.verify(); err != nil {
		panic(err)
	}
	return l
}

// verify returns the first broken invariant.
func (l *Layout) verify() error {
	for i, e := range l.closed {
		if e.Entries < 1 {
			return fmt.Errorf("cursor: layout holds empty ledger %d", e.ID)
		}
		if i > 0 && (l.closed[i-1].ID >= e.ID || l.closed[i-1].Base+l.closed[i-1].Entries > e.Base) {
			return fmt.Errorf("cursor: ledgers of the layout out of order: %+v then %+v", l.closed[i-1], e)
		}
	}
	if n := len(l.closed); n > 0 && l.open != nil && l.closed[n-1].ID >= l.open.ID {
		return fmt.Errorf("cursor: open ledger %d is not above closed ledger %d", l.open.ID, l.closed[n-1].ID)
	}
	return nil
}

// Closed returns the closed ledgers, oldest first. The slice must not be changed.
func (l *Layout) Closed() []Extent { return l.closed }

// Open returns the ledger being written, or nil.
func (l *Layout) Open() *Open { return l.open }

// Last returns the last confirmed position: that of the newest entry. If there
// is no entry, it is the place before the open ledger's first.
func (l *Layout) Last() ledger.Position {
	if l.open != nil {
		if n := l.open.Entries(); n > 0 {
			return ledger.Position{Ledger: l.open.ID, Entry: ledger.EntryID(n - 1)}
		}
	}
	if n := len(l.closed); n > 0 {
		return l.closed[n-1].Last()
	}
	if l.open != nil {
		return ledger.Position{Ledger: l.open.ID, Entry: ledger.BeforeFirst}
	}
	return l.floor
}

// First returns the position of the oldest entry, or of the one to be written
// next if there is none.
func (l *Layout) First() ledger.Position {
	switch {
	case len(l.closed) > 0:
		return ledger.Position{Ledger: l.closed[0].ID}
	case l.open != nil:
		return ledger.Position{Ledger: l.open.ID}
	default:
		return l.floor.Next()
	}
}

// search returns the index of the first closed ledger with an id of at least id.
func (l *Layout) search(id ledger.ID) int {
	return sort.Search(len(l.closed), func(i int) bool { return l.closed[i].ID >= id })
}

// Ceil returns the first position at or after p that holds an entry or is the
// next to be written. Positions beyond that are cut to it.
func (l *Layout) Ceil(p ledger.Position) ledger.Position {
	i := l.search(p.Ledger)
	if i < len(l.closed) && l.closed[i].ID == p.Ledger {
		if int64(p.Entry) < l.closed[i].Entries {
			return ledger.Position{Ledger: p.Ledger, Entry: max(p.Entry, 0)}
		}
		i++
	}
	if i < len(l.closed) {
		return ledger.Position{Ledger: l.closed[i].ID}
	}
	if l.open == nil {
		return l.Last().Next()
	}
	end := ledger.EntryID(l.open.Entries())
	switch {
	case p.Ledger < l.open.ID:
		return ledger.Position{Ledger: l.open.ID}
	case p.Ledger > l.open.ID:
		return ledger.Position{Ledger: l.open.ID, Entry: end}
	default:
		return ledger.Position{Ledger: l.open.ID, Entry: min(max(p.Entry, 0), end)}
	}
}

// Next returns the first position after p that holds an entry or is the next to
// be written.
func (l *Layout) Next(p ledger.Position) ledger.Position {
	if p.Entry == maxEntry {
		return l.Ceil(p)
	}
	return l.Ceil(p.Next())
}

// maxEntry guards against overflow: "latest" is spelled with the largest integers.
const maxEntry = ledger.EntryID(1<<63 - 1)

// Holds reports whether p is an entry that exists.
func (l *Layout) Holds(p ledger.Position) bool {
	return p.Entry >= 0 && p.Entry < l.end(p.Ledger)
}

// end returns how many entries of ledger id exist, as the id after the last.
func (l *Layout) end(id ledger.ID) ledger.EntryID {
	if l.open != nil && l.open.ID == id {
		return ledger.EntryID(l.open.Entries())
	}
	if i := l.search(id); i < len(l.closed) && l.closed[i].ID == id {
		return ledger.EntryID(l.closed[i].Entries)
	}
	return 0
}

// Floor returns the newest entry at or before p, or false if there is none.
func (l *Layout) Floor(p ledger.Position) (ledger.Position, bool) {
	if l.open != nil && p.Ledger >= l.open.ID {
		end := ledger.EntryID(l.open.Entries())
		if p.Ledger > l.open.ID || p.Entry >= end {
			p = ledger.Position{Ledger: l.open.ID, Entry: end - 1}
		}
		if p.Entry >= 0 {
			return p, true
		}
	}
	i := l.search(p.Ledger)
	if i < len(l.closed) && l.closed[i].ID == p.Ledger && p.Entry >= 0 {
		return ledger.Position{Ledger: p.Ledger, Entry: min(p.Entry, ledger.EntryID(l.closed[i].Entries-1))}, true
	}
	if i == 0 {
		return ledger.Position{}, false
	}
	return l.closed[i-1].Last(), true
}

// Ordinal returns how many entries lie at or before p, counting those trimmed
// since the managed ledger was opened. Positions before the oldest entry all
// have the same ordinal.
func (l *Layout) Ordinal(p ledger.Position) int64 {
	if q, ok := l.Floor(p); ok {
		if l.open != nil && q.Ledger == l.open.ID {
			return l.open.Base + int64(q.Entry) + 1
		}
		return l.closed[l.search(q.Ledger)].Base + int64(q.Entry) + 1
	}
	switch {
	case len(l.closed) > 0:
		return l.closed[0].Base
	case l.open != nil:
		return l.open.Base
	default:
		return 0
	}
}

// At is the inverse of Ordinal: the entry with that many entries at or before
// it, or false if it does not exist.
func (l *Layout) At(ordinal int64) (ledger.Position, bool) {
	if l.open != nil && ordinal > l.open.Base {
		n := ordinal - l.open.Base
		return ledger.Position{Ledger: l.open.ID, Entry: ledger.EntryID(n - 1)}, n <= l.open.Entries()
	}
	i := sort.Search(len(l.closed), func(i int) bool { return l.closed[i].Base+l.closed[i].Entries >= ordinal })
	if i == len(l.closed) || ordinal <= l.closed[i].Base {
		return ledger.Position{}, false
	}
	return ledger.Position{Ledger: l.closed[i].ID, Entry: ledger.EntryID(ordinal - l.closed[i].Base - 1)}, true
}

// Count returns how many entries lie after the first position and at or before
// the second; 0 if they are the wrong way round.
func (l *Layout) Count(after, upTo ledger.Position) int64 {
	return max(l.Ordinal(upTo)-l.Ordinal(after), 0)
}
