package bookie

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/cockroachdb/pebble/v2"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

// A ledger stream is one group's whole state on its way to another member; see
// docs/formats/ledger-stream.md.
const (
	streamMagic        = "MGSTREAM"
	streamEnd          = "MGSTREND"
	streamVersion      = 1
	streamHeaderBytes  = 40
	streamSectionBytes = 44

	// streamChunkBytes is how much of a ledger is read at a time.
	streamChunkBytes = 256 << 10
)

// streamHeader opens a stream.
type streamHeader struct {
	group   raftlog.GroupID
	applied raftlog.Index
	ledgers uint64
}

func (h streamHeader) encode() []byte {
	dst := append(make([]byte, 0, streamHeaderBytes), streamMagic...)
	dst = append(dst, streamVersion, 0, 0, 0)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(h.group))
	dst = binary.LittleEndian.AppendUint64(dst, uint64(h.applied))
	dst = binary.LittleEndian.AppendUint64(dst, h.ledgers)
	dst = binary.LittleEndian.AppendUint32(dst, 0)
	return binary.LittleEndian.AppendUint32(dst, crc32.Checksum(dst, castagnoli))
}

func parseStreamHeader(b []byte) (streamHeader, error) {
	if len(b) != streamHeaderBytes || string(b[:8]) != streamMagic {
		return streamHeader{}, fmt.Errorf("ledger stream does not begin with %q", streamMagic)
	}
	if b[8] != streamVersion {
		return streamHeader{}, fmt.Errorf("ledger stream has version %d, this bookie reads %d", b[8], streamVersion)
	}
	if got, want := crc32.Checksum(b[:36], castagnoli), binary.LittleEndian.Uint32(b[36:]); got != want {
		return streamHeader{}, fmt.Errorf("ledger stream header has CRC32C %08x, want %08x", got, want)
	}
	return streamHeader{
		group:   raftlog.GroupID(binary.LittleEndian.Uint32(b[12:])),
		applied: raftlog.Index(binary.LittleEndian.Uint64(b[16:])),
		ledgers: binary.LittleEndian.Uint64(b[24:]),
	}, nil
}

// appendSection appends the header of one ledger's part of a stream.
func appendSection(dst []byte, id ledger.ID, f facts) []byte {
	start := len(dst)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(id))
	dst = binary.LittleEndian.AppendUint32(dst, uint32(factsHeaderBytes+len(f.owner)))
	dst = appendFacts(dst, facts{f.state, f.epoch, f.next, f.bytes, ""})
	binary.LittleEndian.PutUint16(dst[start+14:], uint16(len(f.owner)))
	sum := crc32.Update(crc32.Checksum(dst[start:], castagnoli), castagnoli, []byte(f.owner))
	dst = binary.LittleEndian.AppendUint32(dst, sum)
	return append(dst, f.owner...)
}

// parseSection reads a section's header. owner reads that many bytes of owner,
// at most maxOwnerBytes.
func parseSection(b []byte, owner func(n int) ([]byte, error)) (ledger.ID, facts, error) {
	id := ledger.ID(binary.LittleEndian.Uint64(b))
	n := int64(binary.LittleEndian.Uint32(b[8:])) - factsHeaderBytes
	if n < 0 || n > maxOwnerBytes || id < 1 {
		return 0, facts{}, fmt.Errorf("ledger stream: ledger %d with an owner of %d bytes, want an id from 1 and at most %d bytes", id, n, maxOwnerBytes)
	}
	name, err := owner(int(n))
	if err != nil {
		return 0, facts{}, err
	}
	fixed := b[:12+factsHeaderBytes]
	sum := crc32.Update(crc32.Checksum(fixed, castagnoli), castagnoli, name)
	if want := binary.LittleEndian.Uint32(b[12+factsHeaderBytes:]); sum != want {
		return 0, facts{}, fmt.Errorf("ledger stream: section header has CRC32C %08x, want %08x", sum, want)
	}
	f, err := parseFacts(append(fixed[12:len(fixed):len(fixed)], name...))
	return id, f, err
}

// sectionBytes is the exact length of one ledger's part of a stream.
func sectionBytes(f facts) int64 {
	return streamSectionBytes + int64(len(f.owner)) + int64(f.next)*bookiepb.FrameHeaderBytes + f.bytes
}

// Stream returns a consistent copy of the group's state, as of a checkpoint
// that it makes. Its size is known from the ledgers' counters, without a look at
// the data. The segments that it reads stay until it is closed, whatever is
// deleted meanwhile. A damaged entry fails the stream.
func (m *Machine) Stream() (raftlog.Stream, error) {
	m.checkpointMu.Lock()
	defer m.checkpointMu.Unlock()
	if err := m.checkpoint(); err != nil {
		return raftlog.Stream{}, err
	}
	s := &stream{m: m, snapshot: m.store.index.db.NewSnapshot(), size: streamHeaderBytes + int64(len(streamEnd))}
	if err := s.open(); err != nil {
		return raftlog.Stream{}, errors.Join(fmt.Errorf("group %d: ledger stream: %w", m.group, err), s.Close())
	}
	return raftlog.Stream{ReadCloser: s, Size: s.size, Applied: s.header.applied}, nil
}

// stream reads one snapshot of the index and the segments it refers to. One
// goroutine reads it.
type stream struct {
	m        *Machine
	snapshot *pebble.Snapshot
	pinned   []*segment
	header   streamHeader
	size     int64

	iter   *pebble.Iterator // over the ledgers; nil before the first
	buf    []byte           // made and not read yet
	id     ledger.ID        // the ledger in progress
	facts  facts
	next   ledger.EntryID
	ended  bool
	closed bool
}

// open pins the segments and adds up the size. It needs checkpointMu, so that
// no segment goes between the snapshot and its pin.
func (s *stream) open() (err error) {
	if s.header.applied, err = s.m.store.index.applied(s.snapshot, s.m.group); err != nil {
		return err
	}
	live, err := liveBytes(s.snapshot, s.m.group)
	if err != nil {
		return err
	}
	for number := range live {
		seg, err := s.m.store.segments.pin(number)
		if err != nil {
			return err
		}
		s.pinned = append(s.pinned, seg)
	}
	err = eachLedger(s.snapshot, s.m.group, func(_ ledger.ID, f facts) error {
		s.header.ledgers++
		s.size += sectionBytes(f)
		return nil
	})
	if err != nil {
		return err
	}
	s.header.group = s.m.group
	s.buf = s.header.encode()
	prefix := groupKey(keyLedger, s.m.group)
	s.iter, err = s.snapshot.NewIter(&pebble.IterOptions{LowerBound: prefix, UpperBound: prefixEnd(prefix)})
	if err == nil {
		s.iter.First()
	}
	return err
}

// Read implements io.Reader.
func (s *stream) Read(p []byte) (int, error) {
	for len(s.buf) == 0 {
		if s.closed {
			return 0, errors.New("ledger stream closed")
		}
		if s.ended {
			return 0, io.EOF
		}
		if err := s.fill(); err != nil {
			return 0, fmt.Errorf("group %d: ledger stream: %w", s.m.group, err)
		}
	}
	n := copy(p, s.buf)
	s.buf = s.buf[n:]
	return n, nil
}

// fill makes the next bytes: entries of the ledger in progress, the next
// ledger's header, or the end.
func (s *stream) fill() error {
	s.buf = s.buf[:0]
	switch {
	case s.next < s.facts.next:
		return s.fillEntries()
	case s.iter.Valid():
		f, err := parseFacts(s.iter.Value())
		if err != nil {
			return err
		}
		s.id, s.facts, s.next = ledger.ID(binary.BigEndian.Uint64(s.iter.Key()[5:])), f, 0
		s.buf = appendSection(s.buf, s.id, f)
		s.iter.Next()
		return nil
	default:
		s.ended = true
		s.buf = append(s.buf, streamEnd...)
		return s.iter.Error()
	}
}

func (s *stream) fillEntries() error {
	c := collector{next: s.next, last: s.facts.last(), room: streamChunkBytes}
	if err := eachRun(s.snapshot, s.m.group, s.id, s.next, c.add); err != nil {
		return err
	}
	b := readBuffer{out: &s.buf, limit: streamChunkBytes}
	n, err := s.m.readRuns(c.runs, s.id, s.next, s.facts.last(), &b)
	if err == nil && n == 0 {
		err = fmt.Errorf("ledger %d: no run holds entry %d: %w", s.id, s.next, ledger.ErrDamaged)
	}
	s.next += ledger.EntryID(n)
	return err
}

// Close lets the segments go. It may be called twice.
func (s *stream) Close() error {
	if s.closed {
		return nil
	}
	s.closed = true
	var err error
	if s.iter != nil {
		err = s.iter.Close()
	}
	for _, seg := range s.pinned {
		s.m.store.segments.unpin(seg)
	}
	return errors.Join(err, s.snapshot.Close())
}
