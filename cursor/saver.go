package cursor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
)

// What a Store answers.
var (
	// ErrNotFound reports that there is no record.
	ErrNotFound = errors.New("no such cursor")

	// ErrConflict reports a record at another version than expected: somebody
	// else has written it. A cursor that sees it stops saving for good.
	ErrConflict = errors.New("cursor record was changed by another owner")
)

// State is what a record holds.
type State struct {
	MarkDeleted ledger.Position
	Acked       []Range // after MarkDeleted, in order
	Unsaved     int     // how many further ranges had no room
}

// Store keeps one cursor's record, under compare-and-set.
type Store interface {
	// Load returns the record and its version, or [ErrNotFound].
	Load(ctx context.Context) (State, int64, error)
	// Save replaces the record if it is at the version given (0: absent) and
	// returns the new one, or [ErrConflict]. If it cannot tell whether it
	// happened, saving the same state again must be harmless.
	Save(ctx context.Context, state State, version int64) (int64, error)
	// Remove deletes the record if it is at that version. Absent is success.
	Remove(ctx context.Context, version int64) error
}

// Options are a durable cursor's.
type Options struct {
	Store     Store
	Interval  time.Duration // between two saves, and so the most that a crash can undo
	Timeout   time.Duration // of one save
	MaxRanges int           // in a record; further ones stay in memory
	Log       *slog.Logger
	// Lost is called once, on a goroutine of its own, when the record turns out to
	// belong to a newer owner. It may be nil.
	Lost func(error)
}

// saver writes a cursor's record. It has a goroutine only while there is
// something to write.
type saver struct {
	Options
	c    *Cursor
	turn chan struct{} // capacity 1: holds a token while somebody saves or resets
	busy sync.WaitGroup

	// All guarded by c.mu.
	version int64
	saved   uint64 // the seq that the record has
	last    time.Time
	timer   *time.Timer // set while a save is scheduled
	failed  bool        // the last save failed; log only the first
	lost    bool        // the record is somebody else's
	stopped bool        // nothing is scheduled any more
}

// Create makes a durable cursor and its record, which must not exist yet. It
// starts after marked.
func Create(ctx context.Context, name string, layout func() *Layout, marked ledger.Position, o Options) (*Cursor, error) {
	version, err := o.Store.Save(ctx, State{MarkDeleted: marked}, 0)
	if err != nil {
		return nil, fmt.Errorf("create cursor %q: %w", name, err)
	}
	c := New(name, layout, marked)
	c.attach(o, version)
	return c, nil
}

// Load opens the cursor whose record exists, or fails with [ErrNotFound]. It
// writes the record once, so that a former owner which is still alive finds
// another version at its next save and stops.
func Load(ctx context.Context, name string, layout func() *Layout, o Options) (*Cursor, error) {
	for {
		state, version, err := o.Store.Load(ctx)
		if err != nil {
			return nil, fmt.Errorf("load cursor %q: %w", name, err)
		}
		version, err = o.Store.Save(ctx, state, version)
		if errors.Is(err, ErrConflict) && ctx.Err() == nil {
			continue // the former owner saved once more in between: start from that
		}
		if err != nil {
			return nil, fmt.Errorf("take cursor %q over: %w", name, err)
		}
		c := New(name, layout, state.MarkDeleted)
		l := layout()
		for _, r := range state.Acked {
			c.restore(l, r)
		}
		c.absorbLocked(l)
		c.MoveTo(l.First()) // what was trimmed had been acknowledged, if not saved as such
		c.attach(o, version)
		return c, nil
	}
}

// restore adds what still exists of r. The cursor is not shared yet.
func (c *Cursor) restore(l *Layout, r Range) {
	last := min(r.Last, l.end(r.Ledger)-1)
	for e := max(r.First, 0); e <= last; e++ {
		if p := (ledger.Position{Ledger: r.Ledger, Entry: e}); p.After(c.marked) {
			c.acked.add(p)
		}
	}
}

func (c *Cursor) attach(o Options, version int64) {
	c.saver = &saver{Options: o, c: c, turn: make(chan struct{}, 1), version: version, last: time.Now()}
	c.saver.saved = c.seq
}

// scheduleLocked makes sure that a save will happen. The caller holds c.mu.
func (s *saver) scheduleLocked() {
	if s.timer != nil || s.stopped || s.lost {
		return
	}
	wait := s.Interval - time.Since(s.last)
	s.busy.Add(1)
	s.timer = time.AfterFunc(max(wait, 0), s.fire)
}

// fire is one scheduled save, on the timer's goroutine.
func (s *saver) fire() {
	defer s.busy.Done()
	s.c.mu.Lock()
	s.timer = nil
	s.c.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), s.Timeout)
	defer cancel()
	err := s.save(ctx)

	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.saved != s.c.seq {
		s.scheduleLocked()
	}
	switch {
	case err == nil:
		s.failed = false
	case !s.failed && !s.lost:
		s.failed = true
		s.Log.Warn("cursor not saved; will retry, and a crash now would deliver entries again",
			"cursor", s.c.name, "err", err)
	}
}

// save writes the record if memory is ahead of it.
func (s *saver) save(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.turn }()

	s.c.mu.Lock()
	if s.saved == s.c.seq || s.lost {
		lost := s.lost
		s.c.mu.Unlock()
		if lost {
			return ErrConflict
		}
		return nil
	}
	seq := s.c.seq
	state := State{MarkDeleted: s.c.marked}
	state.Acked, state.Unsaved = s.c.acked.ranges(s.MaxRanges)
	s.c.mu.Unlock()

	return s.write(ctx, state, seq)
}

// write saves state, which is that of seq. The caller holds the turn.
func (s *saver) write(ctx context.Context, state State, seq uint64) error {
	s.c.mu.Lock()
	version := s.version
	s.last = time.Now()
	s.c.mu.Unlock()
	next, err := s.Store.Save(ctx, state, version)

	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	switch {
	case err == nil:
		s.version, s.saved = next, seq
		s.c.unsaved = state.Unsaved
	case errors.Is(err, ErrConflict) && !s.lost:
		s.lost = true
		if s.Lost != nil {
			s.busy.Go(func() { s.Lost(fmt.Errorf("save cursor %q: %w", s.c.name, err)) })
		}
	}
	return err
}

// Flush saves now if memory is ahead of the record, and waits for it. It does
// nothing for a cursor that is not durable.
func (c *Cursor) Flush(ctx context.Context) error {
	if c.saver == nil {
		return nil
	}
	if err := c.saver.save(ctx); err != nil {
		return fmt.Errorf("save cursor %q: %w", c.name, err)
	}
	return nil
}

// Reset moves the cursor to target, backwards or forwards: entries before it
// count as acknowledged, entries from it on as not. The record is written first,
// so a crash cannot undo it. Acknowledgements fail with [ErrResetting] meanwhile.
func (c *Cursor) Reset(ctx context.Context, target ledger.Position) error {
	if c.saver != nil {
		select {
		case c.saver.turn <- struct{}{}:
			defer func() { <-c.saver.turn }()
		case <-ctx.Done():
			return fmt.Errorf("reset cursor %q: %w", c.name, ctx.Err())
		}
	}
	c.mu.Lock()
	if err := c.ackableLocked(); err != nil {
		c.mu.Unlock()
		return err
	}
	l := c.layout()
	target = l.Ceil(target)
	marked := ledger.Position{Ledger: target.Ledger, Entry: target.Entry - 1}
	c.resetting = true
	seq := c.seq + 1
	c.mu.Unlock()

	var err error
	if c.saver != nil {
		err = c.saver.write(ctx, State{MarkDeleted: marked}, seq)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.resetting = false
	if err != nil {
		// Whether it was written is not known. Memory stands; write it again.
		c.changedLocked()
		return fmt.Errorf("reset cursor %q to %v: %w", c.name, target, err)
	}
	c.marked, c.read, c.seq = marked, target, seq
	c.epoch++
	c.acked.clear()
	return nil
}

// Close refuses further acknowledgements, saves what is unsaved and waits for
// the goroutine. It may be called more than once.
func (c *Cursor) Close(ctx context.Context) error {
	c.stop()
	if c.saver == nil {
		return nil
	}
	err := c.saver.save(ctx)
	c.saver.busy.Wait()
	if err != nil && !errors.Is(err, ErrConflict) {
		return fmt.Errorf("save cursor %q before closing it: %w", c.name, err)
	}
	return nil
}

// Abandon ends the cursor without saving, for an owner that has lost the managed
// ledger. It waits for a save in progress only as long as that takes.
func (c *Cursor) Abandon() {
	c.stop()
	if c.saver == nil {
		return
	}
	c.mu.Lock()
	c.saver.lost = true
	c.mu.Unlock()
}

// Delete ends the cursor and removes its record.
func (c *Cursor) Delete(ctx context.Context) error {
	c.stop()
	s := c.saver
	if s == nil {
		return nil
	}
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return fmt.Errorf("delete cursor %q: %w", c.name, ctx.Err())
	}
	c.mu.Lock()
	version := s.version
	s.saved = c.seq // nothing is to be saved any more
	c.mu.Unlock()
	if err := s.Store.Remove(ctx, version); err != nil {
		return fmt.Errorf("delete cursor %q: %w", c.name, err)
	}
	return nil
}

// stop refuses acknowledgements and cancels the scheduled save.
func (c *Cursor) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	s := c.saver
	if s == nil || s.stopped {
		return
	}
	s.stopped = true
	if s.timer != nil && s.timer.Stop() {
		s.timer = nil
		s.busy.Done()
	}
}
