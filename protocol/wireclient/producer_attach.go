package wireclient

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// run keeps the producer attached to the broker that owns its topic.
func (p *Producer) run() {
	for {
		if c := p.attachedTo(); c != nil {
			select {
			case <-c.done:
				p.detach(c)
			case <-p.lost: // perhaps of an earlier connection: look again
				continue
			case <-p.ctx.Done():
				return
			}
		}
		if !p.reattach() {
			return
		}
	}
}

func (p *Producer) attachedTo() *conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.conn
}

// reattach tries until the producer is attached. It reports false once the
// producer has ended.
func (p *Producer) reattach() bool {
	b := p.client.backoff()
	for {
		ctx, cancel := context.WithTimeout(p.ctx, p.client.options.OperationTimeout)
		err := p.attach(ctx)
		cancel()
		switch {
		case err == nil:
			return true
		case p.ctx.Err() != nil:
			return false
		case lasting(err):
			p.log.Error("producer ended by the broker", "producer", p.Name(), "err", err)
			p.end(err)
			return false
		}
		p.log.Warn("producer is not connected; will retry", "producer", p.Name(), "err", err)
		if !b.wait(p.ctx) {
			return false
		}
	}
}

// attach finds the owner of the topic, opens the producer there, and sends again
// what has no receipt. It does not retry.
func (p *Producer) attach(ctx context.Context) error {
	c, err := p.client.broker(ctx, p.topic, p.id)
	if err != nil {
		return err
	}
	if err := c.addProducer(p); err != nil {
		return err
	}
	answer, err := c.request(ctx, p.command)
	if err == nil && answer.GetProducerSuccess() == nil {
		err = fmt.Errorf("broker %s answers PRODUCER with %v", c.address, answer.GetType())
	}
	if err != nil {
		c.removeProducer(p.id)
		if !errors.As(err, new(*ServerError)) {
			p.closeLate(c)
		}
		return err
	}
	return p.attached(c, answer.GetProducerSuccess())
}

// closeLate undoes a PRODUCER whose answer was not awaited.
func (p *Producer) closeLate(c *conn) {
	id := p.client.requestID.Add(1)
	_ = c.sendCommand(&pulsarpb.BaseCommand{
		Type:          pulsarpb.BaseCommand_CLOSE_PRODUCER.Enum(),
		CloseProducer: &pulsarpb.CommandCloseProducer{ProducerId: &p.id, RequestId: &id},
	}) // fails only once the connection is over, which closes the producer too
}

// command makes PRODUCER. Each call is a new epoch, so that the broker can tell
// this session from an older one that it still thinks alive.
func (p *Producer) command(request uint64) *pulsarpb.BaseCommand {
	p.mu.Lock()
	defer p.mu.Unlock()
	epoch, own := p.epoch, p.options.Name != ""
	p.epoch++
	command := &pulsarpb.CommandProducer{
		RequestId: &request, ProducerId: &p.id, Topic: new(p.topic.String()),
		Epoch: &epoch, UserProvidedProducerName: &own,
	}
	if name := p.name; name != "" {
		command.ProducerName = &name
	}
	return &pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_PRODUCER.Enum(), Producer: command}
}

// attached switches to c and sends again what has no receipt.
func (p *Producer) attached(c *conn, success *pulsarpb.CommandProducerSuccess) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return p.err
	}
	p.conn = c
	if c.producer(p.id) != p { // closed by the broker before we got here
		p.conn = nil
		return fmt.Errorf("broker %s: %w: it closed the producer again", c.address, ErrDisconnected)
	}
	if !p.opened {
		p.opened = true
		p.last = success.GetLastSequenceId()
		p.next = uint64(p.last + 1)
	}
	p.name = success.GetProducerName()
	for _, e := range p.pending {
		if err := c.send(e.head, e.payload); err != nil {
			return nil
		}
	}
	if n := len(p.pending); n > 0 {
		p.log.Info("messages without a receipt sent again", "producer", p.name, "messages", n)
	}
	return nil
}

// detach leaves a connection that is over, or whose broker closed the producer.
func (p *Producer) detach(c *conn) {
	c.removeProducer(p.id)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn != c {
		return
	}
	p.conn = nil
	select {
	case p.lost <- struct{}{}:
	default:
	}
}

// expire is a goroutine that fails messages whose time is up.
func (p *Producer) expire() {
	tick := time.NewTicker(max(p.options.SendTimeout/10, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			for _, e := range p.overdue(now) {
				e.done(MessageID{}, fmt.Errorf("publish to %s: %w: waited %v", p.topic, ErrTimeout, p.options.SendTimeout))
			}
		case <-p.ctx.Done():
			return
		}
	}
}

// overdue takes the messages that have waited too long from the queue.
func (p *Producer) overdue(now time.Time) []*pending {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for n < len(p.pending) && now.Sub(p.pending[n].since) >= p.options.SendTimeout {
		n++
	}
	late := append([]*pending(nil), p.pending[:n]...)
	if n > 0 {
		p.popLocked(n)
	}
	return late
}

func (c *conn) addProducer(p *Producer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return fmt.Errorf("%w: %w", ErrDisconnected, c.err)
	}
	c.producers[p.id] = p
	return nil
}

func (c *conn) removeProducer(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.producers, id)
}
