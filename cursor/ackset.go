package cursor

import (
	"fmt"
	"math/bits"
	"sort"

	"github.com/magnetar-io/magnetar/ledger"
)

// Range is a run of entries of one ledger, First to Last, both included.
type Range struct {
	Ledger      ledger.ID
	First, Last ledger.EntryID
}

// String returns "ledger:first..last".
func (r Range) String() string { return fmt.Sprintf("%d:%d..%d", r.Ledger, r.First, r.Last) }

// pageBits is how many entries one page of an ackSet covers (512 bytes of bits).
const pageBits = 4096

// page is the acknowledged entries among pageBits neighbours, one bit each.
type page struct {
	words [pageBits / 64]uint64
	n     int // bits set
}

// fullPage stands for every page that is all acknowledged, so that a long run
// costs a pointer for 4096 entries. It must never be written.
var fullPage = func() *page {
	p := &page{n: pageBits}
	for i := range p.words {
		p.words[i] = ^uint64(0)
	}
	return p
}()

// ledgerAcks is the acknowledged entries of one ledger. A nil page has none.
type ledgerAcks struct {
	id    ledger.ID
	first int64 // number of pages[0]
	pages []*page
	n     int64 // bits set in all pages
}

// ackSet is a set of positions: a bit for each entry, because acknowledgements
// of a shared subscription come in no order and a sorted list of ranges would
// move half of itself for each.
type ackSet struct {
	ledgers []*ledgerAcks // ascending; none of them empty
	n       int64         // positions in the set
}

// find returns the index of ledger id, or where it would stand.
func (s *ackSet) find(id ledger.ID) (int, bool) {
	i := sort.Search(len(s.ledgers), func(i int) bool { return s.ledgers[i].id >= id })
	return i, i < len(s.ledgers) && s.ledgers[i].id == id
}

// add puts p into the set and reports whether it was not there before.
func (s *ackSet) add(p ledger.Position) bool {
	i, ok := s.find(p.Ledger)
	if !ok {
		s.ledgers = append(s.ledgers, nil)
		copy(s.ledgers[i+1:], s.ledgers[i:])
		s.ledgers[i] = &ledgerAcks{id: p.Ledger, first: int64(p.Entry) / pageBits}
	}
	if !s.ledgers[i].add(p.Entry) {
		return false
	}
	s.n++
	return true
}

func (l *ledgerAcks) add(entry ledger.EntryID) bool {
	number, bit := int64(entry)/pageBits, int64(entry)%pageBits
	if number < l.first {
		l.pages = append(make([]*page, l.first-number), l.pages...)
		l.first = number
	}
	for number >= l.first+int64(len(l.pages)) {
		l.pages = append(l.pages, nil)
	}
	p := l.pages[number-l.first]
	if p == nil {
		p = &page{}
		l.pages[number-l.first] = p
	}
	word, mask := bit/64, uint64(1)<<(bit%64)
	if p.words[word]&mask != 0 {
		return false
	}
	p.words[word] |= mask
	p.n++
	l.n++
	if p.n == pageBits {
		l.pages[number-l.first] = fullPage
	}
	return true
}

func (l *ledgerAcks) page(number int64) *page {
	if number < l.first || number >= l.first+int64(len(l.pages)) {
		return nil
	}
	return l.pages[number-l.first]
}

// has reports whether p is in the set.
func (s *ackSet) has(p ledger.Position) bool {
	i, ok := s.find(p.Ledger)
	if !ok || p.Entry < 0 {
		return false
	}
	bit := int64(p.Entry) % pageBits
	pg := s.ledgers[i].page(int64(p.Entry) / pageBits)
	return pg != nil && pg.words[bit/64]&(1<<(bit%64)) != 0
}

// runEnd returns the first entry at or after p, in p's ledger, that is not in
// the set; that is p itself if it is not.
func (s *ackSet) runEnd(p ledger.Position) ledger.EntryID {
	i, ok := s.find(p.Ledger)
	if !ok {
		return p.Entry
	}
	return s.ledgers[i].scan(p.Entry, false, maxEntry)
}

// nextAcked returns the first entry at or after p, in p's ledger, that is in the
// set; limit if there is none below it.
func (s *ackSet) nextAcked(p ledger.Position, limit ledger.EntryID) ledger.EntryID {
	i, ok := s.find(p.Ledger)
	if !ok {
		return limit
	}
	return s.ledgers[i].scan(p.Entry, true, limit)
}

// scan returns the first entry in [entry, limit) whose bit equals want, or limit.
// Looking for a clear bit, it ends at the last page at the latest.
func (l *ledgerAcks) scan(entry ledger.EntryID, want bool, limit ledger.EntryID) ledger.EntryID {
	last := ledger.EntryID((l.first + int64(len(l.pages))) * pageBits)
	for entry < limit {
		if entry >= last {
			if want {
				return limit
			}
			return entry
		}
		number, bit := int64(entry)/pageBits, int64(entry)%pageBits
		p := l.page(number)
		if whole := (p == nil && want) || (p == fullPage && !want); whole {
			entry = ledger.EntryID((number + 1) * pageBits)
			continue
		}
		if p == nil {
			return entry
		}
		word := p.words[bit/64]
		if !want {
			word = ^word
		}
		if word >>= bit % 64; word != 0 {
			return min(entry+ledger.EntryID(bits.TrailingZeros64(word)), limit)
		}
		entry += ledger.EntryID(64 - bit%64)
	}
	return limit
}

// dropThrough takes every position at or before p out of the set.
func (s *ackSet) dropThrough(p ledger.Position) {
	i, ok := s.find(p.Ledger)
	for _, l := range s.ledgers[:i] {
		s.n -= l.n
	}
	if ok {
		before := s.ledgers[i].n
		s.ledgers[i].dropThrough(p.Entry)
		s.n -= before - s.ledgers[i].n
		if s.ledgers[i].n == 0 {
			i++
		}
	}
	clear(s.ledgers[:i])
	s.ledgers = s.ledgers[i:]
	if len(s.ledgers) == 0 {
		s.ledgers = nil // let the array go
	}
}

func (l *ledgerAcks) dropThrough(entry ledger.EntryID) {
	keep := (int64(entry) + 1) / pageBits // the page of the first entry that stays
	for len(l.pages) > 0 && l.first < keep {
		if l.pages[0] != nil {
			l.n -= int64(l.pages[0].n)
			l.pages[0] = nil
		}
		l.pages = l.pages[1:]
		l.first++
	}
	if len(l.pages) == 0 || l.first != keep || l.pages[0] == nil {
		return
	}
	cut := (int64(entry) + 1) % pageBits
	if cut == 0 {
		return
	}
	p := l.pages[0]
	if p == fullPage {
		own := *fullPage
		p = &own
		l.pages[0] = p
	}
	before := p.n
	for w := range cut / 64 {
		p.n -= bits.OnesCount64(p.words[w])
		p.words[w] = 0
	}
	if rest := cut % 64; rest != 0 {
		gone := p.words[cut/64] & (1<<rest - 1)
		p.n -= bits.OnesCount64(gone)
		p.words[cut/64] &^= gone
	}
	l.n -= int64(before - p.n)
	if p.n == 0 {
		l.pages[0] = nil
	}
}

// clear empties the set.
func (s *ackSet) clear() { *s = ackSet{} }

// ranges returns the runs of the set in order, at most limit of them, and how
// many more there are.
func (s *ackSet) ranges(limit int) (runs []Range, more int) {
	for _, l := range s.ledgers {
		end := ledger.EntryID((l.first + int64(len(l.pages))) * pageBits)
		for at := l.scan(ledger.EntryID(l.first*pageBits), true, end); at < end; at = l.scan(at, true, end) {
			first := at
			at = l.scan(at, false, end)
			if len(runs) < limit {
				runs = append(runs, Range{Ledger: l.id, First: first, Last: at - 1})
			} else {
				more++
			}
		}
	}
	return runs, more
}

// verify returns the first broken invariant.
func (s *ackSet) verify() error {
	var total int64
	for i, l := range s.ledgers {
		if i > 0 && s.ledgers[i-1].id >= l.id {
			return fmt.Errorf("cursor: ack set: ledger %d after ledger %d", l.id, s.ledgers[i-1].id)
		}
		var n int64
		for k, p := range l.pages {
			if p == nil {
				continue
			}
			set := 0
			for _, w := range p.words {
				set += bits.OnesCount64(w)
			}
			if set != p.n || set == 0 || (set == pageBits) != (p == fullPage) {
				return fmt.Errorf("cursor: ack set: ledger %d page %d counts %d, holds %d", l.id, l.first+int64(k), p.n, set)
			}
			n += int64(set)
		}
		if n != l.n || n == 0 {
			return fmt.Errorf("cursor: ack set: ledger %d counts %d, holds %d", l.id, l.n, n)
		}
		total += n
	}
	if total != s.n {
		return fmt.Errorf("cursor: ack set counts %d, holds %d", s.n, total)
	}
	return nil
}
