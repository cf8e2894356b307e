package broker

import (
	"math"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/protocol"
)

// flow serves FLOW: the client has room for so many more messages. For a
// consumer that is not there it is ignored; the broker may just have closed it.
func (c *conn) flow(f protocol.Frame) error {
	cmd := f.Command.GetFlow()
	consumer, sub := c.consumer(cmd.GetConsumerId())
	if consumer == nil {
		return nil
	}
	_ = sub.flow(c.ctx, consumer, int(min(cmd.GetMessagePermits(), math.MaxInt32))) // it fails only when nobody needs it
	return nil
}

// deliver sends one entry of a consumer as a MESSAGE.
func (c *conn) deliver(consumer *consumer, e ledger.Entry, redeliveries int) {
	c.out.deliver(delivery{
		consumer: consumer.id, ledger: uint64(e.Position.Ledger), entry: uint64(e.Position.Entry),
		partition: consumer.partition, redeliveries: uint32(redeliveries), epoch: consumer.epoch,
	}, e.Data)
}
