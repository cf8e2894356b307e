package broker

import (
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// closeConsumer serves CLOSE_CONSUMER. What the consumer did not acknowledge goes
// to the others at once. Closing one that is not there is no error.
func (c *conn) closeConsumer(f protocol.Frame) error {
	cmd := f.Command.GetCloseConsumer()
	id, request := cmd.GetConsumerId(), cmd.GetRequestId()
	c.mu.Lock()
	slot := c.consumers[id]
	delete(c.consumers, id) // if it is subscribing, it leaves right after
	var consumer *consumer
	var sub *subscription
	if slot != nil {
		consumer, sub = slot.consumer, slot.sub
	}
	c.mu.Unlock()
	if consumer == nil {
		c.succeed(request)
		return nil
	}
	sub.remove(consumer, func() { c.succeed(request) })
	return nil
}

// consumer returns an open consumer of the connection, or nil.
func (c *conn) consumer(id uint64) (*consumer, *subscription) {
	c.mu.Lock()
	defer c.mu.Unlock()
	slot := c.consumers[id]
	if slot == nil {
		return nil, nil
	}
	return slot.consumer, slot.sub
}

// The connection's side of its consumers: see [sink].

func (c *conn) room(w waker) int { return c.out.room(w) }

func (c *conn) tellActive(consumer *consumer, active bool) {
	if c.version < int32(pulsarpb.ProtocolVersion_v12) {
		return // it would not know the command
	}
	c.out.reply(&pulsarpb.BaseCommand{
		Type:                 pulsarpb.BaseCommand_ACTIVE_CONSUMER_CHANGE.Enum(),
		ActiveConsumerChange: &pulsarpb.CommandActiveConsumerChange{ConsumerId: &consumer.id, IsActive: &active},
	})
}

// disconnect tells the client that the broker closed its consumer.
func (c *conn) disconnect(consumer *consumer) {
	c.mu.Lock()
	if slot := c.consumers[consumer.id]; slot != nil && slot.consumer == consumer {
		delete(c.consumers, consumer.id)
	}
	c.mu.Unlock()
	request := noRequest
	c.out.reply(&pulsarpb.BaseCommand{
		Type:          pulsarpb.BaseCommand_CLOSE_CONSUMER.Enum(),
		CloseConsumer: &pulsarpb.CommandCloseConsumer{ConsumerId: &consumer.id, RequestId: &request},
	})
}
