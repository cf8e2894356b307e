package broker

import (
	"context"
	"fmt"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// lastMessageID serves GET_LAST_MESSAGE_ID: the newest message of the consumer's
// topic, entry -1 if there is none, and how far the subscription has acknowledged,
// which clients in use trust to be there.
func (c *conn) lastMessageID(f protocol.Frame) error {
	cmd := f.Command.GetGetLastMessageId()
	request := cmd.GetRequestId()
	consumer, sub := c.consumer(cmd.GetConsumerId())
	if consumer == nil {
		c.refuse(request, fmt.Errorf("last message id: consumer %d is not open on this connection: %w", cmd.GetConsumerId(), ErrConsumerNotFound))
		return nil
	}
	return c.async(func(ctx context.Context) {
		t, err := c.b.topics.loaded(ctx, sub.topic)
		if err == nil && t == nil {
			err = fmt.Errorf("last message id of %s: %w", sub.topic, ErrClosed)
		}
		if err != nil {
			c.refuse(request, err)
			return
		}
		last, index, err := t.last(ctx)
		if err != nil {
			c.refuse(request, err)
			return
		}
		id := messageID(last, consumer.partition)
		batch := int32(index)
		id.BatchIndex = &batch
		c.out.reply(&pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_GET_LAST_MESSAGE_ID_RESPONSE.Enum(),
			GetLastMessageIdResponse: &pulsarpb.CommandGetLastMessageIdResponse{
				RequestId: &request, LastMessageId: id,
				ConsumerMarkDeletePosition: messageID(sub.reader.MarkDeleted(), consumer.partition),
			},
		})
	})
}

func messageID(p ledger.Position, partition int32) *pulsarpb.MessageIdData {
	l, e := uint64(p.Ledger), uint64(p.Entry)
	return &pulsarpb.MessageIdData{LedgerId: &l, EntryId: &e, Partition: &partition}
}
