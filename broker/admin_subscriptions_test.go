package broker

import (
	"errors"
	"testing"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

func TestDeleteSubscription(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	c.publish(1, 0, 2)
	c.subscribe(topicA, "s", exclusive, 1)
	name, _ := protocol.ParseTopic(topicA)
	unknown, _ := protocol.ParseTopic(topicA + "-unknown")

	if err := n.DeleteSubscription(t.Context(), unknown, "s", true); !errors.Is(err, ErrTopicNotFound) {
		t.Errorf("unknown topic: %v, want ErrTopicNotFound", err)
	}
	if err := n.DeleteSubscription(t.Context(), name, "other", true); !errors.Is(err, ErrSubscriptionNotFound) {
		t.Errorf("unknown subscription: %v, want ErrSubscriptionNotFound", err)
	}
	if err := n.DeleteSubscription(t.Context(), name, "s", false); !errors.Is(err, ErrConsumerBusy) {
		t.Errorf("with a consumer: %v, want ErrConsumerBusy", err)
	}
	if err := n.DeleteSubscription(t.Context(), name, "s", true); err != nil {
		t.Fatal(err)
	}
	c.expect(pulsarpb.BaseCommand_CLOSE_CONSUMER)
	if s := n.stats(topicA); len(s.Subscriptions) != 0 {
		t.Errorf("still there: %v", s.Subscriptions)
	}
}

func TestClearBacklog(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	c.publish(1, 0, 5)
	c.subscribe(topicA, "s", sharedSub, 1)
	c.flow(1, 2)
	c.receive(1, "0", "1") // and does not acknowledge them
	name, _ := protocol.ParseTopic(topicA)

	if err := n.ClearBacklog(t.Context(), name, "other"); !errors.Is(err, ErrSubscriptionNotFound) {
		t.Errorf("unknown subscription: %v, want ErrSubscriptionNotFound", err)
	}
	if err := n.ClearBacklog(t.Context(), name, "s"); err != nil {
		t.Fatal(err)
	}
	if got := n.stats(topicA).Subscriptions["s"].MsgBacklog; got != 0 {
		t.Errorf("backlog is %d, want 0", got)
	}
	c.publish(1, 5, 6)
	c.flow(1, 10)
	c.receive(1, "5") // nothing of what was cleared
}
