package managedledger

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/magnetar-io/magnetar/cursor"
	"github.com/magnetar-io/magnetar/entrycache"
	"github.com/magnetar-io/magnetar/executor"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata"
)

// state is what the append pipeline is doing. Reads go on in all but the last
// two.
type state uint8

const (
	stateOpen       state = iota // the current ledger takes entries
	stateClosing                 // it is full: sent entries are answered first, new ones wait
	stateCreating                // a new ledger is being made; entries wait
	stateTerminated              // sealed: no entry will ever be added
	stateClosed                  // closed by this owner
	stateFenced                  // taken over, or being deleted
)

var stateNames = [...]string{"LedgerOpened", "ClosingLedger", "CreatingLedger", "Terminated", "Closed", "Fenced"}

// String returns Pulsar's name of the state.
func (s state) String() string { return stateNames[s] }

// ManagedLedger is one topic's log. Open one with [Factory.Open]. All methods are
// safe for concurrent use.
type ManagedLedger struct {
	f     *Factory
	name  string
	cfg   Config // as it was when the managed ledger was opened
	log   *slog.Logger
	owner string // this opening's name in the records

	ctx        context.Context // ends background work
	cancel     context.CancelFunc
	background sync.WaitGroup // switching, trimming, reading; joined by Close
	fencedCh   chan struct{}  // closed by fence

	view     atomic.Pointer[view] // what exists; replaced under completing and mu
	ring     *entrycache.Ring     // written under completing
	strand   *executor.Strand     // callbacks of readers, if they are not inline
	registry registry             // its readers
	waiters  waiters              // readers that wait for the next entry
	sources  sources              // ledgers' ordered read workers
	trimming trimming

	// metaTurn holds a token while somebody changes the record. It is a channel
	// because it is held over I/O.
	metaTurn chan struct{}
	// cursorTurn holds a token while a durable cursor is opened, deleted or moved
	// back, and while trimming decides what nobody needs. It is taken after metaTurn.
	cursorTurn chan struct{}
	record     *record          // guarded by metaTurn; replaced, never changed
	version    metadata.Version // guarded by metaTurn
	failing    backoff          // guarded by metaTurn: between ledgers that failed at once

	// completing orders the answers of adds, whichever goroutine brings them: an
	// add is answered under it, so the next one cannot be before that.
	completing sync.Mutex

	ended        atomic.Pointer[error] // why nothing works any more; set once closing or fenced
	pendingBytes atomic.Int64
	totalAdded   atomic.Int64

	mu         sync.Mutex
	state      state         // guarded by mu
	refuse     error         // guarded by mu: set once adds are refused
	cause      error         // guarded by mu: why it is fenced
	writer     Writer        // guarded by mu: the current ledger's
	generation uint64        // guarded by mu: rises when a writer's answers stop to count
	pending    addQueue      // guarded by mu: adds not answered, in order
	sent       int           // guarded by mu: how many of them the writer has
	entries    int64         // guarded by mu: sent to the current ledger
	bytes      int64         // guarded by mu: likewise
	created    time.Time     // guarded by mu: when the current ledger was made
	maxAge     time.Duration // guarded by mu: rollover age of the current ledger
	changed    chan struct{} // guarded by mu: closed and replaced when pending or state changes
	closing    chan struct{} // guarded by mu: set by the first Close, closed when it is done
	closeErr   error         // set before closing is closed, read after
}

// view is what exists: the layout that cursors compute on, and sizes.
type view struct {
	layout  *cursor.Layout
	closed  []LedgerInfo // same order as layout.Closed()
	current *current     // nil when nothing will be written any more
}

// current is the ledger being written.
type current struct {
	cursor.Open
	bytes   atomic.Int64
	created time.Time
}

// newCurrent is a ledger without an entry, which comes after base others.
func newCurrent(id ledger.ID, base int64) *current {
	c := &current{created: time.Now()}
	c.ID, c.Base = id, base
	return c
}

// sumEntries adds up the entries of closed ledgers.
func sumEntries(closed []LedgerInfo) (sum int64) {
	for i := range closed {
		sum += closed[i].Entries
	}
	return sum
}

// newView pictures closed ledgers (with entries), and cur, which may be nil. base
// is how many entries came before the first of them; end stands for the last
// position when there is nothing.
func newView(closed []LedgerInfo, base int64, cur *current, end ledger.Position) *view {
	extents := make([]cursor.Extent, len(closed))
	for i, l := range closed {
		extents[i] = cursor.Extent{ID: l.ID, Entries: l.Entries, Base: base}
		base += l.Entries
	}
	v := &view{closed: closed, current: cur}
	var open *cursor.Open
	if cur != nil {
		open = &cur.Open
	}
	v.layout = cursor.NewLayout(extents, open, end)
	return v
}

// base returns how many entries came before the view's oldest.
func (v *view) base() int64 {
	if closed := v.layout.Closed(); len(closed) > 0 {
		return closed[0].Base
	}
	if v.current != nil {
		return v.current.Base
	}
	return 0
}

// meanEntry estimates the size of an entry of ledger id.
func (v *view) meanEntry(id ledger.ID) int64 {
	if v.current != nil && v.current.ID == id {
		if n := v.current.Entries(); n > 0 {
			return v.current.bytes.Load()/n + 1
		}
	}
	for i := range v.closed {
		if v.closed[i].ID == id {
			return v.closed[i].Bytes/v.closed[i].Entries + 1
		}
	}
	return 1024
}

// layout is what cursors compute on.
func (m *ManagedLedger) layout() *cursor.Layout { return m.view.Load().layout }

// Name returns the managed ledger's name.
func (m *ManagedLedger) Name() string { return m.name }

// Fenced is closed when the managed ledger fails because another owner took it
// over or it is being deleted. It is not closed by Close.
func (m *ManagedLedger) Fenced() <-chan struct{} { return m.fencedCh }

// LastConfirmed returns the position of the newest entry that is safely stored,
// or the place before the first one.
func (m *ManagedLedger) LastConfirmed() ledger.Position { return m.layout().Last() }

// FirstPosition returns the position of the oldest entry that is kept, or of the
// next one to be written if there is none.
func (m *ManagedLedger) FirstPosition() ledger.Position { return m.layout().First() }

// PendingBytes returns the bytes of the entries that were added and are not
// answered. Whoever calls Append keeps it bounded.
func (m *ManagedLedger) PendingBytes() int64 { return m.pendingBytes.Load() }

// usable reports whether the handle may be given out.
func (m *ManagedLedger) usable() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state != stateFenced && m.closing == nil
}

// failure returns why nothing works any more, nil while it does. It takes no
// lock, because every read asks.
func (m *ManagedLedger) failure() error {
	if p := m.ended.Load(); p != nil {
		return *p
	}
	return nil
}

// takeTurn waits for the right to change the record.
func (m *ManagedLedger) takeTurn(ctx context.Context) error {
	select {
	case m.metaTurn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (m *ManagedLedger) giveTurn() { <-m.metaTurn }

// save writes next as the record. The caller holds the turn. A conflict fences
// the managed ledger.
func (m *ManagedLedger) save(ctx context.Context, next *record) error {
	next.owner = m.owner
	version, err := putIf(ctx, m.f.meta, ledgerKey(m.name), next.marshal(), m.version, m.owner, recordOwner, m.f.backoff())
	if err != nil {
		return err
	}
	m.record, m.version = next, version
	return nil
}

// noteLocked tells those who wait for the pipeline that it changed.
func (m *ManagedLedger) noteLocked() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// LedgerStats describes one ledger of the list.
type LedgerStats struct {
	ID      ledger.ID
	Entries int64
	Bytes   int64
	Closed  time.Time // zero for the one being written
}

// Stats is a managed ledger's state for people.
type Stats struct {
	Name           string
	State          string // Pulsar's name of it
	Entries        int64  // kept, in all ledgers
	Bytes          int64
	Added          int64 // since it was opened
	Ledgers        []LedgerStats
	CurrentLedger  ledger.ID // 0 if there is none
	CurrentEntries int64
	CurrentBytes   int64
	CurrentCreated time.Time
	LastConfirmed  ledger.Position
	PendingAdds    int
	PendingBytes   int64
	WaitingReaders int
	Cursors        []cursor.Stats
}

// Stats returns the state of this moment.
func (m *ManagedLedger) Stats() Stats {
	v := m.view.Load()
	s := Stats{
		Name: m.name, Added: m.totalAdded.Load(), LastConfirmed: v.layout.Last(),
		PendingBytes: m.PendingBytes(), WaitingReaders: m.waiters.count(),
	}
	m.mu.Lock()
	s.State, s.PendingAdds = m.state.String(), m.pending.len()
	m.mu.Unlock()
	for _, l := range v.closed {
		s.Ledgers = append(s.Ledgers, LedgerStats(l))
		s.Entries += l.Entries
		s.Bytes += l.Bytes
	}
	if c := v.current; c != nil {
		s.CurrentLedger, s.CurrentEntries, s.CurrentBytes = c.ID, c.Entries(), c.bytes.Load()
		s.CurrentCreated = c.created
		s.Ledgers = append(s.Ledgers, LedgerStats{ID: c.ID, Entries: s.CurrentEntries, Bytes: s.CurrentBytes})
		s.Entries += s.CurrentEntries
		s.Bytes += s.CurrentBytes
	}
	for _, r := range m.registry.all() {
		s.Cursors = append(s.Cursors, r.c.Stats())
	}
	return s
}
