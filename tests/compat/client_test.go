package compat

import (
	"context"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	plog "github.com/apache/pulsar-client-go/pulsar/log"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/protocoltest"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
	"github.com/magnetar-io/magnetar/protocol/wireclient"
)

const topic = "persistent://public/default/compat"

// pulsarClient connects an unmodified Pulsar client.
func pulsarClient(t *testing.T, b *protocoltest.Broker) pulsar.Client {
	t.Helper()
	c, err := pulsar.NewClient(pulsar.ClientOptions{URL: b.URL(), Logger: plog.DefaultNopLogger(), OperationTimeout: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func wire(t *testing.T, b *protocoltest.Broker) *wireclient.Client {
	t.Helper()
	c, err := wireclient.Dial(limit(t), b.URL(), wireclient.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func limit(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// TestPulsarProducerToOurConsumer: what the Pulsar client sends, single and in
// batches, is what our codec and client read.
func TestPulsarProducerToOurConsumer(t *testing.T) {
	for _, batching := range []bool{false, true} {
		t.Run(fmt.Sprintf("batching=%v", batching), func(t *testing.T) {
			k := protocoltest.NewCluster()
			b := k.NewBroker(t)
			p, err := pulsarClient(t, b).CreateProducer(pulsar.ProducerOptions{Topic: topic, Name: "them", DisableBatching: !batching})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			event := time.UnixMilli(1_600_000_000_123)
			const n = 20
			failed := make(chan error, n)
			for i := range n {
				p.SendAsync(limit(t), &pulsar.ProducerMessage{
					Payload: fmt.Appendf(nil, "message %d", i), Key: strconv.Itoa(i % 3), Properties: map[string]string{"n": strconv.Itoa(i)}, EventTime: event,
				}, func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) { failed <- err })
			}
			if err := p.FlushWithCtx(limit(t)); err != nil {
				t.Fatal(err)
			}
			for range n {
				if err := <-failed; err != nil {
					t.Error(err)
				}
			}
			entries := k.Entries(topic)
			if batching == (len(entries) == n) {
				t.Errorf("%d entries for %d messages", len(entries), n)
			}
			messages := 0
			for _, e := range entries {
				m, err := protocol.Peek(e)
				if err != nil || protocol.CheckPayload(e) != nil || string(m.ProducerName) != "them" || m.Batch != batching {
					t.Errorf("Peek = %+v, %v", m, err)
				}
				messages += m.Messages
			}
			if messages != n {
				t.Errorf("Peek counts %d messages, want %d", messages, n)
			}
			c, err := wire(t, b).Subscribe(limit(t), wireclient.SubscribeOptions{Topic: topic, Subscription: "us", FromEarliest: true})
			if err != nil {
				t.Fatal(err)
			}
			for i := range n {
				m, err := c.Receive(limit(t))
				if err != nil {
					t.Fatal(err)
				}
				if string(m.Payload) != fmt.Sprintf("message %d", i) || m.Key != strconv.Itoa(i%3) || m.Properties["n"] != strconv.Itoa(i) ||
					!m.EventTime.Equal(event) || m.SequenceID != uint64(i) {
					t.Errorf("message %d is %+v", i, m)
				}
				if err := c.AckAndWait(limit(t), m); err != nil {
					t.Error(err)
				}
			}
			if left := k.Unacknowledged(topic, "us"); left != 0 {
				t.Errorf("%d entries are not acknowledged", left)
			}
		})
	}
}

// TestOurProducerToPulsarConsumer: what our client sends, the Pulsar client reads.
func TestOurProducerToPulsarConsumer(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	p, err := wire(t, b).CreateProducer(limit(t), wireclient.ProducerOptions{Topic: topic})
	if err != nil {
		t.Fatal(err)
	}
	event := time.UnixMilli(1_600_000_000_123)
	for i := range 20 {
		if _, err := p.Send(limit(t), wireclient.OutMessage{
			Payload: fmt.Appendf(nil, "message %d", i), Key: "k", Properties: map[string]string{"n": strconv.Itoa(i)}, EventTime: event,
		}); err != nil {
			t.Fatal(err)
		}
	}
	c, err := pulsarClient(t, b).Subscribe(pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: "them", SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest, AckWithResponse: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for i := range 20 {
		m, err := c.Receive(limit(t))
		if err != nil {
			t.Fatal(err)
		}
		if string(m.Payload()) != fmt.Sprintf("message %d", i) || m.Key() != "k" || m.Properties()["n"] != strconv.Itoa(i) ||
			!m.EventTime().Equal(event) || m.ProducerName() != p.Name() || m.ID().EntryID() != int64(i) {
			t.Errorf("message %d is %q %v", i, m.Payload(), m.ID())
		}
		if err := c.Ack(m); err != nil {
			t.Error(err)
		}
	}
	if left := k.Unacknowledged(topic, "them"); left != 0 {
		t.Errorf("%d messages are not acknowledged", left)
	}
}

// TestCommandsOfThePulsarClient records each kind of command that the client
// sends while it works, and checks what a broker relies on.
func TestCommandsOfThePulsarClient(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	seen := make(chan *pulsarpb.BaseCommand, 1000)
	b.SetHook(func(_ *protocoltest.Conn, f protocol.Frame) bool {
		seen <- f.Command
		return false
	})
	client := pulsarClient(t, b)
	p, err := client.CreateProducer(pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.Subscribe(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "s", Type: pulsar.Shared, AckWithResponse: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Send(limit(t), &pulsar.ProducerMessage{Payload: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	m, err := c.Receive(limit(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Ack(m); err != nil {
		t.Fatal(err)
	}
	if _, err := c.GetLastMessageIDs(); err != nil {
		t.Error(err)
	}
	if err := c.Seek(m.ID()); err != nil {
		t.Error(err)
	}
	c.Close()
	p.Close()
	commands := map[pulsarpb.BaseCommand_Type]*pulsarpb.BaseCommand{}
	for len(seen) > 0 {
		command := <-seen
		if commands[command.GetType()] == nil {
			commands[command.GetType()] = command
		}
	}
	for _, typ := range []pulsarpb.BaseCommand_Type{
		pulsarpb.BaseCommand_CONNECT, pulsarpb.BaseCommand_PARTITIONED_METADATA, pulsarpb.BaseCommand_LOOKUP, pulsarpb.BaseCommand_PRODUCER,
		pulsarpb.BaseCommand_SEND, pulsarpb.BaseCommand_SUBSCRIBE, pulsarpb.BaseCommand_FLOW, pulsarpb.BaseCommand_ACK,
		pulsarpb.BaseCommand_GET_LAST_MESSAGE_ID, pulsarpb.BaseCommand_SEEK, pulsarpb.BaseCommand_CLOSE_CONSUMER, pulsarpb.BaseCommand_CLOSE_PRODUCER,
	} {
		if commands[typ] == nil {
			t.Errorf("the client sent no %v", typ)
		}
	}
	connect := commands[pulsarpb.BaseCommand_CONNECT].GetConnect()
	if connect.GetProtocolVersion() != 20 || !connect.GetFeatureFlags().GetSupportsBrokerEntryMetadata() {
		t.Errorf("CONNECT is %v", connect)
	}
	if s := commands[pulsarpb.BaseCommand_SUBSCRIBE].GetSubscribe(); s.GetTopic() != topic || s.GetSubscription() != "s" ||
		s.GetSubType() != pulsarpb.CommandSubscribe_Shared || !s.GetDurable() {
		t.Errorf("SUBSCRIBE is %v", s)
	}
	if a := commands[pulsarpb.BaseCommand_ACK].GetAck(); a.RequestId == nil || a.GetMessageId()[0].GetLedgerId() != 7 {
		t.Errorf("ACK is %v", a)
	}
}
