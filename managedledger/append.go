package managedledger

import (
	"errors"
	"fmt"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
)

// MaxEntryBytes is the largest entry that bookies store.
const MaxEntryBytes = 8<<20 - 4<<10

// add is one call of Append, until it is answered.
type add struct {
	m     *ManagedLedger
	data  []byte
	done  func(ledger.Position, error)
	since time.Time
	at    ledger.Position // where it was sent; meaningful once sent
	sent  bool            // the current writer, or the one being retired, has it
}

// addQueue is adds in order: a slice with a moving head.
type addQueue struct {
	adds []*add
	head int
}

func (q *addQueue) len() int { return len(q.adds) - q.head }

func (q *addQueue) push(a *add) {
	if q.head > 0 && len(q.adds) == cap(q.adds) {
		n := copy(q.adds, q.adds[q.head:])
		clear(q.adds[n:])
		q.adds, q.head = q.adds[:n], 0
	}
	q.adds = append(q.adds, a)
}

func (q *addQueue) front() *add {
	if q.len() == 0 {
		return nil
	}
	return q.adds[q.head]
}

func (q *addQueue) pop() {
	q.adds[q.head] = nil
	if q.head++; q.head == len(q.adds) {
		q.adds, q.head = q.adds[:0], 0
	}
}

// waiting returns the adds in the queue, oldest first. The slice is the queue's.
func (q *addQueue) waiting() []*add { return q.adds[q.head:] }

// take empties the queue.
func (q *addQueue) take() []*add {
	all := q.waiting()
	*q = addQueue{}
	return all
}

// Append adds data as the next entry. It never blocks. done is called exactly
// once: with the entry's position, in the order of the calls of Append, once the
// entry is stored and readable; or with [ErrFenced], [ErrClosed],
// [ErrTerminated] or [ErrTooLarge]. An add that failed because of those may still have been
// stored. done runs on a goroutine that others wait for, or inside Append if the
// add is refused: it must not block.
//
// data belongs to the managed ledger from then on and must not change. Entries
// pile up while storage cannot be reached; see [ManagedLedger.PendingBytes].
func (m *ManagedLedger) Append(data []byte, done func(ledger.Position, error)) {
	if len(data) > MaxEntryBytes {
		// Storage would refuse it in every ledger, and everything behind it waits.
		done(ledger.Position{}, fmt.Errorf("managed ledger %q: %w: %d bytes, at most %d are allowed", m.name, ErrTooLarge, len(data), MaxEntryBytes))
		return
	}
	a := &add{m: m, data: data, done: done, since: time.Now()}
	m.mu.Lock()
	if m.refuse != nil {
		err := m.refuse
		m.mu.Unlock()
		done(ledger.Position{}, err)
		return
	}
	m.pending.push(a)
	m.pendingBytes.Add(int64(len(data)))
	if m.state == stateOpen {
		m.sendLocked(a, a.since)
	}
	m.mu.Unlock()
}

// sendLocked sends a to the current ledger and notices if that is full then.
// Writers take appends without blocking and answer from their own goroutine, so
// calling them under mu is what keeps the order.
func (m *ManagedLedger) sendLocked(a *add, now time.Time) {
	a.sent = true
	a.at = ledger.Position{Ledger: m.writer.ID(), Entry: ledger.EntryID(m.entries)}
	m.sent++
	m.entries++
	m.bytes += int64(len(a.data))
	generation := m.generation
	m.writer.Append(a.data, func(entry ledger.EntryID, err error) { m.answered(a, generation, entry, err) })
	if m.fullLocked(now) {
		m.state = stateClosing // once all that was sent is answered, the ledger is closed
	}
}

// fullLocked is the rollover rule: entries or bytes, but not before the minimum
// age. The maximum age is the housekeeper's.
func (m *ManagedLedger) fullLocked(now time.Time) bool {
	if m.entries < int64(m.cfg.MaxEntriesPerLedger) && m.bytes < m.cfg.MaxSizePerLedgerMB<<20 {
		return false
	}
	return m.cfg.MinRolloverMinutes <= 0 || now.Sub(m.created) > time.Duration(m.cfg.MinRolloverMinutes)*time.Minute
}

// answered is the writer's answer to one add.
func (m *ManagedLedger) answered(a *add, generation uint64, entry ledger.EntryID, err error) {
	m.completing.Lock()
	m.mu.Lock()
	if generation != m.generation {
		// The ledger was retired, or the managed ledger closed: the add is, or will
		// be, answered by whoever did that.
		m.mu.Unlock()
		m.completing.Unlock()
		return
	}
	if err == nil && (m.pending.front() != a || entry != a.at.Entry) {
		err = fmt.Errorf("storage answered entry %d of ledger %d out of order", entry, a.at.Ledger)
	}
	if err != nil {
		m.retireLocked(err)
		m.mu.Unlock()
		m.completing.Unlock()
		return
	}
	m.pending.pop()
	m.sent--
	m.mu.Unlock()

	m.confirm(a)
	m.completing.Unlock()
	m.waiters.wake()

	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state == stateClosing && m.sent == 0 && generation == m.generation {
		m.switchLocked(switchFull, false)
	}
	if m.pending.len() == 0 {
		m.noteLocked()
	}
}

// confirm makes a's entry readable and answers it, in this order: cached,
// confirmed, answered. Waking readers is the caller's. The caller holds
// completing, and a is off the queue.
func (m *ManagedLedger) confirm(a *add) {
	c := m.view.Load().current
	size := int64(len(a.data))
	if m.registry.count() > 0 {
		m.ring.Put(a.at, a.data)
	}
	c.bytes.Add(size)
	c.Confirm(a.at.Entry)
	m.totalAdded.Add(1)
	m.pendingBytes.Add(-size)
	m.f.metrics.added.Inc()
	m.f.metrics.addedBytes.Add(float64(size))
	m.f.metrics.addSeconds.Observe(time.Since(a.since).Seconds())
	a.done(a.at, nil)
}

// retireLocked stops using the current ledger after a failed write and starts
// finding out what it holds. Later answers of its writer do not count.
func (m *ManagedLedger) retireLocked(cause error) {
	if m.state != stateOpen && m.state != stateClosing {
		return
	}
	m.log.Warn("write failed; going on in a new ledger", "ledger", m.writer.ID(), "pending", m.pending.len(), "err", cause)
	m.switchLocked(switchFailed, true)
}

// failPending answers adds with err. The caller holds completing.
func (m *ManagedLedger) failPending(adds []*add, err error) {
	for _, a := range adds {
		m.pendingBytes.Add(-int64(len(a.data)))
		a.done(ledger.Position{}, err)
	}
}

// fence ends this handle because another owner has the managed ledger, or it is
// being deleted, or storage lost what it had confirmed. Everything that waits
// fails with cause, in order.
func (m *ManagedLedger) fence(cause error) {
	m.completing.Lock()
	m.mu.Lock()
	if m.state == stateFenced || m.state == stateClosed {
		m.mu.Unlock()
		m.completing.Unlock()
		return
	}
	m.state = stateFenced
	m.cause, m.refuse = cause, cause
	m.ended.Store(&cause)
	m.generation++
	adds := m.pending.take()
	m.sent = 0
	writer := m.writer
	m.writer = nil
	close(m.fencedCh)
	m.noteLocked()
	m.mu.Unlock()
	m.failPending(adds, cause)
	m.completing.Unlock()

	m.cancel()
	if writer != nil {
		writer.Abandon()
	}
	if errors.Is(cause, ErrFenced) {
		m.f.metrics.fenced.Inc()
		m.log.Warn("managed ledger fenced", "failedAdds", len(adds), "err", cause)
	}
	for _, r := range m.registry.all() {
		r.c.Abandon()
		r.signal()
	}
}

// lost is what a conflict on one of the records means.
func (m *ManagedLedger) lost(err error) {
	m.fence(fmt.Errorf("managed ledger %q: %w: %w", m.name, ErrFenced, err))
}
