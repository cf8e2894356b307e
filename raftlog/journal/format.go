package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"time"

	"github.com/hashicorp/raft"
)

const (
	version = 1

	headerBytes      = 64 // at the start of a segment
	frameHeaderBytes = 48
	recordBytes      = 48 // a record without extensions and data
	trailerBytes     = 64 // at the end of a sealed segment
	footerOpBytes    = 32 // an operation of the footer without its locations
	locationBytes    = 8
	alignment        = 8 // frames begin at multiples of it

	headerMagic  = "MGJRNLSG"
	frameMagic   = "MGJF"
	trailerMagic = "MGJRNLEN"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func sum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// recordKind says what a record does to its group's log.
type recordKind uint8

const (
	kindEntry      recordKind = 1 // appends an entry
	kindTruncate   recordKind = 2 // cuts the log from index on
	kindFirst      recordKind = 3 // cuts the log before index
	kindReset      recordKind = 4 // empties the log
	kindRelocation recordKind = 5 // an entry of the log in a new place
	kindCommit     recordKind = 6 // the commit index that was staged
)

func (k recordKind) valid() bool { return k >= kindEntry && k <= kindCommit }

func (k recordKind) holdsEntry() bool { return k == kindEntry || k == kindRelocation }

// errFormat is wrapped by every complaint about bytes.
var errFormat = errors.New("bytes do not check")

func badFormat(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{errFormat}, args...)...)
}

// header is a segment's first bytes.
type header struct {
	number     uint32
	generation uint64
	size       uint64 // of the whole file
	prevEnd    uint64 // where the frames of the segment before end; 0 = there was none
}

func (h header) encode() []byte {
	b := make([]byte, headerBytes)
	copy(b, headerMagic)
	b[8] = version
	binary.LittleEndian.PutUint64(b[16:], uint64(h.number))
	binary.LittleEndian.PutUint64(b[24:], h.generation)
	binary.LittleEndian.PutUint64(b[32:], h.size)
	binary.LittleEndian.PutUint64(b[40:], h.prevEnd)
	binary.LittleEndian.PutUint32(b[60:], sum(b[:60]))
	return b
}

func parseHeader(b []byte) (h header, err error) {
	if len(b) < headerBytes || string(b[:8]) != headerMagic {
		return h, badFormat("no segment header")
	}
	if binary.LittleEndian.Uint32(b[60:]) != sum(b[:60]) {
		return h, badFormat("checksum of the segment header")
	}
	if b[8] != version {
		return h, fmt.Errorf("journal format version %d: this program reads version %d only; run the release that wrote it", b[8], version)
	}
	number := binary.LittleEndian.Uint64(b[16:])
	h = header{uint32(number), binary.LittleEndian.Uint64(b[24:]), binary.LittleEndian.Uint64(b[32:]), binary.LittleEndian.Uint64(b[40:])}
	if uint64(h.number) != number || h.size > maxSegmentBytes {
		return h, badFormat("segment header out of range")
	}
	return h, nil
}

// frameHeader precedes the records of one write.
type frameHeader struct {
	generation uint64
	number     uint32
	body       uint32 // bytes of records; the next frame begins at the next multiple of alignment
	records    uint32
	synced     uint64 // everything below this offset of the segment was on the disk
}

func (h frameHeader) put(b []byte) {
	clear(b[:frameHeaderBytes])
	copy(b, frameMagic)
	b[4] = version
	binary.LittleEndian.PutUint64(b[8:], h.generation)
	binary.LittleEndian.PutUint64(b[16:], uint64(h.number))
	binary.LittleEndian.PutUint32(b[24:], h.body)
	binary.LittleEndian.PutUint32(b[28:], h.records)
	binary.LittleEndian.PutUint64(b[32:], h.synced)
	binary.LittleEndian.PutUint32(b[44:], sum(b[:44]))
}

// parseFrameHeader accepts a header of this use of this segment only.
func parseFrameHeader(b []byte, generation uint64, number uint32) (h frameHeader, err error) {
	switch {
	case len(b) < frameHeaderBytes || string(b[:4]) != frameMagic:
		return h, badFormat("no frame header")
	case binary.LittleEndian.Uint32(b[44:]) != sum(b[:44]):
		return h, badFormat("checksum of the frame header")
	case b[4] != version:
		return h, badFormat("frame version %d", b[4])
	case binary.LittleEndian.Uint64(b[8:]) != generation || binary.LittleEndian.Uint64(b[16:]) != uint64(number):
		return h, badFormat("frame of another use of the file")
	}
	return frameHeader{
		generation, number,
		binary.LittleEndian.Uint32(b[24:]), binary.LittleEndian.Uint32(b[28:]), binary.LittleEndian.Uint64(b[32:]),
	}, nil
}

// align rounds up to where the next frame may begin.
func align(n int64) int64 { return (n + alignment - 1) &^ (alignment - 1) }

// record is one decoded record. ext and data alias the bytes it was read from.
type record struct {
	kind  recordKind
	typ   raft.LogType
	gen   uint32 // low half of the segment's generation
	group Group
	index uint64
	term  uint64
	at    int64 // append time in Unix nanoseconds; 0 = none
	ext   []byte
	data  []byte
}

func (r *record) size() int { return recordBytes + len(r.ext) + len(r.data) }

// append encodes r behind b. The generation is stamped later, by stamp: callers
// encode before anybody knows which segment it will be.
func (r *record) append(b []byte) []byte {
	var h [recordBytes]byte
	h[0], h[1] = byte(r.kind), byte(r.typ)
	binary.LittleEndian.PutUint32(h[8:], uint32(r.group))
	binary.LittleEndian.PutUint32(h[12:], uint32(len(r.ext)))
	binary.LittleEndian.PutUint64(h[16:], r.index)
	binary.LittleEndian.PutUint64(h[24:], r.term)
	binary.LittleEndian.PutUint64(h[32:], uint64(r.at))
	binary.LittleEndian.PutUint32(h[40:], uint32(len(r.data)))
	crc := crc32.Update(0, castagnoli, h[:4])
	crc = crc32.Update(crc, castagnoli, h[8:44])
	crc = crc32.Update(crc, castagnoli, r.ext)
	crc = crc32.Update(crc, castagnoli, r.data)
	binary.LittleEndian.PutUint32(h[44:], crc)
	b = append(b, h[:]...)
	b = append(b, r.ext...)
	return append(b, r.data...)
}

// stamp writes the generation into an encoded record.
func stamp(b []byte, generation uint64) {
	binary.LittleEndian.PutUint32(b[4:], uint32(generation))
}

// parseRecord decodes the record at the start of b.
func parseRecord(b []byte) (r record, err error) {
	if len(b) < recordBytes {
		return r, badFormat("record of %d bytes", len(b))
	}
	ext, data := uint64(binary.LittleEndian.Uint32(b[12:])), uint64(binary.LittleEndian.Uint32(b[40:]))
	end := recordBytes + ext + data
	if end > uint64(len(b)) {
		return r, badFormat("record of %d bytes in %d", end, len(b))
	}
	crc := crc32.Update(0, castagnoli, b[:4])
	crc = crc32.Update(crc, castagnoli, b[8:44])
	crc = crc32.Update(crc, castagnoli, b[recordBytes:end])
	if crc != binary.LittleEndian.Uint32(b[44:]) {
		return r, badFormat("checksum of a record")
	}
	r = record{
		kind: recordKind(b[0]), typ: raft.LogType(b[1]), gen: binary.LittleEndian.Uint32(b[4:]),
		group: Group(binary.LittleEndian.Uint32(b[8:])), index: binary.LittleEndian.Uint64(b[16:]),
		term: binary.LittleEndian.Uint64(b[24:]), at: int64(binary.LittleEndian.Uint64(b[32:])),
	}
	if !r.kind.valid() || b[2] != 0 || b[3] != 0 {
		return r, badFormat("record kind %d, flags %d %d", b[0], b[2], b[3])
	}
	if ext > 0 {
		r.ext = b[recordBytes : recordBytes+ext : recordBytes+ext]
	}
	if data > 0 {
		r.data = b[recordBytes+ext : end : end]
	}
	return r, nil
}

// parseFrame decodes the records of a frame's body and checks all of it.
func parseFrame(h frameHeader, body []byte) ([]record, error) {
	if uint64(h.records)*recordBytes > uint64(len(body)) {
		return nil, badFormat("%d records in %d bytes", h.records, len(body))
	}
	records := make([]record, 0, h.records)
	for len(body) > 0 {
		r, err := parseRecord(body)
		if err != nil {
			return nil, err
		}
		if r.gen != uint32(h.generation) {
			return nil, badFormat("record of another use of the file")
		}
		records = append(records, r)
		body = body[r.size():]
	}
	if len(records) != int(h.records) {
		return nil, badFormat("%d records, the header says %d", len(records), h.records)
	}
	return records, nil
}

func entryRecord(group Group, l *raft.Log) record {
	r := record{kind: kindEntry, typ: l.Type, group: group, index: l.Index, term: l.Term, ext: l.Extensions, data: l.Data}
	if !l.AppendedAt.IsZero() {
		r.at = l.AppendedAt.UnixNano()
	}
	return r
}

func (r *record) log(into *raft.Log) {
	*into = raft.Log{Index: r.index, Term: r.term, Type: r.typ, Data: r.data, Extensions: r.ext}
	if r.at != 0 {
		into.AppendedAt = time.Unix(0, r.at)
	}
}

// location is where an encoded record rests in a segment.
type location struct {
	offset uint32
	length uint32
}

// op is one step of a footer: what records of one kind, of consecutive indexes
// and one term, did. at is empty unless the kind holds entries.
type op struct {
	kind  recordKind
	group Group
	index uint64
	term  uint64
	at    []location
}

// footerSize returns the bytes of a footer, the trailer left out.
func footerSize(ops, locations int) int64 {
	return int64(ops)*footerOpBytes + int64(locations)*locationBytes
}

// trailer says where a sealed segment's footer is.
type trailer struct {
	generation uint64
	number     uint32
	offset     uint64 // of the footer: the end of the frames
	length     uint64
	ops        uint32
	crc        uint32 // of the footer
}

func (t trailer) encode() []byte {
	b := make([]byte, trailerBytes)
	copy(b, trailerMagic)
	b[8] = version
	binary.LittleEndian.PutUint32(b[12:], t.ops)
	binary.LittleEndian.PutUint64(b[16:], uint64(t.number))
	binary.LittleEndian.PutUint64(b[24:], t.generation)
	binary.LittleEndian.PutUint64(b[32:], t.offset)
	binary.LittleEndian.PutUint64(b[40:], t.length)
	binary.LittleEndian.PutUint32(b[48:], t.crc)
	binary.LittleEndian.PutUint32(b[60:], sum(b[:60]))
	return b
}

func parseTrailer(b []byte, h header) (t trailer, err error) {
	switch {
	case len(b) < trailerBytes || string(b[:8]) != trailerMagic:
		return t, badFormat("no footer")
	case binary.LittleEndian.Uint32(b[60:]) != sum(b[:60]):
		return t, badFormat("checksum of the trailer")
	case b[8] != version:
		return t, badFormat("trailer version %d", b[8])
	case binary.LittleEndian.Uint64(b[16:]) != uint64(h.number) || binary.LittleEndian.Uint64(b[24:]) != h.generation:
		return t, badFormat("trailer of another use of the file")
	}
	t = trailer{
		h.generation, h.number, binary.LittleEndian.Uint64(b[32:]), binary.LittleEndian.Uint64(b[40:]),
		binary.LittleEndian.Uint32(b[12:]), binary.LittleEndian.Uint32(b[48:]),
	}
	if t.offset < headerBytes || t.offset > h.size || t.length > h.size-t.offset || t.length+trailerBytes > h.size-t.offset {
		return t, badFormat("footer at %d of %d bytes", t.offset, t.length)
	}
	return t, nil
}

// encodeFooter returns the footer of a segment.
func encodeFooter(ops []op) []byte {
	var b []byte
	for _, o := range ops {
		var h [footerOpBytes]byte
		h[0] = byte(o.kind)
		binary.LittleEndian.PutUint32(h[4:], uint32(o.group))
		binary.LittleEndian.PutUint64(h[8:], o.index)
		binary.LittleEndian.PutUint64(h[16:], o.term)
		binary.LittleEndian.PutUint32(h[24:], uint32(len(o.at)))
		b = append(b, h[:]...)
		for _, l := range o.at {
			b = binary.LittleEndian.AppendUint32(b, l.offset)
			b = binary.LittleEndian.AppendUint32(b, l.length)
		}
	}
	return b
}

// parseFooter decodes a footer whose checksum is right, for a segment whose
// frames end at end.
func parseFooter(b []byte, count uint32, end uint64) ([]op, error) {
	if uint64(count)*footerOpBytes > uint64(len(b)) {
		return nil, badFormat("%d operations in a footer of %d bytes", count, len(b))
	}
	ops := make([]op, 0, count)
	for range count {
		if len(b) < footerOpBytes {
			return nil, badFormat("footer ends early")
		}
		o := op{
			kind: recordKind(b[0]), group: Group(binary.LittleEndian.Uint32(b[4:])),
			index: binary.LittleEndian.Uint64(b[8:]), term: binary.LittleEndian.Uint64(b[16:]),
		}
		n := uint64(binary.LittleEndian.Uint32(b[24:]))
		b = b[footerOpBytes:]
		if !o.kind.valid() || o.kind.holdsEntry() != (n > 0) || n*locationBytes > uint64(len(b)) {
			return nil, badFormat("footer operation of kind %d with %d places", o.kind, n)
		}
		for range n {
			l := location{binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])}
			b = b[locationBytes:]
			if l.offset < headerBytes || l.length < recordBytes || uint64(l.offset)+uint64(l.length) > end {
				return nil, badFormat("footer names a record at %d of %d bytes", l.offset, l.length)
			}
			o.at = append(o.at, l)
		}
		ops = append(ops, o)
	}
	if len(b) != 0 {
		return nil, badFormat("%d bytes behind the footer's operations", len(b))
	}
	return ops, nil
}
