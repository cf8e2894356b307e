package broker

import (
	"errors"
	"fmt"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// ack serves ACK, individual (one or a list) and cumulative. With a request id it
// is answered by ACK_RESPONSE, whose message is empty on success.
//
// Of a batch that is acknowledged in part (ack_set is there) nothing is kept, as
// with acknowledgmentAtBatchIndexLevelEnabled=false: an individual one is passed
// over until all of the batch is acknowledged, a cumulative one counts up to the
// entry before. A client that found a message broken (validation_error) does
// acknowledge it.
func (c *conn) ack(f protocol.Frame) error {
	cmd := f.Command.GetAck()
	done := func(err error) { c.acked(cmd, err) }
	consumer, sub := c.consumer(cmd.GetConsumerId())
	switch {
	case consumer == nil:
		done(fmt.Errorf("acknowledge: consumer %d is not open on this connection: %w", cmd.GetConsumerId(), ErrConsumerNotFound))
	case cmd.GetTxnidMostBits() != 0 || cmd.GetTxnidLeastBits() != 0:
		done(fmt.Errorf("acknowledge in a transaction: %w", ErrUnsupported))
	case cmd.GetAckType() == pulsarpb.CommandAck_Cumulative:
		if len(cmd.GetMessageId()) != 1 {
			done(fmt.Errorf("cumulative acknowledgement of %d messages, want 1: %w", len(cmd.GetMessageId()), ErrNotAllowed))
			return nil
		}
		id := cmd.GetMessageId()[0]
		p := positionOf(id)
		if len(id.GetAckSet()) > 0 {
			p.Entry--
		}
		sub.ackCumulative(c.ctx, consumer, p, done)
	default:
		positions := make([]ledger.Position, 0, len(cmd.GetMessageId()))
		for _, id := range cmd.GetMessageId() {
			if len(id.GetAckSet()) == 0 {
				positions = append(positions, positionOf(id))
			}
		}
		if len(positions) == 0 {
			done(nil)
			return nil
		}
		sub.ack(c.ctx, consumer, positions, done)
	}
	return nil
}

// acked answers an ACK, if the client wants an answer.
func (c *conn) acked(cmd *pulsarpb.CommandAck, err error) {
	if err != nil && !errors.Is(err, ErrConsumerNotFound) {
		c.log.Debug("acknowledgement failed", "consumer", cmd.GetConsumerId(), "err", err)
	}
	if cmd.RequestId == nil {
		return
	}
	r := &pulsarpb.CommandAckResponse{ConsumerId: cmd.ConsumerId, RequestId: cmd.RequestId}
	if err != nil {
		code, text := serverError(err), err.Error()
		r.Error, r.Message = &code, &text
	}
	c.out.reply(&pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_ACK_RESPONSE.Enum(), AckResponse: r})
}
