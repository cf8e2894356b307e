package broker

import (
	"context"
	"fmt"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/protocol"
)

// seek serves SEEK: the subscription moves to a message, which is delivered next,
// or to the first one published at or after a time. Then all its consumers are
// disconnected, this one too, and SUCCESS follows; they subscribe again. A SEEK
// that comes before they did is refused.
func (c *conn) seek(f protocol.Frame) error {
	cmd := f.Command.GetSeek()
	request := cmd.GetRequestId()
	consumer, sub := c.consumer(cmd.GetConsumerId())
	switch {
	case consumer == nil:
		c.refuse(request, fmt.Errorf("seek: consumer %d is not open on this connection: %w", cmd.GetConsumerId(), ErrConsumerNotFound))
		return nil
	case cmd.MessageId == nil && cmd.MessagePublishTime == nil:
		c.refuse(request, fmt.Errorf("seek: neither a message nor a time is given: %w", ErrNotAllowed))
		return nil
	}
	var to *ledger.Position
	if id := cmd.GetMessageId(); id != nil {
		p := positionOf(id)
		to = &p
	}
	return c.async(func(ctx context.Context) {
		t, err := c.b.topics.loaded(ctx, sub.topic)
		if err == nil && t == nil {
			err = fmt.Errorf("seek on %q of %s: %w", sub.name, sub.topic, ErrClosed)
		}
		if err != nil {
			c.refuse(request, err)
			return
		}
		finished := make(chan struct{})
		sub.seek(ctx, consumer, t.seekTo(sub, to, cmd.GetMessagePublishTime()), func(err error) {
			if err != nil {
				c.refuse(request, err)
			} else {
				c.succeed(request)
			}
			close(finished)
		})
		<-finished // ctx lives as long as the seek does
	})
}
