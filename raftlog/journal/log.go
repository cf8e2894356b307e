package journal

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/hashicorp/raft"
)

// Group names one Raft group of the bookie.
type Group uint32

// slot is where one entry of a log rests. segment 0 is a hole, which exists only
// while a journal is being recovered.
type slot struct {
	segment uint32
	offset  uint32
	length  uint32
	term    uint64
}

// Log is one group's log: a raft.LogStore that is monotonic and tracks the commit
// index. Writes go through the journal's committer.
type Log struct {
	j  *Journal
	id Group

	planned span // the log once everything that the committer took is done; committer only

	mu     sync.RWMutex // guards what follows; never held during I/O
	base   uint64       // index of slots[0]; meaningless if slots is empty
	slots  []slot
	unused int // slots in front of slots that its array still holds
	commit uint64
	staged uint64 // goes to disk with the next StoreLogs; 0 = nothing to say
}

var (
	_ raft.LogStore               = (*Log)(nil)
	_ raft.MonotonicLogStore      = (*Log)(nil)
	_ raft.CommitTrackingLogStore = (*Log)(nil)
)

// span is a run of indexes; first 0 is an empty one.
type span struct{ first, last uint64 }

func (s *span) cutSuffix(from uint64) {
	if s.last < from {
		return
	}
	s.last = from - 1
	if s.last < s.first {
		*s = span{}
	}
}

func (s *span) cutPrefix(before uint64) {
	if s.first = max(s.first, before); s.last < s.first {
		*s = span{}
	}
}

// IsMonotonic implements [raft.MonotonicLogStore]: there are no gaps.
func (l *Log) IsMonotonic() bool { return true }

// FirstIndex implements [raft.LogStore].
func (l *Log) FirstIndex() (uint64, error) { return l.bounds().first, nil }

// LastIndex implements [raft.LogStore].
func (l *Log) LastIndex() (uint64, error) { return l.bounds().last, nil }

func (l *Log) bounds() span {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if len(l.slots) == 0 {
		return span{}
	}
	return span{l.base, l.base + uint64(len(l.slots)) - 1}
}

// GetLog implements [raft.LogStore]. The error is raft.ErrLogNotFound for an entry
// that is not in the log, a [DamageError] for one whose bytes are not what was
// written. The bytes in into belong to the caller.
func (l *Log) GetLog(index uint64, into *raft.Log) error {
	l.mu.RLock()
	if index < l.base || index-l.base >= uint64(len(l.slots)) {
		l.mu.RUnlock()
		return raft.ErrLogNotFound
	}
	at := l.slots[index-l.base]
	seg := l.j.acquire(at.segment) // under mu: nothing drops a segment that a slot names
	l.mu.RUnlock()
	if seg == nil {
		return ErrClosed
	}
	defer seg.release()
	r, err := seg.read(l.id, index, at)
	if err != nil {
		return err
	}
	r.log(into)
	return nil
}

// StoreLog implements [raft.LogStore].
func (l *Log) StoreLog(log *raft.Log) error { return l.StoreLogs([]*raft.Log{log}) }

// StoreLogs implements [raft.LogStore]. The entries must be consecutive and must
// not leave a gap behind the log. If the log holds entries from the first index
// on, those are cut first.
func (l *Log) StoreLogs(logs []*raft.Log) error {
	if len(logs) == 0 {
		return nil
	}
	r := &request{log: l, logs: logs, ends: make([]int, len(logs)), done: make(chan error, 1)}
	size := 0
	for _, e := range logs {
		size += recordBytes + len(e.Extensions) + len(e.Data)
	}
	r.buf = make([]byte, 0, size)
	for i, e := range logs {
		if want := logs[0].Index + uint64(i); e.Index != want || want == 0 {
			return fmt.Errorf("group %d: store entry %d where %d is next: want consecutive entries", l.id, e.Index, want)
		}
		rec := entryRecord(l.id, e)
		if rec.size() > l.j.maxRecord {
			return fmt.Errorf("group %d: entry %d takes %d bytes, more than the %d that fit", l.id, e.Index, rec.size(), l.j.maxRecord)
		}
		r.buf = rec.append(r.buf)
		r.ends[i] = len(r.buf)
	}
	return l.j.do(r)
}

// DeleteRange implements [raft.LogStore]. The range must reach one end of the
// log: there are no holes.
func (l *Log) DeleteRange(low, high uint64) error {
	if low > high {
		return nil
	}
	return l.j.do(&request{log: l, low: low, high: high, done: make(chan error, 1)})
}

// StageCommitIndex implements [raft.CommitTrackingLogStore].
func (l *Log) StageCommitIndex(index uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.staged = index
	return nil
}

// GetCommitIndex implements [raft.CommitTrackingLogStore].
func (l *Log) GetCommitIndex() (uint64, error) {
	last := l.bounds().last
	l.mu.RLock()
	defer l.mu.RUnlock()
	return min(l.commit, last), nil
}

func (l *Log) takeStaged() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.staged
	l.staged = 0
	return s
}

// errOrder is what records of sound bytes and impossible order are.
var errOrder = errors.New("records contradict each other")

// apply does what o says, whose entries rest in seg. It fails only on a journal
// that this program did not write.
func (l *Log) apply(o op, seg *segment) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch o.kind {
	case kindEntry:
		l.cutSuffix(o.index)
		if len(l.slots) == 0 {
			l.base = o.index
		}
		if err := l.reach(o.index); err != nil {
			return err
		}
		for _, at := range o.at {
			l.slots = append(l.slots, l.rest(o.term, at, seg))
		}
	case kindRelocation:
		return l.relocate(o, seg)
	case kindTruncate:
		l.cutSuffix(o.index)
	case kindFirst:
		l.cutPrefix(o.index)
	case kindReset:
		l.cutSuffix(0)
		l.commit = 0
	case kindCommit:
		l.commit = o.index
	}
	return nil
}

// rest makes a slot and counts it for its segment.
func (l *Log) rest(term uint64, at location, seg *segment) slot {
	seg.count(1, int64(at.length))
	return slot{seg.number, at.offset, at.length, term}
}

// drop counts a slot out. The caller holds mu.
func (l *Log) drop(s slot) {
	if s.segment != 0 {
		l.j.segment(s.segment).count(-1, -int64(s.length))
	}
}

// relocate gives entries of the log another place. During recovery the place
// before may be gone already, so the entries may not be known yet. The caller
// holds mu.
func (l *Log) relocate(o op, seg *segment) error {
	if len(l.slots) == 0 {
		l.base = o.index
	}
	if l.base-o.index < maxHoles && o.index < l.base {
		l.slots = append(make([]slot, l.base-o.index), l.slots...)
		l.base, l.unused = o.index, 0
	}
	if err := l.reach(o.index); err != nil {
		return err
	}
	for i, at := range o.at {
		k := o.index + uint64(i) - l.base
		if k == uint64(len(l.slots)) {
			l.slots = append(l.slots, l.rest(o.term, at, seg))
			continue
		}
		if l.slots[k].segment != 0 && l.slots[k].term != o.term {
			return fmt.Errorf("%w: group %d: relocation of entry %d of term %d, which the log does not hold", errOrder, l.id, o.index+uint64(i), o.term)
		}
		l.drop(l.slots[k])
		l.slots[k] = l.rest(o.term, at, seg)
	}
	return nil
}

// maxHoles bounds how much of a log can be missing while a journal is recovered.
const maxHoles = 1 << 26

// reach makes the log reach up to index, which it does unless the journal is
// being recovered: entries in between that were relocated later than what is at
// index are holes until then. The caller holds mu.
func (l *Log) reach(index uint64) error {
	end := l.base + uint64(len(l.slots))
	if index <= end && index >= l.base {
		return nil
	}
	if !l.j.recovering || index < l.base || index-end > maxHoles {
		return fmt.Errorf("%w: group %d: entry %d in a log from %d to %d", errOrder, l.id, index, l.base, end-1)
	}
	l.slots = append(l.slots, make([]slot, index-end)...)
	return nil
}

// cutSuffix forgets the entries from index on. The caller holds mu.
func (l *Log) cutSuffix(index uint64) {
	keep := uint64(0)
	if index > l.base {
		keep = min(index-l.base, uint64(len(l.slots)))
	}
	for _, s := range l.slots[keep:] {
		l.drop(s)
	}
	l.slots = l.slots[:keep]
	l.shrink()
}

// cutPrefix forgets the entries before index. The caller holds mu.
func (l *Log) cutPrefix(index uint64) {
	if len(l.slots) == 0 || index <= l.base {
		return
	}
	n := min(index-l.base, uint64(len(l.slots)))
	for _, s := range l.slots[:n] {
		l.drop(s)
	}
	l.slots, l.base, l.unused = l.slots[n:], l.base+n, l.unused+int(n)
	l.shrink()
}

// smallLog is how many slots are not worth giving back.
const smallLog = 1024

// shrink keeps the index's memory in proportion to the log. The caller holds mu.
func (l *Log) shrink() {
	if l.unused+cap(l.slots) > 4*len(l.slots)+smallLog {
		l.slots, l.unused = slices.Clip(slices.Clone(l.slots)), 0
	}
}

// hole returns an index without a place, if there is one.
func (l *Log) hole() (uint64, bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for i, s := range l.slots {
		if s.segment == 0 {
			return l.base + uint64(i), true
		}
	}
	return 0, false
}

// resting returns the entries that rest in a segment, from the lowest index on,
// until they take that many bytes.
func (l *Log) resting(number uint32, bytes int64) (indexes []uint64, at []slot) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for i, s := range l.slots {
		if bytes <= 0 {
			break
		}
		if s.segment == number {
			indexes, at = append(indexes, l.base+uint64(i)), append(at, s)
			bytes -= int64(s.length)
		}
	}
	return indexes, at
}
