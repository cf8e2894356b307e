package broker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/managedledger"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// producer is one client's right to publish to a topic.
//
// Receipts and errors go out in the order of the SENDs they answer, whatever
// order they become known in: results wait in window behind earlier ones.
type producer struct {
	id        uint64 // the client's number, unique on its connection
	name      string
	userNamed bool
	epoch     uint64 // of the client's reconnections
	topic     *topic
	conn      *conn
	metadata  map[string]string
	since     time.Time

	in traffic

	mu      sync.Mutex // guards the following; held while receipts are queued
	window  []*publish // sent by the client and not answered, oldest first
	closing func()     // runs once window is empty; the client wants to close
	closed  bool       // nothing is answered any more
}

// publish is one SEND on its way.
type publish struct {
	producer *producer
	sequence uint64
	highest  uint64
	messages int
	size     int

	position ledger.Position
	err      error // answered with SEND_ERROR
	done     bool  // position or err is set; guarded by the producer's mu
}

// begin gives a SEND its place among the answers, or returns nil if the producer
// is closed and the client will send it again elsewhere.
func (p *producer) begin(cmd *pulsarpb.CommandSend) *publish {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.closing != nil {
		return nil
	}
	op := &publish{producer: p, sequence: cmd.GetSequenceId(), highest: cmd.GetHighestSequenceId(), messages: 1}
	p.window = append(p.window, op)
	return op
}

// refuse answers the SEND with an error; nothing was stored.
func (op *publish) refuse(err error) {
	op.err = err
	op.producer.answer(op)
}

// stored is the managed ledger's answer. The receipt goes out only if this broker
// may still speak for the topic: if not, somebody else may have decided that the
// entry does not exist, and the client must ask there.
func (op *publish) stored(at ledger.Position, err error) {
	p := op.producer
	if errors.Is(err, managedledger.ErrTooLarge) || errors.Is(err, managedledger.ErrTerminated) {
		op.refuse(err) // sending it again could not help
		return
	}
	if err != nil || !p.topic.claim.Valid() {
		if err != nil {
			p.topic.b.metrics.publishFailed.Inc()
		}
		if p.disconnect() && err != nil { // said once for all that was under way
			p.topic.log.Warn("publish failed; its producer reconnects and sends again", "producer", p.name, "err", err)
		}
		return
	}
	p.in.add(op.messages, op.size)
	p.topic.in.add(op.messages, op.size)
	p.topic.lastIn.Store(time.Now().UnixMilli())
	op.position = at
	p.answer(op)
}

// answer marks op as known and sends what is known from the front of the window.
func (p *producer) answer(op *publish) {
	p.mu.Lock()
	op.done = true
	n := 0
	for n < len(p.window) && p.window[n].done {
		if !p.closed {
			p.reply(p.window[n])
		}
		p.window[n] = nil
		n++
	}
	var end func()
	if p.window = p.window[n:]; len(p.window) == 0 {
		p.window = nil
		end, p.closing = p.closing, nil
		p.closed = p.closed || end != nil
	}
	p.mu.Unlock()
	if end != nil {
		end()
	}
}

// reply queues the answer to one SEND. The caller holds mu.
func (p *producer) reply(op *publish) {
	if op.err != nil {
		code, text := serverError(op.err), op.err.Error()
		p.conn.out.reply(&pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_SEND_ERROR.Enum(),
			SendError: &pulsarpb.CommandSendError{
				ProducerId: &p.id, SequenceId: &op.sequence, Error: &code, Message: &text,
			},
		})
		return
	}
	l, e, partition := uint64(op.position.Ledger), uint64(op.position.Entry), int32(p.topic.name.Partition)
	p.conn.out.reply(&pulsarpb.BaseCommand{
		Type: pulsarpb.BaseCommand_SEND_RECEIPT.Enum(),
		SendReceipt: &pulsarpb.CommandSendReceipt{
			ProducerId: &p.id, SequenceId: &op.sequence, HighestSequenceId: &op.highest,
			MessageId: &pulsarpb.MessageIdData{LedgerId: &l, EntryId: &e, Partition: &partition},
		},
	})
}

// succeeds reports whether p is old after a reconnection. On one connection a
// higher epoch says so. Across connections it does only for names that brokers
// made up, which no two clients share; a name that users chose may be the other
// client's, so whether its connection lives decides.
func (p *producer) succeeds(old *producer) bool {
	return p.epoch > old.epoch && (p.conn == old.conn || !p.userNamed && !old.userNamed)
}

// shut stops answering. It reports whether it was this call that did, and returns
// what was to run once all was answered.
func (p *producer) shut() (end func(), first bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, false
	}
	end = p.closing
	p.closed, p.window, p.closing = true, nil, nil
	return end, true
}

// drop ends a producer whose client is gone or has replaced it.
func (p *producer) drop() {
	end, _ := p.shut()
	p.topic.removeProducer(p)
	if end != nil {
		end()
	}
}

// disconnect ends a producer and tells its client to look the topic up again. It
// reports whether it was this call that did.
func (p *producer) disconnect() bool {
	end, first := p.shut()
	switch {
	case !first:
	case end != nil: // somebody is closing it already, and tells
		end()
	default:
		p.topic.removeProducer(p)
		p.conn.producerClosed(p)
	}
	return first
}

// finish ends a producer once all that its client sent is answered; what comes
// from now on is dropped. Then it frees the name and runs done, on another
// goroutine or this one. If it ends another way first, done runs then.
func (p *producer) finish(done func()) {
	p.mu.Lock()
	before := p.closing
	end := func() {
		if before != nil {
			before() // the client wanted to close it before the broker did
		}
		p.topic.removeProducer(p)
		done()
	}
	if !p.closed && len(p.window) > 0 {
		p.closing = end
		p.mu.Unlock()
		return
	}
	p.closed = true
	p.mu.Unlock()
	end()
}

// produce opens a producer for a connection.
func (b *Broker) produce(ctx context.Context, c *conn, cmd *pulsarpb.CommandProducer) (*producer, error) {
	if err := checkName("producer", cmd.GetProducerName()); err != nil {
		return nil, err
	}
	if mode := cmd.GetProducerAccessMode(); mode != pulsarpb.ProducerAccessMode_Shared {
		return nil, fmt.Errorf("producer access mode %v: this broker knows Shared only: %w", mode, ErrUnsupported)
	}
	if cmd.GetTxnEnabled() {
		return nil, fmt.Errorf("producer with transactions: %w", ErrUnsupported)
	}
	name, err := parseTopic(cmd.GetTopic())
	if err != nil {
		return nil, err
	}
	t, err := b.topic(ctx, name, createAllowed)
	if err != nil {
		return nil, err
	}
	if first := cmd.GetInitialSubscriptionName(); first != "" {
		r := request{name: first, durable: true, earliest: true, create: b.cfg.AllowAutoSubscriptionCreation}
		if err := checkName("subscription", first); err != nil {
			return nil, err
		}
		if _, err := t.subscription(ctx, r); err != nil {
			return nil, err
		}
	}
	p := &producer{
		id: cmd.GetProducerId(), name: cmd.GetProducerName(), epoch: cmd.GetEpoch(), topic: t, conn: c,
		userNamed: cmd.GetProducerName() != "" && cmd.GetUserProvidedProducerName(),
		metadata:  keyValues(cmd.GetMetadata()), since: time.Now(),
	}
	if p.name == "" {
		p.name = fmt.Sprintf("%s-%d", b.nameBase, b.nameCount.Add(1))
	}
	for range 3 {
		err = t.addProducer(p)
		h, busy := asBusy(err)
		if !busy || h.alive(ctx) {
			return p, err
		}
	}
	return nil, err
}

// errNoPayload reports a SEND without the part that is to be stored.
var errNoPayload = fmt.Errorf("SEND without a payload, nothing to store: %w", ErrNotAllowed)

func keyValues(list []*pulsarpb.KeyValue) map[string]string {
	if len(list) == 0 {
		return nil
	}
	m := make(map[string]string, len(list))
	for _, kv := range list {
		m[kv.GetKey()] = kv.GetValue()
	}
	return m
}
