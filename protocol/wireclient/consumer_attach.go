package wireclient

import (
	"context"
	"errors"
	"fmt"

	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// run keeps the consumer attached to the broker that owns its topic.
func (k *Consumer) run() {
	for {
		if c := k.attachedTo(); c != nil {
			select {
			case <-c.done:
				k.detach(c)
			case <-k.lost: // perhaps of an earlier connection: look again
				continue
			case <-k.ctx.Done():
				return
			}
		}
		if !k.reattach() {
			return
		}
	}
}

func (k *Consumer) attachedTo() *conn {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.conn
}

// reattach tries until the consumer is attached. It reports false once the
// consumer has ended.
func (k *Consumer) reattach() bool {
	b := k.client.backoff()
	for {
		ctx, cancel := context.WithTimeout(k.ctx, k.client.options.OperationTimeout)
		err := k.attach(ctx)
		cancel()
		switch {
		case err == nil:
			return true
		case k.ctx.Err() != nil:
			return false
		case lasting(err):
			k.log.Error("consumer ended by the broker", "err", err)
			k.end(err)
			return false
		}
		k.log.Warn("consumer is not connected; will retry", "err", err)
		if !b.wait(k.ctx) {
			return false
		}
	}
}

// attach finds the owner of the topic, subscribes there and allows a queue full
// of messages. It does not retry.
func (k *Consumer) attach(ctx context.Context) error {
	c, err := k.client.broker(ctx, k.topic, k.id)
	if err != nil {
		return err
	}
	if err := c.addConsumer(k); err != nil {
		return err
	}
	if _, err = c.request(ctx, k.subscribe); err != nil {
		c.removeConsumer(k.id)
		if !errors.As(err, new(*ServerError)) {
			k.closeLate(c)
		}
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err != nil {
		return k.err
	}
	k.conn = c
	if c.consumer(k.id) != k { // closed by the broker before we got here
		k.conn = nil
		return fmt.Errorf("broker %s: %w: it closed the consumer again", c.address, ErrDisconnected)
	}
	k.queue, k.taken, k.ended = nil, 0, false // what was not acknowledged comes again
	_ = c.sendCommand(k.flow(uint32(k.options.QueueSize)))
	return nil
}

// closeLate undoes a SUBSCRIBE whose answer was not awaited.
func (k *Consumer) closeLate(c *conn) {
	id := k.client.requestID.Add(1)
	_ = c.sendCommand(&pulsarpb.BaseCommand{
		Type:          pulsarpb.BaseCommand_CLOSE_CONSUMER.Enum(),
		CloseConsumer: &pulsarpb.CommandCloseConsumer{ConsumerId: &k.id, RequestId: &id},
	}) // fails only once the connection is over, which closes the consumer too
}

func (k *Consumer) subscribe(request uint64) *pulsarpb.BaseCommand {
	k.mu.Lock()
	if k.seekTo != nil {
		k.options.Start, k.start, k.seekTo = k.seekTo, k.seekTo, nil
	}
	start := k.start
	k.mu.Unlock()
	o := &k.options
	command := &pulsarpb.CommandSubscribe{
		RequestId: &request, ConsumerId: &k.id, Topic: new(k.topic.String()), Subscription: &o.Subscription,
		SubType: o.Type.Enum(), PriorityLevel: &o.Priority, Durable: new(start == nil),
	}
	if o.Name != "" {
		command.ConsumerName = &o.Name
	}
	if o.FromEarliest {
		command.InitialPosition = pulsarpb.CommandSubscribe_Earliest.Enum()
	}
	if start != nil {
		command.StartMessageId = start.data()
	}
	return &pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_SUBSCRIBE.Enum(), Subscribe: command}
}

// detach leaves a connection that is over, or whose broker closed the consumer.
func (k *Consumer) detach(c *conn) {
	c.removeConsumer(k.id)
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn != c {
		return
	}
	k.conn = nil
	k.queue = nil // what was not acknowledged comes again
	select {
	case k.lost <- struct{}{}:
	default:
	}
}

func (k *Consumer) reachedEnd() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ended = true
	k.signal()
}

// command sends a command that has no answer.
func (k *Consumer) command(what string, command *pulsarpb.BaseCommand) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.err != nil:
		return fmt.Errorf("%s on %s: %w", what, k.topic, k.err)
	case k.conn == nil:
		return fmt.Errorf("%s on %s: %w", what, k.topic, ErrDisconnected)
	}
	if err := k.conn.sendCommand(command); err != nil {
		return fmt.Errorf("%s on %s: %w", what, k.topic, err)
	}
	return nil
}

// request sends a command and waits for its answer, at most OperationTimeout.
func (k *Consumer) request(ctx context.Context, what string, build func(id uint64) *pulsarpb.BaseCommand) (*pulsarpb.BaseCommand, error) {
	k.mu.Lock()
	c, err := k.conn, k.err
	k.mu.Unlock()
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s on %s: %w", what, k.topic, err)
	case c == nil:
		return nil, fmt.Errorf("%s on %s: %w", what, k.topic, ErrDisconnected)
	}
	ctx, cancel := context.WithTimeout(ctx, k.client.options.OperationTimeout)
	defer cancel()
	answer, err := c.request(ctx, build)
	if err != nil {
		return nil, fmt.Errorf("%s on %s: %w", what, k.topic, err)
	}
	return answer, nil
}

func (c *conn) addConsumer(k *Consumer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return fmt.Errorf("%w: %w", ErrDisconnected, c.err)
	}
	c.consumers[k.id] = k
	return nil
}

func (c *conn) removeConsumer(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.consumers, id)
}
