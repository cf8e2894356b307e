package bookie

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/ledger"
)

// opKind is what one operation of a command does.
type opKind uint8

const (
	opCreate opKind = 1
	opAppend opKind = 2
	opFence  opKind = 3
	opClose  opKind = 4
	opDelete opKind = 5
)

const (
	commandVersion     = 1
	commandHeaderBytes = 4
	opHeaderBytes      = 32
	commandSumBytes    = 4

	// maxOps bounds the operations of one command: an append per entry.
	maxOps = bookiepb.BatchEntries

	// maxOwnerBytes bounds the text that says who a ledger is for.
	maxOwnerBytes = 1024

	// maxFramesBytes bounds the entries of one append operation, so that it fits
	// into a command.
	maxFramesBytes = bookiepb.MaxEntryBytes + bookiepb.FrameHeaderBytes
)

// errForeignCommand reports a command that this program cannot decide: a newer
// version, or bytes that are not a command. The group must stop, because its
// peers may have decided it.
var errForeignCommand = errors.New("not a ledger command of version 1")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// op is one operation. Which fields count depends on kind; see
// docs/formats/ledger-command.md.
type op struct {
	kind   opKind
	ledger ledger.ID
	epoch  uint64
	first  ledger.EntryID // append only
	owner  string         // create only
	frames []byte         // append only; borrowed from the command once decoded
}

// appendCommand appends the encoding of ops to dst.
func appendCommand(dst []byte, ops []op) []byte {
	start := len(dst)
	dst = append(dst, commandVersion, 0)
	dst = binary.LittleEndian.AppendUint16(dst, uint16(len(ops)))
	for _, o := range ops {
		dst = append(dst, byte(o.kind), 0)
		dst = binary.LittleEndian.AppendUint16(dst, uint16(len(o.owner)))
		dst = binary.LittleEndian.AppendUint32(dst, uint32(len(o.frames)))
		dst = binary.LittleEndian.AppendUint64(dst, uint64(o.ledger))
		dst = binary.LittleEndian.AppendUint64(dst, o.epoch)
		dst = binary.LittleEndian.AppendUint64(dst, uint64(o.first))
		dst = append(dst, o.owner...)
		dst = append(dst, o.frames...)
	}
	return binary.LittleEndian.AppendUint32(dst, crc32.Checksum(dst[start:], castagnoli))
}

// commandBytes is the length of what appendCommand appends.
func commandBytes(ops []op) int {
	n := commandHeaderBytes + commandSumBytes
	for _, o := range ops {
		n += opHeaderBytes + len(o.owner) + len(o.frames)
	}
	return n
}

// decodeCommand appends the operations of b to dst. Their frames are parts of
// b. Every error wraps errForeignCommand.
func decodeCommand(b []byte, dst []op) ([]op, error) {
	if len(b) < commandHeaderBytes+commandSumBytes {
		return nil, fmt.Errorf("%d bytes are too short: %w", len(b), errForeignCommand)
	}
	if b[0] != commandVersion {
		return nil, fmt.Errorf("command version %d: %w; upgrade this bookie", b[0], errForeignCommand)
	}
	body := b[:len(b)-commandSumBytes]
	want := binary.LittleEndian.Uint32(b[len(body):])
	if got := crc32.Checksum(body, castagnoli); got != want {
		return nil, fmt.Errorf("CRC32C is %08x, want %08x: %w", got, want, errForeignCommand)
	}
	count := int(binary.LittleEndian.Uint16(body[2:]))
	if count == 0 || count > maxOps || body[1] != 0 {
		return nil, fmt.Errorf("%d operations, want 1 to %d: %w", count, maxOps, errForeignCommand)
	}
	body = body[commandHeaderBytes:]
	for range count {
		o, rest, err := decodeOp(body)
		if err != nil {
			return nil, err
		}
		dst, body = append(dst, o), rest
	}
	if len(body) != 0 {
		return nil, fmt.Errorf("%d bytes behind the last operation: %w", len(body), errForeignCommand)
	}
	return dst, nil
}

func decodeOp(b []byte) (o op, rest []byte, err error) {
	if len(b) < opHeaderBytes {
		return op{}, nil, fmt.Errorf("operation header cut off at %d bytes: %w", len(b), errForeignCommand)
	}
	owner, frames := int(binary.LittleEndian.Uint16(b[2:])), binary.LittleEndian.Uint32(b[4:])
	o = op{
		kind:   opKind(b[0]),
		ledger: ledger.ID(binary.LittleEndian.Uint64(b[8:])),
		epoch:  binary.LittleEndian.Uint64(b[16:]),
		first:  ledger.EntryID(binary.LittleEndian.Uint64(b[24:])),
	}
	flags := b[1]
	b = b[opHeaderBytes:]
	if frames > maxFramesBytes || owner > maxOwnerBytes || owner+int(frames) > len(b) {
		return op{}, nil, fmt.Errorf("operation wants %d + %d bytes, %d are left: %w", owner, frames, len(b), errForeignCommand)
	}
	o.owner = string(b[:owner])
	o.frames = b[owner : owner+int(frames) : owner+int(frames)]
	if err := o.validate(); err != nil || flags != 0 {
		return op{}, nil, fmt.Errorf("operation %d with flags %d: %w: %w", o.kind, flags, errForeignCommand, err)
	}
	return o, b[owner+int(frames):], nil
}

// validate checks the parts of an operation that do not depend on any state.
// It runs before proposing, too, so that no log ever holds an operation that
// stops its group.
func (o op) validate() error {
	switch {
	case o.kind < opCreate || o.kind > opDelete:
		return fmt.Errorf("kind %d is none of create (1) to delete (5)", o.kind)
	case o.ledger < 1:
		return fmt.Errorf("ledger id %d: ids start at 1", o.ledger)
	case len(o.owner) > maxOwnerBytes || (o.owner != "" && o.kind != opCreate):
		return fmt.Errorf("owner of %d bytes: only create has one, of at most %d bytes", len(o.owner), maxOwnerBytes)
	case (len(o.frames) > 0) != (o.kind == opAppend) || len(o.frames) > maxFramesBytes:
		return fmt.Errorf("entries of %d bytes: an append has at least one and at most %d bytes, nothing else has any", len(o.frames), maxFramesBytes)
	case o.first < 0 || (o.first != 0 && o.kind != opAppend):
		return fmt.Errorf("first entry %d: only an append has one, from 0 on", o.first)
	case o.epoch == 0 && o.kind != opDelete:
		return errors.New("epoch 0: epochs start at 1")
	}
	return nil
}
