package broker

import (
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/protocol"
)

// redeliver serves REDELIVER_UNACKNOWLEDGED_MESSAGES. On Shared it gives back the
// messages named, or all if none is; on Exclusive and Failover the active
// consumer goes back to its first unacknowledged message, whatever it names. For a
// consumer that is not there it is ignored: its messages go round already.
func (c *conn) redeliver(f protocol.Frame) error {
	cmd := f.Command.GetRedeliverUnacknowledgedMessages()
	consumer, sub := c.consumer(cmd.GetConsumerId())
	if consumer == nil {
		return nil
	}
	positions := make([]ledger.Position, 0, len(cmd.GetMessageIds()))
	for _, id := range cmd.GetMessageIds() {
		positions = append(positions, positionOf(id))
	}
	epoch := int64(-1)
	if cmd.ConsumerEpoch != nil {
		epoch = int64(cmd.GetConsumerEpoch())
	}
	_ = sub.giveBack(c.ctx, consumer, positions, len(positions) == 0, epoch) // it fails only when nobody needs it
	return nil
}
