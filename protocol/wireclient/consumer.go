package wireclient

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// SubscriptionType says how the consumers of a subscription share its messages.
type SubscriptionType = pulsarpb.CommandSubscribe_SubType

// The types, by Pulsar's names.
const (
	Exclusive = pulsarpb.CommandSubscribe_Exclusive
	Shared    = pulsarpb.CommandSubscribe_Shared
	Failover  = pulsarpb.CommandSubscribe_Failover
	KeyShared = pulsarpb.CommandSubscribe_Key_Shared
)

// SubscribeOptions adjust a [Consumer]. Topic and Subscription are needed.
type SubscribeOptions struct {
	Topic        string
	Subscription string
	Type         SubscriptionType
	Name         string // the consumer's; "" = the broker makes one up

	// FromEarliest starts a new subscription at the topic's first message instead of
	// after its last.
	FromEarliest bool

	// Start makes a reader: no durable subscription, from that message on.
	Start *MessageID

	// QueueSize bounds the messages on their way or waiting. 0 = 1000.
	QueueSize int

	// Priority: consumers with a lower number are served first.
	Priority int32
}

// Consumer receives the messages of one topic through one subscription.
type Consumer struct {
	client  *Client
	topic   protocol.TopicName
	id      uint64
	log     *slog.Logger
	options SubscribeOptions

	ctx    context.Context // ends at Close or on a lasting error
	cancel context.CancelFunc
	lost   chan struct{} // capacity 1; tells run that conn was detached
	ready  chan struct{} // capacity 1; tells Receive that queue, ended or err changed

	mu    sync.Mutex // guards all below; taken before a connection's
	conn  *conn      // nil while detached
	queue []*Message
	taken int        // messages taken since the last FLOW
	start *MessageID // where a reader goes on after a reconnection
	// seekTo is where a reader starts when it connects next, in place of start.
	seekTo *MessageID
	ended  bool  // the topic is terminated and all was delivered
	err    error // why nothing more will come
}

// Subscribe opens a consumer. It retries until the broker agrees, refuses for
// good, or ctx ends.
func (c *Client) Subscribe(ctx context.Context, options SubscribeOptions) (*Consumer, error) {
	topic, err := protocol.ParseTopic(options.Topic)
	if err != nil {
		return nil, err
	}
	if options.Subscription == "" {
		return nil, fmt.Errorf("subscribe to %s: the subscription has no name", topic)
	}
	options.QueueSize = cmp.Or(options.QueueSize, 1000)
	k := &Consumer{
		client: c, topic: topic, id: c.handleID.Add(1), options: options, start: options.Start,
		log:  c.options.Log.With("topic", topic.String(), "subscription", options.Subscription),
		lost: make(chan struct{}, 1), ready: make(chan struct{}, 1),
	}
	k.ctx, k.cancel = context.WithCancel(c.ctx)
	if err := c.register(k); err != nil {
		return nil, err
	}
	err = c.retry(ctx, k.attach)
	if err == nil && !c.start(k.run) {
		err = fmt.Errorf("client: %w", ErrClosed)
	}
	if err != nil {
		k.end(err)
		return nil, fmt.Errorf("subscribe to %s as %s: %w", topic, options.Subscription, err)
	}
	return k, nil
}

// Receive returns the next message, waiting until ctx ends. After the last
// message of a terminated topic it returns [ErrEndOfTopic].
func (k *Consumer) Receive(ctx context.Context) (*Message, error) {
	for {
		m, err := k.take()
		if m != nil || err != nil {
			return m, err
		}
		select {
		case <-k.ready:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// take returns the next message if one is here.
func (k *Consumer) take() (*Message, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.queue) > 0 {
		m := k.queue[0]
		k.queue[0] = nil
		k.queue = k.queue[1:]
		k.grantLocked(1)
		if k.start != nil {
			k.start = &m.ID
		}
		if len(k.queue) > 0 || k.ended || k.err != nil {
			k.signal() // another Receive may wait, and signals merge
		}
		return m, nil
	}
	switch {
	case k.err != nil:
		k.signal()
		return nil, fmt.Errorf("receive from %s: %w", k.topic, k.err)
	case k.ended:
		k.signal()
		return nil, fmt.Errorf("receive from %s: %w", k.topic, ErrEndOfTopic)
	}
	return nil, nil //nolint:nilnil // nothing here yet, and nothing wrong
}

func (k *Consumer) signal() {
	select {
	case k.ready <- struct{}{}:
	default:
	}
}

// grantLocked counts messages that left the queue, and lets the broker send as
// many more once half a queue is free.
func (k *Consumer) grantLocked(n int) {
	k.taken += n
	if k.conn == nil || k.taken < (k.options.QueueSize+1)/2 {
		return
	}
	permits := uint32(k.taken)
	k.taken = 0
	_ = k.conn.sendCommand(k.flow(permits)) // on error the connection is over, and attach grants anew
}

func (k *Consumer) flow(permits uint32) *pulsarpb.BaseCommand {
	return &pulsarpb.BaseCommand{
		Type: pulsarpb.BaseCommand_FLOW.Enum(),
		Flow: &pulsarpb.CommandFlow{ConsumerId: &k.id, MessagePermits: &permits},
	}
}

// message handles MESSAGE.
func (k *Consumer) message(c *conn, command *pulsarpb.CommandMessage, payload []byte) {
	var messages []*Message
	var permits int // that the broker counted, less those that will be taken
	err := protocol.CheckPayload(payload)
	if err == nil {
		messages, permits, err = unpack(command, payload)
	}
	if err != nil {
		k.log.Error("message damaged on its way; connecting anew", "id", idOf(command.GetMessageId()).String(), "err", err)
		c.fail(fmt.Errorf("message %v: %w", idOf(command.GetMessageId()), err))
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn != c {
		return
	}
	for _, m := range messages {
		if k.skipLocked(m) {
			continue
		}
		m.consumer = k
		k.queue = append(k.queue, m)
		permits--
	}
	k.grantLocked(permits) // those that nobody will take
	k.signal()
}

// skipLocked reports whether a reader had m before its reconnection: the broker
// starts again with the entry of the last message that was taken.
func (k *Consumer) skipLocked(m *Message) bool {
	s := k.start
	return s != nil && s != k.options.Start && m.ID.Position == s.Position && m.ID.BatchIndex <= s.BatchIndex
}

// Ack acknowledges one message. It does not wait for the broker: while there is
// no connection it fails, and the broker delivers the message again. An entry of a
// batch is acknowledged with its last message.
func (k *Consumer) Ack(m *Message) error {
	if !k.completes(m) {
		return nil
	}
	return k.command("acknowledge", k.ackCommand(pulsarpb.CommandAck_Individual, m, nil))
}

// AckCumulative acknowledges a message and all before it. It does not wait for
// the broker.
func (k *Consumer) AckCumulative(m *Message) error {
	return k.command("acknowledge", k.ackCommand(pulsarpb.CommandAck_Cumulative, m, nil))
}

// AckAndWait is Ack that waits until the broker has taken the acknowledgement.
func (k *Consumer) AckAndWait(ctx context.Context, m *Message) error {
	if !k.completes(m) {
		return nil
	}
	answer, err := k.request(ctx, "acknowledge", func(id uint64) *pulsarpb.BaseCommand {
		return k.ackCommand(pulsarpb.CommandAck_Individual, m, &id)
	})
	if err != nil {
		return err
	}
	if r := answer.GetAckResponse(); r.GetMessage() != "" {
		return fmt.Errorf("acknowledge on %s: %w", k.topic, &ServerError{r.GetError(), r.GetMessage(), ""})
	}
	return nil
}

// completes reports whether with m all of its entry is acknowledged.
func (k *Consumer) completes(m *Message) bool {
	if m.batch == nil {
		return true
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if b := m.batch; b.open[m.ID.BatchIndex] {
		b.open[m.ID.BatchIndex] = false
		b.left--
	}
	return m.batch.left == 0
}

func (k *Consumer) ackCommand(how pulsarpb.CommandAck_AckType, m *Message, request *uint64) *pulsarpb.BaseCommand {
	id := m.ID
	id.BatchIndex = -1
	if how == pulsarpb.CommandAck_Cumulative && m.batch != nil && int(m.ID.BatchIndex) < len(m.batch.open)-1 {
		id.Entry-- // the batch itself still has messages behind m
	}
	return &pulsarpb.BaseCommand{
		Type: pulsarpb.BaseCommand_ACK.Enum(),
		Ack: &pulsarpb.CommandAck{
			ConsumerId: &k.id, AckType: how.Enum(), MessageId: []*pulsarpb.MessageIdData{id.data()}, RequestId: request,
		},
	}
}

// Redeliver asks the broker to deliver messages again: those given, or with none
// given, all that this consumer has not acknowledged.
func (k *Consumer) Redeliver(messages ...*Message) error {
	command := &pulsarpb.CommandRedeliverUnacknowledgedMessages{ConsumerId: &k.id}
	for _, m := range messages {
		id := m.ID
		id.BatchIndex = -1
		command.MessageIds = append(command.MessageIds, id.data())
	}
	if len(messages) == 0 {
		k.mu.Lock()
		n := len(k.queue)
		k.queue = nil // these come again
		k.grantLocked(n)
		k.mu.Unlock()
	}
	return k.command("redeliver", &pulsarpb.BaseCommand{
		Type: pulsarpb.BaseCommand_REDELIVER_UNACKNOWLEDGED_MESSAGES.Enum(), RedeliverUnacknowledgedMessages: command,
	})
}

// Seek moves the subscription to a message, [Earliest] or [Latest]. The broker
// then closes the consumer, which connects anew; messages queued here are dropped.
func (k *Consumer) Seek(ctx context.Context, id MessageID) error {
	return k.seek(ctx, id, &pulsarpb.CommandSeek{MessageId: id.data()})
}

// SeekTime moves the subscription to the first message published at t or later.
func (k *Consumer) SeekTime(ctx context.Context, t time.Time) error {
	return k.seek(ctx, Earliest, &pulsarpb.CommandSeek{MessagePublishTime: new(uint64(t.UnixMilli()))})
}

func (k *Consumer) seek(ctx context.Context, to MessageID, command *pulsarpb.CommandSeek) error {
	k.mu.Lock()
	if k.options.Start != nil {
		k.seekTo = &to // before the broker closes us: run connects anew at once
	}
	k.mu.Unlock()
	_, err := k.request(ctx, "seek", func(id uint64) *pulsarpb.BaseCommand {
		command.ConsumerId, command.RequestId = &k.id, &id
		return &pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_SEEK.Enum(), Seek: command}
	})
	if err != nil {
		k.mu.Lock()
		k.seekTo = nil
		k.mu.Unlock()
	}
	return err
}

// LastMessageID returns the topic's last message; its entry is -1 if there is
// none.
func (k *Consumer) LastMessageID(ctx context.Context) (MessageID, error) {
	answer, err := k.request(ctx, "ask for the last message", func(id uint64) *pulsarpb.BaseCommand {
		return &pulsarpb.BaseCommand{
			Type:             pulsarpb.BaseCommand_GET_LAST_MESSAGE_ID.Enum(),
			GetLastMessageId: &pulsarpb.CommandGetLastMessageId{ConsumerId: &k.id, RequestId: &id},
		}
	})
	if err != nil {
		return MessageID{}, err
	}
	return idOf(answer.GetGetLastMessageIdResponse().GetLastMessageId()), nil
}

// Unsubscribe deletes the subscription and closes the consumer.
func (k *Consumer) Unsubscribe(ctx context.Context) error {
	_, err := k.request(ctx, "unsubscribe", func(id uint64) *pulsarpb.BaseCommand {
		return &pulsarpb.BaseCommand{
			Type:        pulsarpb.BaseCommand_UNSUBSCRIBE.Enum(),
			Unsubscribe: &pulsarpb.CommandUnsubscribe{ConsumerId: &k.id, RequestId: &id},
		}
	})
	if err == nil {
		k.end(fmt.Errorf("consumer: %w", ErrClosed))
	}
	return err
}

// Close closes the consumer. Its unacknowledged messages go to other consumers.
func (k *Consumer) Close(ctx context.Context) error {
	_, err := k.request(ctx, "close", func(id uint64) *pulsarpb.BaseCommand {
		return &pulsarpb.BaseCommand{
			Type:          pulsarpb.BaseCommand_CLOSE_CONSUMER.Enum(),
			CloseConsumer: &pulsarpb.CommandCloseConsumer{ConsumerId: &k.id, RequestId: &id},
		}
	})
	k.end(fmt.Errorf("consumer: %w", ErrClosed))
	if errors.Is(err, ErrDisconnected) || errors.Is(err, ErrClosed) {
		return nil // the broker closes the consumers of a lost connection
	}
	return err
}

func (k *Consumer) abandon() { k.end(fmt.Errorf("client: %w", ErrClosed)) }

// end lets nothing more in. The first reason counts.
func (k *Consumer) end(err error) {
	k.mu.Lock()
	if k.err != nil {
		k.mu.Unlock()
		return
	}
	k.err = err
	c := k.conn
	k.conn, k.queue = nil, nil
	k.signal()
	k.mu.Unlock()
	k.cancel()
	k.client.unregister(k)
	if c != nil {
		c.removeConsumer(k.id)
	}
}
