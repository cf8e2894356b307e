package broker

import (
	"fmt"
	"time"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// consumerStats serves CONSUMER_STATS: what topic statistics say of one consumer.
// Failures go inside the response.
func (c *conn) consumerStats(f protocol.Frame) error {
	cmd := f.Command.GetConsumerStats()
	r := &pulsarpb.CommandConsumerStatsResponse{RequestId: cmd.RequestId}
	consumer, sub := c.consumer(cmd.GetConsumerId())
	if consumer == nil {
		err := fmt.Errorf("consumer %d is not open on this connection: %w", cmd.GetConsumerId(), ErrConsumerNotFound)
		code, text := serverError(err), err.Error()
		r.ErrorCode, r.ErrorMessage = &code, &text
	} else {
		messages, bytes := consumer.out.rate()
		again, _ := consumer.redeliver.rate()
		acks, _ := consumer.acks.rate()
		permits, unacked := uint64(max(0, consumer.available.Load())), uint64(consumer.unacked.Load())
		blocked, kind := consumer.blocked.Load(), typeName(subType(sub.kindSeen.Load()))
		since, backlog, expired := consumer.since.Format(time.RFC3339Nano), uint64(sub.reader.Backlog()), 0.0
		r.MsgRateOut, r.MsgThroughputOut, r.MsgRateRedeliver, r.MessageAckRate = &messages, &bytes, &again, &acks
		r.ConsumerName, r.Address, r.ConnectedSince, r.Type = &consumer.name, &consumer.address, &since, &kind
		r.AvailablePermits, r.UnackedMessages, r.BlockedConsumerOnUnackedMsgs = &permits, &unacked, &blocked
		r.MsgRateExpired, r.MsgBacklog = &expired, &backlog
	}
	c.out.reply(&pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_CONSUMER_STATS_RESPONSE.Enum(), ConsumerStatsResponse: r})
	return nil
}
