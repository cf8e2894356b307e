package broker

import "github.com/magnetar-io/magnetar/protocol"

// closeProducer serves CLOSE_PRODUCER. It is answered once everything that the
// producer sent is. Closing one that is not there is no error.
func (c *conn) closeProducer(f protocol.Frame) error {
	cmd := f.Command.GetCloseProducer()
	id, request := cmd.GetProducerId(), cmd.GetRequestId()
	c.mu.Lock()
	slot := c.producers[id]
	var p *producer
	if slot != nil {
		p = slot.producer
	}
	if p == nil {
		delete(c.producers, id) // if it is being opened, it ends right after
	}
	c.mu.Unlock()
	if p == nil {
		c.succeed(request)
		return nil
	}
	p.finish(func() {
		c.mu.Lock()
		if c.producers[id] == slot {
			delete(c.producers, id)
		}
		c.mu.Unlock()
		c.succeed(request)
	})
	return nil
}
