package protocol

import (
	"fmt"
	"time"

	"github.com/planetscale/vtprotobuf/protohelpers"
)

// Meta is what a broker needs to know of an entry. All slices alias the payload
// that it was read from and must not be changed.
type Meta struct {
	// Messages is how many messages the entry holds, at least 1.
	Messages int
	// Batch tells a batch of one from a plain message: their bodies differ.
	Batch bool

	ProducerName []byte
	SequenceID   uint64
	// HighestSequenceID is that of a batch's last message; SequenceID if the
	// producer did not say.
	HighestSequenceID uint64

	PublishTime uint64 // Unix milliseconds, by the producer's clock
	EventTime   uint64 // Unix milliseconds; 0 = none
	DeliverAt   int64  // Unix milliseconds; 0 = at once

	PartitionKey []byte // nil = none
	KeyIsBase64  bool   // PartitionKey is text that stands for bytes
	OrderingKey  []byte // nil = none

	Marker     bool // written by a broker for itself; never delivered
	MarkerType int32

	Chunks  int32 // how many chunks the whole message has; 0 = it is not chunked
	ChunkID int32 // counts from 0

	Encrypted      bool
	SchemaVersion  []byte // nil = none
	ReplicatedFrom []byte // the cluster the message was copied from; nil = none

	Txn               bool // belongs to the transaction of the two ids
	TxnMost, TxnLeast uint64

	hasName, hasSeq, hasTime bool // required fields met
}

// Key returns what Key_Shared distributes by: the ordering key, or else the
// partition key, or nil.
func (m *Meta) Key() []byte {
	if m.OrderingKey != nil {
		return m.OrderingKey
	}
	return m.PartitionKey
}

// Delayed reports whether the entry should not be delivered yet.
func (m *Meta) Delayed(now time.Time) bool { return m.DeliverAt > now.UnixMilli() }

// Field numbers of MessageMetadata that Peek reads.
const (
	fieldProducerName   = 1
	fieldSequenceID     = 2
	fieldPublishTime    = 3
	fieldReplicatedFrom = 5
	fieldPartitionKey   = 6
	fieldNumMessages    = 11
	fieldEventTime      = 12
	fieldEncryptionKeys = 13
	fieldSchemaVersion  = 16
	fieldKeyIsBase64    = 17
	fieldOrderingKey    = 18
	fieldDeliverAt      = 19
	fieldMarkerType     = 20
	fieldTxnLeast       = 22
	fieldTxnMost        = 23
	fieldHighest        = 24
	fieldNumChunks      = 27
	fieldChunkID        = 29
)

// Protobuf wire types.
const (
	wireVarint = 0
	wire64     = 1
	wireBytes  = 2
	wireGroup  = 3
	wire32     = 5
)

// Peek reads the fields of a payload's metadata that a broker acts on, without
// allocating. It agrees with [ParseMetadata] on every payload that the latter
// accepts; it looks less closely at the fields it skips, and like it does not
// verify the checksum. The error wraps [ErrMalformed].
func Peek(p []byte) (Meta, error) {
	s, err := split(p)
	if err != nil {
		return Meta{}, err
	}
	m := Meta{Messages: 1}
	if err := m.read(s.metadata); err != nil {
		return Meta{}, err
	}
	switch {
	case !m.hasName:
		return Meta{}, missing("producer_name")
	case !m.hasSeq:
		return Meta{}, missing("sequence_id")
	case !m.hasTime:
		return Meta{}, missing("publish_time")
	case m.Messages < 1:
		return Meta{}, badCount(int32(m.Messages))
	}
	if m.HighestSequenceID == 0 {
		m.HighestSequenceID = m.SequenceID
	}
	return m, nil
}

func missing(field string) error {
	return fmt.Errorf("%w message metadata: required field %s is missing", ErrMalformed, field)
}

func (m *Meta) read(b []byte) error {
	for i := 0; i < len(b); {
		start := i
		tag, next := varint(b, i)
		if next < 0 {
			return cut(i)
		}
		i = next
		number, wire := int32(tag>>3), int(tag&7)
		if number <= 0 {
			return fmt.Errorf("%w message metadata: field number %d at byte %d", ErrMalformed, number, start)
		}
		switch wire {
		case wireVarint:
			v, next := varint(b, i)
			if next < 0 {
				return cut(i)
			}
			i = next
			if !m.number(number, v) {
				return wrongWire(number, wire)
			}
		case wireBytes:
			size, next := varint(b, i)
			if next < 0 || size > uint64(len(b)-next) {
				return cut(i)
			}
			i = next + int(size)
			if !m.bytes(number, b[next:i:i]) {
				return wrongWire(number, wire)
			}
		default:
			if known(number) {
				return wrongWire(number, wire)
			}
			n, err := skip(b[start:], i-start, wire)
			if err != nil || n > len(b)-start {
				return cut(start)
			}
			i = start + n
		}
	}
	return nil
}

// skip returns how many bytes a field takes whose tag takes the first head.
func skip(b []byte, head, wire int) (int, error) {
	switch wire {
	case wire32:
		return head + 4, nil
	case wire64:
		return head + 8, nil
	case wireGroup:
		return protohelpers.Skip(b)
	default:
		return 0, ErrMalformed
	}
}

// number stores a varint field; false if the field is not a varint.
func (m *Meta) number(field int32, v uint64) bool {
	switch field {
	case fieldSequenceID:
		m.SequenceID, m.hasSeq = v, true
	case fieldPublishTime:
		m.PublishTime, m.hasTime = v, true
	case fieldNumMessages:
		m.Messages, m.Batch = int(int32(v)), true
	case fieldEventTime:
		m.EventTime = v
	case fieldKeyIsBase64:
		m.KeyIsBase64 = v != 0
	case fieldDeliverAt:
		m.DeliverAt = int64(v)
	case fieldMarkerType:
		m.MarkerType, m.Marker = int32(v), true
	case fieldTxnLeast:
		m.TxnLeast, m.Txn = v, true
	case fieldTxnMost:
		m.TxnMost, m.Txn = v, true
	case fieldHighest:
		m.HighestSequenceID = v
	case fieldNumChunks:
		m.Chunks = int32(v)
	case fieldChunkID:
		m.ChunkID = int32(v)
	default:
		return !isBytes(field)
	}
	return true
}

// bytes stores a length-delimited field; false if the field is not one.
func (m *Meta) bytes(field int32, v []byte) bool {
	switch field {
	case fieldProducerName:
		m.ProducerName, m.hasName = v, true
	case fieldReplicatedFrom:
		m.ReplicatedFrom = v
	case fieldPartitionKey:
		m.PartitionKey = v
	case fieldEncryptionKeys:
		m.Encrypted = true
	case fieldSchemaVersion:
		m.SchemaVersion = v
	case fieldOrderingKey:
		m.OrderingKey = v
	default:
		return !isNumber(field)
	}
	return true
}

func known(field int32) bool { return isBytes(field) || isNumber(field) }

func isBytes(field int32) bool {
	switch field {
	case fieldProducerName, fieldReplicatedFrom, fieldPartitionKey, fieldEncryptionKeys, fieldSchemaVersion, fieldOrderingKey:
		return true
	}
	return false
}

func isNumber(field int32) bool {
	switch field {
	case fieldSequenceID, fieldPublishTime, fieldNumMessages, fieldEventTime, fieldKeyIsBase64, fieldDeliverAt,
		fieldMarkerType, fieldTxnLeast, fieldTxnMost, fieldHighest, fieldNumChunks, fieldChunkID:
		return true
	}
	return false
}

// varint decodes at i and returns the value and the place after it, or -1 if it
// is cut off or longer than ten bytes. Bits beyond the 64th are dropped, as the
// generated code does.
func varint(b []byte, i int) (v uint64, next int) {
	for shift := uint(0); shift < 64 && i < len(b); shift += 7 {
		c := b[i]
		i++
		v |= uint64(c&0x7f) << shift
		if c < 0x80 {
			return v, i
		}
	}
	return 0, -1
}

func cut(at int) error {
	return fmt.Errorf("%w message metadata: cut off in the field at byte %d", ErrMalformed, at)
}

func wrongWire(field int32, wire int) error {
	return fmt.Errorf("%w message metadata: field %d has wire type %d", ErrMalformed, field, wire)
}
