package wireclient

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/protocoltest"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// entry makes a payload section with one plain message.
func entry(text string) []byte { return protocol.BuildPayload(entryMeta(), []byte(text)) }

func entryMeta() *pulsarpb.MessageMetadata {
	return &pulsarpb.MessageMetadata{ProducerName: new("p"), SequenceId: new(uint64(3)), PublishTime: new(uint64(5))}
}

// batchEntry makes a payload section with a batch.
func batchEntry(texts ...string) []byte {
	var body []byte
	for i, text := range texts {
		single := &pulsarpb.SingleMessageMetadata{
			PayloadSize: new(int32(len(text))), PartitionKey: new("k" + strconv.Itoa(i)), SequenceId: new(uint64(100 + i)),
		}
		raw, err := single.MarshalVT()
		if err != nil {
			panic(err)
		}
		body = append(binary.BigEndian.AppendUint32(body, uint32(len(raw))), raw...)
		body = append(body, text...)
	}
	meta := entryMeta()
	meta.NumMessagesInBatch = new(int32(len(texts)))
	return protocol.BuildPayload(meta, body)
}

// cut cuts the connections and waits until k is attached to a new one.
func cut(t *testing.T, b *protocoltest.Broker, k *Consumer) {
	t.Helper()
	old := k.attachedTo()
	b.Disconnect()
	eventually(t, "attached again", func() bool { c := k.attachedTo(); return c != nil && c != old })
}

func store(k *protocoltest.Cluster, n int) {
	for i := range n {
		k.Store(testTopic, entry(strconv.Itoa(i)))
	}
}

func TestConsume(t *testing.T) {
	k := protocoltest.NewCluster()
	c := dial(t, k.NewBroker(t).URL(), quick())
	p := produce(t, c, ProducerOptions{Name: "me"})
	consumer := subscribe(t, c, SubscribeOptions{})
	event := time.UnixMilli(1_600_000_000_000)
	if _, err := p.Send(testContext(t), OutMessage{Payload: []byte("hello"), Key: "k", Properties: map[string]string{"a": "b"}, EventTime: event}); err != nil {
		t.Fatal(err)
	}
	m := receive(t, consumer)
	if m.ID.String() != "7:0" || string(m.Payload) != "hello" || m.Key != "k" || m.Properties["a"] != "b" || m.Producer != "me" ||
		m.SequenceID != 0 || !m.EventTime.Equal(event) || time.Since(m.PublishTime).Abs() > time.Minute || m.Redeliveries != 0 {
		t.Errorf("received %+v", m)
	}
	if n := k.Unacknowledged(testTopic, "sub"); n != 1 {
		t.Errorf("%d unacknowledged before Ack", n)
	}
	if err := consumer.AckAndWait(testContext(t), m); err != nil {
		t.Fatal(err)
	}
	if n := k.Unacknowledged(testTopic, "sub"); n != 0 {
		t.Errorf("%d unacknowledged after Ack", n)
	}
	if id, err := consumer.LastMessageID(testContext(t)); err != nil || id.String() != "7:0" {
		t.Errorf("LastMessageID = %v, %v", id, err)
	}
	if err := consumer.Close(testContext(t)); err != nil {
		t.Error(err)
	}
	if _, err := consumer.Receive(testContext(t)); !errors.Is(err, ErrClosed) {
		t.Errorf("Receive after Close: %v", err)
	}
	if err := consumer.Ack(m); !errors.Is(err, ErrClosed) {
		t.Errorf("Ack after Close: %v", err)
	}
}

// TestFlow counts permits: a full queue at first, then refills of half a queue.
func TestFlow(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	var mu sync.Mutex
	var flows []uint32
	b.SetHook(hookOn(pulsarpb.BaseCommand_FLOW, func(_ *protocoltest.Conn, command *pulsarpb.BaseCommand) bool {
		mu.Lock()
		defer mu.Unlock()
		flows = append(flows, command.GetFlow().GetMessagePermits())
		return false
	}))
	c := dial(t, b.URL(), quick())
	store(k, 35)
	consumer := subscribe(t, c, SubscribeOptions{FromEarliest: true, QueueSize: 10})
	for i := range 35 {
		m := receive(t, consumer)
		if string(m.Payload) != strconv.Itoa(i) {
			t.Fatalf("message %d is %q", i, m.Payload)
		}
		consumer.mu.Lock()
		n := len(consumer.queue)
		consumer.mu.Unlock()
		if n > 10 {
			t.Errorf("%d messages queued, QueueSize is 10", n)
		}
	}
	if err := consumer.Close(testContext(t)); err != nil { // after it, all FLOWs have been read
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if want := []uint32{10, 5, 5, 5, 5, 5, 5, 5}; !slices.Equal(flows, want) {
		t.Errorf("permits %v, want %v", flows, want)
	}
}

// TestFlowStartsAnew: what was taken over a lost connection does not count on the
// next one.
func TestFlowStartsAnew(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	c := dial(t, b.URL(), quick())
	store(k, 20)
	consumer := subscribe(t, c, SubscribeOptions{FromEarliest: true, QueueSize: 10})
	for range 3 {
		receive(t, consumer)
	}
	var flows atomic.Int32
	b.SetHook(hookOn(pulsarpb.BaseCommand_FLOW, func(*protocoltest.Conn, *pulsarpb.BaseCommand) bool {
		flows.Add(1)
		return false
	}))
	cut(t, b, consumer)
	for range 4 {
		receive(t, consumer)
	}
	if err := consumer.Close(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if n := flows.Load(); n != 1 {
		t.Errorf("%d FLOWs after four messages, want only the first", n)
	}
}

func TestBatch(t *testing.T) {
	k := protocoltest.NewCluster()
	c := dial(t, k.NewBroker(t).URL(), quick())
	k.Store(testTopic, batchEntry("a", "b", "c"))
	k.Store(testTopic, batchEntry("d"))
	compressed := entryMeta()
	compressed.NumMessagesInBatch, compressed.Compression = proto.Int32(5), pulsarpb.CompressionType_LZ4.Enum()
	k.Store(testTopic, protocol.BuildPayload(compressed, []byte("zzz")))
	for range 20 {
		k.Store(testTopic, batchEntry("e", "f"))
	}
	consumer := subscribe(t, c, SubscribeOptions{FromEarliest: true, QueueSize: 6})
	var got []*Message
	for range 5 {
		got = append(got, receive(t, consumer))
	}
	for i, want := range []string{"7:0:-1:0 a k0 100", "7:0:-1:1 b k1 101", "7:0:-1:2 c k2 102", "7:1:-1:0 d k0 100"} {
		m := got[i]
		if s := strings.Join([]string{m.ID.String(), string(m.Payload), m.Key, strconv.Itoa(int(m.SequenceID))}, " "); s != want {
			t.Errorf("message %d is %s, want %s", i, s, want)
		}
	}
	if m := got[4]; m.Compression != pulsarpb.CompressionType_LZ4 || string(m.Payload) != "zzz" || m.ID.BatchIndex != -1 {
		t.Errorf("compressed batch: %+v", m)
	}
	for _, i := range []int{0, 2, 2} {
		if err := consumer.AckAndWait(testContext(t), got[i]); err != nil {
			t.Fatal(err)
		}
	}
	if n := k.Unacknowledged(testTopic, "sub"); n != 23 {
		t.Errorf("%d entries unacknowledged with one message of the batch left, want 23", n)
	}
	if err := consumer.AckAndWait(testContext(t), got[1]); err != nil {
		t.Fatal(err)
	}
	if n := k.Unacknowledged(testTopic, "sub"); n != 22 {
		t.Errorf("%d entries unacknowledged after the batch, want 22", n)
	}
	for range 40 { // permits must not run out over what the batches count
		receive(t, consumer)
	}
}

func TestBadBatches(t *testing.T) {
	command := &pulsarpb.CommandMessage{ConsumerId: new(uint64(1)), MessageId: Earliest.data()}
	good := batchEntry("abc", "def")
	meta, body, err := protocol.ParseMetadata(good)
	if err != nil {
		t.Fatal(err)
	}
	for n := range len(body) {
		if _, _, err := unpack(command, protocol.BuildPayload(meta, body[:n])); !errors.Is(err, protocol.ErrMalformed) {
			t.Errorf("batch cut to %d of %d bytes: %v", n, len(body), err)
		}
	}
	meta.NumMessagesInBatch = proto.Int32(1 << 30)
	if _, _, err := unpack(command, protocol.BuildPayload(meta, body)); !errors.Is(err, protocol.ErrMalformed) {
		t.Errorf("batch of 2^30 messages: %v", err)
	}
	meta.NumMessagesInBatch = proto.Int32(2)
	command.AckSet = []int64{2} // the first is acknowledged
	messages, permits, err := unpack(command, protocol.BuildPayload(meta, body))
	if err != nil || len(messages) != 1 || string(messages[0].Payload) != "def" || permits != 2 || messages[0].batch.left != 1 {
		t.Errorf("with an ack set: %v, %d, %v", messages, permits, err)
	}
}

func TestCumulativeAck(t *testing.T) {
	k := protocoltest.NewCluster()
	c := dial(t, k.NewBroker(t).URL(), quick())
	store(k, 3)
	k.Store(testTopic, batchEntry("a", "b"))
	consumer := subscribe(t, c, SubscribeOptions{FromEarliest: true})
	var last *Message
	for range 4 {
		last = receive(t, consumer)
	}
	for want := 1; want >= 0; want-- { // first inside the batch, then at its end
		if err := consumer.AckCumulative(last); err != nil {
			t.Fatal(err)
		}
		eventually(t, "acknowledged", func() bool { return k.Unacknowledged(testTopic, "sub") == want })
		if want == 1 {
			last = receive(t, consumer)
		}
	}
}

func TestUnacknowledgedComesAgain(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	c := dial(t, b.URL(), quick())
	store(k, 4)
	consumer := subscribe(t, c, SubscribeOptions{FromEarliest: true, Type: Shared})
	first := receive(t, consumer)
	if err := consumer.AckAndWait(testContext(t), first); err != nil {
		t.Fatal(err)
	}
	receive(t, consumer)
	cut(t, b, consumer)
	for i := 1; i < 4; i++ { // all but the acknowledged one
		if m := receive(t, consumer); string(m.Payload) != strconv.Itoa(i) {
			t.Errorf("after the cut, got %q, want %d", m.Payload, i)
		}
	}
	if err := consumer.Redeliver(); err != nil {
		t.Fatal(err)
	}
	m := receive(t, consumer)
	if string(m.Payload) != "1" || m.Redeliveries != 1 {
		t.Errorf("redelivered %q for the %d. time, want 1 for the first", m.Payload, m.Redeliveries)
	}
	receive(t, consumer)
	if last := receive(t, consumer); string(last.Payload) != "3" {
		t.Fatalf("got %q", last.Payload)
	}
	if err := consumer.Redeliver(m); err != nil {
		t.Fatal(err)
	}
	if again := receive(t, consumer); again.ID != m.ID || again.Redeliveries != 2 {
		t.Errorf("asked for %v again, got %v with %d redeliveries", m.ID, again.ID, again.Redeliveries)
	}
}

func TestDamagedMessageIsNotDelivered(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	c := dial(t, b.URL(), quick())
	good := entry("damaged")
	bad := slices.Clone(good)
	bad[len(bad)-1] ^= 1
	consumer := subscribe(t, c, SubscribeOptions{FromEarliest: true})
	k.Store(testTopic, bad)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if m, err := consumer.Receive(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("received %v, %v", m, err)
	}
	k.Replace(testTopic, 0, good) // the storage repairs itself
	if m := receive(t, consumer); string(m.Payload) != "damaged" {
		t.Errorf("received %q", m.Payload)
	}
}

func TestSeekAndReader(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	c := dial(t, b.URL(), quick())
	store(k, 5)
	start := MessageID{Position: receiveFirst(t, c).ID.Position, Partition: -1, BatchIndex: -1}
	start.Entry = 2
	reader := subscribe(t, c, SubscribeOptions{Subscription: "reader", Start: &start})
	for i := 2; i < 4; i++ {
		if m := receive(t, reader); string(m.Payload) != strconv.Itoa(i) {
			t.Errorf("reader got %q, want %d", m.Payload, i)
		}
	}
	cut(t, b, reader) // a reader goes on where it was, though the broker keeps no position
	if m := receive(t, reader); string(m.Payload) != "4" {
		t.Errorf("after the cut the reader got %q, want 4", m.Payload)
	}
	for what, seek := range map[string]func() error{
		"id":   func() error { return reader.Seek(testContext(t), Earliest) },
		"time": func() error { return reader.SeekTime(testContext(t), time.UnixMilli(1)) },
	} {
		if err := seek(); err != nil {
			t.Fatal(err)
		}
		for i := range 5 {
			if m := receive(t, reader); string(m.Payload) != strconv.Itoa(i) {
				t.Errorf("after a seek by %s got %q, want %d", what, m.Payload, i)
			}
		}
	}
}

func receiveFirst(t *testing.T, c *Client) *Message {
	t.Helper()
	k := subscribe(t, c, SubscribeOptions{Subscription: "first", FromEarliest: true})
	m := receive(t, k)
	if err := k.Unsubscribe(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Receive(testContext(t)); !errors.Is(err, ErrClosed) {
		t.Errorf("Receive after Unsubscribe: %v", err)
	}
	return m
}

func TestEndOfTopic(t *testing.T) {
	k := protocoltest.NewCluster()
	c := dial(t, k.NewBroker(t).URL(), quick())
	store(k, 1)
	consumer := subscribe(t, c, SubscribeOptions{FromEarliest: true})
	k.Terminate(testTopic)
	receive(t, consumer)
	for range 2 {
		if _, err := consumer.Receive(testContext(t)); !errors.Is(err, ErrEndOfTopic) {
			t.Errorf("past the end: %v", err)
		}
	}
}

func TestConsumerRefused(t *testing.T) {
	k := protocoltest.NewCluster()
	c := dial(t, k.NewBroker(t).URL(), quick())
	subscribe(t, c, SubscribeOptions{})
	_, err := c.Subscribe(testContext(t), SubscribeOptions{Topic: testTopic, Subscription: "sub"})
	if err == nil || !strings.Contains(err.Error(), "ConsumerBusy: exclusive consumer is already connected") {
		t.Errorf("second exclusive consumer: %v", err)
	}
	if _, err := c.Subscribe(testContext(t), SubscribeOptions{Topic: testTopic}); err == nil {
		t.Error("a subscription without a name was accepted")
	}
	if _, err := c.Subscribe(testContext(t), SubscribeOptions{Topic: "a/b", Subscription: "s"}); !errors.Is(err, protocol.ErrTopicName) {
		t.Errorf("bad topic: %v", err)
	}
}

func TestManyReceiversShareOneConsumer(t *testing.T) {
	k := protocoltest.NewCluster()
	c := dial(t, k.NewBroker(t).URL(), quick())
	consumer := subscribe(t, c, SubscribeOptions{FromEarliest: true, QueueSize: 7})
	var wg sync.WaitGroup
	got := make(chan string, 200)
	ctx, cancel := context.WithCancel(t.Context())
	for range 5 {
		wg.Go(func() {
			for {
				m, err := consumer.Receive(ctx)
				if err != nil {
					return
				}
				got <- string(m.Payload)
			}
		})
	}
	store(k, 200)
	seen := map[string]bool{}
	for range 200 {
		seen[<-got] = true
	}
	cancel()
	wg.Wait()
	if len(seen) != 200 {
		t.Errorf("%d distinct messages of 200", len(seen))
	}
}
