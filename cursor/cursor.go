package cursor

import (
	"errors"
	"fmt"
	"sync"

	"github.com/magnetar-io/magnetar/ledger"
)

// What a caller must tell apart.
var (
	// ErrBeyondEnd reports an acknowledgement of an entry that does not exist yet.
	// Nothing was changed.
	ErrBeyondEnd = errors.New("position is beyond the last confirmed entry")

	// ErrBehind reports a cumulative acknowledgement before the mark-delete
	// position. Everything it names is acknowledged already; nothing was changed.
	ErrBehind = errors.New("position is before the mark-delete position")

	// ErrResetting reports an acknowledgement, or a second reset, while the
	// cursor is being reset. Nothing was changed; the consumer starts anew anyway.
	ErrResetting = errors.New("cursor is being reset")

	// ErrClosed reports a cursor that was closed or deleted.
	ErrClosed = errors.New("cursor is closed")
)

// Cursor is one reader's place. Make one with [New], [Create] or [Load].
type Cursor struct {
	name   string
	layout func() *Layout // the picture of this moment; called with mu held, must not block
	saver  *saver         // nil if not durable

	mu        sync.Mutex
	marked    ledger.Position // guarded by mu: everything at or before it is acknowledged
	acked     ackSet          // guarded by mu: acknowledged entries after marked, all of them existing
	read      ledger.Position // guarded by mu: the next entry to deliver is at or after it
	epoch     uint64          // guarded by mu: rises when read is moved other than by delivery
	seq       uint64          // guarded by mu: rises with every change of marked or acked
	resetting bool            // guarded by mu
	closed    bool            // guarded by mu
	unsaved   int             // guarded by mu: ranges that the last record had no room for
}

// Stats is a cursor's state for people.
type Stats struct {
	Name          string
	Durable       bool
	MarkDeleted   ledger.Position
	ReadPosition  ledger.Position
	Backlog       int64 // entries not acknowledged
	AckedBeyond   int64 // entries acknowledged beyond MarkDeleted
	UnsavedRanges int   // ranges that the last record had no room for
	Dirty         bool  // memory is ahead of the record
}

// New makes a cursor that is never saved. It starts after marked. layout returns
// the managed ledger's layout of the moment; it must be cheap and not block.
func New(name string, layout func() *Layout, marked ledger.Position) *Cursor {
	c := &Cursor{name: name, layout: layout, marked: marked}
	c.read = layout().Next(marked)
	return c
}

// Name returns the cursor's name.
func (c *Cursor) Name() string { return c.name }

// Durable reports whether the cursor is saved.
func (c *Cursor) Durable() bool { return c.saver != nil }

// Ended reports whether the cursor was closed, or its deletion begun.
func (c *Cursor) Ended() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// MarkDeleted returns the position up to which everything is acknowledged.
func (c *Cursor) MarkDeleted() ledger.Position {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.marked
}

// ReadPosition returns where the next delivery starts: the position of an entry,
// or of the one to be written next.
func (c *Cursor) ReadPosition() ledger.Position {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.layout().Ceil(c.read)
}

// Backlog returns how many entries are not acknowledged.
func (c *Cursor) Backlog() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.backlogLocked()
}

func (c *Cursor) backlogLocked() int64 {
	l := c.layout()
	return max(l.Count(c.marked, l.Last())-c.acked.n, 0)
}

// Stats returns the state of this moment.
func (c *Cursor) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Stats{
		Name: c.name, Durable: c.saver != nil,
		MarkDeleted: c.marked, ReadPosition: c.layout().Ceil(c.read),
		Backlog: c.backlogLocked(), AckedBeyond: c.acked.n,
		UnsavedRanges: c.unsaved, Dirty: c.saver != nil && c.saver.saved != c.seq,
	}
}

// IsAcked reports whether p is acknowledged. Entries that are gone are.
func (c *Cursor) IsAcked(p ledger.Position) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.isAckedLocked(p)
}

func (c *Cursor) isAckedLocked(p ledger.Position) bool {
	return !p.After(c.marked) || c.acked.has(p)
}

// Unacked appends to dst those of positions that exist and are not acknowledged,
// in the order given.
func (c *Cursor) Unacked(dst, positions []ledger.Position) []ledger.Position {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.layout()
	for _, p := range positions {
		if !c.isAckedLocked(p) && l.Holds(p) {
			dst = append(dst, p)
		}
	}
	return dst
}

// Ack acknowledges single entries. Entries that are acknowledged already or do
// not exist any more are skipped; one beyond the last confirmed entry fails the
// whole call with [ErrBeyondEnd].
func (c *Cursor) Ack(positions []ledger.Position) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.ackableLocked(); err != nil {
		return err
	}
	l := c.layout()
	last := l.Last()
	for _, p := range positions {
		if p.After(last) {
			return fmt.Errorf("acknowledge %v: %w: that is %v", p, ErrBeyondEnd, last)
		}
	}
	changed := false
	for _, p := range positions {
		if p.After(c.marked) && l.Holds(p) && c.acked.add(p) {
			changed = true
		}
	}
	if changed {
		c.absorbLocked(l)
		c.changedLocked()
	}
	return nil
}

// AckCumulative acknowledges every entry up to and including p. The read
// position moves along if it was not beyond p.
func (c *Cursor) AckCumulative(p ledger.Position) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ackCumulativeLocked(p)
}

func (c *Cursor) ackCumulativeLocked(p ledger.Position) error {
	if err := c.ackableLocked(); err != nil {
		return err
	}
	l := c.layout()
	switch last := l.Last(); {
	case p.After(last) && (p.Entry != ledger.BeforeFirst || l.open == nil || p.Ledger != l.open.ID):
		return fmt.Errorf("acknowledge up to %v: %w: that is %v", p, ErrBeyondEnd, last)
	case p.Before(c.marked):
		return fmt.Errorf("acknowledge up to %v: %w: that is %v", p, ErrBehind, c.marked)
	}
	if q, ok := l.Floor(p); ok && q.After(c.marked) {
		c.marked = q
		c.absorbLocked(l)
		c.changedLocked()
	}
	return nil
}

// Skip acknowledges the next n entries that are not acknowledged, or all if
// there are fewer.
func (c *Cursor) Skip(n int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.layout()
	last := l.Last()
	at := c.marked
	for n > 0 {
		next := l.Next(at)
		if next.After(last) {
			break
		}
		at = ledger.Position{Ledger: next.Ledger, Entry: c.acked.runEnd(next) - 1}
		if at.Before(next) { // next is not acknowledged: take as many as lie together
			stop := c.acked.nextAcked(next, l.end(next.Ledger))
			take := min(n, int64(stop-next.Entry))
			at = ledger.Position{Ledger: next.Ledger, Entry: next.Entry + ledger.EntryID(take) - 1}
			n -= take
		}
	}
	if at == c.marked {
		return c.ackableLocked()
	}
	return c.ackCumulativeLocked(at)
}

// Clear acknowledges everything there is at this moment.
func (c *Cursor) Clear() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if last := c.layout().Last(); last.After(c.marked) {
		return c.ackCumulativeLocked(last)
	}
	return c.ackableLocked()
}

func (c *Cursor) ackableLocked() error {
	switch {
	case c.closed:
		return fmt.Errorf("cursor %q: %w", c.name, ErrClosed)
	case c.resetting:
		return fmt.Errorf("cursor %q: %w", c.name, ErrResetting)
	}
	return nil
}

// absorbLocked moves the mark-delete position over the acknowledged entries that
// now touch it, across ledgers, and the read position along with it.
func (c *Cursor) absorbLocked(l *Layout) {
	for c.acked.n > 0 {
		next := l.Next(c.marked)
		end := c.acked.runEnd(next)
		if end == next.Entry {
			break
		}
		c.marked = ledger.Position{Ledger: next.Ledger, Entry: end - 1}
		c.acked.dropThrough(c.marked) // shrinks the set, so the loop ends
	}
	c.acked.dropThrough(c.marked)
	if !c.read.After(c.marked) {
		c.read = l.Next(c.marked)
	}
}

// changedLocked notes that memory is ahead of the record.
func (c *Cursor) changedLocked() {
	c.seq++
	if c.saver != nil {
		c.saver.scheduleLocked()
	}
}

// Next returns the next run of entries to deliver: n entries of one ledger
// starting at first, none of them acknowledged, at most limit. n is 0 if
// everything confirmed has been delivered or acknowledged. The read position
// stays before the run until [Cursor.Advance].
func (c *Cursor) Next(limit int) (first ledger.Position, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.layout()
	return c.runLocked(l, l.Ceil(c.read), limit)
}

// NextAfter is Next for the run after the entry p, whatever the read position.
func (c *Cursor) NextAfter(p ledger.Position, limit int) (first ledger.Position, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.layout()
	return c.runLocked(l, l.Next(p), limit)
}

func (c *Cursor) runLocked(l *Layout, at ledger.Position, limit int) (ledger.Position, int) {
	if !at.After(c.marked) {
		at = l.Next(c.marked)
	}
	last := l.Last()
	for {
		if end := c.acked.runEnd(at); end != at.Entry {
			at = l.Ceil(ledger.Position{Ledger: at.Ledger, Entry: end})
			continue
		}
		if at.After(last) {
			return at, 0
		}
		end := l.end(at.Ledger)
		if at.Ledger == last.Ledger {
			end = min(end, last.Entry+1)
		}
		stop := c.acked.nextAcked(at, min(end, at.Entry+ledger.EntryID(limit)))
		return at, int(stop - at.Entry)
	}
}

// Begin returns the read position and the epoch to pass to [Cursor.Advance].
func (c *Cursor) Begin() (ledger.Position, uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.layout().Ceil(c.read), c.epoch
}

// Advance moves the read position to just after p, an entry that was handed to
// the consumer. It never moves it back, and does nothing if the cursor was
// rewound or reset since the [Cursor.Begin] that returned epoch: what was read
// then is to be read again.
func (c *Cursor) Advance(p ledger.Position, epoch uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if next := p.Next(); epoch == c.epoch && next.After(c.read) {
		c.read = next
	}
}

// Pass moves the read position over p if p is what would be read next. An entry
// that was replayed need not be delivered once more.
func (c *Cursor) Pass(p ledger.Position) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.layout().Ceil(c.read) == p {
		c.read = p.Next()
	}
}

// Rewind moves the read position to just after the mark-delete position.
// Acknowledged entries beyond it stay acknowledged.
func (c *Cursor) Rewind() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.read = c.layout().Next(c.marked)
	c.epoch++
}

// MoveTo moves the cursor forward, so that it starts at or after p: the entries
// before it are gone. It does nothing if the cursor is further already.
func (c *Cursor) MoveTo(p ledger.Position) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := ledger.Position{Ledger: p.Ledger, Entry: p.Entry - 1}
	if !before.After(c.marked) {
		return
	}
	c.marked = before
	c.absorbLocked(c.layout())
	c.changedLocked()
}

// verify returns the first broken invariant.
func (c *Cursor) verify() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.layout()
	switch next := l.Next(c.marked); {
	case c.acked.has(next):
		return fmt.Errorf("cursor %q: %v is acknowledged and follows mark-delete %v", c.name, next, c.marked)
	case !c.read.After(c.marked):
		return fmt.Errorf("cursor %q: read position %v not after mark-delete %v", c.name, c.read, c.marked)
	case l.Count(c.marked, l.Last()) < c.acked.n:
		return fmt.Errorf("cursor %q: %d acknowledged among %d entries", c.name, c.acked.n, l.Count(c.marked, l.Last()))
	}
	return c.acked.verify()
}
