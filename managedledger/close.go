package managedledger

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
)

// Close ends the handle in order: adds are refused and those pending answered,
// cursors saved, the current ledger closed and its end recorded, goroutines
// joined. What cannot be done before ctx ends is left to the next opening, which
// loses nothing: adds still pending fail with [ErrClosed] and may have been
// stored. It may be called more than once; later calls wait for the first.
//
// Call it neither from an add's callback nor from a reader's.
func (m *ManagedLedger) Close(ctx context.Context) error {
	m.mu.Lock()
	if m.closing != nil {
		m.mu.Unlock()
		select {
		case <-m.closing:
			return m.closeErr
		case <-ctx.Done():
			return fmt.Errorf("close managed ledger %q: %w", m.name, ctx.Err())
		}
	}
	m.closing = make(chan struct{})
	closed := fmt.Errorf("managed ledger %q: %w", m.name, ErrClosed)
	if m.refuse == nil {
		m.refuse = closed
	}
	m.ended.CompareAndSwap(nil, &closed)
	m.mu.Unlock()

	err := m.shut(ctx)
	if err != nil {
		err = fmt.Errorf("close managed ledger %q: %w", m.name, err)
	}
	m.f.forgetLedger(m)
	m.closeErr = err
	close(m.closing)
	return err
}

func (m *ManagedLedger) shut(ctx context.Context) error {
	drained := m.drain(ctx)
	cursors := m.closeReaders(ctx)
	closed := m.closeCurrent(ctx)
	m.end()
	m.cancel()
	m.background.Wait()
	m.sources.end()
	m.strand.Close()
	m.ring.Close()
	if errors.Is(closed, errConflict) || m.fencedNow() {
		return nil // nothing here is ours any more; there is nothing to save
	}
	return errors.Join(drained, cursors, closed)
}

func (m *ManagedLedger) fencedNow() bool {
	select {
	case <-m.fencedCh:
		return true
	default:
		return false
	}
}

// drain waits until every add is answered and no switch is going on.
func (m *ManagedLedger) drain(ctx context.Context) error {
	for {
		m.mu.Lock()
		settled := m.pending.len() == 0 && (m.state == stateOpen || m.state >= stateTerminated)
		waiting, changed := m.pending.len(), m.changed
		m.mu.Unlock()
		if settled {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%d adds not answered: %w", waiting, ctx.Err())
		}
	}
}

// closeReaders saves every cursor and wakes whoever waits on a reader.
func (m *ManagedLedger) closeReaders(ctx context.Context) error {
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		errs []error
	)
	for _, r := range m.registry.all() {
		wg.Go(func() {
			err := r.c.Close(ctx)
			r.shut()
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// closeCurrent closes the current ledger and records its end; an empty one is
// taken off the list and deleted.
func (m *ManagedLedger) closeCurrent(ctx context.Context) error {
	m.mu.Lock()
	writer := m.writer
	open := m.state == stateOpen
	m.mu.Unlock()
	if writer == nil || !open {
		return nil // end abandons it; the next opening recovers it
	}
	if err := m.takeTurn(ctx); err != nil {
		return err
	}
	defer m.giveTurn()
	size := m.view.Load().current.bytes.Load()
	last, err := writer.Close(ctx)
	if err != nil {
		return fmt.Errorf("close ledger %d: %w", writer.ID(), err)
	}
	if confirmed := m.view.Load().current.Entries() - 1; int64(last) < confirmed {
		m.storageLost(writer.ID(), last, ledger.EntryID(confirmed))
		return nil
	}
	next := m.record.clone()
	next.close(last, size, time.Now())
	if err := m.save(ctx, next); err != nil {
		if errors.Is(err, errConflict) {
			m.lost(err)
		}
		return err
	}
	m.mu.Lock()
	m.writer = nil
	m.mu.Unlock()
	m.sweepUnlisted(ctx)
	return nil
}

// sweepUnlisted deletes what the last change took off the list. The caller holds
// the turn; there is nobody left to wait for it.
func (m *ManagedLedger) sweepUnlisted(ctx context.Context) {
	for _, id := range m.record.unlisted {
		if err := m.f.deleteLedger(ctx, id); err != nil {
			m.log.Warn("ledger not deleted; the next opening tries again", "ledger", id, "err", err)
			return
		}
	}
}

// end makes the handle closed and fails the adds that were not answered in time.
func (m *ManagedLedger) end() {
	m.completing.Lock()
	defer m.completing.Unlock()
	m.mu.Lock()
	if m.state == stateFenced {
		m.mu.Unlock()
		return
	}
	m.state = stateClosed
	m.generation++
	writer := m.writer // still set if it could not be closed
	m.writer = nil
	adds := m.pending.take()
	m.sent = 0
	err := m.refuse
	m.noteLocked()
	m.mu.Unlock()
	if writer != nil {
		writer.Abandon()
	}
	m.failPending(adds, err)
}

// Terminate seals the managed ledger: adds that were accepted are answered,
// further ones fail with [ErrTerminated], and readers that have seen everything
// get it too. It returns the last position; calling it again returns the same.
func (m *ManagedLedger) Terminate(ctx context.Context) (ledger.Position, error) {
	m.mu.Lock()
	if err := m.failure(); err != nil {
		m.mu.Unlock()
		return ledger.Position{}, err
	}
	m.refuse = fmt.Errorf("managed ledger %q: %w", m.name, ErrTerminated)
	m.mu.Unlock()
	if err := m.drain(ctx); err != nil {
		return ledger.Position{}, fmt.Errorf("terminate managed ledger %q: %w; adds are refused, call it again", m.name, err)
	}
	if err := m.takeTurn(ctx); err != nil {
		return ledger.Position{}, fmt.Errorf("terminate managed ledger %q: %w", m.name, err)
	}
	defer m.giveTurn()
	if err := m.failure(); err != nil {
		return ledger.Position{}, err
	}
	if p := m.record.terminated; p != nil {
		return *p, nil
	}
	last, err := m.seal(ctx)
	if err != nil {
		return ledger.Position{}, fmt.Errorf("terminate managed ledger %q: %w", m.name, err)
	}
	for _, r := range m.registry.all() {
		r.signal()
	}
	m.log.Info("managed ledger terminated", "last", last)
	m.trimSoon(false)
	return last, nil
}

// seal closes the current ledger for good. The caller holds the turn and the
// pipeline is drained.
func (m *ManagedLedger) seal(ctx context.Context) (ledger.Position, error) {
	v := m.view.Load()
	m.mu.Lock()
	writer := m.writer
	m.mu.Unlock()
	end := Closed{Bytes: v.current.bytes.Load()}
	var err error
	if end.Last, err = writer.Close(ctx); err != nil {
		if end, err = m.f.storage.Recover(ctx, writer.ID()); err != nil {
			return ledger.Position{}, err
		}
	}
	last := v.layout.Last()
	next := m.record.clone()
	next.close(end.Last, end.Bytes, time.Now())
	next.terminated = &last
	if err := m.save(ctx, next); err != nil {
		if errors.Is(err, errConflict) {
			m.lost(err)
			err = m.failure()
		}
		return ledger.Position{}, err
	}
	m.completing.Lock()
	defer m.completing.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state == stateFenced {
		return ledger.Position{}, m.cause
	}
	m.state = stateTerminated
	m.generation++
	m.writer = nil
	m.view.Store(newView(closeCurrent(v, end), v.base(), nil, last))
	return last, nil
}
