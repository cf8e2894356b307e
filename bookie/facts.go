package bookie

import (
	"encoding/binary"
	"fmt"

	"github.com/magnetar-io/magnetar/ledger"
)

// state is where a ledger is in its life.
type state uint8

const (
	stateOpen   state = 1 // its writer may append
	stateFenced state = 2 // taken over: nobody may append
	stateClosed state = 3 // ended by its writer
)

func (s state) String() string {
	switch s {
	case stateOpen:
		return "open"
	case stateFenced:
		return "fenced"
	case stateClosed:
		return "closed"
	default:
		return fmt.Sprintf("state %d", uint8(s))
	}
}

// facts are what a group knows of one ledger, apart from where its entries are.
type facts struct {
	state state
	epoch uint64         // at least 1; raised by fences
	next  ledger.EntryID // id of the next entry, so also the number of entries
	bytes int64          // sum of the entries' lengths
	owner string
}

const (
	factsVersion     = 1
	factsHeaderBytes = 28
)

// appendFacts appends the encoding of f, see docs/formats/entry-index.md.
func appendFacts(dst []byte, f facts) []byte {
	dst = append(dst, factsVersion, byte(f.state))
	dst = binary.LittleEndian.AppendUint16(dst, uint16(len(f.owner)))
	dst = binary.LittleEndian.AppendUint64(dst, f.epoch)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(f.next))
	dst = binary.LittleEndian.AppendUint64(dst, uint64(f.bytes))
	return append(dst, f.owner...)
}

// parseFacts is the inverse of appendFacts.
func parseFacts(b []byte) (facts, error) {
	if len(b) < factsHeaderBytes || b[0] != factsVersion {
		return facts{}, fmt.Errorf("ledger facts %x: want version %d and at least %d bytes", b[:min(len(b), 64)], factsVersion, factsHeaderBytes)
	}
	f := facts{
		state: state(b[1]),
		epoch: binary.LittleEndian.Uint64(b[4:]),
		next:  ledger.EntryID(binary.LittleEndian.Uint64(b[12:])),
		bytes: int64(binary.LittleEndian.Uint64(b[20:])),
		owner: string(b[factsHeaderBytes:]),
	}
	if owner := int(binary.LittleEndian.Uint16(b[2:])); owner != len(f.owner) {
		return facts{}, fmt.Errorf("ledger facts: owner of %d bytes, want %d", len(f.owner), owner)
	}
	return f, f.check()
}

// check reports facts that no sequence of commands leads to.
func (f facts) check() error {
	if f.state < stateOpen || f.state > stateClosed || f.epoch == 0 || f.next < 0 || f.bytes < 0 || len(f.owner) > maxOwnerBytes {
		return fmt.Errorf("impossible ledger facts: %v, epoch %d, %d entries of %d bytes, owner of %d bytes",
			f.state, f.epoch, f.next, f.bytes, len(f.owner))
	}
	return nil
}

func (f facts) last() ledger.EntryID { return f.next - 1 }

// run is where consecutive entries of a ledger are: records back to back in one
// segment.
type run struct {
	first   ledger.EntryID
	count   uint32
	length  uint32 // bytes of the records, headers and frames included
	segment uint64
	offset  int64
}

func (r run) end() ledger.EntryID { return r.first + ledger.EntryID(r.count) }

const (
	runVersion = 1
	runBytes   = 28

	// maxRunBytes bounds how far records that touch are joined to one run, and
	// so what a read of one small entry costs.
	maxRunBytes = 64 << 10
)

// appendRun adds r behind runs, joined to the last one if they touch and the
// result is small.
func appendRun(runs []run, r run) []run {
	if n := len(runs); n > 0 {
		last := &runs[n-1]
		if last.segment == r.segment && last.offset+int64(last.length) == r.offset &&
			last.end() == r.first && last.length+r.length <= maxRunBytes {
			last.count += r.count
			last.length += r.length
			return runs
		}
	}
	return append(runs, r)
}

// encodeRun returns the index's value for r; its first entry is in the key.
func encodeRun(r run) []byte {
	b := make([]byte, 0, runBytes)
	b = append(b, runVersion, 0, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, r.count)
	b = binary.LittleEndian.AppendUint32(b, r.length)
	b = binary.LittleEndian.AppendUint64(b, r.segment)
	return binary.LittleEndian.AppendUint64(b, uint64(r.offset))
}

func parseRun(first ledger.EntryID, b []byte) (run, error) {
	if len(b) != runBytes || b[0] != runVersion {
		return run{}, fmt.Errorf("run %x: want version %d and %d bytes", b[:min(len(b), 64)], runVersion, runBytes)
	}
	r := run{
		first:   first,
		count:   binary.LittleEndian.Uint32(b[4:]),
		length:  binary.LittleEndian.Uint32(b[8:]),
		segment: binary.LittleEndian.Uint64(b[12:]),
		offset:  int64(binary.LittleEndian.Uint64(b[20:])),
	}
	if r.first < 0 || r.count == 0 || r.length > maxRecordBytes || r.offset < segmentHeaderBytes {
		return run{}, fmt.Errorf("impossible run %+v", r)
	}
	return r, nil
}
