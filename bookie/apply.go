package bookie

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

// flushBytes is how much of one batch's entries gathers before it is written.
const flushBytes = 1 << 20

// outcome is what became of one operation. Apply answers each command with one
// per operation, as a []outcome.
type outcome struct {
	last  ledger.EntryID // the ledger's last entry, or that of the append
	bytes int64          // of the ledger
	err   error          // nil = done, or had been done before
}

// Apply decides and carries out commands, in order. Entries are written before
// any reader can see them. The answer to a command is a []outcome, or an error
// if the machine has stopped.
func (m *Machine) Apply(batch []raftlog.Command) []any {
	results := make([]any, len(batch))
	a := &m.apply
	err := m.usable()
	for i, c := range batch {
		if err == nil {
			results[i], err = a.command(c)
		}
		if err != nil {
			results[i] = fmt.Errorf("%w: %w", err, ledger.ErrUnknownOutcome)
		}
	}
	if errCommit := a.commit(); errCommit != nil {
		for i := range results {
			results[i] = fmt.Errorf("%w: %w", errCommit, ledger.ErrUnknownOutcome)
		}
	}
	return results
}

// applier is the state of one Apply: what its commands have changed so far and
// no reader sees yet.
type applier struct {
	m       *Machine
	works   map[ledger.ID]*work
	index   raftlog.Index // last command decided; 0 = none
	ops     []op
	entries int   // stored by this batch
	bytes   int64 // of those
	out     recordWriter
}

// work is one ledger as this batch sees it.
type work struct {
	change
	id      ledger.ID
	exists  bool
	touched bool
}

// command carries out one command. An error means that the machine has stopped.
func (a *applier) command(c raftlog.Command) ([]outcome, error) {
	if last := max(a.index, a.m.applied); c.Index <= last { // applied changes on this goroutine only
		return nil, a.m.stop(fmt.Errorf("command at index %d came after the one at %d", c.Index, last))
	}
	var err error
	a.ops, err = decodeCommand(c.Data, a.ops[:0])
	if err != nil {
		return nil, a.m.stop(fmt.Errorf("command at index %d: %w", c.Index, err))
	}
	outcomes := make([]outcome, len(a.ops))
	for i := range a.ops {
		outcomes[i], err = a.op(&a.ops[i], c.Index)
		if err != nil {
			return nil, a.m.stop(fmt.Errorf("command at index %d: %w", c.Index, err))
		}
	}
	clear(a.ops) // the frames belong to the log
	a.index = c.Index
	return outcomes, nil
}

func (a *applier) load(id ledger.ID) (*work, error) {
	if w := a.works[id]; w != nil {
		return w, nil
	}
	f, ok, err := a.m.lookup(id)
	if err != nil {
		return nil, err
	}
	w := &work{id: id, exists: ok, change: change{facts: f}}
	a.works[id] = w
	return w, nil
}

func (a *applier) op(o *op, index raftlog.Index) (outcome, error) {
	w, err := a.load(o.ledger)
	if err != nil {
		return outcome{}, err
	}
	switch {
	case o.kind == opCreate:
		return a.create(w, o), nil
	case o.kind == opDelete:
		return outcome{}, a.delete(w)
	case !w.exists:
		return outcome{err: fmt.Errorf("ledger %d: %w", o.ledger, ledger.ErrNoSuchLedger)}, nil
	case o.kind == opFence:
		return a.fence(w, o), nil
	case o.kind == opClose:
		return a.close(w, o), nil
	default:
		return a.append(w, o, index)
	}
}

func (a *applier) create(w *work, o *op) outcome {
	switch {
	case !w.exists:
		w.exists, w.deleted, w.touched = true, false, true
		w.facts = facts{state: stateOpen, epoch: o.epoch, owner: o.owner}
	case w.facts.owner != o.owner:
		return outcome{err: fmt.Errorf("ledger %d exists, owned by %q and not %q: %w", w.id, w.facts.owner, o.owner, rpc.ErrInvalid)}
	case w.facts.epoch != o.epoch:
		return outcome{err: fmt.Errorf("ledger %d exists at epoch %d and not %d: %w", w.id, w.facts.epoch, o.epoch, ledger.ErrFenced)}
	}
	return w.end()
}

// delete forgets the ledger and its runs. Its bytes in segments are released by
// the next checkpoint.
func (a *applier) delete(w *work) error {
	if !w.exists {
		return nil
	}
	if err := a.flush(); err != nil { // so that every run of w is known
		return err
	}
	w.dead = append(w.dead, w.runs...)
	w.runs = nil
	w.exists, w.deleted, w.fresh, w.touched = false, true, true, true
	return nil
}

func (a *applier) fence(w *work, o *op) outcome {
	switch {
	case o.epoch < w.facts.epoch:
		return outcome{err: w.stale(o)}
	case w.facts.state == stateClosed: // its end is fixed already
	case o.epoch > w.facts.epoch:
		w.facts.epoch, w.facts.state, w.touched = o.epoch, stateFenced, true
	case w.facts.state == stateOpen: // its own writer's epoch
		return outcome{err: fmt.Errorf("ledger %d: fence with epoch %d, want more than its writer's: %w", w.id, o.epoch, rpc.ErrInvalid)}
	}
	return w.end()
}

func (a *applier) close(w *work, o *op) outcome {
	if w.facts.state == stateFenced || o.epoch != w.facts.epoch {
		return outcome{err: w.stale(o)}
	}
	if w.facts.state == stateOpen {
		w.facts.state, w.touched = stateClosed, true
	}
	return w.end()
}

// append stores the part of o that is not there yet. A stale epoch is refused
// even if everything is there: what a fenced writer believes must not matter.
func (a *applier) append(w *work, o *op, index raftlog.Index) (outcome, error) {
	if w.facts.state == stateFenced || o.epoch != w.facts.epoch {
		return outcome{err: w.stale(o)}, nil
	}
	if o.first > w.facts.next {
		return outcome{err: fmt.Errorf("ledger %d: append of entry %d, the next is %d: %w", w.id, o.first, w.facts.next, ledger.ErrGap)}, nil
	}
	known, rest, err := split(o.frames, int64(w.facts.next-o.first))
	if err != nil {
		return outcome{}, err
	}
	if len(known) > 0 {
		same, err := a.stored(w, o.first, known)
		switch {
		case errors.Is(err, ledger.ErrDamaged) && len(rest) == 0:
			return outcome{err: err}, nil // nothing changes whatever the answer
		case err != nil:
			return outcome{}, err
		case !same:
			return outcome{err: fmt.Errorf("ledger %d: an entry from %d on is there with other bytes: %w", w.id, o.first, rpc.ErrInvalid)}, nil
		}
	}
	if len(rest) == 0 {
		n, _, err := countFrames(known)
		return outcome{last: o.first + ledger.EntryID(n) - 1, bytes: w.facts.bytes}, err
	}
	if w.facts.state == stateClosed {
		return outcome{err: fmt.Errorf("ledger %d ends at entry %d: %w", w.id, w.facts.last(), ledger.ErrClosed)}, nil
	}
	count, size, err := countFrames(rest)
	if err != nil {
		return outcome{}, err
	}
	a.out.add(a.m.store, record{
		group: a.m.group, count: uint32(count), index: index,
		ledger: w.id, first: w.facts.next, body: uint32(len(rest)),
	}, rest, w)
	w.facts.next += ledger.EntryID(count)
	w.facts.bytes += size
	w.touched = true
	a.entries, a.bytes = a.entries+count, a.bytes+size
	if a.out.size() >= flushBytes {
		err = a.flush()
	}
	return w.end(), err
}

// stored reports whether the entries from first on have the same bytes as
// frames. Their checksums are compared first, by the frames' headers.
func (a *applier) stored(w *work, first ledger.EntryID, frames []byte) (bool, error) {
	if err := a.flush(); err != nil { // entries of this very batch
		return false, err
	}
	same := true
	for len(frames) > 0 && same {
		runs := coveredBy(&w.change, first, int64(len(frames)))
		if (len(runs) == 0 || runs[0].first > first) && !w.fresh {
			published, err := a.m.runs(w.id, first, w.facts.last(), int64(len(frames)))
			if err != nil {
				return false, err
			}
			runs = append(published, runs...)
		}
		have := readBuffer{out: a.m.store.buffer(), limit: int64(len(frames))}
		count, err := a.m.readRuns(runs, w.id, first, w.facts.last(), &have)
		if err == nil && count == 0 {
			err = fmt.Errorf("ledger %d: no run holds entry %d: %w", w.id, first, ledger.ErrDamaged)
		}
		if err == nil {
			n := min(len(*have.out), len(frames))
			same = bytes.Equal((*have.out)[:n], frames[:n])
			frames, first = frames[n:], first+ledger.EntryID(count)
		}
		a.m.store.recycle(have.out)
		if err != nil {
			return false, err
		}
	}
	return same, nil
}

// flush writes what has gathered and notes the runs.
func (a *applier) flush() error {
	return a.out.flush(a.m.store)
}

// commit writes the rest and lets readers see everything that was decided.
func (a *applier) commit() error {
	defer a.reset()
	if a.index == 0 {
		return nil
	}
	if err := a.flush(); err != nil {
		return a.m.stop(err)
	}
	m := a.m
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, w := range a.works {
		if w.touched {
			m.publishLocked(id, &w.change)
		}
	}
	for number, n := range a.out.live {
		m.live[number] += n
	}
	m.applied = a.index
	m.store.metrics.entries.Add(float64(a.entries))
	m.store.metrics.bytes.Add(float64(a.bytes))
	return nil
}

// publishLocked lays one ledger's change over the current layer.
func (m *Machine) publishLocked(id ledger.ID, w *change) {
	c := m.current[id]
	if c == nil {
		c = &change{}
		m.current[id] = c
	}
	if w.fresh {
		c.dead = append(c.dead, c.runs...)
		c.runs, c.fresh = nil, true
	}
	c.dead = append(c.dead, w.dead...)
	c.facts, c.deleted = w.facts, w.deleted
	for _, r := range w.runs {
		c.runs = appendRun(c.runs, r)
	}
}

func (a *applier) reset() {
	clear(a.works)
	a.index, a.entries, a.bytes = 0, 0, 0
	a.out.reset()
}

func (w *work) end() outcome { return outcome{last: w.facts.last(), bytes: w.facts.bytes} }

func (w *work) stale(o *op) error {
	return fmt.Errorf("ledger %d is %v at epoch %d, the request has epoch %d: %w", w.id, w.facts.state, w.facts.epoch, o.epoch, ledger.ErrFenced)
}

// split cuts frames behind the n-th one; n at or below 0 cuts at the beginning.
func split(frames []byte, n int64) (head, tail []byte, err error) {
	tail = frames
	for ; n > 0 && len(tail) > 0; n-- {
		if _, _, tail, err = bookiepb.Next(tail); err != nil {
			return nil, nil, err
		}
	}
	return frames[:len(frames)-len(tail)], tail, nil
}

// countFrames returns the number of frames and the sum of their data, without
// looking at the data: the command's checksum covers it.
func countFrames(frames []byte) (count int, size int64, err error) {
	for len(frames) > 0 {
		data, _, rest, err := bookiepb.Next(frames)
		if err != nil {
			return 0, 0, err
		}
		count, size, frames = count+1, size+int64(len(data)), rest
	}
	return count, size, nil
}
