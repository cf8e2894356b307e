package bookie

import (
	"errors"
	"fmt"
	"io"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/ledger"
)

// readBuffer receives the frames that a read finds.
type readBuffer struct {
	out   *[]byte
	limit int64 // stop before out exceeds it; the first entry always fits
}

// full reports whether n more bytes are too many.
func (b *readBuffer) full(n int) bool {
	return len(*b.out) > 0 && int64(len(*b.out)+n) > b.limit
}

// read appends frames of the ledger's entries from first to last to b, a
// non-empty prefix, and returns their number. It answers from what this replica
// has applied:
// [ledger.ErrNoSuchLedger] and [ledger.ErrNoSuchEntry] are the truth only where
// the caller has made sure of that.
func (m *Machine) read(id ledger.ID, first, last ledger.EntryID, b *readBuffer) (int, error) {
	for {
		installs := m.installs.Load()
		f, ok, err := m.lookup(id)
		switch {
		case err != nil:
			return 0, err
		case !ok:
			return 0, fmt.Errorf("ledger %d: %w", id, ledger.ErrNoSuchLedger)
		case first >= f.next:
			return 0, fmt.Errorf("ledger %d ends at entry %d, wanted %d: %w", id, f.last(), first, ledger.ErrNoSuchEntry)
		}
		runs, err := m.runs(id, first, min(last, f.last()), b.limit)
		if err != nil {
			return 0, err
		}
		if *b.out == nil {
			*b.out = make([]byte, 0, sizeOf(runs, b.limit))
		}
		count, err := m.readRuns(runs, id, first, last, b)
		if count > 0 {
			return count, nil // damage further on is the next read's
		}
		if err == nil {
			err = fmt.Errorf("ledger %d: no run holds entry %d: %w", id, first, ledger.ErrDamaged)
		}
		// A ledger deleted since the lookup loses its runs and segments, and an
		// installed state keeps it elsewhere.
		if _, still, errLookup := m.lookup(id); errLookup == nil && (!still || m.installs.Load() != installs) {
			continue
		}
		return 0, err
	}
}

// sizeOf is a good capacity for the frames in runs, of which limit bytes are
// wanted.
func sizeOf(runs []run, limit int64) int64 {
	n := int64(0)
	for _, r := range runs {
		n += int64(r.length)
	}
	return min(n, limit)
}

// readRuns appends the frames of entries first to last out of runs, which hold
// them in order, until b is full. The number of entries is good even with an
// error, which wraps [ledger.ErrDamaged].
func (m *Machine) readRuns(runs []run, id ledger.ID, first, last ledger.EntryID, b *readBuffer) (int, error) {
	buf := m.store.buffer()
	defer m.store.recycle(buf)
	next := first
	for _, r := range runs {
		if next > last || r.first > next {
			break
		}
		n, full, err := m.readRun(r, id, next, last, buf, b)
		next += ledger.EntryID(n)
		if err != nil || full {
			return int(next - first), err
		}
	}
	return int(next - first), nil
}

// readRun appends what it can of entries first to last out of one run.
func (m *Machine) readRun(r run, id ledger.ID, first, last ledger.EntryID, buf *[]byte, b *readBuffer) (n int, full bool, err error) {
	if err := m.load(r, buf); err != nil {
		return 0, false, fmt.Errorf("ledger %d, entry %d: %w", id, first, err)
	}
	at, rest := r.first, *buf
	for len(rest) > 0 {
		var h record
		var frames []byte
		if h, frames, rest, err = parseRecord(rest); err != nil {
			break
		}
		if h.segment != r.segment || h.group != m.group || h.ledger != id || h.first != at {
			err = fmt.Errorf("record of segment %d, group %d, ledger %d, entry %d found, want %d, %d, %d, %d: %w",
				h.segment, h.group, h.ledger, h.first, r.segment, m.group, id, at, ledger.ErrDamaged)
			break
		}
		for range h.count {
			var ok bool
			before := frames
			if frames, ok, err = takeFrame(frames, at >= first && at <= last, b); err != nil || !ok {
				return n, !ok, place(err, r, id, at)
			}
			if at >= first && at <= last && len(before) > 0 {
				n++
			}
			at++
		}
		if len(frames) > 0 {
			err = fmt.Errorf("%d bytes behind the last entry: %w", len(frames), ledger.ErrDamaged)
			break
		}
		if at > last {
			return n, true, nil
		}
	}
	if err == nil && at != r.end() {
		err = fmt.Errorf("run ends at entry %d, want %d: %w", at-1, r.end()-1, ledger.ErrDamaged)
	}
	return n, false, place(err, r, id, at)
}

func place(err error, r run, id ledger.ID, at ledger.EntryID) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("entry %v, segment %d, run at %d: %w", ledger.Position{Ledger: id, Entry: at}, r.segment, r.offset, err)
}

// takeFrame splits the first frame off frames and, if wanted, checks it and
// appends it to b. It reports false when b has no room for it.
func takeFrame(frames []byte, wanted bool, b *readBuffer) (rest []byte, ok bool, err error) {
	data, crc, rest, err := bookiepb.Next(frames)
	if err != nil {
		return nil, true, fmt.Errorf("%w: %w", err, ledger.ErrDamaged)
	}
	if !wanted {
		return rest, true, nil
	}
	size := bookiepb.FrameHeaderBytes + len(data)
	if b.full(size) {
		return nil, false, nil
	}
	if got := bookiepb.CRC(data); got != crc {
		return nil, true, fmt.Errorf("%d bytes with CRC32C %08x, want %08x: %w", len(data), got, crc, ledger.ErrDamaged)
	}
	*b.out = append(*b.out, frames[:size]...)
	return rest, true, nil
}

// load reads the records of a run into buf.
func (m *Machine) load(r run, buf *[]byte) error {
	seg, err := m.store.segments.pin(r.segment)
	if err != nil {
		if errors.Is(err, errSegmentGone) {
			err = fmt.Errorf("%w: %w", err, ledger.ErrDamaged)
		}
		return err
	}
	defer m.store.segments.unpin(seg)
	if cap(*buf) < int(r.length) {
		*buf = make([]byte, r.length)
	}
	*buf = (*buf)[:r.length]
	n, err := seg.file.ReadAt(*buf, r.offset)
	if n == len(*buf) {
		return nil
	}
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("segment %d ends at %d, want %d more bytes", r.segment, r.offset+int64(n), len(*buf)-n)
	}
	return fmt.Errorf("%w: %w", err, ledger.ErrDamaged) // it exists, and cannot be read
}
