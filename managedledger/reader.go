package managedledger

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/magnetar-io/magnetar/cursor"
	"github.com/magnetar-io/magnetar/ledger"
)

// Limit bounds a batch. One entry is returned whatever its size.
type Limit struct {
	Entries int   // below 1 counts as 1
	Bytes   int64 // below 1 means no bound
}

func (l Limit) normalized() Limit {
	if l.Entries < 1 {
		l.Entries = 1
	}
	if l.Bytes < 1 {
		l.Bytes = math.MaxInt64
	}
	return l
}

// Batch is entries that were read, in order. Entries is the holder's; their bytes
// are immutable and stay valid.
type Batch struct {
	Entries []ledger.Entry

	reads *permits
	held  atomic.Int64 // bytes of the permit, until Release
}

// Release returns the batch's permit: its bytes no longer count as in flight.
// Whoever receives a batch calls it once it is done with it; calling it again
// does nothing.
func (b *Batch) Release() {
	if n := b.held.Swap(0); n > 0 {
		b.reads.release(n)
	}
}

// Bytes returns the size of the entries.
func (b *Batch) Bytes() (sum int64) {
	for i := range b.Entries {
		sum += int64(len(b.Entries[i].Data))
	}
	return sum
}

// Reader is a cursor joined to where the entries are. One goroutine at a time
// should read; acknowledging and asking is safe from anywhere beside it.
type Reader struct {
	m *ManagedLedger
	c *cursor.Cursor

	ready   chan struct{} // capacity 1
	waiting atomic.Bool   // it is in the managed ledger's list of waiters
	armed   atomic.Bool   // a ReadEntries waits for a signal
	depth   atomic.Int32  // callbacks of this reader that are running nested

	mu        sync.Mutex
	closed    bool                             // guarded by mu
	window    []ledger.Entry                   // guarded by mu: fetched, not yet returned, consecutive
	replayed  map[ledger.Position]ledger.Entry // guarded by mu: fetched for TryReplay
	touched   time.Time                        // guarded by mu: when something was last taken from or put into them
	streaming bool                             // guarded by mu: the last entries came from bookies
	fetch     *want                            // guarded by mu: the fetch that the next TryRead needs
	fetchErr  error                            // guarded by mu: what it ended with; for one TryRead
	replays   []*want                          // guarded by mu: fetches for TryReplay
	replayErr error                            // guarded by mu: for one TryReplay
	pending   *pendingRead                     // guarded by mu: a ReadEntries that waits
}

func newReader(m *ManagedLedger, c *cursor.Cursor) *Reader {
	return &Reader{m: m, c: c, ready: make(chan struct{}, 1)}
}

// Name returns the cursor's name.
func (r *Reader) Name() string { return r.c.Name() }

// Durable reports whether the cursor survives the process.
func (r *Reader) Durable() bool { return r.c.Durable() }

// Ready receives a value when it is worth calling TryRead or TryReplay again. One
// value may stand for several events, and may turn out to be for nothing; but
// after ErrWouldBlock one will come, unless the managed ledger stays as it is.
func (r *Reader) Ready() <-chan struct{} { return r.ready }

// signal makes Ready fire and runs a waiting ReadEntries.
func (r *Reader) signal() {
	select {
	case r.ready <- struct{}{}:
	default: // one is there already, and will be received after this
	}
	if r.armed.Load() {
		r.resumeSoon()
	}
}

// TryRead returns entries from the read position on, skipping acknowledged ones,
// and moves the read position behind them. It never blocks on I/O:
//
//   - If the first entry is in memory, it returns what is there from it on.
//   - If not, it starts fetching and returns [ErrWouldBlock].
//   - At the end it returns [ErrWouldBlock], or [ErrTerminated] if nothing more
//     will ever come.
//
// A fetch that failed is reported once, with the read position where it was;
// calling again tries again. After [ErrClosed] and [ErrFenced] nothing more comes.
func (r *Reader) TryRead(limit Limit) (*Batch, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.tryReadLocked(limit.normalized())
}

func (r *Reader) tryReadLocked(limit Limit) (*Batch, error) {
	if err := r.failureLocked(); err != nil {
		return nil, err
	}
	b := &Batch{reads: r.m.f.reads}
	before, epoch := r.c.Begin()
	bytes := limit.Bytes
	for len(b.Entries) < limit.Entries && bytes > 0 {
		first, n := r.c.Next(limit.Entries - len(b.Entries))
		if n == 0 {
			if len(b.Entries) > 0 {
				break
			}
			if r.m.view.Load().current == nil {
				return nil, r.endedLocked()
			}
			r.m.waiters.join(r)
			if first, n = r.c.Next(limit.Entries); n == 0 {
				if r.m.view.Load().current == nil {
					return nil, r.endedLocked()
				}
				return nil, ErrWouldBlock
			}
		}
		size := r.takeLocked(b, first, n, bytes)
		if size < 0 {
			if len(b.Entries) > 0 {
				break
			}
			return nil, r.missLocked(first, limit)
		}
		bytes -= size
		r.c.Advance(b.Entries[len(b.Entries)-1].Position, epoch)
	}
	r.prefetchLocked(limit)
	r.m.passed(before, b.Entries[len(b.Entries)-1].Position)
	return b, nil
}

// failureLocked returns why this reader works no more.
func (r *Reader) failureLocked() error {
	if r.closed {
		return fmt.Errorf("reader %q: %w", r.Name(), ErrClosed)
	}
	return r.m.failure()
}

// endedLocked is the answer at the end of a managed ledger that takes no more.
func (r *Reader) endedLocked() error {
	return fmt.Errorf("reader %q has read everything: %w", r.Name(), ErrTerminated)
}

// takeLocked appends to b up to n entries from first on, out of the cache or the
// window, and moves their permits to b. It returns their size, or -1 if the first
// one is in neither.
func (r *Reader) takeLocked(b *Batch, first ledger.Position, n int, maxBytes int64) int64 {
	had := len(b.Entries)
	// An entry that would start a batch is returned whatever its size; one that
	// would continue it must fit.
	b.Entries = r.m.ring.Get(b.Entries, first, n, maxBytes)
	if got := b.Entries[had:]; len(got) > 0 {
		size := sizeOf(got)
		if had > 0 && size > maxBytes {
			b.Entries = b.Entries[:had]
			return -1
		}
		b.held.Add(size)
		b.reads.add(size)
		r.m.f.cache.Hit(len(got), size)
		return size
	}
	r.trimWindowLocked(first)
	var size int64
	taken := 0
	for taken < n && taken < len(r.window) {
		e := r.window[taken]
		if e.Position != (ledger.Position{Ledger: first.Ledger, Entry: first.Entry + ledger.EntryID(taken)}) {
			break
		}
		if next := size + int64(len(e.Data)); next > maxBytes && had+taken > 0 {
			break
		}
		size += int64(len(e.Data))
		b.Entries = append(b.Entries, e)
		taken++
	}
	if taken == 0 {
		return -1
	}
	clear(r.window[:taken])
	r.window = r.window[taken:]
	b.held.Add(size) // the permit moves with the entries
	r.touched = time.Now()
	return size
}

// trimWindowLocked drops what lies before p in the window, and all of it if p is
// not in it.
func (r *Reader) trimWindowLocked(p ledger.Position) {
	if len(r.window) == 0 || r.window[0].Position == p {
		return
	}
	skip := len(r.window)
	if r.window[0].Position.Ledger == p.Ledger && p.Entry > r.window[0].Position.Entry {
		skip = int(min(int64(skip), int64(p.Entry-r.window[0].Position.Entry)))
	}
	gone := sizeOf(r.window[:skip])
	clear(r.window[:skip])
	r.window = r.window[skip:]
	r.m.f.reads.release(gone)
}

// missLocked is what TryRead answers when the entry at p is not in memory.
func (r *Reader) missLocked(p ledger.Position, limit Limit) error {
	if err := r.fetchErr; err != nil {
		r.fetchErr = nil
		return err
	}
	r.fetchLocked(p, limit)
	return ErrWouldBlock
}

// prefetchLocked asks for what follows the window once that is used up.
func (r *Reader) prefetchLocked(limit Limit) {
	if !r.streaming || r.fetch != nil || len(r.window) > 0 {
		return
	}
	r.window = nil
	first, n := r.c.Next(limit.Entries)
	if n == 0 || r.m.ring.Has(first) {
		r.streaming = false // caught up with the cache: nothing to fetch until the next miss
		return
	}
	r.fetchLocked(first, limit)
}

const (
	// fetchEntries and fetchBytes are the least that one fetch asks for, so that a
	// consumer with a permit for one message does not cost a read for each.
	fetchEntries = 128
	fetchBytes   = 1 << 20
	// maxFetchBytes bounds one fetch whatever the limit.
	maxFetchBytes = 5 << 20
)

// fetchLocked makes sure that the entry at p is being fetched for TryRead.
func (r *Reader) fetchLocked(p ledger.Position, limit Limit) {
	if r.fetch != nil && r.fetch.covers(p) {
		return
	}
	first, n := r.c.Next(max(limit.Entries, fetchEntries))
	if n == 0 || first != p {
		r.signal() // moved by an acknowledgement meanwhile: look again
		return
	}
	w := &want{
		reader: r, ledger: p.Ledger, first: p.Entry, last: p.Entry + ledger.EntryID(n) - 1,
		maxBytes: min(max(limit.Bytes, fetchBytes), maxFetchBytes, r.m.f.reads.limit),
	}
	r.fetch, r.fetchErr = w, nil
	if !r.m.sources.submit(r.m, w) {
		r.fetch = nil
		r.signal() // the ledger was trimmed, or the managed ledger closed: look again
	}
}

// settle delivers what a fetch brought. It runs on the ledger's worker.
func (r *Reader) settle(w *want, entries []ledger.Entry, err error) {
	if (errors.Is(err, ledger.ErrNoSuchLedger) || errors.Is(err, ErrClosed)) && !r.m.layout().Holds(ledger.Position{Ledger: w.ledger, Entry: w.first}) {
		entries, err = nil, nil // trimmed, with its worker, while it was being read: the reader goes on behind it
	}
	r.mu.Lock()
	switch {
	case w.replay:
		r.settleReplayLocked(w, entries, err)
	case r.fetch == w:
		r.fetch, r.fetchErr = nil, err
		if len(entries) > 0 && !r.closed {
			r.keepLocked(entries)
		}
	default: // the reader went elsewhere meanwhile
	}
	r.mu.Unlock()
	r.signal()
}

// keepLocked puts fetched entries behind the window, or in its place if they do
// not follow it.
func (r *Reader) keepLocked(entries []ledger.Entry) {
	if n := len(r.window); n > 0 && r.window[n-1].Position.Next() != entries[0].Position {
		r.dropWindowLocked()
	}
	size := sizeOf(entries)
	r.m.f.reads.add(size)
	r.window = append(r.window, entries...)
	r.streaming = true
	r.touched = time.Now()
}

func (r *Reader) dropWindowLocked() {
	gone := sizeOf(r.window)
	r.window = nil
	r.m.f.reads.release(gone)
}

// idleWindow is how long fetched entries may lie unused while others wait for
// permits.
const idleWindow = time.Second

// dropIdleWindow gives up fetched entries that nobody has asked for in a while.
// They are fetched again when somebody does.
func (r *Reader) dropIdleWindow() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.window)+len(r.replayed) > 0 && time.Since(r.touched) >= idleWindow {
		r.dropWindowLocked()
		r.dropReplayedLocked()
	}
}

func sizeOf(entries []ledger.Entry) (sum int64) {
	for i := range entries {
		sum += int64(len(entries[i].Data))
	}
	return sum
}

// passed lets go of cached entries that every reader has passed, when a reader
// went over the end of a block.
func (m *ManagedLedger) passed(from, to ledger.Position) {
	const block = 32
	if from.Ledger == to.Ledger && from.Entry/block == (to.Entry+1)/block {
		return
	}
	oldest, ok := m.ring.Oldest()
	if !ok {
		return
	}
	slowest, found := ledger.Position{}, false
	for _, r := range m.registry.all() {
		// A reader before the ring's beginning will miss it whatever is kept.
		if p := r.c.ReadPosition(); !p.Before(oldest) && (!found || p.Before(slowest)) {
			slowest, found = p, true
		}
	}
	if found && slowest.After(oldest) {
		m.ring.DropBefore(slowest)
	}
}

// shut ends the reader: whoever waits on it gets ErrClosed.
func (r *Reader) shut() {
	r.mu.Lock()
	r.closed = true
	r.fetch = nil
	r.replays = nil
	r.dropWindowLocked()
	r.dropReplayedLocked()
	r.mu.Unlock()
	r.signal()
}

// Close ends reading. Of a durable cursor it saves the state; the cursor stays
// and goes on holding its data, and OpenCursor gives the reader out again. A
// reader that is not durable is gone.
func (r *Reader) Close(ctx context.Context) error {
	r.shut()
	if !r.Durable() {
		r.m.registry.remove(r)
		return r.c.Close(ctx)
	}
	return r.c.Flush(ctx)
}

// reopen makes a closed durable reader usable again, from the mark-delete
// position.
func (r *Reader) reopen() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		r.closed = false
		r.c.Rewind()
	}
}
