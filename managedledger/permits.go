package managedledger

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// reclaimEvery is how often, while reads wait for permits, idle readers are asked
// to give theirs up and waits that took too long are ended.
const reclaimEvery = 250 * time.Millisecond

// permits bounds the bytes that reads have in flight: being fetched from a
// bookie, waiting in a reader, or held by whoever received a batch.
//
// Fetches ask and wait in line. What has arrived, and what comes from the cache,
// is only counted: it is in memory already, and a cached read must not wait for
// somebody's fetch. Counting it makes later fetches wait.
type permits struct {
	limit   int64
	queue   int
	timeout time.Duration
	reclaim func() // asks idle holders to release

	mu     sync.Mutex
	used   int64           // guarded by mu
	line   []*permitWaiter // guarded by mu: first come, first served
	timer  *time.Timer     // guarded by mu: runs while somebody waits
	closed bool            // guarded by mu
	busy   sync.WaitGroup  // the timer's goroutine
}

type permitWaiter struct {
	bytes int64
	since time.Time
	grant func(error) // called once, without mu; must not block
	stop  func() bool // ends the watch on its context
}

// answer ends the wait.
func (w *permitWaiter) answer(err error) {
	w.stop()
	w.grant(err)
}

func newPermits(limit int64, queue int, timeout time.Duration, reclaim func()) *permits {
	return &permits{limit: limit, queue: queue, timeout: timeout, reclaim: reclaim}
}

// acquire calls grant once: with nil when bytes are reserved, perhaps at once, or
// with an error, at the latest when ctx ends. bytes must not be above the limit.
func (p *permits) acquire(ctx context.Context, bytes int64, grant func(error)) {
	p.mu.Lock()
	switch {
	case p.closed:
		p.mu.Unlock()
		grant(ErrClosed)
	case len(p.line) == 0 && p.fitsLocked(bytes):
		p.used += bytes
		p.mu.Unlock()
		grant(nil)
	case len(p.line) >= p.queue:
		n := len(p.line)
		p.mu.Unlock()
		grant(fmt.Errorf("%w: %d reads are waiting for a share of %d bytes already", ErrTooManyReads, n, p.limit))
	default:
		w := &permitWaiter{bytes: bytes, since: time.Now(), grant: grant}
		w.stop = context.AfterFunc(ctx, func() { p.leave(w) })
		p.line = append(p.line, w)
		if p.timer == nil {
			p.armLocked()
		}
		p.mu.Unlock()
	}
}

// leave ends w's wait because its context ended.
func (p *permits) leave(w *permitWaiter) {
	p.mu.Lock()
	at := slices.Index(p.line, w)
	if at < 0 {
		p.mu.Unlock()
		return
	}
	p.line = slices.Delete(p.line, at, at+1)
	p.mu.Unlock()
	w.grant(ErrClosed)
}

// fitsLocked: one request always fits when nothing is in flight.
func (p *permits) fitsLocked(bytes int64) bool {
	return p.used == 0 || p.used+bytes <= p.limit
}

// add counts bytes that are in memory anyway.
func (p *permits) add(bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used += bytes
}

// release gives bytes back and lets those in line go on.
func (p *permits) release(bytes int64) {
	if bytes == 0 {
		return
	}
	p.mu.Lock()
	p.used -= bytes
	granted := p.grantLocked()
	p.mu.Unlock()
	for _, w := range granted {
		w.answer(nil)
	}
}

func (p *permits) grantLocked() (granted []*permitWaiter) {
	for len(p.line) > 0 && p.fitsLocked(p.line[0].bytes) {
		p.used += p.line[0].bytes
		granted = append(granted, p.line[0])
		p.line[0] = nil
		p.line = p.line[1:]
	}
	return granted
}

// inUse returns the bytes in flight and how many fetches wait.
func (p *permits) inUse() (bytes int64, waiting int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used, len(p.line)
}

func (p *permits) armLocked() {
	p.busy.Add(1)
	p.timer = time.AfterFunc(reclaimEvery, p.tick)
}

// tick asks for permits back and ends waits that took too long.
func (p *permits) tick() {
	defer p.busy.Done()
	p.reclaim()
	p.mu.Lock()
	granted := p.grantLocked()
	var late []*permitWaiter
	for len(p.line) > 0 && time.Since(p.line[0].since) >= p.timeout {
		late = append(late, p.line[0])
		p.line = p.line[1:]
	}
	used := p.used
	p.timer = nil
	if len(p.line) > 0 && !p.closed {
		p.armLocked()
	}
	p.mu.Unlock()
	for _, w := range granted {
		w.answer(nil)
	}
	for _, w := range late {
		w.answer(fmt.Errorf("%w: waited %v for %d of %d bytes, %d are held", ErrTooManyReads, p.timeout, w.bytes, p.limit, used))
	}
}

// close fails those in line and waits for the timer.
func (p *permits) close() {
	p.mu.Lock()
	p.closed = true
	line := p.line
	p.line = nil
	if p.timer != nil && p.timer.Stop() {
		p.timer = nil
		p.busy.Done()
	}
	p.mu.Unlock()
	for _, w := range line {
		w.answer(ErrClosed)
	}
	p.busy.Wait()
}
