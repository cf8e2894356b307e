package wireclient

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/protobuf/proto"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// ProducerOptions adjust a [Producer]. Only Topic is needed.
type ProducerOptions struct {
	Topic string

	// Name is the producer's name on the topic; "" = the broker makes one up.
	Name string

	// MaxPending and MaxPendingBytes bound the messages without a receipt.
	// 0 = 1000 and 64 MiB.
	MaxPending      int
	MaxPendingBytes int64

	// SendTimeout is how long a message may wait for its receipt, reconnections
	// included. 0 = 30 s; negative = for ever.
	SendTimeout time.Duration
}

// Producer publishes to one topic.
type Producer struct {
	client  *Client
	topic   protocol.TopicName
	id      uint64
	log     *slog.Logger
	options ProducerOptions

	ctx    context.Context // ends at Close or on a lasting error
	cancel context.CancelFunc
	lost   chan struct{} // capacity 1; tells run that conn was detached

	messages, bytes *semaphore.Weighted // room for pending

	mu      sync.Mutex // guards all below; taken before a connection's
	opened  bool       // attached at least once
	name    string
	epoch   uint64
	conn    *conn // nil while detached
	next    uint64
	last    int64         // last_sequence_id that the broker answered first
	pending []*pending    // oldest first
	err     error         // why nothing can be sent any more
	idle    chan struct{} // closed when pending becomes empty; nil if nobody waits
}

// pending is a message that waits for its receipt.
type pending struct {
	sequence      uint64
	head, payload []byte // the frame
	since         time.Time
	done          func(MessageID, error)
}

// CreateProducer opens a producer. It retries until the broker agrees, refuses
// for good, or ctx ends.
func (c *Client) CreateProducer(ctx context.Context, options ProducerOptions) (*Producer, error) {
	topic, err := protocol.ParseTopic(options.Topic)
	if err != nil {
		return nil, err
	}
	options.MaxPending = cmp.Or(options.MaxPending, 1000)
	options.MaxPendingBytes = cmp.Or(options.MaxPendingBytes, 64<<20)
	options.SendTimeout = cmp.Or(options.SendTimeout, 30*time.Second)
	p := &Producer{
		client: c, topic: topic, id: c.handleID.Add(1), options: options, name: options.Name,
		log:  c.options.Log.With("topic", topic.String()),
		lost: make(chan struct{}, 1), last: -1,
		messages: semaphore.NewWeighted(int64(options.MaxPending)), bytes: semaphore.NewWeighted(options.MaxPendingBytes),
	}
	p.ctx, p.cancel = context.WithCancel(c.ctx)
	if err := c.register(p); err != nil {
		return nil, err
	}
	err = c.retry(ctx, p.attach)
	if err == nil && !c.start(p.run) {
		err = fmt.Errorf("client: %w", ErrClosed)
	}
	if err != nil {
		p.end(err)
		return nil, fmt.Errorf("create producer on %s: %w", topic, err)
	}
	if options.SendTimeout > 0 {
		c.start(p.expire)
	}
	return p, nil
}

// Name returns the producer's name on the topic.
func (p *Producer) Name() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.name
}

// LastSequenceID returns the highest sequence id that the broker had stored for
// this producer's name when it was created; -1 if none, or if the broker does not
// deduplicate.
func (p *Producer) LastSequenceID() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last
}

// Send publishes a message and waits for its receipt. If ctx ends first the
// message may still be stored.
func (p *Producer) Send(ctx context.Context, m OutMessage) (MessageID, error) {
	type result struct {
		id  MessageID
		err error
	}
	answer := make(chan result, 1)
	if err := p.SendAsync(ctx, m, func(id MessageID, err error) { answer <- result{id, err} }); err != nil {
		return MessageID{}, err
	}
	select {
	case r := <-answer:
		return r.id, r.err
	case <-ctx.Done():
		return MessageID{}, fmt.Errorf("publish to %s: %w: %w", p.topic, ErrTimeout, context.Cause(ctx))
	}
}

// SendAsync queues a message, waiting for room until ctx ends. If it returns nil,
// done is called exactly once and must not block; receipts come in the order of
// sending. If it returns an error, the message was not sent and done is not called.
func (p *Producer) SendAsync(ctx context.Context, m OutMessage, done func(MessageID, error)) error {
	size := int64(len(m.Payload)) + frameOverhead(&m)
	if size > p.options.MaxPendingBytes {
		return fmt.Errorf("publish to %s: %w: %d bytes, MaxPendingBytes is %d", p.topic, ErrMessageTooLarge, size, p.options.MaxPendingBytes)
	}
	if err := p.acquire(ctx, size); err != nil {
		return fmt.Errorf("publish to %s: %w", p.topic, err)
	}
	if err := p.enqueue(&m, size, done); err != nil {
		p.release(size)
		return fmt.Errorf("publish to %s: %w", p.topic, err)
	}
	return nil
}

// frameOverhead estimates what a frame holds beside the payload, from above.
func frameOverhead(m *OutMessage) int64 {
	n := 256 + len(m.Key)
	for k, v := range m.Properties {
		n += 16 + len(k) + len(v)
	}
	return int64(n)
}

// acquire waits for room, until ctx ends or the producer does.
func (p *Producer) acquire(ctx context.Context, size int64) error {
	if p.messages.TryAcquire(1) {
		if p.bytes.TryAcquire(size) {
			return nil
		}
		p.messages.Release(1)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(p.ctx, func() { cancel(p.ended()) }) //nolint:contextcheck // waits for both, the caller and the producer
	defer stop()
	if err := p.messages.Acquire(ctx, 1); err != nil {
		return context.Cause(ctx)
	}
	if err := p.bytes.Acquire(ctx, size); err != nil {
		p.messages.Release(1)
		return context.Cause(ctx)
	}
	return nil
}

func (p *Producer) release(size int64) {
	p.messages.Release(1)
	p.bytes.Release(size)
}

func (p *Producer) ended() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return cmp.Or(p.err, ErrClosed)
}

func (p *Producer) enqueue(m *OutMessage, size int64, done func(MessageID, error)) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return p.err
	}
	now := time.Now()
	sequence := p.next
	if m.SequenceID != nil {
		sequence = *m.SequenceID
		if n := len(p.pending); n > 0 && sequence <= p.pending[n-1].sequence {
			return fmt.Errorf("sequence id %d after %d: it must rise", sequence, p.pending[n-1].sequence)
		}
	}
	payload := protocol.BuildPayload(m.metadata(p.name, sequence, now), m.Payload)
	if p.conn != nil && len(payload) > p.conn.maxMessage {
		return fmt.Errorf("%w: %d bytes with its metadata, the broker takes %d", ErrMessageTooLarge, len(payload), p.conn.maxMessage)
	}
	e := &pending{
		sequence: sequence, payload: payload, since: now,
		head: protocol.AppendPayloadHeader(nil, &pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_SEND.Enum(),
			Send: &pulsarpb.CommandSend{ProducerId: &p.id, SequenceId: &sequence, NumMessages: proto.Int32(1)},
		}, len(payload)),
		done: func(id MessageID, err error) {
			p.release(size)
			done(id, err)
		},
	}
	p.next = sequence + 1
	p.pending = append(p.pending, e)
	if p.conn != nil {
		_ = p.conn.send(e.head, e.payload) // on error the connection is over, and run sends e again
	}
	return nil
}

// receipt handles SEND_RECEIPT. Receipts come in the order of sending; one that
// is older than what waits answers a message that was sent twice or timed out.
func (p *Producer) receipt(c *conn, r *pulsarpb.CommandSendReceipt) {
	p.mu.Lock()
	if p.conn != c || len(p.pending) == 0 || r.GetSequenceId() < p.pending[0].sequence {
		p.mu.Unlock()
		return
	}
	e := p.pending[0]
	if r.GetSequenceId() > e.sequence {
		p.mu.Unlock()
		c.fail(fmt.Errorf("receipt for sequence %d of producer %d, but %d is the oldest without one", r.GetSequenceId(), p.id, e.sequence))
		return
	}
	p.popLocked(1)
	p.mu.Unlock()
	e.done(idOf(r.GetMessageId()), nil)
}

// sendError handles SEND_ERROR. Most reasons pass, and then the broker has
// dropped what followed too: start over on a new connection.
func (p *Producer) sendError(c *conn, e *pulsarpb.CommandSendError) {
	err := &ServerError{e.GetError(), e.GetMessage(), c.address}
	switch e.GetError() {
	case pulsarpb.ServerError_TopicTerminatedError, pulsarpb.ServerError_ProducerFenced:
		p.end(err)
	case pulsarpb.ServerError_NotAllowedError:
		p.mu.Lock()
		var refused *pending
		if len(p.pending) > 0 && p.pending[0].sequence == e.GetSequenceId() {
			refused = p.pending[0]
			p.popLocked(1)
		}
		p.mu.Unlock()
		if refused != nil {
			refused.done(MessageID{}, fmt.Errorf("publish to %s: %w", p.topic, err))
		}
	default:
		c.fail(err)
	}
}

// popLocked removes the n oldest.
func (p *Producer) popLocked(n int) {
	clear(p.pending[:n])
	p.pending = p.pending[n:]
	if len(p.pending) == 0 {
		p.pending = nil // let the array go that the slice has walked through
		if p.idle != nil {
			close(p.idle)
			p.idle = nil
		}
	}
}

// Flush waits until every message sent before has its receipt or has failed.
func (p *Producer) Flush(ctx context.Context) error {
	p.mu.Lock()
	if len(p.pending) == 0 {
		p.mu.Unlock()
		return nil
	}
	if p.idle == nil {
		p.idle = make(chan struct{})
	}
	idle := p.idle
	p.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("flush %s: %w", p.topic, context.Cause(ctx))
	}
}

// Close waits for the receipts of what was sent, until ctx ends, and closes the
// producer. What has no receipt by then fails with ErrClosed.
func (p *Producer) Close(ctx context.Context) error {
	err := p.Flush(ctx)
	p.mu.Lock()
	c := p.conn
	p.mu.Unlock()
	p.end(fmt.Errorf("producer: %w", ErrClosed))
	if c == nil {
		return err
	}
	_, closeErr := c.request(ctx, func(id uint64) *pulsarpb.BaseCommand {
		return &pulsarpb.BaseCommand{
			Type:          pulsarpb.BaseCommand_CLOSE_PRODUCER.Enum(),
			CloseProducer: &pulsarpb.CommandCloseProducer{ProducerId: &p.id, RequestId: &id},
		}
	})
	if errors.Is(closeErr, ErrDisconnected) {
		closeErr = nil // the broker closes the producers of a lost connection
	}
	return errors.Join(err, closeErr)
}

func (p *Producer) abandon() { p.end(fmt.Errorf("client: %w", ErrClosed)) }

// end fails everything that waits and lets nothing more in. The first reason
// counts.
func (p *Producer) end(err error) {
	p.mu.Lock()
	if p.err != nil {
		p.mu.Unlock()
		return
	}
	p.err = err
	c := p.conn
	p.conn = nil
	failed := p.pending
	p.pending = nil
	if p.idle != nil {
		close(p.idle)
		p.idle = nil
	}
	p.mu.Unlock()
	p.cancel()
	p.client.unregister(p)
	if c != nil {
		c.removeProducer(p.id)
	}
	for _, e := range failed {
		e.done(MessageID{}, fmt.Errorf("publish to %s: %w", p.topic, err))
	}
}
