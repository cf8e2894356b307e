package wireclient

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// MessageID names a message: its entry, and its place in a batch.
type MessageID struct {
	ledger.Position
	Partition  int32 // -1 = the topic is not a partition
	BatchIndex int32 // -1 = not part of a batch
}

// String returns "ledger:entry", with ":partition" and ":batch" as far as they
// are set.
func (id MessageID) String() string {
	s := id.Position.String()
	if id.Partition >= 0 || id.BatchIndex >= 0 {
		s += fmt.Sprintf(":%d", id.Partition)
	}
	if id.BatchIndex >= 0 {
		s += fmt.Sprintf(":%d", id.BatchIndex)
	}
	return s
}

// The ends of a topic, for Seek and SubscribeOptions.Start.
var (
	Earliest = MessageID{ledger.Position{Ledger: -1, Entry: -1}, -1, -1}
	Latest   = MessageID{ledger.Position{Ledger: 1<<63 - 1, Entry: 1<<63 - 1}, -1, -1}
)

func idOf(d *pulsarpb.MessageIdData) MessageID {
	return MessageID{
		ledger.Position{Ledger: ledger.ID(d.GetLedgerId()), Entry: ledger.EntryID(d.GetEntryId())},
		d.GetPartition(), d.GetBatchIndex(),
	}
}

func (id MessageID) data() *pulsarpb.MessageIdData {
	d := &pulsarpb.MessageIdData{LedgerId: new(uint64(id.Ledger)), EntryId: new(uint64(id.Entry))}
	if id.Partition >= 0 {
		d.Partition = &id.Partition
	}
	if id.BatchIndex >= 0 {
		d.BatchIndex = &id.BatchIndex
	}
	return d
}

// OutMessage is a message to publish. Only Payload is needed.
type OutMessage struct {
	Payload    []byte // not changed until the callback
	Key        string // "" = none
	Properties map[string]string
	EventTime  time.Time // zero = none
	DeliverAt  time.Time // zero = at once

	// SequenceID replaces the producer's own numbering, if not nil. It must rise.
	SequenceID *uint64
}

// metadata describes m; name and sequence are the producer's.
func (m *OutMessage) metadata(name string, sequence uint64, now time.Time) *pulsarpb.MessageMetadata {
	meta := &pulsarpb.MessageMetadata{
		ProducerName: &name, SequenceId: &sequence, PublishTime: new(uint64(now.UnixMilli())),
	}
	if m.Key != "" {
		meta.PartitionKey = &m.Key
	}
	for k, v := range m.Properties {
		meta.Properties = append(meta.Properties, &pulsarpb.KeyValue{Key: new(k), Value: new(v)})
	}
	if !m.EventTime.IsZero() {
		meta.EventTime = new(uint64(m.EventTime.UnixMilli()))
	}
	if !m.DeliverAt.IsZero() {
		meta.DeliverAtTime = new(m.DeliverAt.UnixMilli())
	}
	return meta
}

// Message is one that a consumer received.
type Message struct {
	ID          MessageID
	Payload     []byte
	Key         string
	Properties  map[string]string
	PublishTime time.Time
	EventTime   time.Time // zero = none
	Producer    string
	SequenceID  uint64

	// Redeliveries is how often the broker delivered it before.
	Redeliveries int

	// Compression is not NONE if Payload is still compressed. A compressed batch
	// arrives as one message.
	Compression pulsarpb.CompressionType

	consumer *Consumer
	batch    *batch // nil = not part of one
}

// batch counts the messages of an entry that are not acknowledged.
type batch struct {
	open []bool // guarded by the consumer's mu
	left int    // guarded by the consumer's mu
}

// unpack makes messages of an entry, and says how many the broker counted. The
// payload's checksum has been verified.
func unpack(command *pulsarpb.CommandMessage, payload []byte) (messages []*Message, permits int, err error) {
	meta, body, err := protocol.ParseMetadata(payload)
	if err != nil {
		return nil, 0, err
	}
	permits = int(meta.GetNumMessagesInBatch())
	whole := &Message{
		ID: idOf(command.GetMessageId()), Payload: body, Key: meta.GetPartitionKey(), Properties: properties(meta.GetProperties()),
		PublishTime: time.UnixMilli(int64(meta.GetPublishTime())), EventTime: timeOf(meta.GetEventTime()),
		Producer: meta.GetProducerName(), SequenceID: meta.GetSequenceId(),
		Redeliveries: int(command.GetRedeliveryCount()), Compression: meta.GetCompression(),
	}
	if meta.NumMessagesInBatch == nil || meta.GetCompression() != pulsarpb.CompressionType_NONE || len(meta.GetEncryptionKeys()) > 0 {
		return []*Message{whole}, permits, nil
	}
	messages, err = unpackBatch(whole, permits, command.GetAckSet())
	return messages, permits, err
}

// minBatched is the least that a message takes inside a batch, in bytes: its
// metadata's length field and the required payload_size.
const minBatched = 4 + 2

func unpackBatch(whole *Message, n int, ackSet []int64) ([]*Message, error) {
	body := whole.Payload
	if n > len(body)/minBatched {
		return nil, fmt.Errorf("%w batch: %d messages in %d bytes", protocol.ErrMalformed, n, len(body))
	}
	messages := make([]*Message, 0, n)
	b := &batch{open: make([]bool, n)}
	for i := range n {
		var single pulsarpb.SingleMessageMetadata
		if len(body) < 4 || uint64(binary.BigEndian.Uint32(body)) > uint64(len(body)-4) {
			return nil, fmt.Errorf("%w batch: cut off in message %d of %d", protocol.ErrMalformed, i, n)
		}
		size := int(binary.BigEndian.Uint32(body))
		if err := single.UnmarshalVT(body[4 : 4+size]); err != nil {
			return nil, fmt.Errorf("%w batch: message %d of %d: %w", protocol.ErrMalformed, i, n, err)
		}
		body = body[4+size:]
		length := int(single.GetPayloadSize())
		if length < 0 || length > len(body) {
			return nil, fmt.Errorf("%w batch: message %d of %d has %d bytes, %d are there", protocol.ErrMalformed, i, n, length, len(body))
		}
		m := *whole
		m.ID.BatchIndex, m.batch = int32(i), b
		m.Payload, body = body[:length:length], body[length:]
		m.Key, m.Properties, m.EventTime = single.GetPartitionKey(), properties(single.GetProperties()), timeOf(single.GetEventTime())
		if single.SequenceId != nil {
			m.SequenceID = single.GetSequenceId()
		}
		if single.GetCompactedOut() || acked(ackSet, i) {
			continue
		}
		b.open[i] = true
		b.left++
		messages = append(messages, &m)
	}
	return messages, nil
}

// acked reads a broker's set of messages that are not acknowledged; an empty set
// says nothing.
func acked(set []int64, i int) bool {
	if len(set) == 0 {
		return false
	}
	return i/64 >= len(set) || set[i/64]&(1<<(i%64)) == 0
}

func properties(list []*pulsarpb.KeyValue) map[string]string {
	if len(list) == 0 {
		return nil
	}
	m := make(map[string]string, len(list))
	for _, kv := range list {
		m[kv.GetKey()] = kv.GetValue()
	}
	return m
}

func timeOf(milliseconds uint64) time.Time {
	if milliseconds == 0 {
		return time.Time{}
	}
	return time.UnixMilli(int64(milliseconds))
}
