package managedledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/magnetar-io/magnetar/executor"
	"github.com/magnetar-io/magnetar/ledger"
)

// sources is the ordered read workers of a managed ledger, one for each ledger
// that was read from bookies.
type sources struct {
	flights sync.WaitGroup // reads going on or waiting for permits

	mu     sync.Mutex
	byID   map[ledger.ID]*source // guarded by mu
	closed bool                  // guarded by mu
}

// source is one ledger's worker. The strand decides and settles; it never waits.
// The I/O runs on goroutines of its own, so a slow read holds up neither another
// read of the same ledger nor anybody's appends.
type source struct {
	m       *ManagedLedger
	id      ledger.ID
	strand  *executor.Strand
	mu      sync.Mutex // for reads that settle after the strand was closed; lock it before any Reader's
	flights []*flight  // guarded by mu
}

// want is somebody's wish for the entries first to last of a ledger, or a prefix
// of them. It is its own task: deciding how to get them.
type want struct {
	source   *source
	reader   *Reader // or nil, and then answer is set
	answer   func([]ledger.Entry, error)
	replay   bool
	ledger   ledger.ID
	first    ledger.EntryID
	last     ledger.EntryID
	maxBytes int64
}

func (w *want) covers(p ledger.Position) bool {
	return w.ledger == p.Ledger && w.first <= p.Entry && p.Entry <= w.last
}

// deliver answers the want, once.
func (w *want) deliver(entries []ledger.Entry, err error) {
	if w.reader != nil {
		w.reader.settle(w, entries, err)
		return
	}
	w.answer(entries, err)
}

// flight is one read from the bookies, and who waits for it.
type flight struct {
	source      *source
	first, last ledger.EntryID
	maxBytes    int64
	reserved    int64 // permit held while the read goes on
	wants       []*want
	entries     []ledger.Entry
	err         error
}

// submit hands w to its ledger's worker. It returns false if there is none any
// more: the ledger was trimmed or the managed ledger is closing. Otherwise w is
// delivered exactly once, later.
func (s *sources) submit(m *ManagedLedger, w *want) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	src := s.byID[w.ledger]
	if src == nil {
		if !m.layout().Holds(ledger.Position{Ledger: w.ledger, Entry: w.first}) {
			return false
		}
		src = &source{m: m, id: w.ledger, strand: executor.NewStrand(m.f.guard)}
		if s.byID == nil {
			s.byID = map[ledger.ID]*source{}
		}
		s.byID[w.ledger] = src
	}
	w.source = src
	return src.strand.Submit(w) == nil
}

// drop ends the worker of a ledger that was trimmed. Reads going on are still
// delivered.
func (s *sources) drop(id ledger.ID) {
	s.mu.Lock()
	src := s.byID[id]
	delete(s.byID, id)
	s.mu.Unlock()
	if src != nil {
		src.strand.Close()
	}
}

// end refuses further wants and waits until those going on are delivered. The
// managed ledger's context has ended, so that they end soon.
func (s *sources) end() {
	s.mu.Lock()
	s.closed = true
	all := s.byID
	s.byID = nil
	s.mu.Unlock()
	for _, src := range all {
		src.strand.Close()
	}
	s.flights.Wait()
}

// Run decides how to get what w wants: by joining a read that is going on and
// covers its first entry, or by a new one. It runs on the strand.
func (w *want) Run() {
	src := w.source
	src.mu.Lock()
	defer src.mu.Unlock()
	for _, f := range src.flights {
		if f.first <= w.first && w.first <= f.last {
			f.wants = append(f.wants, w)
			src.m.f.metrics.joined.Inc()
			return
		}
	}
	f := &flight{source: src, first: w.first, last: w.last, maxBytes: w.maxBytes, wants: []*want{w}}
	mean := src.m.view.Load().meanEntry(src.id)
	f.reserved = min(f.maxBytes, int64(f.last-f.first+1)*mean, src.m.f.reads.limit)
	src.flights = append(src.flights, f)
	src.m.sources.flights.Add(1)
	src.m.f.reads.acquire(src.m.ctx, f.reserved, func(err error) { go f.fly(err) })
}

// fly reads, unless there was no permit for it, and hands the outcome to the
// strand. It is a goroutine of its own; sources.flights waits for it.
func (f *flight) fly(noPermit error) {
	src := f.source
	defer src.m.sources.flights.Done()
	if noPermit != nil {
		f.reserved = 0
		f.err = fmt.Errorf("read ledger %d from entry %d: %w", src.id, f.first, noPermit)
	} else {
		f.read()
	}
	if src.strand.Submit(f) != nil {
		f.Run() // the ledger was trimmed, or the managed ledger closed
	}
}

func (f *flight) read() {
	src := f.source
	metrics := src.m.f.metrics
	ctx, cancel := context.WithTimeout(src.m.ctx, src.m.cfg.readTimeout())
	defer cancel()
	start := time.Now()
	metrics.reads.Inc()
	f.entries, f.err = src.m.f.storage.Read(ctx, src.id, f.first, f.last, int(f.maxBytes))
	metrics.readSeconds.Observe(time.Since(start).Seconds())
	if f.err == nil {
		f.err = f.check()
	}
	switch {
	case f.err == nil:
		src.m.f.cache.Miss(len(f.entries), sizeOf(f.entries))
	case src.m.ctx.Err() != nil:
		f.entries, f.err = nil, src.m.failure()
		if f.err == nil {
			f.err = ErrClosed
		}
	default:
		metrics.readFailures.Inc()
		f.entries, f.err = nil, fmt.Errorf("read ledger %d from entry %d: %w", src.id, f.first, f.err)
	}
}

// check refuses an answer that is not what was asked for.
func (f *flight) check() error {
	if len(f.entries) == 0 {
		return errors.New("storage returned no entry")
	}
	for i, e := range f.entries {
		want := ledger.Position{Ledger: f.source.id, Entry: f.first + ledger.EntryID(i)}
		if e.Position != want || want.Entry > f.last {
			return fmt.Errorf("storage returned %v in place of %v", e.Position, want)
		}
	}
	return nil
}

// Run settles the read: everybody who waits gets the part it wants. It runs on
// the strand, or where the read ended once the strand is closed.
func (f *flight) Run() {
	src := f.source
	src.mu.Lock()
	defer src.mu.Unlock()
	src.flights = slices.DeleteFunc(src.flights, func(other *flight) bool { return other == f })
	for _, w := range f.wants {
		skip := int(w.first - f.first)
		switch {
		case f.err != nil:
			w.deliver(nil, f.err)
		case skip < len(f.entries):
			w.deliver(cut(f.entries[skip:], w), nil)
		case src.strand.Submit(w) != nil: // the read was cut short of it: ask again
			w.deliver(nil, ErrClosed)
		}
	}
	src.m.f.reads.release(f.reserved)
}

// cut returns the prefix of entries that w asked for.
func cut(entries []ledger.Entry, w *want) []ledger.Entry {
	n := min(len(entries), int(w.last-w.first)+1)
	var size int64
	for i := range entries[:n] {
		if size += int64(len(entries[i].Data)); size > w.maxBytes && i > 0 {
			return entries[:i:i]
		}
	}
	return entries[:n:n]
}

// ReadEntry returns the bytes of one entry. It returns an error that wraps
// [ledger.ErrNoSuchEntry] if there is none at p, or not any more.
func (m *ManagedLedger) ReadEntry(ctx context.Context, p ledger.Position) ([]byte, error) {
	if err := m.failure(); err != nil {
		return nil, err
	}
	if !m.layout().Holds(p) {
		return nil, fmt.Errorf("managed ledger %q, entry %v: %w", m.name, p, ledger.ErrNoSuchEntry)
	}
	var one [1]ledger.Entry
	if got := m.ring.Get(one[:0], p, 1, 0); len(got) == 1 {
		m.f.cache.Hit(1, int64(len(got[0].Data)))
		return got[0].Data, nil
	}
	type answer struct {
		entries []ledger.Entry
		err     error
	}
	answers := make(chan answer, 1)
	w := &want{
		ledger: p.Ledger, first: p.Entry, last: p.Entry, maxBytes: 1,
		answer: func(entries []ledger.Entry, err error) { answers <- answer{entries, err} },
	}
	if !m.sources.submit(m, w) {
		if err := m.failure(); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("managed ledger %q, entry %v was trimmed: %w", m.name, p, ledger.ErrNoSuchEntry)
	}
	select {
	case a := <-answers:
		if a.err != nil {
			return nil, fmt.Errorf("managed ledger %q: %w", m.name, a.err)
		}
		return a.entries[0].Data, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("managed ledger %q, entry %v: %w", m.name, p, ctx.Err())
	}
}
