package managedledger

import (
	"context"
	"errors"
	"fmt"

	"github.com/magnetar-io/magnetar/cursor"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata"
)

// Initial is where a new durable cursor starts.
type Initial uint8

const (
	// Latest starts behind the last confirmed entry.
	Latest Initial = iota
	// Earliest starts at the oldest entry that is kept.
	Earliest
)

// OpenCursor returns the durable cursor of that name, creating it at the given
// place if there is none. One name has one Reader: opening it again returns the
// same, and its place is not changed.
func (m *ManagedLedger) OpenCursor(ctx context.Context, name string, at Initial) (*Reader, error) {
	if err := m.lockCursors(ctx); err != nil {
		return nil, fmt.Errorf("open cursor %q: %w", name, err)
	}
	defer m.unlockCursors()
	if err := m.failure(); err != nil {
		return nil, err
	}
	former := m.registry.durable(name)
	if former != nil && !former.c.Ended() {
		former.reopen()
		return former, nil
	}
	if name == "" {
		return nil, errors.New("cursor name is empty")
	}
	ctx, cancel := context.WithTimeout(ctx, m.cfg.metadataTimeout())
	defer cancel()
	l := m.layout()
	marked := l.Last()
	if at == Earliest {
		first := l.First()
		marked = ledger.Position{Ledger: first.Ledger, Entry: first.Entry - 1}
	}
	var c *cursor.Cursor
	err := cursor.ErrNotFound
	if former != nil { // its deletion failed: whether the record is there decides
		former.c.Abandon()
		c, err = cursor.Load(ctx, name, m.layout, m.cursorOptions(name))
	}
	if errors.Is(err, cursor.ErrNotFound) {
		c, err = cursor.Create(ctx, name, m.layout, marked, m.cursorOptions(name))
	}
	if errors.Is(err, cursor.ErrConflict) {
		// A former owner made it just before we took over, or just after.
		c, err = cursor.Load(ctx, name, m.layout, m.cursorOptions(name))
	}
	if err != nil {
		return nil, err
	}
	// The record went through because nobody else wrote it, which does not yet say
	// that the managed ledger is still ours.
	if err := m.checkOwner(ctx); err != nil {
		c.Abandon()
		return nil, fmt.Errorf("open cursor %q: %w", name, err)
	}
	r := newReader(m, c)
	m.registry.add(r)
	if former != nil {
		m.registry.remove(former)
	}
	if err := m.failure(); err != nil {
		c.Abandon()
		return nil, err
	}
	return r, nil
}

// checkOwner fences the handle if the record is not ours any more.
func (m *ManagedLedger) checkOwner(ctx context.Context) error {
	kv, err := m.f.meta.Get(ctx, ledgerKey(m.name))
	switch {
	case errors.Is(err, metadata.ErrNotFound):
		m.lost(errConflict)
		return m.failure()
	case err != nil:
		return err
	case recordOwner(kv.Value) != m.owner:
		m.lost(errConflict)
		return m.failure()
	}
	return nil
}

// NewReader returns a reader that is not durable and starts at start, inclusive:
// at the oldest entry if that is before it, at the next one to be written if it
// is beyond the end. It does not keep data from being trimmed. Close it.
func (m *ManagedLedger) NewReader(name string, start ledger.Position) *Reader {
	l := m.layout()
	p := l.Ceil(start)
	c := cursor.New(name, m.layout, ledger.Position{Ledger: p.Ledger, Entry: p.Entry - 1})
	r := newReader(m, c)
	m.registry.add(r)
	return r
}

// Cursors returns the readers: the durable ones, open or not, and those that are
// not durable and not closed.
func (m *ManagedLedger) Cursors() []*Reader {
	return append([]*Reader(nil), m.registry.all()...)
}

// DeleteCursor removes a durable cursor. Its reader gets [ErrClosed]. It returns
// an error that wraps [ErrNotFound] if there is none of that name. After another
// error the cursor goes on holding its data, until it is deleted or opened again.
func (m *ManagedLedger) DeleteCursor(ctx context.Context, name string) error {
	if err := m.lockCursors(ctx); err != nil {
		return fmt.Errorf("delete cursor %q: %w", name, err)
	}
	defer m.unlockCursors()
	if err := m.failure(); err != nil {
		return err
	}
	r := m.registry.durable(name)
	if r == nil {
		return fmt.Errorf("cursor %q of managed ledger %q: %w", name, m.name, ErrNotFound)
	}
	r.shut()
	if err := r.c.Delete(ctx); err != nil {
		if errors.Is(err, cursor.ErrConflict) {
			m.lost(err)
		}
		return err
	}
	m.registry.remove(r)
	m.trimSoon(false)
	return nil
}

func (m *ManagedLedger) lockCursors(ctx context.Context) error {
	select {
	case m.cursorTurn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (m *ManagedLedger) unlockCursors() { <-m.cursorTurn }

// Ack acknowledges single entries. Those acknowledged already, or gone, are
// skipped; one beyond the end fails the whole call with [ErrBeyondEnd].
func (r *Reader) Ack(positions []ledger.Position) error {
	if err := r.m.failure(); err != nil {
		return err
	}
	if err := r.c.Ack(positions); err != nil {
		return r.ackError(err)
	}
	r.acked()
	return nil
}

// AckCumulative acknowledges everything up to and including p. It fails with
// [ErrBeyondEnd], or, harmlessly, with [ErrBehind] if p is before the mark-delete
// position.
func (r *Reader) AckCumulative(p ledger.Position) error {
	if err := r.m.failure(); err != nil {
		return err
	}
	if err := r.c.AckCumulative(p); err != nil {
		return r.ackError(err)
	}
	r.acked()
	return nil
}

// ackError says why a cursor refuses: it is closed because its managed ledger is.
func (r *Reader) ackError(err error) error {
	if errors.Is(err, cursor.ErrClosed) {
		if cause := r.m.failure(); cause != nil {
			return cause
		}
		return fmt.Errorf("%w: %w", ErrClosed, err)
	}
	return err
}

// acked starts trimming if the cursor has consumed the oldest ledger.
func (r *Reader) acked() {
	if !r.Durable() {
		return
	}
	if closed := r.m.layout().Closed(); len(closed) > 0 && !closed[0].Last().After(r.c.MarkDeleted()) {
		r.m.trimSoon(false)
	}
}

// IsAcked reports whether the entry at p is acknowledged, or gone.
func (r *Reader) IsAcked(p ledger.Position) bool { return r.c.IsAcked(p) }

// Backlog returns how many entries are not acknowledged; it is exact.
func (r *Reader) Backlog() int64 { return r.c.Backlog() }

// MarkDeleted returns the position up to which everything is acknowledged.
func (r *Reader) MarkDeleted() ledger.Position { return r.c.MarkDeleted() }

// ReadPosition returns where the next TryRead starts.
func (r *Reader) ReadPosition() ledger.Position { return r.c.ReadPosition() }

// Stats returns the cursor's state of this moment.
func (r *Reader) Stats() cursor.Stats { return r.c.Stats() }

// Flush saves what is unsaved of a durable cursor, and waits for it.
func (r *Reader) Flush(ctx context.Context) error { return r.c.Flush(ctx) }

// Rewind moves the read position to just after the mark-delete position:
// everything that is not acknowledged is delivered again.
func (r *Reader) Rewind() {
	r.mu.Lock()
	r.c.Rewind()
	r.fetchErr = nil
	r.mu.Unlock()
	r.signal()
}

// Seek moves the cursor so that p is the next entry to be delivered: those before
// it count as acknowledged, those from it on as not. A p before the oldest entry
// or beyond the last means these.
func (r *Reader) Seek(ctx context.Context, p ledger.Position) error {
	if err := r.m.failure(); err != nil {
		return err
	}
	if err := r.reset(ctx, p); err != nil {
		return err
	}
	r.mu.Lock()
	r.fetchErr, r.replayErr = nil, nil
	r.mu.Unlock()
	r.acked()
	r.signal()
	return nil
}

// reset moves the cursor. Trimming stands still meanwhile: what the cursor goes
// back to is there when it has arrived.
func (r *Reader) reset(ctx context.Context, p ledger.Position) error {
	if err := r.m.lockCursors(ctx); err != nil {
		return fmt.Errorf("seek of %q: %w", r.Name(), err)
	}
	defer r.m.unlockCursors()
	if err := r.c.Reset(ctx, p); err != nil {
		return r.ackError(err)
	}
	return nil
}

// SeekTime moves the cursor to the first entry published at t or later, in Unix
// milliseconds; publishTime reads that from an entry. It searches by halves, so
// it takes publish times for ascending. If all entries are older it moves to the
// end.
func (r *Reader) SeekTime(ctx context.Context, publishTime func(entry []byte) (int64, error), t int64) error {
	l := r.m.layout()
	first, last := l.First(), l.Last()
	low, high := l.Ordinal(first), l.Ordinal(last)+1 // the answer lies in [low, high]
	for low < high {
		middle := low + (high-low)/2
		p, ok := r.m.layout().At(middle)
		if !ok {
			low = middle + 1 // trimmed meanwhile
			continue
		}
		data, err := r.m.ReadEntry(ctx, p)
		if errors.Is(err, ledger.ErrNoSuchEntry) {
			low = middle + 1
			continue
		}
		if err != nil {
			return fmt.Errorf("seek by time: %w", err)
		}
		published, err := publishTime(data)
		if err != nil {
			return fmt.Errorf("seek by time: publish time of %v: %w", p, err)
		}
		if published >= t {
			high = middle
		} else {
			low = middle + 1
		}
	}
	if p, ok := r.m.layout().At(low); ok {
		return r.Seek(ctx, p)
	}
	return r.Seek(ctx, r.m.layout().Next(last))
}

// Skip acknowledges the next n entries that are not acknowledged.
func (r *Reader) Skip(_ context.Context, n int64) error {
	if err := r.m.failure(); err != nil {
		return err
	}
	if err := r.c.Skip(n); err != nil {
		return r.ackError(err)
	}
	r.acked()
	return nil
}

// ClearBacklog acknowledges everything there is at this moment.
func (r *Reader) ClearBacklog(_ context.Context) error {
	if err := r.m.failure(); err != nil {
		return err
	}
	if err := r.c.Clear(); err != nil {
		return r.ackError(err)
	}
	r.acked()
	return nil
}
