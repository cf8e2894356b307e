package journal

import (
	"errors"
	"fmt"
)

// reclaim gives up segments, oldest first, whose entries nobody needs.
func (j *Journal) reclaim() error {
	for {
		s := j.segment(j.first)
		if s == j.active || s.entries.Load() > 0 {
			return nil
		}
		j.segMu.Lock()
		delete(j.segments, s.number)
		j.segMu.Unlock()
		j.first++
		j.m.segments.Set(float64(j.active.number - j.first + 1))
		spare := j.path(s.number, spareSuffix)
		var err error
		if s.retire() && len(j.spares) < maxSpares && s.size == uint64(j.opts.SegmentBytes) {
			if err = j.fs.Rename(s.path, spare); err == nil {
				j.spares = append(j.spares, spare)
			}
		} else {
			err = j.fs.Remove(s.path) // whoever reads it still holds the file
		}
		if err == nil {
			// Before the next one goes, and before anything is written into a spare.
			err = j.fs.SyncDir(j.dir)
		}
		if err != nil {
			return fmt.Errorf("give up journal segment %d: %w", s.number, err)
		}
	}
}

// relocating reports whether the oldest segment is to be emptied by copying what
// is live in it: there are too many, and at least half of what they hold is dead,
// so that what is copied is never more than what is won.
func (j *Journal) relocating() bool {
	n := int64(j.active.number-j.first) + 1
	s := j.segment(j.first)
	return n > int64(j.opts.MaxSegments) && s != j.active && !s.stuck && 2*j.live.Load() <= n*j.opts.SegmentBytes
}

// relocateStep copies some live entries of the oldest segment to the end of the
// journal.
func (j *Journal) relocateStep() error {
	s, left := j.segment(j.first), int64(relocateChunk)
	for _, l := range j.allLogs() {
		indexes, at := l.resting(s.number, left)
		for i, index := range indexes {
			r, err := s.read(l.id, index, at[i])
			if err != nil {
				if _, damaged := errors.AsType[*DamageError](err); !damaged {
					return err
				}
				// It is not ours to judge: whoever needs the entry hears of it.
				j.opts.Log.Error("a log entry in the journal is damaged; its segment stays", "group", uint32(l.id), "index", index, "err", err)
				s.stuck = true
				return j.flush()
			}
			r.kind = kindRelocation
			if err := j.put(l, kindRelocation, index, r.term, r.append(nil)); err != nil {
				return err
			}
			left -= int64(at[i].length)
			j.m.relocated.Add(float64(at[i].length))
		}
		if left <= 0 {
			break
		}
	}
	if err := j.flush(); err != nil {
		return err
	}
	return j.reclaim()
}
