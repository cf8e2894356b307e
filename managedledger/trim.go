package managedledger

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
)

// trimming makes sure that one goroutine trims at a time, and that a trigger
// which comes while it runs is not lost.
type trimming struct {
	mu      sync.Mutex
	running bool // guarded by mu
	again   bool // guarded by mu: run once more
	timer   bool // guarded by mu: asked for by the housekeeper
}

// trimSoon trims in the background: after a cursor left a ledger, a ledger was
// closed, a cursor was deleted, or from the housekeeper (timer). Only the last
// one trims a managed ledger that has no durable cursor.
func (m *ManagedLedger) trimSoon(timer bool) {
	t := &m.trimming
	t.mu.Lock()
	defer t.mu.Unlock()
	t.timer = t.timer || timer
	if t.running {
		t.again = true
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing != nil || m.state == stateFenced {
		return
	}
	t.running = true
	m.background.Go(m.trimLoop)
}

func (m *ManagedLedger) trimLoop() {
	t := &m.trimming
	for {
		t.mu.Lock()
		timer := t.timer
		t.again, t.timer = false, false
		t.mu.Unlock()
		if err := m.trim(timer); err != nil && m.ctx.Err() == nil {
			m.log.Warn("ledgers not trimmed; will try again", "err", err)
		}
		t.mu.Lock()
		if !t.again || m.ctx.Err() != nil {
			t.running = false
			t.mu.Unlock()
			return
		}
		t.mu.Unlock()
	}
}

// trim takes the consumed ledgers off the list and then deletes them, and those
// that earlier changes took off.
func (m *ManagedLedger) trim(timer bool) error {
	gone, err := m.unlistConsumed(timer)
	if err != nil {
		return err
	}
	var deleted []ledger.ID
	for _, id := range gone {
		ctx, cancel := context.WithTimeout(m.ctx, m.cfg.metadataTimeout())
		failed := m.f.deleteLedger(ctx, id)
		cancel()
		if failed != nil {
			err = errors.Join(err, failed)
			continue
		}
		deleted = append(deleted, id)
	}
	if len(deleted) == 0 {
		return err
	}
	// The next change of the list forgets them; until then deleting them once more
	// is harmless, so this is not worth a write of its own.
	if turnErr := m.takeTurn(m.ctx); turnErr != nil {
		return errors.Join(err, turnErr)
	}
	defer m.giveTurn()
	next := m.record.clone()
	next.unlisted = slices.DeleteFunc(next.unlisted, func(id ledger.ID) bool { return slices.Contains(deleted, id) })
	m.record = next
	return err
}

// unlistConsumed writes the list without the consumed ledgers and stops showing
// them. It returns every ledger that is to be deleted.
func (m *ManagedLedger) unlistConsumed(timer bool) ([]ledger.ID, error) {
	ctx, cancel := context.WithTimeout(m.ctx, m.cfg.metadataTimeout())
	defer cancel()
	if err := m.takeTurn(ctx); err != nil {
		return nil, err
	}
	defer m.giveTurn()
	if err := m.lockCursors(ctx); err != nil {
		return nil, err
	}
	defer m.unlockCursors()
	n := m.consumed(m.view.Load(), timer)
	if n == 0 {
		return m.record.unlisted, nil
	}
	next := m.record.clone()
	for _, l := range next.ledgers[:n] {
		next.unlisted = append(next.unlisted, l.ID)
	}
	next.ledgers = next.ledgers[n:]
	if err := m.save(ctx, next); err != nil {
		if errors.Is(err, errConflict) {
			m.lost(err)
		}
		return nil, err
	}
	m.hide(n)
	return next.unlisted, nil
}

// consumed returns how many of the oldest ledgers nobody needs. The current
// ledger is never among them.
func (m *ManagedLedger) consumed(v *view, timer bool) int {
	slowest, durable := ledger.Position{}, false
	for _, r := range m.registry.all() {
		if !r.Durable() {
			continue
		}
		if p := r.c.MarkDeleted(); !durable || p.Before(slowest) {
			slowest, durable = p, true
		}
	}
	for i, e := range v.layout.Closed() {
		switch {
		case durable && e.Last().After(slowest):
			return i
		case !durable && (!timer || time.Since(v.closed[i].Closed) < time.Duration(m.cfg.RetentionCheckPeriod)*time.Second):
			// Without a durable cursor data is kept for a while after its ledger was
			// closed, so that a subscription made right after a restart finds it.
			return i
		}
	}
	return len(v.closed)
}

// hide takes the n oldest ledgers out of the view. Readers that are not durable
// and stand before the new beginning are moved there.
func (m *ManagedLedger) hide(n int) {
	m.completing.Lock()
	m.mu.Lock()
	v := m.view.Load()
	gone := v.closed[:n]
	end := ledger.Position{}
	if v.current == nil {
		end = v.layout.Last()
	}
	m.view.Store(newView(v.closed[n:], v.base()+sumEntries(gone), v.current, end))
	m.mu.Unlock()
	m.completing.Unlock()

	first := m.layout().First()
	for _, r := range m.registry.all() {
		if !r.Durable() {
			r.c.MoveTo(first)
		}
	}
	for _, l := range gone {
		m.ring.Forget(l.ID)
		m.sources.drop(l.ID)
		m.log.Info("ledger trimmed", "ledger", l.ID, "entries", l.Entries, "bytes", l.Bytes)
	}
}
