package broker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// consumerSlot is a consumer id's place on its connection.
type consumerSlot struct {
	consumer *consumer // nil while it is subscribing
	sub      *subscription
}

// subscribe serves SUBSCRIBE on Exclusive, Shared and Failover subscriptions,
// durable or not. The same id again on the same connection answers the same
// again. A subscription may change its type while it has no consumers.
//
// A durable subscription that exists goes on where it is; a new one begins at
// initialPosition. A non-durable one begins at start_message_id, that entry
// included, unless it is still there from before a seek.
//
// Ignored: the schema, read_compacted (there is no compaction, so everything is
// delivered), replicate_subscription_state, subscription properties.
func (c *conn) subscribe(f protocol.Frame) error {
	cmd := f.Command.GetSubscribe()
	id, request := cmd.GetConsumerId(), cmd.GetRequestId()

	c.mu.Lock()
	old := c.consumers[id]
	var slot *consumerSlot
	if old == nil && len(c.consumers) < maxConsumersPerConnection {
		slot = &consumerSlot{}
		c.consumers[id] = slot
	}
	var there bool
	if old != nil {
		there = old.consumer != nil
	}
	c.mu.Unlock()

	switch {
	case slot != nil:
		return c.async(func(ctx context.Context) {
			if err := c.join(ctx, cmd, slot); err != nil {
				c.mu.Lock()
				if c.consumers[id] == slot {
					delete(c.consumers, id)
				}
				c.mu.Unlock()
				c.refuse(request, err)
			}
		})
	case old == nil:
		c.refuse(request, fmt.Errorf("consumers on one connection: at most %d are allowed: %w", maxConsumersPerConnection, ErrTooMany))
	case !there:
		c.refuse(request, fmt.Errorf("consumer %d is subscribing already: %w", id, ErrBusy))
	default:
		c.succeed(request)
	}
	return nil
}

// join makes a consumer and lets it join its subscription, which answers.
func (c *conn) join(ctx context.Context, cmd *pulsarpb.CommandSubscribe, slot *consumerSlot) error {
	r, err := c.b.requestOf(cmd)
	if err != nil {
		return err
	}
	name, err := parseTopic(cmd.GetTopic())
	if err != nil {
		return err
	}
	create := createAllowed
	if cmd.ForceTopicCreation != nil && !*cmd.ForceTopicCreation {
		create = createListed
	}
	t, err := c.b.topic(ctx, name, create)
	if err != nil {
		return err
	}
	epoch := int64(-1)
	if cmd.ConsumerEpoch != nil {
		epoch = int64(cmd.GetConsumerEpoch())
	}
	consumer := &consumer{
		id: cmd.GetConsumerId(), name: cmd.GetConsumerName(), priority: cmd.GetPriorityLevel(), sink: c, holder: c,
		metadata: keyValues(cmd.GetMetadata()), address: c.address, client: c.client, since: time.Now(), epoch: epoch,
		partition: int32(name.Partition),
	}
	abandoned := false
	s, err := t.subscribe(ctx, r, consumer, func(s *subscription) {
		c.mu.Lock()
		if abandoned = c.consumers[consumer.id] != slot; !abandoned {
			slot.consumer, slot.sub = consumer, s
		}
		c.mu.Unlock()
		if !abandoned {
			c.succeed(cmd.GetRequestId())
		}
	})
	if err == nil && abandoned { // the client closed it while it was joining
		s.remove(consumer, nil)
	}
	return err
}

// requestOf reads what a SUBSCRIBE asks for.
func (b *Broker) requestOf(cmd *pulsarpb.CommandSubscribe) (request, error) {
	r := request{
		name: cmd.GetSubscription(), kind: cmd.GetSubType(),
		durable:  cmd.Durable == nil || *cmd.Durable,
		earliest: cmd.GetInitialPosition() == pulsarpb.CommandSubscribe_Earliest,
		create:   b.cfg.AllowAutoSubscriptionCreation,
	}
	switch r.kind {
	case pulsarpb.CommandSubscribe_Exclusive, pulsarpb.CommandSubscribe_Shared, pulsarpb.CommandSubscribe_Failover:
	case pulsarpb.CommandSubscribe_Key_Shared:
		return r, fmt.Errorf("subscription type Key_Shared: this broker knows Exclusive, Shared and Failover: %w", ErrUnsupported)
	default:
		return r, fmt.Errorf("subscription type %d: this broker knows Exclusive, Shared and Failover: %w", r.kind, ErrUnsupported)
	}
	if r.name == "" {
		return r, fmt.Errorf("subscription name is empty: %w", ErrInvalidName)
	}
	if err := errors.Join(checkName("subscription", r.name), checkName("consumer", cmd.GetConsumerName())); err != nil {
		return r, err
	}
	if start := cmd.GetStartMessageId(); start != nil {
		p := positionOf(start)
		r.start = &p
	}
	r.rollback = time.Duration(min(cmd.GetStartMessageRollbackDurationSec(), maxRollbackSeconds)) * time.Second
	return r, nil
}

// maxRollbackSeconds is about 30 years, and keeps the arithmetic from overflowing.
const maxRollbackSeconds = 1e9

// positionOf reads a message id. Clients write -1 as the largest unsigned number.
func positionOf(id *pulsarpb.MessageIdData) ledger.Position {
	return ledger.Position{Ledger: ledger.ID(id.GetLedgerId()), Entry: ledger.EntryID(id.GetEntryId())}
}
