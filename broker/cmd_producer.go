package broker

import (
	"context"
	"fmt"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// producerSlot is a producer id's place on its connection.
type producerSlot struct {
	producer *producer // nil while it is being opened, and after
	closed   bool      // by the broker, or by the client while it was being opened
}

// openProducer serves PRODUCER. A name that a living producer has is refused
// with ProducerBusy; see [producer.succeeds] for who may take one over. The same
// id again on the same connection answers the same again.
//
// last_sequence_id is -1, because there is no deduplication, and the topic epoch
// is absent. Ignored: the schema, which clients then keep to themselves, and
// encryption, which is theirs anyway.
func (c *conn) openProducer(f protocol.Frame) error {
	cmd := f.Command.GetProducer()
	id, request := cmd.GetProducerId(), cmd.GetRequestId()

	c.mu.Lock()
	old := c.producers[id]
	var slot *producerSlot
	var there *producer
	if (old == nil || old.closed) && len(c.producers) < maxProducersPerConnection {
		slot = &producerSlot{}
		c.producers[id] = slot
	}
	if old != nil {
		there = old.producer
	}
	c.mu.Unlock()

	switch {
	case slot != nil:
		return c.async(func(ctx context.Context) {
			p, err := c.b.produce(ctx, c, cmd)
			c.producerOpened(id, request, slot, p, err)
		})
	case old == nil:
		c.refuse(request, fmt.Errorf("producers on one connection: at most %d are allowed: %w", maxProducersPerConnection, ErrTooMany))
	case there == nil:
		c.refuse(request, fmt.Errorf("producer %d is being opened already: %w", id, ErrBusy))
	case !c.producerReady(request, there):
		c.refuse(request, there.topic.closedError())
	}
	return nil
}

// producerOpened puts a new producer into its slot and answers.
func (c *conn) producerOpened(id, request uint64, slot *producerSlot, p *producer, err error) {
	c.mu.Lock()
	current := c.producers[id] == slot
	if current && err == nil {
		slot.producer = p
	} else if current {
		delete(c.producers, id)
	}
	c.mu.Unlock()
	switch {
	case err != nil:
		c.refuse(request, err)
	case !current: // the client closed it meanwhile
		p.drop()
	case !c.producerReady(request, p): // its topic closed first
		c.producerClosed(p)
		c.refuse(request, p.topic.closedError())
	}
}

// producerReady answers that p is open, unless it was closed meanwhile. Whoever
// closes it tells the client after this: the other way round the client would go
// on sending to a closed producer.
func (c *conn) producerReady(request uint64, p *producer) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	last, ready := int64(-1), true
	c.out.reply(&pulsarpb.BaseCommand{
		Type: pulsarpb.BaseCommand_PRODUCER_SUCCESS.Enum(),
		ProducerSuccess: &pulsarpb.CommandProducerSuccess{
			RequestId: &request, ProducerName: &p.name, LastSequenceId: &last, ProducerReady: &ready,
		},
	})
	return true
}

// producerClosed tells the client that the broker closed its producer. What it
// still sends to it is dropped without a word: it will send it again elsewhere.
func (c *conn) producerClosed(p *producer) {
	c.mu.Lock()
	slot := c.producers[p.id]
	mine := slot != nil && slot.producer == p
	if mine {
		slot.producer, slot.closed = nil, true
	}
	c.mu.Unlock()
	if !mine {
		return
	}
	request := noRequest
	c.out.reply(&pulsarpb.BaseCommand{
		Type:          pulsarpb.BaseCommand_CLOSE_PRODUCER.Enum(),
		CloseProducer: &pulsarpb.CommandCloseProducer{ProducerId: &p.id, RequestId: &request},
	})
}
