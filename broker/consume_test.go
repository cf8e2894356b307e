package broker

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// loseClaim makes this node lose the bundle of a topic, as when its lease runs
// out.
func (n *node) loseClaim(tp *topic) {
	n.t.Helper()
	kv, err := n.store.Get(n.t.Context(), "/owners/"+tp.claim.Bundle())
	if err != nil {
		n.t.Fatal(err)
	}
	if err := n.store.RevokeLease(n.t.Context(), kv.Lease); err != nil {
		n.t.Fatal(err)
	}
	waitFor(n.t, "the claim is invalid", func() bool { return !tp.claim.Valid() })
}

func TestSubscribeReceiveAckResume(t *testing.T) {
	for _, kind := range []subType{exclusive, sharedSub, failover} {
		t.Run(typeName(kind), func(t *testing.T) {
			n := newNode(t, "activeConsumerFailoverDelayTimeMillis=50")
			c := n.connect()
			c.produce(topicA, 1)
			c.publish(1, 0, 10)
			c.subscribe(topicA, "s", kind, 1)
			c.subscribe(topicA, "s", kind, 1) // the same id again is no error
			c.flow(1, 100)
			ids := c.receive(1, texts(0, 10)...)
			if ids[3].GetPartition() != -1 {
				t.Errorf("partition of a plain topic's message is %d, want -1", ids[3].GetPartition())
			}
			c.ack(1, ids[0], ids[1], ids[2], ids[5])
			c.closeConsumer(1)
			c.closeConsumer(1) // again is no error
			c.subscribe(topicA, "s", kind, 2)
			c.flow(2, 100)
			c.receive(2, "3", "4", "6", "7", "8", "9")
		})
	}
}

func TestPositionsSurviveTheBroker(t *testing.T) {
	d := newBed(t)
	n := d.node("broker-1")
	c := n.connect()
	c.produce(topicA, 1)
	c.publish(1, 0, 6)
	c.subscribe(topicA, "s", sharedSub, 1)
	c.flow(1, 100)
	ids := c.receive(1, texts(0, 6)...)
	c.ack(1, ids[0], ids[1], ids[4])
	n.stop()
	c = d.node("broker-1").connect()
	c.subscribe(topicA, "s", sharedSub, 1)
	c.flow(1, 100)
	c.receive(1, "2", "3", "5")
}

func TestSubscribeRefusals(t *testing.T) {
	n := newNode(t)
	a, b := n.connect(), n.connect()
	a.subscribe(topicA, "s", exclusive, 1)
	try := func(sub string, kind subType, want pulsarpb.ServerError, change ...func(*pulsarpb.CommandSubscribe)) {
		t.Helper()
		b.write(subscribeCommand(topicA, sub, kind, 9, b.id(), change...))
		a.alive(func() { b.expectError(want) })
	}
	try("s", exclusive, pulsarpb.ServerError_ConsumerBusy)
	try("s", sharedSub, pulsarpb.ServerError_ConsumerBusy)
	try("k", pulsarpb.CommandSubscribe_Key_Shared, pulsarpb.ServerError_NotAllowedError)
	try("k", subType(44), pulsarpb.ServerError_NotAllowedError)
	try("", exclusive, pulsarpb.ServerError_NotAllowedError)
	try(strings.Repeat("x", maxNameLength+1), exclusive, pulsarpb.ServerError_NotAllowedError)
	try("s", exclusive, pulsarpb.ServerError_NotAllowedError, nonDurable(wireEarliest, wireEarliest))
	never := false
	b.write(subscribeCommand(topicA+"-missing", "s", exclusive, 9, b.id(), func(s *pulsarpb.CommandSubscribe) { s.ForceTopicCreation = &never }))
	b.expectError(pulsarpb.ServerError_TopicNotFound)
	b.works()
	a.closeConsumer(1)
	b.subscribe(topicA, "s", sharedSub, 1)
}

func TestSubscriptionCreationNotAllowed(t *testing.T) {
	n := newNode(t, "allowAutoSubscriptionCreation=false")
	c := n.connect()
	c.write(subscribeCommand(topicA, "s", exclusive, 1, c.id()))
	c.expectError(pulsarpb.ServerError_SubscriptionNotFound)
	c.subscribe(topicA, "reader", exclusive, 2, nonDurable(wireEarliest, wireEarliest))
}

func TestLatestSeesOnlyWhatComesAfter(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	c.publish(1, 0, 3)
	c.subscribe(topicA, "s", exclusive, 1, func(s *pulsarpb.CommandSubscribe) {
		s.InitialPosition = pulsarpb.CommandSubscribe_Latest.Enum()
	})
	c.flow(1, 10)
	c.publish(1, 3, 5)
	c.receive(1, "3", "4")
}

func TestReaders(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	c.publish(1, 0, 3)
	middle := c.publish(1, 3, 4)
	c.publish(1, 4, 6)
	c.subscribe(topicA, "r1", exclusive, 1, nonDurable(wireEarliest, wireEarliest))
	c.flow(1, 100)
	c.receive(1, texts(0, 6)...)
	c.subscribe(topicA, "r2", exclusive, 2, nonDurable(uint64(middle.Ledger), uint64(middle.Entry)))
	c.flow(2, 100)
	c.receive(2, "3", "4", "5") // the entry itself is delivered
	c.subscribe(topicA, "r3", exclusive, 3, nonDurable(wireLatest, wireLatest))
	c.flow(3, 100)
	c.publish(1, 6, 7)
	c.receive(1, "6")
	c.receive(2, "6")
	c.receive(3, "6")
	if s := n.stats(topicA); len(s.Subscriptions) != 3 || s.Subscriptions["r1"].IsDurable {
		t.Errorf("subscriptions %v", s.Subscriptions)
	}
	c.closeConsumer(1)
	waitFor(t, "a reader's subscription ends with it", func() bool { return len(n.stats(topicA).Subscriptions) == 2 })
	hour := uint64(3600)
	c.subscribe(topicA, "r4", exclusive, 4, func(s *pulsarpb.CommandSubscribe) {
		nonDurable(wireLatest, wireLatest)(s)
		s.StartMessageRollbackDurationSec = &hour
	})
	c.flow(4, 100)
	c.receive(4, texts(0, 7)...)
}

func TestAckAnswers(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	c.publish(1, 0, 4)
	c.subscribe(topicA, "s", exclusive, 1)
	c.flow(1, 100)
	ids := c.receive(1, texts(0, 4)...)

	// Without a request id nothing is answered.
	c.write(ackCommand(1, pulsarpb.CommandAck_Individual, nil, ids[0]))
	// Part of a batch is passed over.
	part := &pulsarpb.MessageIdData{LedgerId: ids[1].LedgerId, EntryId: ids[1].EntryId, AckSet: []int64{3}}
	c.ack(1, part)
	waitFor(t, "one acknowledged", func() bool { return n.stats(topicA).Subscriptions["s"].MsgBacklog == 3 })
	if len(c.held) > 0 {
		t.Errorf("unexpected %v", c.heldTypes())
	}
	// A cumulative one in the midst of a batch counts up to the entry before.
	part = &pulsarpb.MessageIdData{LedgerId: ids[2].LedgerId, EntryId: ids[2].EntryId, AckSet: []int64{3}}
	c.write(ackCommand(1, pulsarpb.CommandAck_Cumulative, c.id(), part))
	c.ackAnswered("")
	if got := n.stats(topicA).Subscriptions["s"].MsgBacklog; got != 2 {
		t.Errorf("backlog %d, want 2", got)
	}
	c.write(ackCommand(1, pulsarpb.CommandAck_Cumulative, c.id(), ids[3]))
	c.ackAnswered("")
	if got := n.stats(topicA).Subscriptions["s"].MsgBacklog; got != 0 {
		t.Errorf("backlog %d, want 0", got)
	}

	// What cannot be is refused, and the connection goes on.
	far := &pulsarpb.MessageIdData{LedgerId: ids[0].LedgerId, EntryId: new(uint64(99))}
	for name, cmd := range map[string]*command{
		"beyond-the-end":     ackCommand(1, pulsarpb.CommandAck_Individual, new(uint64(100)), far),
		"no-such-consumer":   ackCommand(44, pulsarpb.CommandAck_Individual, new(uint64(100)), ids[0]),
		"cumulative-of-two":  ackCommand(1, pulsarpb.CommandAck_Cumulative, new(uint64(100)), ids[0], ids[1]),
		"cumulative-of-none": ackCommand(1, pulsarpb.CommandAck_Cumulative, new(uint64(100))),
		"in-a-transaction": func() *command {
			cmd := ackCommand(1, pulsarpb.CommandAck_Individual, new(uint64(100)), ids[0])
			cmd.Ack.TxnidMostBits = new(uint64(1))
			return cmd
		}(),
	} {
		c.request = 100
		c.write(cmd)
		r := c.ackAnswered("a reason")
		if r.Error == nil {
			t.Errorf("%s: %v has no error code", name, r)
		}
	}
	c.works()
}

func TestRedeliver(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	c.publish(1, 0, 4)
	c.subscribe(topicA, "s", sharedSub, 1)
	c.flow(1, 100)
	ids := c.receive(1, texts(0, 4)...)
	again := func(consumer uint64, ids ...*pulsarpb.MessageIdData) {
		c.write(&command{
			Type: pulsarpb.BaseCommand_REDELIVER_UNACKNOWLEDGED_MESSAGES.Enum(),
			RedeliverUnacknowledgedMessages: &pulsarpb.CommandRedeliverUnacknowledgedMessages{
				ConsumerId: &consumer, MessageIds: ids,
			},
		})
	}
	again(44, ids[0]) // ignored
	again(1, ids[2], ids[1])
	for _, want := range []string{"1", "2"} {
		got, m := c.message(1)
		if got != want || m.GetRedeliveryCount() != 1 {
			t.Errorf("got %q, count %d; want %q, 1", got, m.GetRedeliveryCount(), want)
		}
	}
	again(1)
	for i, count := range []uint32{1, 2, 2, 1} {
		got, m := c.message(1)
		if got != strconv.Itoa(i) || m.GetRedeliveryCount() != count {
			t.Errorf("got %q, count %d; want %d, %d", got, m.GetRedeliveryCount(), i, count)
		}
	}
}

func TestConnectionThatDiesHandsItsMessagesOn(t *testing.T) {
	n := newNode(t)
	a, b := n.connect(), n.connect()
	a.produce(topicA, 1)
	a.publish(1, 0, 4)
	a.subscribe(topicA, "s", sharedSub, 1)
	a.flow(1, 100)
	ids := a.receive(1, texts(0, 4)...)
	a.ack(1, ids[1])
	b.subscribe(topicA, "s", sharedSub, 1)
	b.flow(1, 100)
	_ = a.nc.Close()
	b.receive(1, "0", "2", "3")
	waitFor(t, "the producer is gone", func() bool { return len(n.stats(topicA).Publishers) == 0 })
}

func TestFailoverTellsWhoIsActive(t *testing.T) {
	n := newNode(t, "activeConsumerFailoverDelayTimeMillis=100")
	c := n.connect()
	const topic = topicA + "-partition-0"
	c.produce(topic, 1)
	c.publish(1, 0, 3)
	join := func(id uint64, name string) {
		c.subscribe(topic, "s", failover, id, func(s *pulsarpb.CommandSubscribe) { s.ConsumerName = &name })
		c.flow(id, 100)
	}
	change := func(id uint64, active bool) {
		t.Helper()
		m := c.expect(pulsarpb.BaseCommand_ACTIVE_CONSUMER_CHANGE).Command.GetActiveConsumerChange()
		if m.GetConsumerId() != id || m.GetIsActive() != active {
			t.Fatalf("%v, want consumer %d active %t", m, id, active)
		}
	}
	join(1, "b")
	change(1, true)
	ids := c.receive(1, "0", "1", "2")
	if ids[0].GetPartition() != 0 {
		t.Errorf("partition %d, want 0", ids[0].GetPartition())
	}
	c.ack(1, ids[0])
	join(2, "a") // before b by name
	change(1, false)
	change(2, true)
	c.receive(2, "1", "2")
	c.closeConsumer(2)
	change(1, true)
	c.receive(1, "1", "2")
	if got := n.stats(topic).Subscriptions["s"].ActiveConsumerName; got != "b" {
		t.Errorf("active consumer %q, want b", got)
	}
}

func seekCommand(consumer uint64, request *uint64, id *pulsarpb.MessageIdData, millis *uint64) *command {
	return &command{
		Type: pulsarpb.BaseCommand_SEEK.Enum(),
		Seek: &pulsarpb.CommandSeek{ConsumerId: &consumer, RequestId: request, MessageId: id, MessagePublishTime: millis},
	}
}

func TestSeek(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	for i := range 6 {
		name, seq, at := "p", uint64(i), uint64(1000*(i+1))
		c.send(1, seq, protocol.BuildPayload(&pulsarpb.MessageMetadata{ProducerName: &name, SequenceId: &seq, PublishTime: &at}, []byte(strconv.Itoa(i))))
		c.receipt()
	}
	for _, durable := range []bool{true, false} {
		t.Run(fmt.Sprintf("durable=%t", durable), func(t *testing.T) {
			sub := fmt.Sprintf("s-%t", durable)
			open := func() {
				t.Helper()
				if durable {
					c.subscribe(topicA, sub, exclusive, 1)
				} else {
					c.subscribe(topicA, sub, exclusive, 1, nonDurable(wireEarliest, wireEarliest))
				}
				c.flow(1, 100)
			}
			open()
			ids := c.receive(1, texts(0, 6)...)
			c.ack(1, ids[:3]...)
			to := func(id *pulsarpb.MessageIdData, millis *uint64, want ...string) {
				t.Helper()
				c.write(seekCommand(1, c.id(), id, millis))
				if m := c.expect(pulsarpb.BaseCommand_CLOSE_CONSUMER).Command.GetCloseConsumer(); m.GetConsumerId() != 1 {
					t.Fatalf("%v", m)
				}
				c.succeeded()
				// In the gap there is nothing to seek with.
				c.write(seekCommand(1, c.id(), id, millis))
				c.expectError(pulsarpb.ServerError_ConsumerNotFound)
				open()
				c.receive(1, want...)
			}
			to(ids[1], nil, texts(1, 6)...)
			to(nil, new(uint64(3000)), texts(2, 6)...)
			to(nil, new(uint64(3001)), texts(3, 6)...)
			to(nil, new(uint64(1)), texts(0, 6)...)
			to(&pulsarpb.MessageIdData{LedgerId: new(uint64(wireEarliest)), EntryId: new(uint64(wireEarliest))}, nil, texts(0, 6)...)
			to(&pulsarpb.MessageIdData{LedgerId: new(uint64(wireLatest)), EntryId: new(uint64(wireLatest))}, nil)
			to(ids[5], nil, "5")
			to(nil, new(uint64(99_999)))
			c.write(seekCommand(1, c.id(), nil, nil))
			c.expectError(pulsarpb.ServerError_NotAllowedError)
			c.nothing(20 * time.Millisecond)
			c.closeConsumer(1)
		})
	}
}

func TestLastMessageID(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.subscribe(topicA, "s", exclusive, 1)
	last := func() *pulsarpb.CommandGetLastMessageIdResponse {
		c.write(&command{Type: pulsarpb.BaseCommand_GET_LAST_MESSAGE_ID.Enum(), GetLastMessageId: &pulsarpb.CommandGetLastMessageId{ConsumerId: new(uint64(1)), RequestId: c.id()}})
		r := c.expect(pulsarpb.BaseCommand_GET_LAST_MESSAGE_ID_RESPONSE).Command.GetGetLastMessageIdResponse()
		if r.ConsumerMarkDeletePosition == nil {
			t.Error("no mark-delete position")
		}
		return r
	}
	if r := last(); int64(r.GetLastMessageId().GetEntryId()) != -1 {
		t.Errorf("of an empty topic: %v, want entry -1", r)
	}
	c.produce(topicA, 1)
	p := c.publish(1, 0, 3)
	if r := last(); positionOf(r.GetLastMessageId()) != p || r.GetLastMessageId().GetBatchIndex() != -1 {
		t.Errorf("%v, want %v", r, p)
	}
	c.send(1, 3, payload("batch", 7))
	c.receipt()
	if r := last(); r.GetLastMessageId().GetBatchIndex() != 6 {
		t.Errorf("of a batch of 7: %v", r)
	}
	c.flow(1, 100)
	ids := c.receive(1, "0", "1", "2", "batch")
	c.ack(1, ids[0], ids[1])
	if r := last(); positionOf(r.GetConsumerMarkDeletePosition()) != positionOf(ids[1]) {
		t.Errorf("mark-delete %v, want %v", r.GetConsumerMarkDeletePosition(), ids[1])
	}
	c.write(&command{Type: pulsarpb.BaseCommand_GET_LAST_MESSAGE_ID.Enum(), GetLastMessageId: &pulsarpb.CommandGetLastMessageId{ConsumerId: new(uint64(44)), RequestId: c.id()}})
	c.expectError(pulsarpb.ServerError_ConsumerNotFound)
}

func TestUnsubscribe(t *testing.T) {
	n := newNode(t)
	a, b := n.connect(), n.connect()
	a.produce(topicA, 1)
	a.publish(1, 0, 2)
	a.subscribe(topicA, "s", sharedSub, 1)
	b.subscribe(topicA, "s", sharedSub, 1)
	leave := func(c *client, consumer uint64, force bool) {
		c.write(&command{Type: pulsarpb.BaseCommand_UNSUBSCRIBE.Enum(), Unsubscribe: &pulsarpb.CommandUnsubscribe{ConsumerId: &consumer, RequestId: c.id(), Force: &force}})
	}
	leave(a, 44, false)
	a.expectError(pulsarpb.ServerError_ConsumerNotFound)
	leave(a, 1, false)
	a.expectError(pulsarpb.ServerError_ConsumerBusy)
	leave(a, 1, true)
	a.succeeded()
	b.expect(pulsarpb.BaseCommand_CLOSE_CONSUMER)
	if s := n.stats(topicA); len(s.Subscriptions) != 0 {
		t.Errorf("still there: %v", s.Subscriptions)
	}
	name, _ := protocol.ParseTopic(topicA)
	if err := n.Unload(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	if s := n.stats(topicA); len(s.Subscriptions) != 0 {
		t.Errorf("back after a reload: %v", s.Subscriptions)
	}
	a.subscribe(topicA, "s", exclusive, 1)
	a.flow(1, 10)
	a.receive(1, "0", "1")
	leave(a, 1, false)
	a.succeeded()
	a.closeConsumer(1) // clients may
}

func TestConsumerStats(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	c.publish(1, 0, 3)
	name := "me"
	c.subscribe(topicA, "s", sharedSub, 1, func(s *pulsarpb.CommandSubscribe) { s.ConsumerName = &name })
	c.flow(1, 10)
	c.receive(1, texts(0, 3)...)
	ask := func(id uint64) *pulsarpb.CommandConsumerStatsResponse {
		c.write(&command{Type: pulsarpb.BaseCommand_CONSUMER_STATS.Enum(), ConsumerStats: &pulsarpb.CommandConsumerStats{ConsumerId: &id, RequestId: c.id()}})
		return c.expect(pulsarpb.BaseCommand_CONSUMER_STATS_RESPONSE).Command.GetConsumerStatsResponse()
	}
	r := ask(1)
	if r.GetConsumerName() != "me" || r.GetAvailablePermits() != 7 || r.GetUnackedMessages() != 3 || r.GetMsgBacklog() != 3 || r.GetType() != "Shared" {
		t.Errorf("%v", r)
	}
	if r := ask(44); r.GetErrorCode() != pulsarpb.ServerError_ConsumerNotFound || r.GetErrorMessage() == "" {
		t.Errorf("%v", r)
	}
}

// A client that does not read its messages costs memory up to a bound, and nobody
// else anything.
func TestSlowConnectionIsBoundedAndAlone(t *testing.T) {
	n := newNode(t)
	slow, fast, p := n.connect(), n.connect(), n.connect()
	p.produce(topicA, 1)
	slow.subscribe(topicA, "slow", exclusive, 1)
	slow.flow(1, 1<<20)
	fast.subscribe(topicA, "fast", exclusive, 1)
	fast.flow(1, 1<<20)
	const each, count = 1 << 20, 64
	data := payload(strings.Repeat("x", each), 1)
	go func() {
		for range count {
			if _, err := fast.next(); err != nil {
				return
			}
		}
	}()
	for i := range count {
		p.send(1, uint64(i), data)
		p.receipt()
	}
	waitFor(t, "the slow one is over its bound", func() bool {
		return n.stats(topicA).Subscriptions["slow"].WhyIdle == SlowConnection
	})
	n.mu.Lock()
	for c := range n.conns {
		c.out.mu.Lock()
		if c.out.messages > outgoingHigh+each+1024 {
			t.Errorf("%d bytes wait for one connection, the bound is %d", c.out.messages, outgoingHigh)
		}
		c.out.mu.Unlock()
	}
	n.mu.Unlock()
	waitFor(t, "the fast one got all", func() bool {
		s := n.stats(topicA).Subscriptions["fast"]
		return s.MsgOutCounter == count
	})
	for range count { // and once it reads, the slow one does too
		if _, err := slow.next(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStatsAndMetrics(t *testing.T) {
	n := newNode(t, "statsUpdateFrequencyInSecs=1", "exposeConsumerLevelMetricsInPrometheus=true", "clusterName=c1")
	c := n.connect()
	c.produce(topicA, 1)
	c.subscribe(topicA, "s", sharedSub, 1)
	c.subscribe(topicA, "s", sharedSub, 2) // same name, other id: series must not collide
	c.flow(1, 100)
	c.publish(1, 0, 10)
	ids := c.receive(1, texts(0, 10)...)
	c.ack(1, ids[:4]...)
	s := n.stats(topicA)
	sub := s.Subscriptions["s"]
	if s.MsgInCounter != 10 || len(s.Publishers) != 1 || sub.MsgBacklog != 6 || sub.UnackedMessages != 6 || sub.Type != "Shared" ||
		len(sub.Consumers) != 2 || sub.MsgOutCounter != 10 || s.StorageSize == 0 || s.BacklogSize == 0 || s.AverageMsgSize == 0 {
		t.Errorf("%+v; %+v", s, sub)
	}
	name, _ := protocol.ParseTopic(topicA)
	in, err := n.InternalStats(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	if cur := in.Cursors["s"]; in.EntriesAdded != 10 || in.NumberOfEntries != 10 || len(in.Ledgers) == 0 || in.State == "" || in.LastConfirmed == "" ||
		cur.MarkDelete == "" || cur.ReadPosition == "" || cur.MsgBacklog != 6 || cur.WhyIdle != CaughtUp {
		t.Errorf("%+v", in)
	}
	waitFor(t, "a rate", func() bool { return n.stats(topicA).MsgRateIn > 0 })

	families, err := n.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if !strings.Contains(p.Metric, "pulsar_") { // those are Pulsar's names, with Pulsar's sins
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
	got := map[string]string{}
	for _, f := range families {
		got[f.GetName()] = f.String()
	}
	for _, want := range []string{
		"pulsar_active_connections", "pulsar_connection_created_total_count", "pulsar_rate_in", "pulsar_in_messages_total",
		"pulsar_in_bytes_total", "pulsar_out_messages_total", "pulsar_subscription_back_log", "pulsar_subscription_unacked_messages",
		"pulsar_storage_size", "pulsar_msg_backlog", "pulsar_producers_count", "pulsar_consumers_count", "pulsar_consumer_available_permits",
	} {
		if !strings.Contains(got[want], `"c1"`) {
			t.Errorf("%s is missing or lacks its cluster: %q", want, got[want])
		}
	}
	if !strings.Contains(got["pulsar_subscription_back_log"], "value:6") || !strings.Contains(got["pulsar_subscription_back_log"], topicA) {
		t.Errorf("backlog: %s", got["pulsar_subscription_back_log"])
	}
}

func TestTopicMetricsCanBeOff(t *testing.T) {
	n := newNode(t, "exposeTopicLevelMetricsInPrometheus=false")
	c := n.connect()
	c.produce(topicA, 1)
	families, err := n.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range families {
		names = append(names, f.GetName())
	}
	if slices.Contains(names, "pulsar_rate_in") || !slices.Contains(names, "pulsar_broker_rate_in") {
		t.Errorf("families %v", names)
	}
}

// Many clients come, work and vanish at once; nothing is left behind, and each
// message is with somebody.
func TestChurn(t *testing.T) {
	n := newNode(t)
	p := n.connect()
	p.produce(topicA, 1)
	const total = 400
	stop := make(chan struct{})
	churned := make(chan struct{})
	go func() {
		defer close(churned)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			c := n.connect()
			c.subscribe(topicA, "s", sharedSub, 1)
			c.flow(1, uint32(1+i%7))
			_ = c.nc.Close()
		}
	}()
	p.publish(1, 0, total)
	close(stop)
	<-churned
	c := n.connect()
	c.subscribe(topicA, "s", sharedSub, 1)
	c.flow(1, 10*total)
	seen := map[string]bool{}
	for len(seen) < total {
		got, m := c.message(1)
		seen[got] = true
		c.write(ackCommand(1, pulsarpb.CommandAck_Individual, nil, m.GetMessageId()))
	}
	waitFor(t, "all acknowledged", func() bool { return n.stats(topicA).Subscriptions["s"].MsgBacklog == 0 })
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := n.topics.loaded(ctx, topicA); err != nil {
		t.Fatal(err)
	}
}
