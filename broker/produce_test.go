package broker

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

func TestLookup(t *testing.T) {
	d := newBed(t)
	a, b := d.node("broker-a"), d.node("broker-b")
	ask := func(n *node, topic string) *pulsarpb.CommandLookupTopicResponse {
		c := n.connect()
		c.write(&command{Type: pulsarpb.BaseCommand_LOOKUP.Enum(), LookupTopic: &pulsarpb.CommandLookupTopic{Topic: &topic, RequestId: c.id()}})
		return c.expect(pulsarpb.BaseCommand_LOOKUP_RESPONSE).Command.GetLookupTopicResponse()
	}
	waitFor(t, "both know both", func() bool {
		x, errX := a.own.Brokers(t.Context())
		y, errY := b.own.Brokers(t.Context())
		return errX == nil && errY == nil && len(x) == 2 && len(y) == 2
	})
	urls := map[string]int{}
	for i := range 20 {
		topic := topicA + strconv.Itoa(i)
		x, y := ask(a, topic), ask(b, topic)
		if x.GetBrokerServiceUrl() != y.GetBrokerServiceUrl() {
			t.Fatalf("%s: %v and %v", topic, x, y)
		}
		urls[x.GetBrokerServiceUrl()]++
		owner, other := x, y
		if x.GetBrokerServiceUrl() == "pulsar://"+b.addr {
			owner, other = y, x
		}
		if owner.GetResponse() != pulsarpb.CommandLookupTopicResponse_Connect || other.GetResponse() != pulsarpb.CommandLookupTopicResponse_Redirect {
			t.Errorf("the owner says %v, the other %v", owner, other)
		}
	}
	if len(urls) != 2 {
		t.Errorf("all topics went to %v", urls)
	}

	for topic, want := range map[string]pulsarpb.ServerError{
		"persistent://public/nowhere/t":     pulsarpb.ServerError_TopicNotFound,
		"persistent://public/default":       pulsarpb.ServerError_InvalidTopicName,
		"non-persistent://public/default/t": pulsarpb.ServerError_NotAllowedError,
	} {
		if r := ask(a, topic); r.GetResponse() != pulsarpb.CommandLookupTopicResponse_Failed || r.GetError() != want || r.GetMessage() == "" {
			t.Errorf("%s: %v, want Failed with %v", topic, r, want)
		}
	}
}

func partitionsOf(c *client, topic string) *pulsarpb.CommandPartitionedTopicMetadataResponse {
	c.t.Helper()
	c.write(&command{
		Type:              pulsarpb.BaseCommand_PARTITIONED_METADATA.Enum(),
		PartitionMetadata: &pulsarpb.CommandPartitionedTopicMetadata{Topic: &topic, RequestId: c.id()},
	})
	return c.expect(pulsarpb.BaseCommand_PARTITIONED_METADATA_RESPONSE).Command.GetPartitionMetadataResponse()
}

func TestPartitionedTopics(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	const topic = "persistent://public/default/parts"
	if r := partitionsOf(c, topic); r.GetResponse() != pulsarpb.CommandPartitionedTopicMetadataResponse_Success || r.GetPartitions() != 0 {
		t.Errorf("unknown topic: %v, want success with 0", r)
	}
	if r := partitionsOf(c, "persistent://public/nowhere/t"); r.GetResponse() != pulsarpb.CommandPartitionedTopicMetadataResponse_Failed {
		t.Errorf("unknown namespace: %v, want Failed", r)
	}
	name, err := protocol.ParseTopic(topic)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.ns.CreatePartitioned(t.Context(), name, 3); err != nil {
		t.Fatal(err)
	}
	if r := partitionsOf(c, topic); r.GetPartitions() != 3 {
		t.Errorf("%v, want 3", r)
	}
	c.produce(topic+"-partition-2", 1)
	if got := c.publish(1, 0, 1); got.Entry != 0 {
		t.Errorf("first entry of a partition is %v", got)
	}
	c.write(producerCommand(topic, 2, c.id()))
	c.expectError(pulsarpb.ServerError_NotAllowedError)
	c.write(producerCommand(topic+"-partition-3", 3, c.id()))
	c.expectError(pulsarpb.ServerError_TopicNotFound)

	ns := "public/default"
	c.write(&command{
		Type:                 pulsarpb.BaseCommand_GET_TOPICS_OF_NAMESPACE.Enum(),
		GetTopicsOfNamespace: &pulsarpb.CommandGetTopicsOfNamespace{RequestId: c.id(), Namespace: &ns},
	})
	got := c.expect(pulsarpb.BaseCommand_GET_TOPICS_OF_NAMESPACE_RESPONSE).Command.GetGetTopicsOfNamespaceResponse().GetTopics()
	if want := []string{topic + "-partition-0", topic + "-partition-1", topic + "-partition-2"}; !slices.Equal(got, want) {
		t.Errorf("topics %v, want %v", got, want)
	}
	// Clients that subscribe to what is listed do not ask for it to be created.
	never := false
	c.subscribe(got[0], "s", sharedSub, 1, func(s *pulsarpb.CommandSubscribe) { s.ForceTopicCreation = &never })
	c.write(subscribeCommand(topic+"-partition-3", "s", sharedSub, 2, c.id(), func(s *pulsarpb.CommandSubscribe) { s.ForceTopicCreation = &never }))
	c.expectError(pulsarpb.ServerError_TopicNotFound)

	missing := "public/nowhere"
	c.write(&command{
		Type:                 pulsarpb.BaseCommand_GET_TOPICS_OF_NAMESPACE.Enum(),
		GetTopicsOfNamespace: &pulsarpb.CommandGetTopicsOfNamespace{RequestId: c.id(), Namespace: &missing},
	})
	if got := c.expect(pulsarpb.BaseCommand_GET_TOPICS_OF_NAMESPACE_RESPONSE).Command.GetGetTopicsOfNamespaceResponse().GetTopics(); len(got) != 0 {
		t.Errorf("topics of a missing namespace: %v", got)
	}
}

func TestTopicsCreatePartitionedByThemselves(t *testing.T) {
	n := newNode(t, "allowAutoTopicCreationType=partitioned", "defaultNumPartitions=4")
	c := n.connect()
	topic, no := topicA, false
	c.write(&command{
		Type:              pulsarpb.BaseCommand_PARTITIONED_METADATA.Enum(),
		PartitionMetadata: &pulsarpb.CommandPartitionedTopicMetadata{Topic: &topic, RequestId: c.id(), MetadataAutoCreationEnabled: &no},
	})
	if r := c.expect(pulsarpb.BaseCommand_PARTITIONED_METADATA_RESPONSE).Command.GetPartitionMetadataResponse(); r.GetPartitions() != 0 {
		t.Errorf("asked not to create: %v", r)
	}
	if r := partitionsOf(c, topicA); r.GetPartitions() != 4 {
		t.Errorf("%v, want 4", r)
	}
}

func TestTopicCreationNotAllowed(t *testing.T) {
	n := newNode(t, "allowAutoTopicCreation=false")
	c := n.connect()
	c.write(producerCommand(topicA, 1, c.id()))
	e := c.expectError(pulsarpb.ServerError_TopicNotFound)
	if !strings.Contains(e.GetMessage(), "allowAutoTopicCreation") {
		t.Errorf("ERROR %q does not say what to do", e.GetMessage())
	}
	name, _ := protocol.ParseTopic(topicA)
	if err := n.CreateTopic(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	c.produce(topicA, 1)
	c.publish(1, 0, 1)
}

func TestProducerNames(t *testing.T) {
	n := newNode(t)
	a, b := n.connect(), n.connect()
	name := a.produce(topicA, 1)
	if again := a.produce(topicA, 1); again != name {
		t.Errorf("the same id again is called %q, was %q", again, name)
	}
	if other := a.produce(topicA, 2); other == name || other == "" {
		t.Errorf("two producers are called %q", other)
	}
	a.produce(topicA, 3, named("mine", 0))
	b.write(producerCommand(topicA, 1, b.id(), named("mine", 0)))
	a.alive(func() { b.expectError(pulsarpb.ServerError_ProducerBusy) })
	a.closeProducer(3)
	if got := b.produce(topicA, 1, named("mine", 0)); got != "mine" {
		t.Errorf("called %q", got)
	}
	b.write(producerCommand(topicA, 4, b.id(), func(p *pulsarpb.CommandProducer) {
		p.ProducerAccessMode = pulsarpb.ProducerAccessMode_Exclusive.Enum()
	}))
	b.expectError(pulsarpb.ServerError_NotAllowedError)
	b.write(producerCommand(topicA, 5, b.id(), named(strings.Repeat("x", maxNameLength+1), 0)))
	b.expectError(pulsarpb.ServerError_NotAllowedError)
	b.write(producerCommand(topicA, 6, b.id(), named("\xff", 0)))
	b.expectError(pulsarpb.ServerError_NotAllowedError)
	b.works()
}

func TestLastSequenceIsMinusOne(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.write(producerCommand(topicA, 1, c.id()))
	r := c.expect(pulsarpb.BaseCommand_PRODUCER_SUCCESS).Command.GetProducerSuccess()
	if r.LastSequenceId == nil || *r.LastSequenceId != -1 || !r.GetProducerReady() {
		t.Errorf("%v", r)
	}
}

// A client that reconnects while the broker still holds its old connection gets
// its name back: the old connection does not answer.
func TestReconnectTakesOver(t *testing.T) {
	n := newNode(t, "connectionLivenessCheckTimeoutMillis=100")
	old := n.connect()
	old.produce(topicA, 1, named("mine", 0))
	old.subscribe(topicA, "s", exclusive, 1)
	old.publish(1, 0, 1)
	// From here on old answers nothing: it is half open.
	c := n.connect()
	if got := c.produce(topicA, 1, named("mine", 1)); got != "mine" {
		t.Errorf("called %q", got)
	}
	c.subscribe(topicA, "s", exclusive, 1)
	c.flow(1, 10)
	c.publish(1, 1, 2)
	c.receive(1, "0", "1")
	old.mute = true
	old.expectClosed()
}

// A made-up name belongs to one client: a higher epoch takes it over at once.
func TestReconnectWithMadeUpNameTakesOverAtOnce(t *testing.T) {
	n := newNode(t, "connectionLivenessCheckTimeoutMillis=60000")
	old := n.connect()
	name := old.produce(topicA, 1)
	epoch, user := uint64(1), false
	c := n.connect()
	c.produce(topicA, 1, func(p *pulsarpb.CommandProducer) {
		p.ProducerName, p.Epoch, p.UserProvidedProducerName = &name, &epoch, &user
	})
	c.publish(1, 0, 1)
	old.send(1, 7, payload("late", 1)) // its producer is gone: dropped without a word
	old.works()
	if got := n.mem.count(); got != 1 {
		t.Errorf("%d entries stored, want 1", got)
	}
}

func TestSendStoresBytesUntouched(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	c.subscribe(topicA, "s", exclusive, 1)
	c.flow(1, 100)
	name, seq, now, lz4, size, count := "p", uint64(9), uint64(time.Now().UnixMilli()), pulsarpb.CompressionType_LZ4, uint32(7), int32(3)
	batch := protocol.BuildPayload(&pulsarpb.MessageMetadata{
		ProducerName: &name, SequenceId: &seq, PublishTime: &now, Compression: &lz4, UncompressedSize: &size, NumMessagesInBatch: &count,
	}, []byte("not LZ4 at all: the broker does not look"))
	highest := uint64(11)
	cmd := &command{Type: pulsarpb.BaseCommand_SEND.Enum(), Send: &pulsarpb.CommandSend{
		ProducerId: new(uint64(1)), SequenceId: &seq, HighestSequenceId: &highest, NumMessages: &count,
	}}
	c.writeRaw(append(protocol.AppendPayloadHeader(nil, cmd, len(batch)), batch...))
	r := c.receipt()
	if r.GetSequenceId() != 9 || r.GetHighestSequenceId() != 11 {
		t.Errorf("receipt %v", r)
	}
	f := c.expect(pulsarpb.BaseCommand_MESSAGE)
	if !slices.Equal(f.Payload, batch) {
		t.Error("the payload came back changed")
	}
	if s := n.stats(topicA); s.MsgInCounter != 3 || s.BytesInCounter != int64(len(batch)) {
		t.Errorf("%d messages of %d bytes came in, want 3 of %d", s.MsgInCounter, s.BytesInCounter, len(batch))
	}
}

func TestBadPayloadsAreRefusedAndNothingIsStored(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	flipped := payload("x", 1)
	flipped[len(flipped)-1] ^= 1
	badSum := payload("x", 1)
	badSum[3] ^= 1
	noMagic := payload("x", 1)
	noMagic[1] = 0x02
	noMeta := []byte{0x0e, 0x01, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff}
	tests := []struct {
		name string
		data []byte
		want pulsarpb.ServerError
	}{
		{"flipped-bit", flipped, pulsarpb.ServerError_ChecksumError},
		{"bad-checksum", badSum, pulsarpb.ServerError_ChecksumError},
		{"other-magic", noMagic, pulsarpb.ServerError_UnsupportedVersionError},
		{"bad-metadata-size", noMeta, pulsarpb.ServerError_UnsupportedVersionError},
		{"one-byte", []byte{0x0e}, pulsarpb.ServerError_UnsupportedVersionError},
		{"empty", nil, pulsarpb.ServerError_NotAllowedError},
	}
	for i, tt := range tests {
		c.send(1, uint64(i), tt.data)
		e := c.expect(pulsarpb.BaseCommand_SEND_ERROR).Command.GetSendError()
		if e.GetError() != tt.want || e.GetSequenceId() != uint64(i) || e.GetProducerId() != 1 || e.GetMessage() == "" {
			t.Errorf("%s: %v, want %v", tt.name, e, tt.want)
		}
	}
	c.writeRaw(func() []byte {
		data := payload("x", 1)
		cmd := &command{Type: pulsarpb.BaseCommand_SEND.Enum(), Send: &pulsarpb.CommandSend{ProducerId: new(uint64(1)), SequenceId: new(uint64(7)), TxnidMostBits: new(uint64(1)), TxnidLeastBits: new(uint64(2))}}
		return append(protocol.AppendPayloadHeader(nil, cmd, len(data)), data...)
	}())
	if e := c.expect(pulsarpb.BaseCommand_SEND_ERROR).Command.GetSendError(); e.GetError() != pulsarpb.ServerError_NotAllowedError {
		t.Errorf("SEND in a transaction: %v", e)
	}
	if got := n.mem.count(); got != 0 {
		t.Errorf("%d entries stored, want none", got)
	}
	c.publish(1, 8, 9) // the producer goes on
}

// Answers go out in the order of the SENDs, also where a later one is known
// first.
func TestAnswersKeepTheOrderOfSends(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	resume := n.mem.pause()
	defer resume()
	c.send(1, 0, payload("0", 1))
	bad := payload("1", 1)
	bad[len(bad)-1] ^= 1
	c.send(1, 1, bad)
	c.send(1, 2, payload("2", 1))
	c.works()
	if len(c.held) > 0 {
		t.Fatalf("answered before storage did: %v", c.heldTypes())
	}
	resume()
	var got []string
	for range 3 {
		f, err := c.next()
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, f.Command.GetType().String())
	}
	if want := []string{"SEND_RECEIPT", "SEND_ERROR", "SEND_RECEIPT"}; !slices.Equal(got, want) {
		t.Errorf("answers %v, want %v", got, want)
	}
}

func TestCloseProducerWaitsForItsReceipts(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	resume := n.mem.pause()
	defer resume()
	c.send(1, 0, payload("0", 1))
	c.write(&command{Type: pulsarpb.BaseCommand_CLOSE_PRODUCER.Enum(), CloseProducer: &pulsarpb.CommandCloseProducer{ProducerId: new(uint64(1)), RequestId: c.id()}})
	c.works()
	if len(c.held) > 0 {
		t.Fatalf("closed before its publish was answered: %v", c.heldTypes())
	}
	resume()
	if r := c.receipt(); r.GetSequenceId() != 0 {
		t.Errorf("receipt %v", r)
	}
	c.succeeded()
	c.closeProducer(1) // again is no error
}

// A connection with too many publishes under way is not read until some are
// answered; others go on.
func TestPublishBackPressure(t *testing.T) {
	tests := []struct {
		name string
		keys []string
		size int
		most int // publishes under way
	}{
		{"requests-per-connection", []string{"maxPendingPublishRequestsPerConnection=10"}, 10, 10},
		{"bytes-of-the-broker", []string{"maxMessagePublishBufferSizeInMB=1"}, 256 << 10, 4},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(t, tt.keys...)
			c := n.connect()
			c.produce(topicA, 1)
			resume := n.mem.pause()
			defer resume()
			go func() {
				for i := range 3 * tt.most {
					data := payload(strings.Repeat("x", tt.size), 1)
					cmd := &command{Type: pulsarpb.BaseCommand_SEND.Enum(), Send: &pulsarpb.CommandSend{ProducerId: new(uint64(1)), SequenceId: new(uint64(i))}}
					if _, err := c.nc.Write(append(protocol.AppendPayloadHeader(nil, cmd, len(data)), data...)); err != nil {
						return
					}
				}
			}()
			topic := n.topics.all()[0]
			pending := func() int { return topic.ml.Stats().PendingAdds }
			waitFor(t, "the reader waits", func() bool {
				n.mu.Lock()
				defer n.mu.Unlock()
				for conn := range n.conns {
					if conn.paused.Load() {
						return true
					}
				}
				return false
			})
			if got := pending(); got > tt.most {
				t.Errorf("%d publishes under way, want at most %d", got, tt.most)
			}
			n.connect().works()
			resume()
			for i := range 3 * tt.most {
				if r := c.receipt(); r.GetSequenceId() != uint64(i) {
					t.Fatalf("receipt %v, want %d", r, i)
				}
			}
		})
	}
}

// No receipt goes out for what was stored after ownership was lost: the producer
// is closed, and its client asks the owner.
func TestNoReceiptWithoutOwnership(t *testing.T) {
	d := newBed(t)
	n := d.node("broker-1")
	c := n.connect()
	c.produce(topicA, 1)
	c.publish(1, 0, 1)
	resume := d.storage.pause()
	defer resume()
	c.send(1, 1, payload("1", 1))
	c.works()
	topic := n.topics.all()[0]
	// Another broker may have the bundle from the moment that the lease is over.
	n.loseClaim(topic)
	resume()
	for {
		f, err := c.next()
		if err != nil {
			t.Fatal(err)
		}
		if f.Command.GetType() == pulsarpb.BaseCommand_SEND_RECEIPT {
			t.Fatal("a receipt went out without ownership")
		}
		if f.Command.GetType() == pulsarpb.BaseCommand_CLOSE_PRODUCER {
			break
		}
	}
}

// fakeClaim is valid until its bool says otherwise, and never notices.
type fakeClaim struct{ valid atomic.Bool }

func (c *fakeClaim) Valid() bool           { return c.valid.Load() }
func (c *fakeClaim) Lost() <-chan struct{} { return nil }
func (c *fakeClaim) Bundle() string        { return "public/default/fake" }

// The same when nothing has noticed yet: the lease is over by the clock alone, as
// in a process that was stopped and goes on.
func TestNoReceiptOnceTheLeaseIsOverByTheClock(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	right := &fakeClaim{}
	right.valid.Store(true)
	n.topics.all()[0].claim = right
	c.publish(1, 0, 1)
	right.valid.Store(false)
	c.send(1, 1, payload("1", 1))
	if f, err := c.next(); err != nil || f.Command.GetType() != pulsarpb.BaseCommand_CLOSE_PRODUCER {
		t.Errorf("%v, %v; want CLOSE_PRODUCER", f.Command, err)
	}
}

// A topic that closes in good order answers what is under way, so that nothing is
// sent twice.
func TestUnloadAnswersWhatIsUnderWay(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	resume := n.mem.pause()
	defer resume()
	c.send(1, 0, payload("0", 1))
	c.send(1, 1, payload("1", 1))
	c.works()
	name, _ := protocol.ParseTopic(topicA)
	unloaded := make(chan error, 1)
	go func() { unloaded <- n.Unload(context.Background(), name) }()
	topic := n.topics.all()[0]
	waitFor(t, "the producer is closing", func() bool {
		topic.mu.Lock()
		defer topic.mu.Unlock()
		for _, p := range topic.producers {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.closing != nil
		}
		return false
	})
	resume()
	for _, want := range []pulsarpb.BaseCommand_Type{
		pulsarpb.BaseCommand_SEND_RECEIPT, pulsarpb.BaseCommand_SEND_RECEIPT, pulsarpb.BaseCommand_CLOSE_PRODUCER,
	} {
		if f, err := c.next(); err != nil || f.Command.GetType() != want {
			t.Fatalf("%v, %v; want %v", f.Command, err, want)
		}
	}
	if err := <-unloaded; err != nil {
		t.Error(err)
	}
}

func TestTopicMovesToAnotherBroker(t *testing.T) {
	d := newBed(t)
	a := d.node("broker-a")
	c := a.connect()
	c.produce(topicA, 1)
	c.subscribe(topicA, "s", exclusive, 1)
	c.flow(1, 100)
	c.publish(1, 0, 5)
	ids := c.receive(1, texts(0, 5)...)
	c.ack(1, ids[:3]...)
	b := d.node("broker-b")
	go a.stop()
	c.expect(pulsarpb.BaseCommand_CLOSE_PRODUCER)
	c.expect(pulsarpb.BaseCommand_CLOSE_CONSUMER)

	c = b.connect()
	waitFor(t, "b serves the topic", func() bool {
		c.write(producerCommand(topicA, 1, c.id()))
		f, err := c.next()
		if err != nil {
			t.Fatal(err)
		}
		return f.Command.GetType() == pulsarpb.BaseCommand_PRODUCER_SUCCESS
	})
	c.publish(1, 5, 6)
	c.subscribe(topicA, "s", exclusive, 1)
	c.flow(1, 100)
	c.receive(1, "3", "4", "5")
}

// A topic whose managed ledger another broker took is closed at once.
func TestFencedTopicSendsItsClientsAway(t *testing.T) {
	d := newBed(t)
	a, b := d.node("broker-a"), d.node("broker-b")
	c := a.connect()
	c.produce(topicA, 1)
	c.publish(1, 0, 1)
	name, _ := protocol.ParseTopic(topicA)
	ml, err := b.factory.Open(t.Context(), name.ManagedLedgerName())
	if err != nil {
		t.Fatal(err)
	}
	defer ml.Close(t.Context())
	c.send(1, 1, payload("1", 1))
	c.expect(pulsarpb.BaseCommand_CLOSE_PRODUCER)
	waitFor(t, "closed", func() bool { return len(a.topics.all()) == 0 })
	c.works()
}

func TestUnloadAndDelete(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	c.publish(1, 0, 2)
	name, _ := protocol.ParseTopic(topicA)
	if err := n.Unload(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	c.expect(pulsarpb.BaseCommand_CLOSE_PRODUCER)
	c.send(1, 2, payload("2", 1)) // still under way when it was closed: dropped
	c.produce(topicA, 1)
	c.publish(1, 2, 3)
	if got := n.mem.count(); got != 3 {
		t.Errorf("%d entries stored, want 3", got)
	}
	if err := n.DeleteTopic(t.Context(), name, false); !errors.Is(err, ErrTopicInUse) {
		t.Errorf("delete while in use: %v", err)
	}
	if err := n.DeleteTopic(t.Context(), name, true); err != nil {
		t.Fatal(err)
	}
	c.expect(pulsarpb.BaseCommand_CLOSE_PRODUCER)
	if err := n.DeleteTopic(t.Context(), name, true); !errors.Is(err, ErrTopicNotFound) {
		t.Errorf("delete again: %v", err)
	}
	c.produce(topicA, 1)
	if got := c.publish(1, 0, 1); got.Entry != 0 {
		t.Errorf("a new topic begins at %v", got)
	}
}

func TestInitialSubscription(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	first := "first"
	c.produce(topicA, 1, func(p *pulsarpb.CommandProducer) { p.InitialSubscriptionName = &first })
	c.publish(1, 0, 2)
	c.subscribe(topicA, first, exclusive, 1, func(s *pulsarpb.CommandSubscribe) {
		s.InitialPosition = pulsarpb.CommandSubscribe_Latest.Enum()
	})
	c.flow(1, 10)
	c.receive(1, "0", "1")
}
