package bookie

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

const (
	recordMagic       = 0x4352474d // "MGRC"
	recordVersion     = 1
	recordHeaderBytes = 56
	maxRecordBytes    = recordHeaderBytes + maxFramesBytes

	segmentMagic       = "MGSEGMNT"
	segmentVersion     = 1
	segmentHeaderBytes = 32
)

// record is the header in front of the frames of one run of entries, as one
// command brought them. See docs/formats/segment.md.
type record struct {
	segment uint64 // the segment it was written for: its generation
	group   raftlog.GroupID
	count   uint32
	index   raftlog.Index
	ledger  ledger.ID
	first   ledger.EntryID
	body    uint32 // bytes of frames behind the header
}

// put writes the header into the first recordHeaderBytes of b.
func (r record) put(b []byte) {
	le := binary.LittleEndian
	le.PutUint32(b, recordMagic)
	b[4], b[5], b[6], b[7] = recordVersion, 0, 0, 0
	le.PutUint64(b[8:], r.segment)
	le.PutUint32(b[16:], uint32(r.group))
	le.PutUint32(b[20:], r.count)
	le.PutUint64(b[24:], uint64(r.index))
	le.PutUint64(b[32:], uint64(r.ledger))
	le.PutUint64(b[40:], uint64(r.first))
	le.PutUint32(b[48:], r.body)
	le.PutUint32(b[52:], crc32.Checksum(b[:52], castagnoli))
}

// parseRecord reads a header and returns the bytes behind its body too. Every
// error wraps [ledger.ErrDamaged].
func parseRecord(b []byte) (r record, frames, rest []byte, err error) {
	if len(b) < recordHeaderBytes {
		return record{}, nil, nil, fmt.Errorf("record header cut off at %d bytes: %w", len(b), ledger.ErrDamaged)
	}
	le := binary.LittleEndian
	if got, want := crc32.Checksum(b[:52], castagnoli), le.Uint32(b[52:]); got != want {
		return record{}, nil, nil, fmt.Errorf("record header has CRC32C %08x, want %08x: %w", got, want, ledger.ErrDamaged)
	}
	if magic := le.Uint32(b); magic != recordMagic || b[4] != recordVersion {
		return record{}, nil, nil, fmt.Errorf("record magic %08x version %d, want %08x and %d: %w",
			magic, b[4], uint32(recordMagic), recordVersion, ledger.ErrDamaged)
	}
	r = record{
		segment: le.Uint64(b[8:]),
		group:   raftlog.GroupID(le.Uint32(b[16:])),
		count:   le.Uint32(b[20:]),
		index:   raftlog.Index(le.Uint64(b[24:])),
		ledger:  ledger.ID(le.Uint64(b[32:])),
		first:   ledger.EntryID(le.Uint64(b[40:])),
		body:    le.Uint32(b[48:]),
	}
	b = b[recordHeaderBytes:]
	if uint64(r.body) > uint64(len(b)) {
		return record{}, nil, nil, fmt.Errorf("record body of %d bytes, %d are left: %w", r.body, len(b), ledger.ErrDamaged)
	}
	return r, b[:r.body:r.body], b[r.body:], nil
}

// segmentHeader returns the first bytes of the segment with the given number.
func segmentHeader(number uint64) []byte {
	b := make([]byte, segmentHeaderBytes)
	copy(b, segmentMagic)
	b[8] = segmentVersion
	binary.LittleEndian.PutUint64(b[16:], number)
	binary.LittleEndian.PutUint32(b[28:], crc32.Checksum(b[:28], castagnoli))
	return b
}

// checkSegmentHeader verifies the first bytes of a segment.
func checkSegmentHeader(b []byte, number uint64) error {
	if len(b) < segmentHeaderBytes || string(b[:8]) != segmentMagic {
		return fmt.Errorf("segment %d does not begin with %q: %w", number, segmentMagic, ledger.ErrDamaged)
	}
	if b[8] != segmentVersion {
		return fmt.Errorf("segment %d has format version %d, this bookie reads %d", number, b[8], segmentVersion)
	}
	sum, want := binary.LittleEndian.Uint32(b[28:]), crc32.Checksum(b[:28], castagnoli)
	if got := binary.LittleEndian.Uint64(b[16:]); got != number || sum != want {
		return fmt.Errorf("segment %d says it is %d, header CRC32C %08x, want %08x: %w", number, got, sum, want, ledger.ErrDamaged)
	}
	return nil
}
