package broker

import (
	"context"
	"errors"
	"fmt"

	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// partitionedMetadata serves PARTITIONED_METADATA: how many partitions a topic
// has; 0 if it has none, or does not exist. Where topics are to be created as
// partitioned ones, this is what creates them, unless the client asks for none.
//
// Failures go inside the response: clients repeat the question on an ERROR.
func (c *conn) partitionedMetadata(f protocol.Frame) error {
	cmd := f.Command.GetPartitionMetadata()
	return c.async(func(ctx context.Context) {
		create := cmd.MetadataAutoCreationEnabled == nil || *cmd.MetadataAutoCreationEnabled
		n, err := c.b.partitions(ctx, cmd.GetTopic(), create)
		r := &pulsarpb.CommandPartitionedTopicMetadataResponse{RequestId: cmd.RequestId}
		if err != nil {
			code, text := lookupError(err), err.Error()
			r.Response = pulsarpb.CommandPartitionedTopicMetadataResponse_Failed.Enum()
			r.Error, r.Message = &code, &text
		} else {
			partitions := uint32(n)
			r.Response = pulsarpb.CommandPartitionedTopicMetadataResponse_Success.Enum()
			r.Partitions = &partitions
		}
		c.out.reply(&pulsarpb.BaseCommand{
			Type:                      pulsarpb.BaseCommand_PARTITIONED_METADATA_RESPONSE.Enum(),
			PartitionMetadataResponse: r,
		})
	})
}

// partitions returns how many partitions a topic has, creating it if it is
// missing, asked for, and to be partitioned.
func (b *Broker) partitions(ctx context.Context, name string, create bool) (int, error) {
	topic, err := parseTopic(name)
	if err != nil {
		return 0, err
	}
	var n int
	err = patiently(ctx, func() (err error) {
		n, err = b.askPartitions(ctx, topic, create)
		return err
	})
	return n, err
}

func (b *Broker) askPartitions(ctx context.Context, topic protocol.TopicName, create bool) (int, error) {
	if err := b.needNamespace(ctx, topic); err != nil {
		return 0, err
	}
	n, err := b.namespaces.Partitions(ctx, topic)
	if err != nil || n > 0 || !create || !b.cfg.AllowAutoTopicCreation || b.cfg.AllowAutoTopicCreationType != "partitioned" || topic.Partition >= 0 {
		return n, err
	}
	if exists, err := b.factory.Exists(ctx, topic.ManagedLedgerName()); err != nil || exists {
		return 0, err
	}
	err = b.namespaces.CreatePartitioned(ctx, topic, b.cfg.DefaultNumPartitions)
	if err != nil && !errors.Is(err, ownership.ErrExists) {
		return 0, err
	}
	return b.namespaces.Partitions(ctx, topic)
}

// needNamespace fails unless the topic's namespace exists.
func (b *Broker) needNamespace(ctx context.Context, topic protocol.TopicName) error {
	exists, err := b.namespaces.NamespaceExists(ctx, topic.NamespaceName())
	if err != nil {
		return err
	}
	if !exists {
		return fmt.Errorf("topic %s: namespace %s: %w", topic, topic.NamespaceName(), ownership.ErrNoSuchNamespace)
	}
	return nil
}
