package managedledger

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
)

// switchLocked begins to go on in a new ledger. If failed, the current one's end
// is not known and adds that were sent to it wait for the answer.
func (m *ManagedLedger) switchLocked(reason string, failed bool) {
	m.state = stateCreating
	m.generation++
	m.f.metrics.switches.WithLabelValues(reason).Inc()
	old := m.writer
	m.background.Go(func() { m.switchLedger(old, failed) })
}

// maybeRollover starts a new ledger if the current one has an entry and is of
// the maximum age.
func (m *ManagedLedger) maybeRollover(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state != stateOpen || m.entries == 0 || m.refuse != nil || now.Sub(m.created) < m.maxAge {
		return
	}
	if m.sent > 0 {
		m.state = stateClosing // the last answer goes on
		return
	}
	m.switchLocked(switchAge, false)
}

// switchLedger fixes the end of the old ledger, makes a new one, lists it and
// lets adds go on. It tries until it succeeds, is fenced, or the managed ledger
// is closed: adds wait meanwhile rather than fail, because an add that fails
// while a later one succeeds would leave a hole in a producer's sequence.
func (m *ManagedLedger) switchLedger(old Writer, failed bool) {
	if m.takeTurn(m.ctx) != nil {
		return
	}
	defer m.giveTurn()
	start := time.Now()
	if failed && m.view.Load().current.Entries() == 0 {
		// The ledger before failed without storing anything: do not go through
		// ledgers as fast as they can be made.
		if m.failing.wait(m.ctx) != nil {
			return
		}
	} else {
		m.failing = m.f.backoff()
	}
	end, err := m.endOf(old, failed)
	if err != nil {
		return // closed or fenced meanwhile
	}
	if confirmed := m.view.Load().current.Entries() - 1; int64(end.Last) < confirmed {
		m.storageLost(old.ID(), end.Last, ledger.EntryID(confirmed))
		return
	}
	writer, err := m.createLedger()
	if err != nil {
		return
	}
	next := m.record.clone()
	next.close(end.Last, end.Bytes, time.Now())
	next.add(writer.ID())
	if err := m.save(m.ctx, next); err != nil {
		writer.Abandon()
		if errors.Is(err, errConflict) {
			m.discard(m.ctx, writer.ID())
			m.lost(err)
		}
		return
	}
	resent := m.install(old.ID(), end, writer)
	m.log.Info("going on in a new ledger", "ledger", writer.ID(), "former", old.ID(), "formerLast", end.Last,
		"resent", resent, "took", time.Since(start))
	m.trimSoon(false)
}

// storageLost ends the handle when the ledger ends before what was confirmed:
// either another owner deleted it, or the bookies lost acknowledged entries.
func (m *ManagedLedger) storageLost(id ledger.ID, end, confirmed ledger.EntryID) {
	m.log.Error("ledger ends before its confirmed entry; closing the managed ledger",
		"ledger", id, "last", end, "confirmed", confirmed)
	m.fence(fmt.Errorf("managed ledger %q: ledger %d ends at entry %d, confirmed was %d: %w",
		m.name, id, end, confirmed, ErrFenced))
}

// endOf returns where the old ledger ends, for good. It retries until ctx of the
// managed ledger ends.
func (m *ManagedLedger) endOf(old Writer, failed bool) (Closed, error) {
	if !failed {
		size := m.view.Load().current.bytes.Load()
		ctx, cancel := context.WithTimeout(m.ctx, m.cfg.metadataTimeout())
		last, err := old.Close(ctx)
		cancel()
		if err == nil {
			return Closed{Last: last, Bytes: size}, nil
		}
		if m.ctx.Err() == nil {
			m.log.Warn("ledger not closed; recovering it", "ledger", old.ID(), "err", err)
		}
	}
	old.Abandon()
	var end Closed
	err := m.persist("recover the former ledger", func(ctx context.Context) (err error) {
		end, err = m.f.storage.Recover(ctx, old.ID())
		if errors.Is(err, ledger.ErrNoSuchLedger) {
			// Nobody but a newer owner deletes it. Writing the list will tell.
			end, err = Closed{Last: ledger.BeforeFirst}, nil
		}
		return err
	})
	return end, err
}

// createLedger makes the next ledger. It retries until ctx of the managed ledger
// ends.
func (m *ManagedLedger) createLedger() (Writer, error) {
	var writer Writer
	err := m.persist("create the next ledger", func(ctx context.Context) (err error) {
		writer, err = m.f.storage.Create(ctx, m.name)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := checkID(m.record, writer.ID()); err != nil {
		writer.Abandon()
		m.log.Error("ledger refused; closing the managed ledger", "ledger", writer.ID(), "err", err)
		m.fence(fmt.Errorf("managed ledger %q: %w", m.name, err))
		return nil, err
	}
	return writer, nil
}

// errIDNotAbove reports a ledger id that would break the order of positions.
var errIDNotAbove = errors.New("storage gave out a ledger id that is not above the managed ledger's last")

// checkID refuses a ledger that would not come after all others.
func checkID(r *record, id ledger.ID) error {
	if id <= r.last {
		return fmt.Errorf("ledger %d after %d: %w: the metadata group was reset or restored", id, r.last, errIDNotAbove)
	}
	return nil
}

// persist calls try until it succeeds or the managed ledger ends. Each attempt
// has its own deadline; the first failure is logged.
func (m *ManagedLedger) persist(what string, try func(context.Context) error) error {
	retry := m.f.backoff()
	for attempt := 0; ; attempt++ {
		ctx, cancel := context.WithTimeout(m.ctx, m.cfg.metadataTimeout())
		err := try(ctx)
		cancel()
		if err == nil {
			return nil
		}
		if m.ctx.Err() != nil {
			return m.ctx.Err()
		}
		if attempt == 0 {
			m.log.Warn("storage does not answer; adds wait until it does", "doing", what, "err", err)
		}
		if err := retry.wait(m.ctx); err != nil {
			return err
		}
	}
}

// install makes writer's ledger the current one. Adds that the old ledger holds
// are answered first; the others are sent to the new one, in order. It returns
// how many those were that had been sent before.
func (m *ManagedLedger) install(old ledger.ID, end Closed, writer Writer) (resent int) {
	m.completing.Lock()
	for {
		m.mu.Lock()
		a := m.pending.front()
		stored := a != nil && a.sent && a.at.Ledger == old && a.at.Entry <= end.Last && m.state == stateCreating
		if !stored {
			break // with mu held
		}
		m.pending.pop()
		m.mu.Unlock()
		m.confirm(a)
	}
	if m.state != stateCreating {
		m.mu.Unlock()
		m.completing.Unlock()
		writer.Abandon() // fenced or closed meanwhile; whoever did that answers the adds
		return 0
	}
	for _, a := range m.pending.waiting() {
		if a.sent {
			a.sent = false
			resent++
		}
	}
	m.f.metrics.resent.Add(float64(resent))
	m.startLocked(writer)
	v := m.view.Load()
	closed := closeCurrent(v, end)
	m.view.Store(newView(closed, v.base(), newCurrent(writer.ID(), v.base()+sumEntries(closed)), ledger.Position{}))
	for _, a := range m.pending.waiting() {
		if m.state != stateOpen {
			break // full already: the rest goes to the ledger after it
		}
		m.sendLocked(a, time.Now())
	}
	m.noteLocked()
	m.mu.Unlock()
	m.completing.Unlock()
	m.waiters.wake()
	return resent
}

// startLocked makes writer the current one, with nothing sent.
func (m *ManagedLedger) startLocked(writer Writer) {
	m.writer = writer
	m.generation++
	m.sent, m.entries, m.bytes = 0, 0, 0
	m.created = time.Now()
	// Up to 5 % more, so that topics opened together do not roll over together.
	limit := time.Duration(m.cfg.MaxRolloverMinutes) * time.Minute
	m.maxAge = limit + time.Duration(int64(writer.ID())%50)*(limit/1000)
	m.state = stateOpen
}

// closeCurrent returns v's closed ledgers with the current one, which ends at
// end, as the last; without it if it is empty.
func closeCurrent(v *view, end Closed) []LedgerInfo {
	closed := append([]LedgerInfo(nil), v.closed...)
	if v.current != nil && end.Last != ledger.BeforeFirst {
		closed = append(closed, LedgerInfo{ID: v.current.ID, Entries: int64(end.Last) + 1, Bytes: end.Bytes, Closed: time.Now()})
	}
	return closed
}

// discard deletes a ledger that was made and never listed.
func (m *ManagedLedger) discard(ctx context.Context, id ledger.ID) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.cfg.cursorTimeout)
	defer cancel()
	if err := m.f.deleteLedger(ctx, id); err != nil {
		m.log.Warn("ledger left behind; the sweep of unlisted ledgers deletes it", "ledger", id, "err", err)
	}
}
