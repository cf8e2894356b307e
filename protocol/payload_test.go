package protocol

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

func itoa(n int) string { return strconv.Itoa(n) }

func testMetadata() *pulsarpb.MessageMetadata {
	return &pulsarpb.MessageMetadata{
		ProducerName: new("producer-1"), SequenceId: proto.Uint64(42), PublishTime: proto.Uint64(1_700_000_000_123),
		Properties:   []*pulsarpb.KeyValue{{Key: new("colour"), Value: new("red")}},
		PartitionKey: new("key-7"),
	}
}

// fullMetadata sets every field that Peek reads.
func fullMetadata() *pulsarpb.MessageMetadata {
	m := testMetadata()
	m.NumMessagesInBatch = proto.Int32(10)
	m.EventTime = proto.Uint64(1_600_000_000_000)
	m.EncryptionKeys = []*pulsarpb.EncryptionKeys{{Key: new("k"), Value: []byte("v")}}
	m.SchemaVersion = []byte{0, 0, 0, 0, 0, 0, 0, 3}
	m.PartitionKeyB64Encoded = new(true)
	m.OrderingKey = []byte("order")
	m.DeliverAtTime = proto.Int64(1_800_000_000_000)
	m.MarkerType = proto.Int32(5)
	m.TxnidLeastBits, m.TxnidMostBits = proto.Uint64(11), proto.Uint64(12)
	m.HighestSequenceId = proto.Uint64(51)
	m.NumChunksFromMsg, m.TotalChunkMsgSize, m.ChunkId = proto.Int32(4), proto.Int32(4000), proto.Int32(2)
	m.ReplicatedFrom = new("east")
	m.ReplicateTo = []string{"west"}
	m.Uuid = new("u")
	return m
}

// metaOf is the slow and obvious way to what Peek returns.
func metaOf(m *pulsarpb.MessageMetadata) Meta {
	want := Meta{
		Messages: int(m.GetNumMessagesInBatch()), Batch: m.NumMessagesInBatch != nil,
		ProducerName: []byte(m.GetProducerName()), SequenceID: m.GetSequenceId(), HighestSequenceID: m.GetHighestSequenceId(),
		PublishTime: m.GetPublishTime(), EventTime: m.GetEventTime(), DeliverAt: m.GetDeliverAtTime(),
		KeyIsBase64: m.GetPartitionKeyB64Encoded(), OrderingKey: m.OrderingKey,
		Marker: m.MarkerType != nil, MarkerType: m.GetMarkerType(),
		Chunks: m.GetNumChunksFromMsg(), ChunkID: m.GetChunkId(),
		Encrypted: len(m.GetEncryptionKeys()) > 0, SchemaVersion: m.SchemaVersion,
		Txn:     m.TxnidLeastBits != nil || m.TxnidMostBits != nil,
		TxnMost: m.GetTxnidMostBits(), TxnLeast: m.GetTxnidLeastBits(),
		hasName: true, hasSeq: true, hasTime: true,
	}
	if m.PartitionKey != nil {
		want.PartitionKey = []byte(m.GetPartitionKey())
	}
	if m.ReplicatedFrom != nil {
		want.ReplicatedFrom = []byte(m.GetReplicatedFrom())
	}
	if want.HighestSequenceID == 0 {
		want.HighestSequenceID = want.SequenceID
	}
	return want
}

func TestPayloadRoundTrip(t *testing.T) {
	for _, meta := range []*pulsarpb.MessageMetadata{testMetadata(), fullMetadata()} {
		p := BuildPayload(meta, []byte("body"))
		if err := CheckPayload(p); err != nil {
			t.Fatal(err)
		}
		got, body, err := ParseMetadata(p)
		if err != nil || string(body) != "body" {
			t.Fatalf("body %q, %v", body, err)
		}
		if diff := cmp.Diff(meta, got, protocmp.Transform()); diff != "" {
			t.Errorf("metadata (-want +got):\n%s", diff)
		}
		peeked, err := Peek(p)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(metaOf(meta), peeked, cmp.AllowUnexported(Meta{})); diff != "" {
			t.Errorf("Peek (-want +got):\n%s", diff)
		}
	}
}

func TestCheckPayloadSeesEveryFlippedBit(t *testing.T) {
	p := BuildPayload(testMetadata(), []byte("body"))
	for i := range len(p) * 8 {
		bad := bytes.Clone(p)
		bad[i/8] ^= 1 << (i % 8)
		if err := CheckPayload(bad); !errors.Is(err, ErrChecksum) && !errors.Is(err, ErrMalformed) {
			t.Errorf("bit %d flipped: %v", i, err)
		}
	}
}

func TestPayloadWithBrokerEntry(t *testing.T) {
	message := BuildPayload(testMetadata(), []byte("body"))
	entry, err := (&pulsarpb.BrokerEntryMetadata{BrokerTimestamp: proto.Uint64(99), Index: proto.Uint64(7)}).MarshalVT()
	if err != nil {
		t.Fatal(err)
	}
	p := binary.BigEndian.AppendUint16(nil, 0x0e02)
	p = binary.BigEndian.AppendUint32(p, uint32(len(entry)))
	p = append(append(p, entry...), message...)

	if err := CheckPayload(p); err != nil {
		t.Errorf("CheckPayload: %v", err)
	}
	if m, err := Peek(p); err != nil || m.SequenceID != 42 {
		t.Errorf("Peek = %+v, %v", m, err)
	}
	if _, body, err := ParseMetadata(p); err != nil || string(body) != "body" {
		t.Errorf("ParseMetadata: body %q, %v", body, err)
	}
	got, rest, err := ParseBrokerEntry(p)
	if err != nil || got.GetIndex() != 7 || got.GetBrokerTimestamp() != 99 || !bytes.Equal(rest, message) {
		t.Errorf("ParseBrokerEntry = %v, %d bytes, %v", got, len(rest), err)
	}
	if got, rest, err := ParseBrokerEntry(message); got != nil || !bytes.Equal(rest, message) || err != nil {
		t.Errorf("ParseBrokerEntry of a plain payload = %v, %d bytes, %v", got, len(rest), err)
	}
	binary.BigEndian.PutUint32(p[2:], 1<<30)
	if err := CheckPayload(p); !errors.Is(err, ErrMalformed) {
		t.Errorf("broker entry longer than the payload: %v", err)
	}
}

func TestBadPayloads(t *testing.T) {
	good := BuildPayload(testMetadata(), nil)
	edit := func(f func(p []byte)) []byte {
		p := bytes.Clone(good)
		f(p)
		return p
	}
	raw := func(meta ...byte) []byte {
		p := append(binary.BigEndian.AppendUint16(nil, 0x0e01), 0, 0, 0, 0)
		return append(binary.BigEndian.AppendUint32(p, uint32(len(meta))), meta...)
	}
	batchOf := func(n int32) []byte {
		m := testMetadata()
		m.NumMessagesInBatch = new(n)
		return BuildPayload(m, nil)
	}
	tests := []struct {
		name  string
		input []byte
		text  string
	}{
		{"empty", nil, "at least 10"},
		{"short", good[:9], "at least 10"},
		{"no-magic", good[6:], "without a checksum are not accepted"},
		{"metadata-too-long", edit(func(p []byte) { binary.BigEndian.PutUint32(p[6:], 1<<31) }), "metadata of 2147483648 bytes"},
		{"cut", good[:len(good)-1], "are there"},
		{"no-name", raw(0x10, 1, 0x18, 1), "producer_name"},
		{"no-sequence", raw(0x0a, 0, 0x18, 1), "sequence_id"},
		{"no-time", raw(0x0a, 0, 0x10, 1), "publish_time"},
		{"cut-varint", raw(0x0a, 0, 0x10, 0x80), "cut off"},
		{"name-is-a-number", raw(0x08, 0, 0x10, 1, 0x18, 1), "wire type"},
		{"sequence-is-bytes", raw(0x0a, 0, 0x12, 0, 0x18, 1), "wire type"},
		{"field-0", raw(0x0a, 0, 0x10, 1, 0x18, 1, 0x00, 0), "field number 0"},
		{"batch-of-0", batchOf(0), "at least 1"},
		{"batch-of-minus-1", batchOf(-1), "at least 1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Peek(tt.input)
			if !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("Peek: %v, want ErrMalformed with %q", err, tt.text)
			}
			if _, _, err := ParseMetadata(tt.input); !errors.Is(err, ErrMalformed) {
				t.Errorf("ParseMetadata: %v, want ErrMalformed", err)
			}
		})
	}
}

func TestMetaKeyAndDelay(t *testing.T) {
	if m := (Meta{PartitionKey: []byte("p")}); string(m.Key()) != "p" {
		t.Errorf("Key = %q, want the partition key", m.Key())
	}
	if m := (Meta{PartitionKey: []byte("p"), OrderingKey: []byte{}}); m.Key() == nil || len(m.Key()) != 0 {
		t.Errorf("Key = %q, want the empty ordering key", m.Key())
	}
	now := time.UnixMilli(1000)
	for at, want := range map[int64]bool{0: false, 1000: false, 1001: true} {
		if m := (Meta{DeliverAt: at}); m.Delayed(now) != want {
			t.Errorf("DeliverAt %d at 1000: Delayed = %v, want %v", at, !want, want)
		}
	}
}

func TestPeekDoesNotAllocate(t *testing.T) {
	p := BuildPayload(fullMetadata(), make([]byte, 100))
	if n := testing.AllocsPerRun(100, func() {
		if _, err := Peek(p); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("Peek allocates %v times", n)
	}
}

// FuzzPeek holds Peek to what the generated decoder says.
func FuzzPeek(f *testing.F) {
	f.Add(BuildPayload(testMetadata(), []byte("x")))
	f.Add(BuildPayload(fullMetadata(), []byte("x")))
	f.Add([]byte{0x0e, 0x02, 0, 0, 0, 0, 0x0e, 0x01})
	unknown := []byte{0x0a, 0, 0x10, 1, 0x18, 1, 0xfb, 0x07, 0x08, 1, 0xfc, 0x07, 0xf9, 0x07, 1, 2, 3, 4, 5, 6, 7, 8} // a group and a fixed64
	f.Add(append([]byte{0x0e, 0x01, 0, 0, 0, 0, 0, 0, 0, byte(len(unknown))}, unknown...))
	f.Fuzz(func(t *testing.T, p []byte) {
		_ = CheckPayload(p)
		meta, _, err := ParseMetadata(p)
		got, peekErr := Peek(p)
		if err != nil {
			return // Peek may be more lenient, never crash
		}
		if peekErr != nil {
			t.Fatalf("ParseMetadata accepts what Peek refuses: %v", peekErr)
		}
		if diff := cmp.Diff(metaOf(meta), got, cmp.AllowUnexported(Meta{})); diff != "" {
			t.Fatalf("Peek (-want +got):\n%s", diff)
		}
	})
}

func BenchmarkPeek(b *testing.B) {
	p := BuildPayload(testMetadata(), make([]byte, 1024))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Peek(p); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCheckPayload(b *testing.B) {
	p := BuildPayload(testMetadata(), make([]byte, 1024))
	b.ReportAllocs()
	b.SetBytes(int64(len(p)))
	for b.Loop() {
		if err := CheckPayload(p); err != nil {
			b.Fatal(err)
		}
	}
}
