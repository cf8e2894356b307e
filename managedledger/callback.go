package managedledger

import (
	"errors"
	"fmt"

	"github.com/magnetar-io/magnetar/executor"
)

// pendingRead is a ReadEntries that waits for something to read.
type pendingRead struct {
	limit Limit
	cb    func(depth int, b *Batch, err error)
}

// ReadEntries is TryRead with a callback, which is called exactly once. It stands
// on TryRead; code that has a goroutine of its own is better off with that.
//
// If the first entry is in memory, the callback runs before ReadEntries returns,
// on the calling goroutine, as long as fewer than
// managedLedgerMaxReadCompletionDepth callbacks are nested there. The callback
// receives a depth, which it passes on if it reads again; everybody else passes
// 0. (If it passes 0 all the same, the reader's own count of running callbacks
// stands in.) At the limit one completion goes to the shared pool.
//
// If nothing is in memory, ReadEntries returns and the callback runs once there
// is, on the pool. With managedLedgerReadEntriesCallbackInline=false callbacks run
// on the managed ledger's strand instead, in place if they are already there.
//
// Failures are reported on whichever goroutine meets them, with depth 0, and the
// read position stays, with one exception: if a completion is refused because the
// factory is closing, its entries are lost to this reader until it rewinds.
//
// One read at a time: a second one fails with [ErrReadPending]. A callback must
// not block, and releases the batch. No order holds between the callbacks of
// different readers.
func (r *Reader) ReadEntries(depth int, l Limit, cb func(depth int, b *Batch, err error)) {
	p := &pendingRead{limit: l.normalized(), cb: cb}
	r.mu.Lock()
	if r.pending != nil {
		r.mu.Unlock()
		cb(0, nil, fmt.Errorf("reader %q: %w", r.Name(), ErrReadPending))
		return
	}
	r.armed.Store(true) // before looking: an event after the look finds it set
	b, err := r.tryReadLocked(p.limit)
	if errors.Is(err, ErrWouldBlock) {
		r.pending = p
		r.mu.Unlock()
		return
	}
	r.armed.Store(false)
	r.mu.Unlock()
	r.complete(max(depth, 0), p, b, err, false)
}

// complete answers p. onStrand says that the caller runs on the managed ledger's
// strand, whatever depth says.
func (r *Reader) complete(depth int, p *pendingRead, b *Batch, err error, onStrand bool) {
	if err != nil {
		p.cb(0, nil, err)
		return
	}
	inline := r.m.cfg.ReadCallbackInline
	nested := max(depth, int(r.depth.Load()))
	// A depth above 0 comes from a callback, and without inline mode callbacks run
	// on the strand only.
	if nested < r.m.cfg.MaxReadCompletionDepth && (inline || onStrand || depth > 0) {
		r.call(nested, p, b)
		return
	}
	task := executor.Func(func() { r.call(0, p, b) })
	if inline {
		r.m.f.metrics.overflows.Inc()
		err = r.m.f.pool.Submit(task)
	} else {
		err = r.m.strand.Submit(task)
	}
	if err != nil {
		b.Release()
		p.cb(0, nil, fmt.Errorf("reader %q: completion refused: %w: %w", r.Name(), ErrClosed, err))
	}
}

// call runs the callback one level deeper than nested.
func (r *Reader) call(nested int, p *pendingRead, b *Batch) {
	r.depth.Add(1)
	defer r.depth.Add(-1) // also if it panics
	p.cb(nested+1, b, nil)
}

// resumeSoon tries the waiting ReadEntries again, away from whoever signals: that
// may be the goroutine that answers adds.
func (r *Reader) resumeSoon() {
	if r.m.cfg.ReadCallbackInline {
		if r.m.f.pool.Submit((*resumption)(r)) == nil {
			return
		}
	} else if r.m.strand.Submit((*resumption)(r)) == nil {
		return
	}
	// The executor is closed, and so is the managed ledger: only the answer is left.
	go (*resumption)(r).Run()
}

// resumption is a Reader as the task of trying its waiting ReadEntries again.
type resumption Reader

// Run answers the waiting ReadEntries if it can be.
func (t *resumption) Run() {
	r := (*Reader)(t)
	r.mu.Lock()
	p := r.pending
	if p == nil {
		r.mu.Unlock()
		return
	}
	b, err := r.tryReadLocked(p.limit)
	if errors.Is(err, ErrWouldBlock) {
		r.mu.Unlock()
		return
	}
	r.pending = nil
	r.armed.Store(false)
	r.mu.Unlock()
	r.complete(0, p, b, err, true)
}
