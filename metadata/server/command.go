package server

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"time"

	"github.com/magnetar-io/magnetar/metadata"
)

// commandVersion is the first byte of every command that this program writes.
const commandVersion = 1

// castagnoli is the polynomial of CRC32C.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// errCommand reports bytes that are no command of a known version.
var errCommand = errors.New("not a metadata command")

// Kind says what a command does. The numbers are on disk.
type Kind uint8

// The kinds of commands.
const (
	KindPut        Kind = 1 // Key, Value, If, Lease
	KindSequential Kind = 2 // Key (the prefix), Value
	KindDelete     Kind = 3 // Key, If
	KindGrant      Kind = 4 // TTL
	KindRevoke     Kind = 5 // Lease
	KindExpire     Kind = 6 // Lease, Revision, Leader
	KindLead       Kind = 7 // a new leader begins to count the time of leases
)

// ClientID names one lane of a client; a lane has one command under way at a
// time. The zero ClientID has no memory: its commands are never recognised.
type ClientID [16]byte

// Origin is who sent a command, so that a repeat is recognised.
type Origin struct {
	Client   ClientID
	Sequence uint64 // of the lane, from 1, one higher for each new command
	// Resend marks every sending but the first. Known is a store revision that
	// the client had seen before the first sending. They serve only if the
	// store has forgotten the client since.
	Resend bool
	Known  metadata.Version
}

// Command is one change of the store, decided when it is applied.
type Command struct {
	Kind     Kind
	Origin   Origin
	Key      string // for KindSequential the prefix
	Value    []byte
	If       metadata.Version // condition on the key's version
	Lease    metadata.LeaseID
	Revision metadata.Version // KindExpire: of the lease that is meant
	Leader   metadata.Version // KindExpire: revision of the proposer's KindLead
	TTL      time.Duration    // whole milliseconds
}

const flagResend = 1

// Encode returns the command's bytes, as docs/formats/metadata-command.md draws
// them.
func (c *Command) Encode() []byte {
	b := make([]byte, 0, 80+len(c.Key)+len(c.Value))
	var flags byte
	if c.Origin.Resend {
		flags |= flagResend
	}
	b = append(b, commandVersion, byte(c.Kind), flags)
	b = append(b, c.Origin.Client[:]...)
	b = appendUint64(b, c.Origin.Sequence)
	b = appendUint64(b, uint64(c.Origin.Known))
	switch c.Kind {
	case KindPut:
		b = appendString(b, c.Key)
		b = appendValue(b, c.Value)
		b = appendUint64(b, uint64(c.If))
		b = appendUint64(b, uint64(c.Lease))
	case KindSequential:
		b = appendString(b, c.Key)
		b = appendValue(b, c.Value)
	case KindDelete:
		b = appendString(b, c.Key)
		b = appendUint64(b, uint64(c.If))
	case KindGrant:
		b = appendUint64(b, uint64(c.TTL.Milliseconds()))
	case KindRevoke:
		b = appendUint64(b, uint64(c.Lease))
	case KindExpire:
		b = appendUint64(b, uint64(c.Lease))
		b = appendUint64(b, uint64(c.Revision))
		b = appendUint64(b, uint64(c.Leader))
	case KindLead:
	default:
		panic(fmt.Sprintf("metadata command of kind %d", c.Kind))
	}
	return appendSum(b)
}

// appendSum ends b with its own CRC32C.
func appendSum(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// DecodeCommand is the inverse of [Command.Encode]. The command's value is its
// own copy. Anything but exactly one valid command of a known version is an
// error.
func DecodeCommand(b []byte) (*Command, error) {
	if len(b) < 3+16+8+8+4 {
		return nil, fmt.Errorf("%w: %d bytes are too short", errCommand, len(b))
	}
	if b[0] != commandVersion {
		return nil, fmt.Errorf("%w: version %d, this program knows version %d: run a newer program on this bookie", errCommand, b[0], commandVersion)
	}
	body, sum := b[:len(b)-4], binary.LittleEndian.Uint32(b[len(b)-4:])
	if got := crc32.Checksum(body, castagnoli); got != sum {
		return nil, fmt.Errorf("%w: checksum %08x, its bytes have %08x", errCommand, sum, got)
	}
	r := reader{b: body[2:]}
	c := &Command{Kind: Kind(b[1])}
	flags := r.byte()
	c.Origin.Resend = flags&flagResend != 0
	copy(c.Origin.Client[:], r.take(len(c.Origin.Client)))
	c.Origin.Sequence = r.uint64()
	c.Origin.Known = metadata.Version(r.uint64())
	switch c.Kind {
	case KindPut:
		c.Key, c.Value = r.string(), r.value()
		c.If, c.Lease = metadata.Version(r.uint64()), metadata.LeaseID(r.uint64())
	case KindSequential:
		c.Key, c.Value = r.string(), r.value()
	case KindDelete:
		c.Key, c.If = r.string(), metadata.Version(r.uint64())
	case KindGrant:
		c.TTL = r.millis()
	case KindRevoke:
		c.Lease = metadata.LeaseID(r.uint64())
	case KindExpire:
		c.Lease, c.Revision = metadata.LeaseID(r.uint64()), metadata.Version(r.uint64())
		c.Leader = metadata.Version(r.uint64())
	case KindLead:
	default:
		return nil, fmt.Errorf("%w: kind %d is unknown: run a newer program on this bookie", errCommand, b[1])
	}
	if flags&^flagResend != 0 || r.failed || len(r.b) != 0 {
		return nil, fmt.Errorf("%w: kind %d with flags %#x does not fill its %d bytes as it should", errCommand, b[1], flags, len(b))
	}
	return c, c.check()
}

// check holds a command to the limits of the store. The engine checks before it
// proposes, so that a command in the log always passes.
func (c *Command) check() error {
	var err error
	switch c.Kind {
	case KindPut:
		err = errors.Join(metadata.CheckKey(c.Key), metadata.CheckValue(c.Key, c.Value), metadata.CheckIf(c.Key, c.If))
	case KindSequential:
		if err = metadata.CheckValue(c.Key, c.Value); err == nil {
			err = metadata.CheckKey(sequentialKey(c.Key, 1))
		}
	case KindDelete:
		err = errors.Join(metadata.CheckKey(c.Key), metadata.CheckIf(c.Key, c.If))
	case KindGrant:
		err = metadata.CheckTTL(c.TTL)
	case KindRevoke, KindExpire, KindLead:
	}
	if err == nil && (c.Lease < 0 || c.Origin.Known < 0) {
		err = fmt.Errorf("lease %d, known revision %d: want 0 or more: %w", c.Lease, c.Origin.Known, metadata.ErrInvalid)
	}
	if err == nil && (c.Origin.Client == ClientID{}) != (c.Origin.Sequence == 0) {
		err = fmt.Errorf("client id and sequence number %d: want both or neither: %w", c.Origin.Sequence, metadata.ErrInvalid)
	}
	return err
}

// sequentialKey is the n-th key of a prefix.
func sequentialKey(prefix string, n int64) string { return fmt.Sprintf("%s%019d", prefix, n) }

func appendUint64(b []byte, n uint64) []byte { return binary.LittleEndian.AppendUint64(b, n) }

func appendString(b []byte, s string) []byte {
	return append(binary.LittleEndian.AppendUint16(b, uint16(len(s))), s...)
}

func appendValue(b, value []byte) []byte {
	return append(binary.LittleEndian.AppendUint32(b, uint32(len(value))), value...)
}

// reader takes fields off bytes. After the first field that is not there, failed
// is set and every field is zero.
type reader struct {
	b      []byte
	failed bool
}

func (r *reader) take(n int) []byte {
	if n > len(r.b) || r.failed {
		r.failed = true
		return make([]byte, min(n, 16)) // callers that need more check failed
	}
	taken := r.b[:n]
	r.b = r.b[n:]
	return taken
}

func (r *reader) byte() byte     { return r.take(1)[0] }
func (r *reader) uint64() uint64 { return binary.LittleEndian.Uint64(r.take(8)) }

func (r *reader) string() string {
	return string(r.take(int(binary.LittleEndian.Uint16(r.take(2)))))
}

func (r *reader) value() []byte {
	taken := r.take(int(binary.LittleEndian.Uint32(r.take(4))))
	return append(make([]byte, 0, len(taken)), taken...)
}

func (r *reader) millis() time.Duration {
	n := r.uint64()
	if n > uint64(metadata.MaxTTL/time.Millisecond) {
		r.failed = true
		return 0
	}
	return time.Duration(n) * time.Millisecond
}
