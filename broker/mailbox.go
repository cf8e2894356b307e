package broker

import (
	"context"
	"sync"
)

// maxMailboxBytes bounds what connections may have waiting for one subscription
// loop. A connection that brings more waits, and so stops reading its socket.
const maxMailboxBytes = 1 << 20

// mailbox hands work to one owner goroutine. Anybody puts, the owner takes; work
// runs on the owner, in the order put.
//
// Work with a cost (what a client asked for) is bounded in bytes and its sender
// waits for room. Work without a cost (what the broker itself must get through:
// a consumer left, a buffer drained) is always taken at once, so that no loop
// ever waits for another.
type mailbox struct {
	wake chan struct{} // capacity 1; a token means "look again"

	mu      sync.Mutex
	queue   []func()      // guarded by mu
	bytes   int           // cost of queue, and of what is held; guarded by mu
	held    int           // cost of work that was taken and is still to be done; guarded by mu
	drained chan struct{} // closed at the next take; nil if nobody waits; guarded by mu
	closed  bool          // guarded by mu
}

func newMailbox() *mailbox {
	return &mailbox{wake: make(chan struct{}, 1)}
}

// post adds work that must not wait. It reports whether the owner will see it.
func (m *mailbox) post(work func()) bool {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return false
	}
	m.queue = append(m.queue, work)
	m.mu.Unlock()
	m.poke()
	return true
}

// put adds work that costs bytes, waiting for room if the owner is behind. It
// returns ErrClosed when the owner has ended.
func (m *mailbox) put(ctx context.Context, cost int, work func()) error {
	for {
		m.mu.Lock()
		if m.closed {
			m.mu.Unlock()
			return ErrClosed
		}
		if m.bytes < maxMailboxBytes {
			m.queue = append(m.queue, work)
			m.bytes += cost
			m.mu.Unlock()
			m.poke()
			return nil
		}
		if m.drained == nil {
			m.drained = make(chan struct{})
		}
		drained := m.drained
		m.mu.Unlock()

		select {
		case <-drained:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// poke makes the owner look again. It never blocks and is never lost.
func (m *mailbox) poke() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// take returns everything queued, in order, and keeps spare's memory for the
// next round.
func (m *mailbox) take(spare []func()) []func() {
	m.mu.Lock()
	defer m.mu.Unlock()
	work := m.queue
	m.queue = spare[:0]
	m.release()
	return work
}

// close refuses further work and returns what is left.
func (m *mailbox) close() []func() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	work := m.queue
	m.queue = nil
	m.release()
	return work
}

// hold counts cost on, for work that the owner has put aside, until unhold.
func (m *mailbox) hold(cost int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.held += cost
	m.bytes += cost
}

// unhold ends the account of what was put aside.
func (m *mailbox) unhold() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bytes -= m.held
	m.held = 0
	m.wakeSenders()
}

// release forgets the cost of what was taken. The caller holds mu.
func (m *mailbox) release() {
	m.bytes = m.held
	m.wakeSenders()
}

// wakeSenders lets those look again who wait for room. The caller holds mu.
func (m *mailbox) wakeSenders() {
	if m.drained != nil {
		close(m.drained)
		m.drained = nil
	}
}
