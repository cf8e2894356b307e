package broker

import (
	"context"
	"fmt"

	"github.com/magnetar-io/magnetar/protocol"
)

// unsubscribe serves UNSUBSCRIBE: the subscription is deleted with its position,
// and the consumer with it. While other consumers are connected it is refused,
// unless forced: then they are disconnected.
func (c *conn) unsubscribe(f protocol.Frame) error {
	cmd := f.Command.GetUnsubscribe()
	id, request := cmd.GetConsumerId(), cmd.GetRequestId()
	consumer, sub := c.consumer(id)
	if consumer == nil {
		c.refuse(request, fmt.Errorf("unsubscribe: consumer %d is not open on this connection: %w", id, ErrConsumerNotFound))
		return nil
	}
	return c.async(func(ctx context.Context) {
		t, err := c.b.topics.loaded(ctx, sub.topic)
		if err == nil && t == nil {
			err = fmt.Errorf("unsubscribe %q of %s: %w", sub.name, sub.topic, ErrClosed)
		}
		if err == nil {
			err = t.unsubscribe(ctx, sub, consumer, cmd.GetForce())
		}
		if err != nil {
			c.refuse(request, err)
			return
		}
		c.mu.Lock()
		if slot := c.consumers[id]; slot != nil && slot.consumer == consumer {
			delete(c.consumers, id)
		}
		c.mu.Unlock()
		c.succeed(request)
	})
}
