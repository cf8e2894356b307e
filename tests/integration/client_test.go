package integration

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	"github.com/apache/pulsar-client-go/pulsar/log"
	"github.com/google/go-cmp/cmp"
)

// receiveLimit is how long a test waits for a message that must come.
const receiveLimit = 30 * time.Second

// quiet is how long a test waits to see that no message comes.
const quiet = 300 * time.Millisecond

func connect(t *testing.T, url string) pulsar.Client {
	t.Helper()
	return connectFor(t, url, receiveLimit)
}

// orphanLimit is the operation timeout of a client whose broker will go away for
// good: its producers and consumers wait that long for an answer when they close.
const orphanLimit = 2 * time.Second

func connectFor(t *testing.T, url string, operations time.Duration) pulsar.Client {
	t.Helper()
	client, err := pulsar.NewClient(pulsar.ClientOptions{
		URL: url, OperationTimeout: operations, ConnectionTimeout: 5 * time.Second,
		Logger: log.NewLoggerWithSlog(slog.New(slog.DiscardHandler)),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	return client
}

// topicFor makes a topic name of the test's own, another one in each run of it.
func topicFor(t *testing.T) string {
	if name, ok := topics.Load(t); ok {
		return name.(string)
	}
	name := fmt.Sprintf("persistent://public/default/%s-%d", strings.ReplaceAll(t.Name(), "/", "-"), topicCount.Add(1))
	topics.Store(t, name)
	t.Cleanup(func() { topics.Delete(t) })
	return name
}

var (
	topics     sync.Map // *testing.T to its topic's name
	topicCount atomic.Int64
)

func produceTo(t *testing.T, client pulsar.Client, o pulsar.ProducerOptions) pulsar.Producer {
	t.Helper()
	producer, err := client.CreateProducer(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(producer.Close)
	return producer
}

func subscribe(t *testing.T, client pulsar.Client, o pulsar.ConsumerOptions) pulsar.Consumer {
	t.Helper()
	if o.SubscriptionName == "" {
		o.SubscriptionName = "sub"
	}
	consumer, err := client.Subscribe(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(consumer.Close)
	return consumer
}

func send(t *testing.T, p pulsar.Producer, m *pulsar.ProducerMessage) pulsar.MessageID {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), receiveLimit)
	defer cancel()
	id, err := p.Send(ctx, m)
	if err != nil {
		t.Fatalf("send: %v", err)
	}
	return id
}

// sendNumbers publishes the numbers from first to last as text.
func sendNumbers(t *testing.T, p pulsar.Producer, first, last int) []pulsar.MessageID {
	t.Helper()
	ids := make([]pulsar.MessageID, 0, last-first+1)
	for n := first; n <= last; n++ {
		ids = append(ids, send(t, p, &pulsar.ProducerMessage{Payload: []byte(strconv.Itoa(n))}))
	}
	return ids
}

func receive(t *testing.T, c pulsar.Consumer) pulsar.Message {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), receiveLimit)
	defer cancel()
	m, err := c.Receive(ctx)
	if err != nil {
		t.Fatalf("receive: %v", err)
	}
	return m
}

// receiveNumbers receives n messages and returns them with their payloads as
// numbers.
func receiveNumbers(t *testing.T, c pulsar.Consumer, n int) ([]int, []pulsar.Message) {
	t.Helper()
	var numbers []int
	var messages []pulsar.Message
	for range n {
		ctx, cancel := context.WithTimeout(t.Context(), receiveLimit)
		m, err := c.Receive(ctx)
		cancel()
		if err != nil {
			t.Fatalf("received %v, then nothing of %d: %v", numbers, n, err)
		}
		number, err := strconv.Atoi(string(m.Payload()))
		if err != nil {
			t.Fatal(err)
		}
		numbers, messages = append(numbers, number), append(messages, m)
	}
	return numbers, messages
}

func wantNumbers(t *testing.T, got []int, first, last int) {
	t.Helper()
	var want []int
	for n := first; n <= last; n++ {
		want = append(want, n)
	}
	if !slices.Equal(got, want) {
		t.Fatalf("received %v, want %d to %d in order", got, first, last)
	}
}

func wantNothing(t *testing.T, c pulsar.Consumer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), quiet)
	defer cancel()
	if m, err := c.Receive(ctx); err == nil {
		t.Fatalf("received %q (%v), want nothing", m.Payload(), m.ID())
	}
}

func ack(t *testing.T, c pulsar.Consumer, messages ...pulsar.Message) {
	t.Helper()
	for _, m := range messages {
		if err := c.Ack(m); err != nil {
			t.Fatalf("ack %v: %v", m.ID(), err)
		}
	}
}

func TestMessagesComeAsTheyWereSent(t *testing.T) {
	client := connect(t, shared.get(t).url)
	compressions := map[string]pulsar.CompressionType{
		"none": pulsar.NoCompression, "lz4": pulsar.LZ4, "zlib": pulsar.ZLib, "zstd": pulsar.ZSTD, "snappy": pulsar.SNAPPY,
	}
	for name, compression := range compressions {
		for _, batching := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s-batching=%v", name, batching), func(t *testing.T) {
				t.Parallel()
				topic := topicFor(t)
				consumer := subscribe(t, client, pulsar.ConsumerOptions{Topic: topic})
				producer := produceTo(t, client, pulsar.ProducerOptions{
					Topic: topic, CompressionType: compression, DisableBatching: !batching,
				})
				sameMessages(t, producer, consumer)
			})
		}
	}
}

// sameMessages publishes messages with everything a message may carry and wants them
// back the same.
func sameMessages(t *testing.T, producer pulsar.Producer, consumer pulsar.Consumer) {
	t.Helper()
	rng := rand.New(rand.NewPCG(1, 2))
	var sent []*pulsar.ProducerMessage
	for i, size := range []int{1, 2, 100, 1023, 4096, 70_000, 300, 1} {
		m := &pulsar.ProducerMessage{
			Payload: make([]byte, size), Key: "key-" + strconv.Itoa(i), OrderingKey: "order-" + strconv.Itoa(i),
			Properties: map[string]string{"number": strconv.Itoa(i), "empty": "", "ünïcode": "✓"},
			EventTime:  time.UnixMilli(1_700_000_000_000 + int64(i)),
		}
		for j := range m.Payload {
			m.Payload[j] = byte(rng.IntN(4)) // compressible, but not to nothing
		}
		sent = append(sent, m)
		producer.SendAsync(t.Context(), m, func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
			if err != nil {
				t.Errorf("send: %v", err)
			}
		})
	}
	if err := producer.FlushWithCtx(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, want := range sent {
		got := receive(t, consumer)
		ack(t, consumer, got)
		if !bytes.Equal(got.Payload(), want.Payload) {
			t.Errorf("message %s: %d bytes differ from the %d sent", want.Key, len(got.Payload()), len(want.Payload))
		}
		if got.Key() != want.Key || got.OrderingKey() != want.OrderingKey {
			t.Errorf("keys %q, %q, want %q, %q", got.Key(), got.OrderingKey(), want.Key, want.OrderingKey)
		}
		if diff := cmp.Diff(want.Properties, got.Properties()); diff != "" {
			t.Errorf("properties differ (-want +got):\n%s", diff)
		}
		if !got.EventTime().Equal(want.EventTime) {
			t.Errorf("event time %v, want %v", got.EventTime(), want.EventTime)
		}
		if got.ProducerName() != producer.Name() {
			t.Errorf("producer %q, want %q", got.ProducerName(), producer.Name())
		}
		if age := time.Since(got.PublishTime()); age < -time.Second || age > time.Minute {
			t.Errorf("published %v ago", age)
		}
	}
	wantNothing(t, consumer)
}

func TestLargestMessage(t *testing.T) {
	client := connect(t, shared.get(t).url)
	topic := topicFor(t)
	consumer := subscribe(t, client, pulsar.ConsumerOptions{Topic: topic})
	producer := produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	const maxMessageSize, metadata = 5 << 20, 1024
	for _, size := range []int{1, maxMessageSize / 2, maxMessageSize - metadata} {
		payload := bytes.Repeat([]byte{byte(size), 'x'}, size/2+1)[:size]
		send(t, producer, &pulsar.ProducerMessage{Payload: payload})
		got := receive(t, consumer)
		if !bytes.Equal(got.Payload(), payload) {
			t.Errorf("%d bytes differ from the %d sent", len(got.Payload()), size)
		}
		ack(t, consumer, got)
	}
	_, err := producer.Send(t.Context(), &pulsar.ProducerMessage{Payload: make([]byte, maxMessageSize+1)})
	if err == nil {
		t.Errorf("a message of %d bytes was accepted", maxMessageSize+1)
	}
	sendNumbers(t, producer, 1, 1) // and the producer still works
}

func TestChunkedMessage(t *testing.T) {
	client := connect(t, shared.get(t).url)
	topic := topicFor(t)
	consumer := subscribe(t, client, pulsar.ConsumerOptions{Topic: topic})
	producer := produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true, EnableChunking: true})
	payload := bytes.Repeat([]byte("0123456789abcde"), 12<<20/15)
	send(t, producer, &pulsar.ProducerMessage{Payload: payload})
	if got := receive(t, consumer).Payload(); !bytes.Equal(got, payload) {
		t.Errorf("%d bytes differ from the %d sent", len(got), len(payload))
	}
}

func TestAcknowledgedMessagesDoNotComeAgain(t *testing.T) {
	client := connect(t, shared.get(t).url)
	topic := topicFor(t)
	options := pulsar.ConsumerOptions{Topic: topic, SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest, AckWithResponse: true}
	producer := produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	sendNumbers(t, producer, 1, 10)

	consumer := subscribe(t, client, options)
	numbers, messages := receiveNumbers(t, consumer, 10)
	wantNumbers(t, numbers, 1, 10)
	ack(t, consumer, messages[0], messages[1], messages[4]) // 3 and 4 are a hole
	consumer.Close()

	consumer = subscribe(t, client, options)
	numbers, messages = receiveNumbers(t, consumer, 7)
	if want := []int{3, 4, 6, 7, 8, 9, 10}; !slices.Equal(numbers, want) {
		t.Fatalf("after 1, 2 and 5 were acknowledged received %v, want %v", numbers, want)
	}
	if err := consumer.AckCumulative(messages[4]); err != nil { // up to 8
		t.Fatal(err)
	}
	consumer.Close()

	consumer = subscribe(t, client, options)
	numbers, messages = receiveNumbers(t, consumer, 2)
	wantNumbers(t, numbers, 9, 10)
	ack(t, consumer, messages...)
	consumer.Close()
	wantNothing(t, subscribe(t, client, options))
}

func TestBatchIsAcknowledgedWithItsLastMessage(t *testing.T) {
	client := connect(t, shared.get(t).url)
	topic := topicFor(t)
	options := pulsar.ConsumerOptions{Topic: topic, AckWithResponse: true}
	consumer := subscribe(t, client, options)
	producer := produceTo(t, client, pulsar.ProducerOptions{
		Topic: topic, BatchingMaxMessages: 5, BatchingMaxPublishDelay: 10 * time.Second,
	})
	for n := range 10 {
		producer.SendAsync(t.Context(), &pulsar.ProducerMessage{Payload: []byte(strconv.Itoa(n + 1))}, func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
			if err != nil {
				t.Errorf("send: %v", err)
			}
		})
	}
	if err := producer.FlushWithCtx(t.Context()); err != nil {
		t.Fatal(err)
	}
	numbers, messages := receiveNumbers(t, consumer, 10)
	wantNumbers(t, numbers, 1, 10)
	if messages[4].ID().EntryID() != messages[0].ID().EntryID() || messages[5].ID().EntryID() == messages[0].ID().EntryID() {
		t.Errorf("messages 1, 5 and 6 have entries %d, %d and %d: want 5 in a batch",
			messages[0].ID().EntryID(), messages[4].ID().EntryID(), messages[5].ID().EntryID())
	}
	ack(t, consumer, messages[:7]...) // the whole first batch, part of the second
	consumer.Close()
	numbers, _ = receiveNumbers(t, subscribe(t, client, options), 5)
	wantNumbers(t, numbers, 6, 10)
}

func TestSubscriptionStartsWhereItSays(t *testing.T) {
	client := connect(t, shared.get(t).url)
	topic := topicFor(t)
	producer := produceTo(t, client, pulsar.ProducerOptions{Topic: topic})
	sendNumbers(t, producer, 1, 3)
	latest := subscribe(t, client, pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "latest"})
	earliest := subscribe(t, client, pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: "earliest", SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest,
	})
	sendNumbers(t, producer, 4, 5)
	numbers, _ := receiveNumbers(t, latest, 2)
	wantNumbers(t, numbers, 4, 5)
	numbers, _ = receiveNumbers(t, earliest, 5)
	wantNumbers(t, numbers, 1, 5)
}

func TestReader(t *testing.T) {
	client := connect(t, shared.get(t).url)
	topic := topicFor(t)
	ids := sendNumbers(t, produceTo(t, client, pulsar.ProducerOptions{Topic: topic}), 1, 10)
	tests := []struct {
		name      string
		start     pulsar.MessageID
		inclusive bool
		first     int
	}{
		{"earliest", pulsar.EarliestMessageID(), false, 1},
		{"after-an-id", ids[3], false, 5},
		{"from-an-id", ids[3], true, 4},
		{"latest-inclusive", pulsar.LatestMessageID(), true, 10},
		{"latest", pulsar.LatestMessageID(), false, 11},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			reader, err := client.CreateReader(pulsar.ReaderOptions{Topic: topic, StartMessageID: tt.start, StartMessageIDInclusive: tt.inclusive})
			if err != nil {
				t.Fatal(err)
			}
			defer reader.Close()
			var numbers []int
			for reader.HasNext() {
				ctx, cancel := context.WithTimeout(t.Context(), receiveLimit)
				m, err := reader.Next(ctx)
				cancel()
				if err != nil {
					t.Fatal(err)
				}
				n, _ := strconv.Atoi(string(m.Payload()))
				numbers = append(numbers, n)
			}
			wantNumbers(t, numbers, tt.first, 10)
		})
	}
}

func TestSeek(t *testing.T) {
	client := connect(t, shared.get(t).url)
	topic := topicFor(t)
	producer := produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	consumer := subscribe(t, client, pulsar.ConsumerOptions{Topic: topic, StartMessageIDInclusive: true})
	ids := sendNumbers(t, producer, 1, 5)
	time.Sleep(20 * time.Millisecond) // publish times are milliseconds of the wall clock
	middle := time.Now()
	time.Sleep(20 * time.Millisecond)
	sendNumbers(t, producer, 6, 10)
	numbers, messages := receiveNumbers(t, consumer, 10)
	wantNumbers(t, numbers, 1, 10)
	if err := consumer.AckCumulative(messages[9]); err != nil {
		t.Fatal(err)
	}

	if err := consumer.SeekByTime(middle); err != nil {
		t.Fatalf("seek to %v: %v", middle, err)
	}
	numbers, _ = receiveNumbers(t, consumer, 5)
	wantNumbers(t, numbers, 6, 10)
	// Not to the earliest or latest id: this client refuses them here. And it goes on
	// dropping what is before the id of its last seek, whatever it seeks by time later.
	if err := consumer.Seek(ids[0]); err != nil {
		t.Fatalf("seek to %v: %v", ids[0], err)
	}
	numbers, _ = receiveNumbers(t, consumer, 10)
	wantNumbers(t, numbers, 1, 10)
	if err := consumer.Seek(ids[2]); err != nil {
		t.Fatalf("seek to %v: %v", ids[2], err)
	}
	numbers, _ = receiveNumbers(t, consumer, 8)
	wantNumbers(t, numbers, 3, 10)
	if err := consumer.SeekByTime(time.Now().Add(time.Hour)); err != nil {
		t.Fatalf("seek to the latest: %v", err)
	}
	sendNumbers(t, producer, 11, 11)
	numbers, _ = receiveNumbers(t, consumer, 1)
	wantNumbers(t, numbers, 11, 11)
}

func TestSharedSubscriptionSplitsTheMessages(t *testing.T) {
	client := connect(t, shared.get(t).url)
	topic := topicFor(t)
	const consumers, messages = 3, 300
	got := make(chan int, messages*2)
	ctx, cancel := context.WithCancel(t.Context())
	var receivers sync.WaitGroup
	share := make([]int, consumers)
	for i := range consumers {
		c := subscribe(t, client, pulsar.ConsumerOptions{Topic: topic, Type: pulsar.Shared, ReceiverQueueSize: 10})
		receivers.Go(func() {
			for {
				m, err := c.Receive(ctx)
				if err != nil {
					return
				}
				n, _ := strconv.Atoi(string(m.Payload()))
				share[i]++
				c.Ack(m)
				got <- n
			}
		})
	}
	sendNumbers(t, produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true}), 1, messages)
	seen := map[int]int{}
	deadline := time.After(receiveLimit)
	for range messages {
		select {
		case n := <-got:
			seen[n]++
		case <-deadline:
			t.Fatalf("%d of %d messages came", len(seen), messages)
		}
	}
	cancel()
	receivers.Wait()
	for n := 1; n <= messages; n++ {
		if seen[n] != 1 {
			t.Errorf("message %d came %d times", n, seen[n])
		}
	}
	for i, n := range share {
		if n == 0 {
			t.Errorf("consumer %d of %d got nothing: %v", i, consumers, share)
		}
	}
}

func TestNegativeAcknowledgementRedelivers(t *testing.T) {
	client := connect(t, shared.get(t).url)
	topic := topicFor(t)
	consumer := subscribe(t, client, pulsar.ConsumerOptions{Topic: topic, Type: pulsar.Shared, NackRedeliveryDelay: 100 * time.Millisecond})
	sendNumbers(t, produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true}), 1, 3)
	_, messages := receiveNumbers(t, consumer, 3)
	ack(t, consumer, messages[0], messages[2])
	consumer.Nack(messages[1])
	again := receive(t, consumer)
	if string(again.Payload()) != string(messages[1].Payload()) || again.RedeliveryCount() != 1 {
		t.Errorf("received %q with redelivery count %d, want %q with 1", again.Payload(), again.RedeliveryCount(), messages[1].Payload())
	}
	ack(t, consumer, again)
	wantNothing(t, consumer)
}

func TestSharedConsumerThatLeavesGivesItsMessagesBack(t *testing.T) {
	client := connect(t, shared.get(t).url)
	topic := topicFor(t)
	options := pulsar.ConsumerOptions{Topic: topic, Type: pulsar.Shared}
	leaver := subscribe(t, client, options)
	sendNumbers(t, produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true}), 1, 5)
	numbers, _ := receiveNumbers(t, leaver, 5)
	wantNumbers(t, numbers, 1, 5)
	heir := subscribe(t, client, options)
	wantNothing(t, heir)
	leaver.Close()
	numbers, _ = receiveNumbers(t, heir, 5)
	slices.Sort(numbers)
	wantNumbers(t, numbers, 1, 5)
}

func TestFailoverSubscription(t *testing.T) {
	client := connect(t, shared.get(t).url)
	topic := topicFor(t)
	options := pulsar.ConsumerOptions{Topic: topic, Type: pulsar.Failover, AckWithResponse: true}
	options.Name = "a"
	active := subscribe(t, client, options)
	options.Name = "b"
	standby := subscribe(t, client, options)
	producer := produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	sendNumbers(t, producer, 1, 5)
	var first pulsar.ConsumerMessage // whoever gets it is the active one
	select {
	case first = <-active.Chan():
	case first = <-standby.Chan():
		active, standby = standby, active
	case <-time.After(receiveLimit):
		t.Fatal("neither consumer got a message")
	}
	numbers, messages := receiveNumbers(t, active, 4)
	wantNumbers(t, numbers, 2, 5)
	wantNothing(t, standby)
	ack(t, active, first.Message, messages[0], messages[1])
	active.Close()
	numbers, _ = receiveNumbers(t, standby, 2)
	wantNumbers(t, numbers, 4, 5)
	sendNumbers(t, producer, 6, 7)
	numbers, _ = receiveNumbers(t, standby, 2)
	wantNumbers(t, numbers, 6, 7)
}

func TestExclusiveSubscriptionIsExclusive(t *testing.T) {
	client := connect(t, shared.get(t).url)
	topic := topicFor(t)
	first := subscribe(t, client, pulsar.ConsumerOptions{Topic: topic})
	_, err := client.Subscribe(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: first.Subscription()})
	if err == nil || !strings.Contains(err.Error(), "ConsumerBusy") {
		t.Errorf("a second consumer got %v, want ConsumerBusy", err)
	}
	first.Close()
	subscribe(t, client, pulsar.ConsumerOptions{Topic: topic})
}

func TestProducerNameIsTakenOnce(t *testing.T) {
	client := connect(t, shared.get(t).url)
	options := pulsar.ProducerOptions{Topic: topicFor(t), Name: "only-one"}
	first := produceTo(t, client, options)
	if _, err := client.CreateProducer(options); err == nil || !strings.Contains(err.Error(), "ProducerBusy") {
		t.Errorf("a second producer of the name got %v, want ProducerBusy", err)
	}
	first.Close()
	produceTo(t, client, options)
}

func TestUnsubscribeForgets(t *testing.T) {
	client := connect(t, shared.get(t).url)
	topic := topicFor(t)
	producer := produceTo(t, client, pulsar.ProducerOptions{Topic: topic})
	consumer := subscribe(t, client, pulsar.ConsumerOptions{Topic: topic})
	sendNumbers(t, producer, 1, 3)
	receiveNumbers(t, consumer, 3)
	if err := consumer.Unsubscribe(); err != nil {
		t.Fatal(err)
	}
	again := subscribe(t, client, pulsar.ConsumerOptions{Topic: topic}) // at the latest: a new subscription
	wantNothing(t, again)
	sendNumbers(t, producer, 4, 4)
	numbers, _ := receiveNumbers(t, again, 1)
	wantNumbers(t, numbers, 4, 4)
}

func TestPartitionedTopic(t *testing.T) {
	s := shared.get(t)
	client := connect(t, s.url)
	topic := topicFor(t)
	const partitions, messages = 3, 60
	put(t, s.web+"/admin/v2/persistent/public/default/"+strings.TrimPrefix(topic, "persistent://public/default/")+"/partitions", strconv.Itoa(partitions))
	names, err := client.TopicPartitions(topic)
	if err != nil || len(names) != partitions {
		t.Fatalf("TopicPartitions = %v, %v, want %d", names, err, partitions)
	}
	consumer := subscribe(t, client, pulsar.ConsumerOptions{Topic: topic})
	producer := produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	for n := range messages {
		send(t, producer, &pulsar.ProducerMessage{Key: strconv.Itoa(n % 20), Payload: []byte(strconv.Itoa(n))})
	}
	perKey := map[string]int{}
	where := map[string]string{}
	for range messages {
		m := receive(t, consumer)
		n, _ := strconv.Atoi(string(m.Payload()))
		if last, seen := perKey[m.Key()]; seen && n <= last {
			t.Errorf("key %s: %d came after %d", m.Key(), n, last)
		}
		if at, seen := where[m.Key()]; seen && at != m.Topic() {
			t.Errorf("key %s is in %s and %s", m.Key(), at, m.Topic())
		}
		perKey[m.Key()], where[m.Key()] = n, m.Topic()
		ack(t, consumer, m)
	}
	used := map[string]bool{}
	for _, at := range where {
		used[at] = true
	}
	if len(used) != partitions {
		t.Errorf("20 keys went to %d of %d partitions", len(used), partitions)
	}
	wantNothing(t, consumer)
}

func TestTopicsOfNamespace(t *testing.T) {
	client := connect(t, shared.get(t).url)
	for _, name := range []string{"a", "b"} {
		sendNumbers(t, produceTo(t, client, pulsar.ProducerOptions{Topic: topicFor(t) + "-" + name}), 1, 1)
	}
	consumer := subscribe(t, client, pulsar.ConsumerOptions{
		TopicsPattern: topicFor(t) + "-.*", SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest,
	})
	receiveNumbers(t, consumer, 2)
}

func TestMissingNamespaceIsRefused(t *testing.T) {
	client := connect(t, shared.get(t).url)
	_, err := client.CreateProducer(pulsar.ProducerOptions{Topic: "persistent://public/nowhere/topic"})
	if err == nil {
		t.Error("a topic in a namespace that does not exist was created")
	}
}

func TestRestartContinues(t *testing.T) {
	for _, how := range []string{"stop", "kill"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "data")
			topic := topicFor(t)
			options := pulsar.ConsumerOptions{Topic: topic, AckWithResponse: true}

			s := start(t, dir)
			client := connectFor(t, s.url, orphanLimit)
			producer := produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
			consumer := subscribe(t, client, options)
			sendNumbers(t, producer, 1, 20)
			numbers, messages := receiveNumbers(t, consumer, 20)
			wantNumbers(t, numbers, 1, 20)
			ack(t, consumer, messages[:10]...)
			ack(t, consumer, messages[12])
			if how == "stop" {
				s.stop(t)
			} else {
				time.Sleep(2 * cursorFlush) // acks older than one flush interval must stand
				s.kill()
			}
			client.Close()

			s = start(t, dir)
			client = connect(t, s.url)
			consumer = subscribe(t, client, options)
			numbers, _ = receiveNumbers(t, consumer, 9)
			if want := []int{11, 12, 14, 15, 16, 17, 18, 19, 20}; !slices.Equal(numbers, want) {
				t.Errorf("after the restart received %v, want %v", numbers, want)
			}
			sendNumbers(t, produceTo(t, client, pulsar.ProducerOptions{Topic: topic}), 21, 21)
			numbers, _ = receiveNumbers(t, consumer, 1)
			wantNumbers(t, numbers, 21, 21)
			client.Close() // while the broker is there: it would wait for it otherwise
			s.stop(t)
		})
	}
}

// cursorFlush is managedLedgerCursorPositionFlushSeconds.
const cursorFlush = time.Second

func TestClientSurvivesRestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	s := start(t, dir)
	client := connect(t, s.url)
	topic := topicFor(t)
	producer := produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	consumer := subscribe(t, client, pulsar.ConsumerOptions{Topic: topic})
	sendNumbers(t, producer, 1, 5)
	_, messages := receiveNumbers(t, consumer, 5)
	ack(t, consumer, messages...)
	s.stop(t)
	sent := make(chan error, 1)
	producer.SendAsync(t.Context(), &pulsar.ProducerMessage{Payload: []byte("6")}, func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) { sent <- err })
	again, err := launchStandalone(dir, portOf(t, s.url))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.kill)
	if err := again.awaitReady(); err != nil {
		t.Fatal(err)
	}
	if err := <-sent; err != nil {
		t.Fatalf("the message sent while the broker was away: %v", err)
	}
	for { // the last acks may have been on their way when the broker stopped
		n, err := strconv.Atoi(string(receive(t, consumer).Payload()))
		if err != nil {
			t.Fatal(err)
		}
		if n == 6 {
			client.Close() // while the broker is there: it would wait for it otherwise
			return
		}
	}
}

func portOf(t *testing.T, url string) int {
	t.Helper()
	port, err := strconv.Atoi(url[strings.LastIndexByte(url, ':')+1:])
	if err != nil {
		t.Fatal(err)
	}
	return port
}
