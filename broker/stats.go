package broker

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/magnetar-io/magnetar/protocol"
)

// TopicStats is what a topic is doing. The JSON names are Pulsar's; so are the
// units: rates are per second, throughputs and sizes in bytes, times in Unix
// milliseconds. A backlog counts entries, in which a batch is one.
type TopicStats struct {
	MsgRateIn             float64                       `json:"msgRateIn"`
	MsgThroughputIn       float64                       `json:"msgThroughputIn"`
	MsgRateOut            float64                       `json:"msgRateOut"`
	MsgThroughputOut      float64                       `json:"msgThroughputOut"`
	BytesInCounter        int64                         `json:"bytesInCounter"`
	MsgInCounter          int64                         `json:"msgInCounter"`
	BytesOutCounter       int64                         `json:"bytesOutCounter"`
	MsgOutCounter         int64                         `json:"msgOutCounter"`
	AverageMsgSize        float64                       `json:"averageMsgSize"`
	MsgChunkPublished     bool                          `json:"msgChunkPublished"`
	StorageSize           int64                         `json:"storageSize"`
	BacklogSize           int64                         `json:"backlogSize"`
	PublishRateLimited    int64                         `json:"publishRateLimitedTimes"`
	OffloadedStorageSize  int64                         `json:"offloadedStorageSize"`
	WaitingPublishers     int                           `json:"waitingPublishers"`
	OwnerBroker           string                        `json:"ownerBroker"`
	TopicCreationTime     int64                         `json:"topicCreationTimeStamp"`
	LastPublishTime       int64                         `json:"lastPublishTimeStamp"`
	Publishers            []PublisherStats              `json:"publishers"`
	Subscriptions         map[string]*SubscriptionStats `json:"subscriptions"`
	Replication           map[string]any                `json:"replication"`
	DeduplicationStatus   string                        `json:"deduplicationStatus"`
	NonContiguousRanges   int                           `json:"nonContiguousDeletedMessagesRanges"`
	NonContiguousRangesSz int                           `json:"nonContiguousDeletedMessagesRangesSerializedSize"`
}

// PublisherStats is what one producer is doing.
type PublisherStats struct {
	AccessMode      string            `json:"accessMode"`
	MsgRateIn       float64           `json:"msgRateIn"`
	MsgThroughputIn float64           `json:"msgThroughputIn"`
	AverageMsgSize  float64           `json:"averageMsgSize"`
	ChunkedRate     float64           `json:"chunkedMessageRate"`
	ProducerID      uint64            `json:"producerId"`
	ProducerName    string            `json:"producerName"`
	Address         string            `json:"address"`
	ConnectedSince  string            `json:"connectedSince"`
	ClientVersion   string            `json:"clientVersion"`
	Metadata        map[string]string `json:"metadata"`
}

// SubscriptionStats is what one subscription is doing.
type SubscriptionStats struct {
	MsgRateOut           float64         `json:"msgRateOut"`
	MsgThroughputOut     float64         `json:"msgThroughputOut"`
	BytesOutCounter      int64           `json:"bytesOutCounter"`
	MsgOutCounter        int64           `json:"msgOutCounter"`
	MsgRateRedeliver     float64         `json:"msgRateRedeliver"`
	MessageAckRate       float64         `json:"messageAckRate"`
	MsgBacklog           int64           `json:"msgBacklog"`
	BacklogSize          int64           `json:"backlogSize"`
	MsgBacklogNoDelayed  int64           `json:"msgBacklogNoDelayed"`
	MsgDelayed           int64           `json:"msgDelayed"`
	MsgInReplay          int64           `json:"msgInReplay"`
	UnackedMessages      int64           `json:"unackedMessages"`
	BlockedOnUnacked     bool            `json:"blockedSubscriptionOnUnackedMsgs"`
	Type                 string          `json:"type"`
	ActiveConsumerName   string          `json:"activeConsumerName,omitempty"`
	MsgRateExpired       float64         `json:"msgRateExpired"`
	TotalMsgExpired      int64           `json:"totalMsgExpired"`
	LastConsumedFlowTime int64           `json:"lastConsumedFlowTimestamp"`
	LastConsumedTime     int64           `json:"lastConsumedTimestamp"`
	LastAckedTime        int64           `json:"lastAckedTimestamp"`
	Consumers            []ConsumerStats `json:"consumers"`
	IsDurable            bool            `json:"isDurable"`
	IsReplicated         bool            `json:"isReplicated"`
	AllowOutOfOrder      bool            `json:"allowOutOfOrderDelivery"`
	WhyIdle              WhyIdle         `json:"whyIdle"` // ours
}

// ConsumerStats is what one consumer is doing.
type ConsumerStats struct {
	MsgRateOut           float64           `json:"msgRateOut"`
	MsgThroughputOut     float64           `json:"msgThroughputOut"`
	BytesOutCounter      int64             `json:"bytesOutCounter"`
	MsgOutCounter        int64             `json:"msgOutCounter"`
	MsgRateRedeliver     float64           `json:"msgRateRedeliver"`
	MessageAckRate       float64           `json:"messageAckRate"`
	ConsumerName         string            `json:"consumerName"`
	AvailablePermits     int64             `json:"availablePermits"`
	UnackedMessages      int64             `json:"unackedMessages"`
	AvgMessagesPerEntry  int               `json:"avgMessagesPerEntry"`
	BlockedOnUnacked     bool              `json:"blockedConsumerOnUnackedMsgs"`
	PriorityLevel        int32             `json:"priorityLevel"`
	Address              string            `json:"address"`
	ConnectedSince       string            `json:"connectedSince"`
	ClientVersion        string            `json:"clientVersion"`
	LastAckedTime        int64             `json:"lastAckedTimestamp"`
	LastConsumedTime     int64             `json:"lastConsumedTimestamp"`
	LastConsumedFlowTime int64             `json:"lastConsumedFlowTimestamp"`
	Metadata             map[string]string `json:"metadata"`
}

// Stats returns what a topic is doing, opening it if it exists and is not open.
// It returns ErrTopicNotFound if there is no such topic, and
// *ownership.NotOwnerError if another broker serves it.
func (b *Broker) Stats(ctx context.Context, name protocol.TopicName) (*TopicStats, error) {
	t, err := b.topic(ctx, name, createNever)
	if err != nil {
		return nil, err
	}
	return t.stats(ctx)
}

func (t *topic) stats(ctx context.Context) (*TopicStats, error) {
	ml := t.ml.Stats()
	s := &TopicStats{
		BytesInCounter: t.in.bytes.Load(), MsgInCounter: t.in.messages.Load(),
		BytesOutCounter: t.removedOut.bytes.Load(), MsgOutCounter: t.removedOut.messages.Load(),
		StorageSize: ml.Bytes, OwnerBroker: t.b.ownership.Self().ID,
		TopicCreationTime: t.since.UnixMilli(), LastPublishTime: t.lastIn.Load(),
		Publishers: []PublisherStats{}, Subscriptions: map[string]*SubscriptionStats{}, Replication: map[string]any{},
		DeduplicationStatus: "Disabled",
	}
	s.MsgRateIn, s.MsgThroughputIn = t.in.rate()
	s.AverageMsgSize = ratio(s.BytesInCounter, s.MsgInCounter)

	t.mu.Lock()
	for _, p := range t.producers {
		s.Publishers = append(s.Publishers, p.stats())
	}
	t.mu.Unlock()
	slices.SortFunc(s.Publishers, func(a, b PublisherStats) int { return strings.Compare(a.ProducerName, b.ProducerName) })

	entrySize := ratio(ml.Bytes, ml.Entries)
	for _, sub := range t.subs() {
		one, err := sub.stats(ctx)
		if err != nil {
			return nil, err
		}
		one.BacklogSize = int64(float64(one.MsgBacklog) * entrySize)
		s.Subscriptions[sub.name] = one
		s.MsgRateOut += one.MsgRateOut
		s.MsgThroughputOut += one.MsgThroughputOut
		s.BytesOutCounter += one.BytesOutCounter
		s.MsgOutCounter += one.MsgOutCounter
		s.BacklogSize = max(s.BacklogSize, one.BacklogSize)
	}
	return s, nil
}

func (p *producer) stats() PublisherStats {
	s := PublisherStats{
		AccessMode: "Shared", ProducerID: p.id, ProducerName: p.name, Address: "/" + p.conn.address,
		ConnectedSince: p.since.Format(time.RFC3339Nano), ClientVersion: strings.ReplaceAll(p.conn.client, " ", "-"), Metadata: p.metadata,
		AverageMsgSize: ratio(p.in.bytes.Load(), p.in.messages.Load()),
	}
	s.MsgRateIn, s.MsgThroughputIn = p.in.rate()
	return s
}

// stats asks the loop for a consistent picture.
func (s *subscription) stats(ctx context.Context) (*SubscriptionStats, error) {
	result := make(chan *SubscriptionStats, 1)
	if !s.box.post(func() { result <- s.statsNow() }) {
		<-s.done
		return s.statsNow(), nil // nobody owns it any more
	}
	select {
	case r := <-result:
		return r, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("statistics of subscription %q of %s: %w", s.name, s.topic, ctx.Err())
	}
}

func (s *subscription) statsNow() *SubscriptionStats {
	r := &SubscriptionStats{
		BytesOutCounter: s.out.bytes.Load(), MsgOutCounter: s.out.messages.Load(),
		MsgBacklog: s.reader.Backlog(), UnackedMessages: s.unacked.Load(), BlockedOnUnacked: s.blocked.Load(),
		IsDurable: s.reader.Durable(), Consumers: []ConsumerStats{}, WhyIdle: *s.why.Load(),
	}
	r.MsgBacklogNoDelayed = r.MsgBacklog
	r.MsgRateOut, r.MsgThroughputOut = s.out.rate()
	r.MsgRateRedeliver, _ = s.redeliver.rate()
	r.MessageAckRate, _ = s.acks.rate()
	switch d := s.dispatcher.(type) {
	case *single:
		if d.active != nil {
			r.ActiveConsumerName = d.active.name
		}
	case *shared:
		r.MsgInReplay = int64(d.replay.len())
	}
	if s.dispatcher != nil {
		r.Type = typeName(s.kind)
	}
	for _, c := range s.consumers {
		one := c.stats()
		r.LastConsumedFlowTime = max(r.LastConsumedFlowTime, one.LastConsumedFlowTime)
		r.LastConsumedTime = max(r.LastConsumedTime, one.LastConsumedTime)
		r.LastAckedTime = max(r.LastAckedTime, one.LastAckedTime)
		r.Consumers = append(r.Consumers, one)
	}
	return r
}

// stats is called by the subscription's loop.
func (c *consumer) stats() ConsumerStats {
	s := ConsumerStats{
		BytesOutCounter: c.out.bytes.Load(), MsgOutCounter: c.out.messages.Load(),
		ConsumerName: c.name, AvailablePermits: c.available.Load(), UnackedMessages: c.unacked.Load(),
		AvgMessagesPerEntry: int(c.average + 0.5), BlockedOnUnacked: c.blocked.Load(), PriorityLevel: c.priority,
		Address: "/" + c.address, ConnectedSince: c.since.Format(time.RFC3339Nano), ClientVersion: strings.ReplaceAll(c.client, " ", "-"),
		LastAckedTime: c.lastAck.Load(), LastConsumedTime: c.lastSent.Load(), LastConsumedFlowTime: c.lastFlow.Load(),
		Metadata: c.metadata,
	}
	s.MsgRateOut, s.MsgThroughputOut = c.out.rate()
	s.MsgRateRedeliver, _ = c.redeliver.rate()
	s.MessageAckRate, _ = c.acks.rate()
	return s
}

func ratio(sum, n int64) float64 {
	if n == 0 {
		return 0
	}
	return float64(sum) / float64(n)
}
