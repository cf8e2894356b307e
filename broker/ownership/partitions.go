package ownership

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/protocol"
)

// MaxPartitions bounds the partitions of one topic: each is a topic of its own,
// created and asked for one by one.
const MaxPartitions = 10_000

// partitioned is the record of a partitioned topic.
type partitioned struct {
	Partitions int `json:"partitions"`
}

// Partitions returns the number of a topic's partitions, 0 if it is not a
// partitioned topic or does not exist. For a partition's own name that is 0.
func (n *Namespaces) Partitions(ctx context.Context, topic protocol.TopicName) (int, error) {
	p, _, err := n.partitioned(ctx, topic)
	if errors.Is(err, ErrNotPartitioned) {
		return 0, nil
	}
	return p.Partitions, err
}

// CreatePartitioned records that topic has the given number of partitions, 1 to
// MaxPartitions. It makes no partition: they are topics, which the caller creates.
// Errors wrap ErrNoSuchNamespace, ErrExists or ErrInvalid, or are metadata's.
func (n *Namespaces) CreatePartitioned(ctx context.Context, topic protocol.TopicName, partitions int) error {
	if err := checkPartitions(topic, partitions); err != nil {
		return err
	}
	if _, _, err := readNamespace(ctx, n.store, topic.NamespaceName()); err != nil {
		return err
	}
	_, err := n.store.Put(ctx, partitionedKey(topic), encode(partitioned{partitions}), 0, 0)
	if errors.Is(err, metadata.ErrBadVersion) {
		return fmt.Errorf("partitioned topic %s %w", topic, ErrExists)
	}
	return err
}

// UpdatePartitions raises the number of partitions. The same number changes
// nothing; a smaller one is ErrInvalid, because messages would be lost from sight.
func (n *Namespaces) UpdatePartitions(ctx context.Context, topic protocol.TopicName, partitions int) error {
	if err := checkPartitions(topic, partitions); err != nil {
		return err
	}
	for {
		p, version, err := n.partitioned(ctx, topic)
		if err != nil {
			return err
		}
		if partitions < p.Partitions {
			return fmt.Errorf("%d partitions for %s is %w: it has %d, and partitions are never taken away", partitions, topic, ErrInvalid, p.Partitions)
		}
		if partitions == p.Partitions {
			return nil
		}
		p.Partitions = partitions
		_, err = n.store.Put(ctx, partitionedKey(topic), encode(p), version, 0)
		if !errors.Is(err, metadata.ErrBadVersion) {
			return err
		}
	}
}

// DeletePartitioned forgets that topic is partitioned, or returns
// ErrNotPartitioned. Its partitions are topics, which the caller deletes first.
func (n *Namespaces) DeletePartitioned(ctx context.Context, topic protocol.TopicName) error {
	err := n.store.Delete(ctx, partitionedKey(topic), metadata.AnyVersion)
	return notFoundAs(err, ErrNotPartitioned, topic.String())
}

// ListPartitioned lists the partitioned topics of a namespace by full name, in
// order, or returns ErrNoSuchNamespace.
func (n *Namespaces) ListPartitioned(ctx context.Context, ns string) ([]string, error) {
	if _, _, err := readNamespace(ctx, n.store, ns); err != nil {
		return nil, err
	}
	keys, err := n.list(ctx, partitionedDir(ns))
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(keys))
	for _, key := range keys {
		scheme, escaped, _ := strings.Cut(key, "/")
		local, err := url.PathUnescape(escaped)
		if err != nil {
			return nil, fmt.Errorf("partitioned topic %s%s: %w", partitionedDir(ns), key, err)
		}
		names = append(names, scheme+"://"+ns+"/"+local)
	}
	return names, nil
}

func (n *Namespaces) partitioned(ctx context.Context, topic protocol.TopicName) (partitioned, metadata.Version, error) {
	var p partitioned
	version, err := read(ctx, n.store, partitionedKey(topic), &p)
	return p, version, notFoundAs(err, ErrNotPartitioned, topic.String())
}

func checkPartitions(topic protocol.TopicName, partitions int) error {
	if partitions < 1 || partitions > MaxPartitions {
		return fmt.Errorf("%d partitions for %s is %w: want 1 to %d", partitions, topic, ErrInvalid, MaxPartitions)
	}
	if topic.Partition >= 0 {
		return fmt.Errorf("partitioned topic name %s is %w: it ends like a partition's", topic, ErrInvalid)
	}
	return nil
}
