package broker

import (
	"context"
	"fmt"

	"github.com/magnetar-io/magnetar/protocol"
)

// DeleteSubscription deletes a subscription with its position. While consumers
// are connected it refuses with ErrConsumerBusy, unless forced: then it
// disconnects them. It returns ErrTopicNotFound or ErrSubscriptionNotFound, and
// *ownership.NotOwnerError if another broker serves the topic.
func (b *Broker) DeleteSubscription(ctx context.Context, name protocol.TopicName, subscription string, force bool) error {
	t, s, err := b.subscriptionOf(ctx, name, subscription)
	if err != nil {
		return err
	}
	return t.unsubscribe(ctx, s, nil, force)
}

// ClearBacklog acknowledges every message that the subscription has not, up to
// the newest one at this moment. It returns the errors of DeleteSubscription.
func (b *Broker) ClearBacklog(ctx context.Context, name protocol.TopicName, subscription string) error {
	_, s, err := b.subscriptionOf(ctx, name, subscription)
	if err != nil {
		return err
	}
	result := make(chan error, 1)
	s.clearBacklog(ctx, func(err error) { result <- err })
	if err := <-result; err != nil {
		return fmt.Errorf("clear the backlog of %q of %s: %w", subscription, name, err)
	}
	return nil
}

// subscriptionOf returns a subscription that exists, opening its topic if need be.
func (b *Broker) subscriptionOf(ctx context.Context, name protocol.TopicName, sub string) (*topic, *subscription, error) {
	t, err := b.topic(ctx, name, createNever)
	if err != nil {
		return nil, nil, err
	}
	t.mu.Lock()
	place := t.subscriptions[sub]
	t.mu.Unlock()
	if place != nil {
		select {
		case <-place.ready:
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("subscription %q of %s: %w", sub, t.full, ctx.Err())
		}
	}
	if place == nil || place.sub == nil {
		return nil, nil, fmt.Errorf("subscription %q of %s: %w", sub, t.full, ErrSubscriptionNotFound)
	}
	return t, place.sub, nil
}
