package broker

import (
	"context"
	"errors"
	"slices"

	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// topicsOfNamespace serves GET_TOPICS_OF_NAMESPACE: the names of a namespace's
// topics, partitions one by one. A namespace that does not exist has none.
//
// Ignored: topics_pattern (the client filters; the response says so) and
// topics_hash.
func (c *conn) topicsOfNamespace(f protocol.Frame) error {
	cmd := f.Command.GetGetTopicsOfNamespace()
	return c.async(func(ctx context.Context) {
		var topics []string
		if cmd.GetMode() != pulsarpb.CommandGetTopicsOfNamespace_NON_PERSISTENT {
			var err error
			topics, err = c.b.Topics(ctx, cmd.GetNamespace())
			if err != nil && !errors.Is(err, ownership.ErrNoSuchNamespace) {
				c.refuse(cmd.GetRequestId(), err)
				return
			}
		}
		c.out.reply(&pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_GET_TOPICS_OF_NAMESPACE_RESPONSE.Enum(),
			GetTopicsOfNamespaceResponse: &pulsarpb.CommandGetTopicsOfNamespaceResponse{
				RequestId: cmd.RequestId, Topics: topics,
			},
		})
	})
}

// Topics returns the full names of a namespace's topics in order: those that
// were used or created, and every partition of its partitioned topics. It returns
// ownership.ErrNoSuchNamespace if there is no such namespace.
func (b *Broker) Topics(ctx context.Context, ns string) ([]string, error) {
	if _, _, err := protocol.ParseNamespace(ns); err != nil {
		return nil, err
	}
	kept, err := b.factory.List(ctx, ns+"/persistent/")
	if err != nil {
		return nil, err
	}
	var topics []string
	for _, name := range kept {
		topic, err := protocol.ParseManagedLedgerName(name)
		if err != nil {
			return nil, err
		}
		topics = append(topics, topic.String())
	}
	partitioned, err := b.namespaces.ListPartitioned(ctx, ns)
	if err != nil {
		return nil, err
	}
	for _, name := range partitioned {
		topic, err := protocol.ParseTopic(name)
		if err != nil {
			return nil, err
		}
		n, err := b.namespaces.Partitions(ctx, topic)
		if err != nil {
			return nil, err
		}
		for i := range n {
			topics = append(topics, topic.WithPartition(i).String())
		}
	}
	slices.Sort(topics)
	return slices.Compact(topics), nil
}
