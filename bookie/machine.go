package bookie

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

var _ raftlog.Machine = (*Machine)(nil)

// Machine is the replicated state of one ledger group: facts and runs, in three
// layers. What was applied since the last checkpoint is in current; what a
// checkpoint in progress is writing is in frozen; the rest is in the index. A
// newer layer hides an older one, ledger by ledger.
//
// Make one with [Store.Machine].
type Machine struct {
	store *Store
	group raftlog.GroupID
	log   *slog.Logger

	apply applier // apply goroutine only

	// installs counts states installed, so that a read knows whether what it
	// looked up was replaced. It rises before the old state's segments go.
	installs atomic.Uint64

	// checkpointMu is held for a whole checkpoint, for the beginning of a
	// stream and for the exchange at the end of an install, so that each sees
	// the index between two checkpoints.
	checkpointMu sync.Mutex

	mu        sync.RWMutex // guards what follows; never held across I/O
	applied   raftlog.Index
	durable   raftlog.Index // applied index in the index
	current   layer
	frozen    layer // nil unless a checkpoint is running
	live      map[uint64]int64
	persisted map[uint64]int64 // live as the index has it
	stopped   error            // why the machine applies nothing more
	closed    bool
}

// layer holds what changed, by ledger.
type layer map[ledger.ID]*change

// change is what a layer knows of one ledger.
type change struct {
	facts   facts
	deleted bool  // the ledger does not exist; facts mean nothing
	fresh   bool  // whatever older layers say of this ledger is void: it was deleted
	runs    []run // runs of this layer, ascending; older layers have the rest
	dead    []run // runs written in this layer and deleted in it
}

func openMachine(s *Store, group raftlog.GroupID) (*Machine, error) {
	applied, err := s.index.applied(s.index.db, group)
	if err != nil {
		return nil, err
	}
	live, err := liveBytes(s.index.db, group)
	if err != nil {
		return nil, fmt.Errorf("group %d: live bytes: %w", group, err)
	}
	m := &Machine{
		store: s, group: group, log: s.log.With("group", uint32(group)),
		applied: applied, durable: applied, current: layer{}, live: live, persisted: maps.Clone(live),
	}
	m.apply = applier{m: m, works: map[ledger.ID]*work{}}
	return m, nil
}

// Applied returns the index of the last command applied.
func (m *Machine) Applied() raftlog.Index {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.applied
}

// errMachineClosed reports use of a closed machine.
var errMachineClosed = errors.New("machine closed")

// Close makes what was applied durable, unless the machine has stopped, and
// ends its use. It may be called twice.
func (m *Machine) Close() error {
	m.mu.RLock()
	done := m.closed
	m.mu.RUnlock()
	if done {
		return nil
	}
	err := m.Checkpoint()
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.store.forget(m.group)
	return err
}

// stop ends the machine: nothing is applied or made durable from now on. It
// tells the program and returns err with the group's name.
func (m *Machine) stop(err error) error {
	err = fmt.Errorf("group %d stopped: %w", m.group, err)
	m.mu.Lock()
	if m.stopped == nil {
		m.stopped = err
	}
	m.mu.Unlock()
	m.store.fatal(err)
	return err
}

func (m *Machine) usable() error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.usableLocked()
}

func (m *Machine) usableLocked() error {
	if m.closed {
		return errMachineClosed
	}
	return m.stopped
}

// lookup returns the facts of a ledger as of the last command applied.
func (m *Machine) lookup(id ledger.ID) (f facts, ok bool, err error) {
	m.mu.RLock()
	for _, l := range []layer{m.current, m.frozen} {
		if c := l[id]; c != nil {
			f, ok = c.facts, !c.deleted
			m.mu.RUnlock()
			return f, ok, nil
		}
	}
	m.mu.RUnlock()
	return m.store.index.facts(m.group, id)
}

// runs returns runs that cover the ledger's entries from first on, in order,
// until one covers last or their records exceed maxBytes. It may return fewer, or
// none, if the ledger was deleted meanwhile.
func (m *Machine) runs(id ledger.ID, first, last ledger.EntryID, maxBytes int64) ([]run, error) {
	c := collector{next: first, last: last, room: maxBytes}
	m.mu.RLock()
	newer, older, fresh := coveredBy(m.current[id], first, maxBytes), []run(nil), false
	if hidden := m.current[id]; hidden != nil && hidden.fresh {
		fresh = true
	} else if hidden := m.frozen[id]; hidden != nil {
		older, fresh = coveredBy(hidden, first, maxBytes), hidden.fresh
	}
	m.mu.RUnlock()

	layered := slices.Concat(older, newer)
	if !fresh && (len(layered) == 0 || layered[0].first > first) {
		err := eachRun(m.store.index.db, m.group, id, first, func(r run) bool {
			if len(layered) > 0 && r.first >= layered[0].first {
				return false // a checkpoint has written meanwhile what we hold already
			}
			return c.add(r)
		})
		if err != nil {
			return nil, err
		}
	}
	for _, r := range layered {
		if !c.add(r) {
			break
		}
	}
	return c.runs, nil
}

// coveredBy returns a copy of the runs of c that end behind first, as many as
// hold maxBytes and at least one.
func coveredBy(c *change, first ledger.EntryID, maxBytes int64) []run {
	if c == nil {
		return nil
	}
	from, _ := slices.BinarySearchFunc(c.runs, first, func(r run, first ledger.EntryID) int {
		if r.end() <= first {
			return -1
		}
		return +1
	})
	to := from
	for size := int64(0); to < len(c.runs) && (to == from || size < maxBytes); to++ {
		size += int64(c.runs[to].length)
	}
	return slices.Clone(c.runs[from:to])
}

// collector gathers runs without a hole until it has enough.
type collector struct {
	runs []run
	next ledger.EntryID // the entry that the next run must hold
	last ledger.EntryID
	room int64
}

// add takes r if it holds the next entry, and says whether more is wanted.
func (c *collector) add(r run) bool {
	if c.next > c.last || (c.room <= 0 && len(c.runs) > 0) {
		return false
	}
	if r.end() <= c.next {
		return true
	}
	if r.first > c.next {
		return false // a hole: the reader finds the entry missing and says so
	}
	c.runs = append(c.runs, r)
	c.next, c.room = r.end(), c.room-int64(r.length)
	return c.next <= c.last && c.room > 0
}
