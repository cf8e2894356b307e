package bookie

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"

	"github.com/cockroachdb/pebble/v2"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

// Install replaces the group's whole state by a ledger stream, durably once it
// returns nil and not at all otherwise. Entries go to segments first, so reads of
// the old state work until the exchange. It must not run beside Apply.
func (m *Machine) Install(r io.Reader, applied raftlog.Index) error {
	if err := m.usable(); err != nil {
		return err
	}
	in := &installer{m: m, r: bufio.NewReaderSize(r, streamChunkBytes), batch: m.store.index.db.NewBatch()}
	defer func() { _ = in.batch.Close() }()
	err := in.receive()
	if err == nil && in.header.applied > applied {
		err = fmt.Errorf("ledger stream is at index %d, newer than what it is to be installed as", in.header.applied)
	}
	if err != nil {
		in.abandon()
		if m.usable() == nil && in.fatal != nil {
			return m.stop(in.fatal)
		}
		return fmt.Errorf("group %d: install at index %d: %w", m.group, applied, err)
	}
	if err := in.exchange(applied); err != nil {
		return m.stop(fmt.Errorf("install at index %d: %w", applied, err))
	}
	return nil
}

// installer is the state of one Install.
type installer struct {
	m      *Machine
	r      *bufio.Reader
	batch  *pebble.Batch
	header streamHeader
	out    recordWriter
	runs   []run  // of the ledger in progress
	frames []byte // entries that wait for a record
	fatal  error  // set if writing failed, as opposed to the stream
}

func (in *installer) addRun(r run) { in.runs = appendRun(in.runs, r) }

// receive reads the stream, writes its entries and fills the batch.
func (in *installer) receive() error {
	if err := in.clearGroup(); err != nil {
		return err
	}
	b := make([]byte, streamHeaderBytes)
	if _, err := io.ReadFull(in.r, b); err != nil {
		return fmt.Errorf("ledger stream header: %w", err)
	}
	var err error
	if in.header, err = parseStreamHeader(b); err != nil {
		return err
	}
	if in.header.group != in.m.group {
		return fmt.Errorf("ledger stream of group %d", in.header.group)
	}
	for range in.header.ledgers {
		if err := in.ledger(); err != nil {
			return err
		}
	}
	end := make([]byte, len(streamEnd))
	if _, err := io.ReadFull(in.r, end); err != nil || string(end) != streamEnd {
		return fmt.Errorf("ledger stream ends with %q, want %q: %w", end, streamEnd, errors.Join(err, io.ErrUnexpectedEOF))
	}
	switch _, err := in.r.ReadByte(); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return fmt.Errorf("ledger stream behind its end: %w", err)
	default:
		return errors.New("ledger stream goes on behind its end")
	}
}

// clearGroup begins the batch: whatever the group had goes.
func (in *installer) clearGroup() error {
	for _, kind := range []byte{keyLedger, keyRun, keySegment} {
		prefix := groupKey(kind, in.m.group)
		if err := in.batch.DeleteRange(prefix, prefixEnd(prefix), nil); err != nil {
			return err
		}
	}
	return nil
}

func (in *installer) ledger() error {
	b := make([]byte, streamSectionBytes)
	if _, err := io.ReadFull(in.r, b); err != nil {
		return fmt.Errorf("ledger stream section: %w", err)
	}
	id, f, err := parseSection(b, func(n int) ([]byte, error) {
		owner := make([]byte, n)
		_, err := io.ReadFull(in.r, owner)
		return owner, err
	})
	if err != nil {
		return err
	}
	if err := in.entries(id, f); err != nil {
		return fmt.Errorf("ledger %d: %w", id, err)
	}
	if err := in.batch.Set(ledgerKey(in.m.group, id), appendFacts(nil, f), nil); err != nil {
		return err
	}
	for _, r := range in.runs {
		if err := in.batch.Set(runKey(in.m.group, id, r.first), encodeRun(r), nil); err != nil {
			return err
		}
	}
	in.runs = in.runs[:0]
	return nil
}

// entries reads one ledger's frames and writes them as records.
func (in *installer) entries(id ledger.ID, f facts) error {
	first, left := ledger.EntryID(0), f.bytes
	for next := range f.next {
		n, err := in.frame(left)
		if err != nil {
			return fmt.Errorf("entry %d: %w", next, err)
		}
		left -= int64(n)
		if len(in.frames) >= bookiepb.BatchBytes || next+1 == f.next {
			if err := in.record(id, first, next+1); err != nil {
				return err
			}
			first = next + 1
		}
	}
	if left != 0 {
		return fmt.Errorf("entries are %d bytes short of %d", left, f.bytes)
	}
	return in.flush()
}

// frame reads one frame behind in.frames; its data may have left bytes at most.
func (in *installer) frame(left int64) (int, error) {
	header, err := in.r.Peek(bookiepb.FrameHeaderBytes)
	if err != nil {
		return 0, err
	}
	n := int64(binary.LittleEndian.Uint32(header))
	if n > bookiepb.MaxEntryBytes || n > left {
		return 0, fmt.Errorf("length %d, want at most %d and the %d bytes left of the ledger", n, bookiepb.MaxEntryBytes, left)
	}
	start := len(in.frames)
	in.frames = append(in.frames, make([]byte, bookiepb.FrameHeaderBytes+n)...)
	if _, err := io.ReadFull(in.r, in.frames[start:]); err != nil {
		return 0, err
	}
	_, _, err = bookiepb.Check(in.frames[start:])
	return int(n), err
}

func (in *installer) record(id ledger.ID, first, end ledger.EntryID) error {
	in.out.add(in.m.store, record{
		group: in.m.group, count: uint32(end - first), index: in.header.applied,
		ledger: id, first: first, body: uint32(len(in.frames)),
	}, in.frames, in)
	in.frames = in.frames[:0]
	if in.out.size() >= flushBytes {
		return in.flush()
	}
	return nil
}

func (in *installer) flush() error {
	if err := in.out.flush(in.m.store); err != nil {
		in.fatal = err
		return err
	}
	return nil
}

// abandon gives up what was written for a stream that turned out bad.
func (in *installer) abandon() {
	in.m.store.segments.release(in.out.live)
}

// exchange puts the new state in the place of the old.
func (in *installer) exchange(applied raftlog.Index) error {
	m := in.m
	m.checkpointMu.Lock()
	defer m.checkpointMu.Unlock()
	if err := m.store.segments.sync(); err != nil {
		return err
	}
	fresh := maps.Clone(in.out.live)
	if fresh == nil {
		fresh = map[uint64]int64{}
	}
	for number, n := range fresh {
		if err := in.batch.Set(segmentKey(m.group, number), binary.BigEndian.AppendUint64(nil, uint64(n)), nil); err != nil {
			return err
		}
	}
	if err := m.writeApplied(in.batch, applied); err != nil {
		return err
	}
	if err := in.batch.Commit(pebble.Sync); err != nil {
		return err
	}
	m.mu.Lock()
	old := m.live
	m.live, m.persisted = fresh, maps.Clone(fresh)
	m.current, m.applied, m.durable = layer{}, applied, applied
	m.mu.Unlock()
	m.installs.Add(1)
	m.store.segments.release(old)
	return nil
}
