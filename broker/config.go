package broker

import (
	"time"

	"github.com/magnetar-io/magnetar/internal/config"
	"github.com/magnetar-io/magnetar/managedledger"
	"github.com/magnetar-io/magnetar/protocol"
)

// Bounds that are not keys: they protect the broker from one peer and nobody has
// a reason to tune them.
const (
	// maxFrameBeforeConnect is the largest frame, in bytes, from a peer that has
	// not introduced itself.
	maxFrameBeforeConnect = 64 << 10
	// connectTimeout is how long such a peer may stay.
	connectTimeout = 10 * time.Second
	// maxConnecting is how many such peers may be there at once.
	maxConnecting = 1024

	// outgoingHigh is how many bytes of messages a connection may have waiting to
	// be written. Over it, its consumers get nothing more until outgoingLow.
	outgoingHigh = 8 << 20
	outgoingLow  = outgoingHigh / 2
	// maxRepliesBytes is how many bytes of everything else may wait. Over it, the
	// connection is not read until it is half empty: who does not read answers may
	// not ask more.
	maxRepliesBytes = 1 << 20

	// maxPendingRequests is how many slow requests (lookups, subscribing, opening
	// producers, seeking) one connection may have under way.
	maxPendingRequests = 256
	// maxPublishBytesPerConnection is how many bytes one connection may have in
	// publishes that are not stored yet.
	maxPublishBytesPerConnection = 32 << 20
	// maxProducersPerConnection and maxConsumersPerConnection bound what one
	// connection may open.
	maxProducersPerConnection = 10_000
	maxConsumersPerConnection = 10_000

	// requestTimeout bounds one slow request. Clients give up after 30 s.
	requestTimeout = 30 * time.Second
	// closeTimeout bounds closing one topic: flushing its cursors and closing its
	// ledger.
	closeTimeout = 10 * time.Second
	// lingerTimeout is how long the last answer to a peer that is being
	// disconnected may take to write.
	lingerTimeout = 2 * time.Second
	// lingerRead is how long it then has to close its side, before the socket is
	// closed under what it still sends.
	lingerRead = 300 * time.Millisecond
	// seekGrace is how long a non-durable subscription waits for its reader to
	// come back after a seek disconnected it.
	seekGrace = 60 * time.Second

	// maxNameLength bounds producer, consumer and subscription names, in bytes.
	maxNameLength = 4096
)

// Config is the broker's section of the configuration. [Config.Register] gives
// the fields their defaults and says what each means.
type Config struct {
	ClusterName string

	MaxMessageSize                   int
	KeepAliveIntervalSeconds         int
	MaxConnections                   int
	MaxConnectionsPerIP              int
	MaxPendingPublishRequests        int
	MaxMessagePublishBufferMB        int
	ConnectionLivenessTimeoutMillis  int
	AllowAutoTopicCreation           bool
	AllowAutoTopicCreationType       string
	DefaultNumPartitions             int
	AllowAutoSubscriptionCreation    bool
	DispatcherMaxReadBatchSize       int
	DispatcherMinReadBatchSize       int
	DispatcherMaxReadSizeBytes       int
	DispatcherMaxRoundRobinBatchSize int
	ReadFailureBackoffInitialMillis  int
	ReadFailureBackoffMaxMillis      int
	FailoverDelayMillis              int
	MaxUnackedPerConsumer            int
	MaxUnackedPerSubscription        int
	StatsUpdateFrequencySeconds      int
	ExposeTopicMetrics               bool
	ExposeConsumerMetrics            bool
}

// Register adds the broker's keys to s.
func (c *Config) Register(s *config.Set) {
	s.String(&c.ClusterName, "clusterName", "standalone", "Name of the cluster; the same on every bookie and broker of it.")

	s.Int(&c.MaxMessageSize, "maxMessageSize", protocol.DefaultMaxMessageSize, 1024, managedledger.MaxEntryBytes-protocol.FramePadding,
		"Largest message that producers may send, in bytes, with its metadata. A batch counts as one message.")
	s.Int(&c.KeepAliveIntervalSeconds, "keepAliveIntervalSeconds", 30, 1, 3600,
		"A connection that was silent this many seconds is asked whether it lives, and closed after the same time again.")
	s.Int(&c.MaxConnections, "brokerMaxConnections", 0, 0, 1<<20,
		"Connections that clients may have to this broker. 0 = no limit.")
	s.Int(&c.MaxConnectionsPerIP, "brokerMaxConnectionsPerIp", 0, 0, 1<<20,
		"Connections that one client address may have to this broker. 0 = no limit.")
	s.Int(&c.ConnectionLivenessTimeoutMillis, "connectionLivenessCheckTimeoutMillis", 5000, 1, 60_000,
		"When a name or an exclusive subscription is taken by another connection, that connection has this many milliseconds to show that it lives.")

	s.Int(&c.MaxPendingPublishRequests, "maxPendingPublishRequestsPerConnection", 1000, 1, 1<<20,
		"Publishes of one connection that may wait for storage. Beyond it the connection is not read.")
	s.Int(&c.MaxMessagePublishBufferMB, "maxMessagePublishBufferSizeInMB", 128, 1, 1<<20,
		"Megabytes of publishes that may wait for storage in the whole broker. Beyond it publishing connections are not read.")

	s.Bool(&c.AllowAutoTopicCreation, "allowAutoTopicCreation", true,
		"Create a topic when a client first uses it. Its namespace must exist.")
	s.Choice(&c.AllowAutoTopicCreationType, "allowAutoTopicCreationType", "non-partitioned", []string{"non-partitioned", "partitioned"},
		"What such a topic becomes.")
	s.Int(&c.DefaultNumPartitions, "defaultNumPartitions", 1, 1, 10_000,
		"Partitions of such a topic, if it becomes partitioned.")
	s.Bool(&c.AllowAutoSubscriptionCreation, "allowAutoSubscriptionCreation", true,
		"Create a durable subscription when a consumer first uses it.")

	s.Int(&c.DispatcherMaxReadBatchSize, "dispatcherMaxReadBatchSize", 500, 1, 100_000,
		"Entries that a subscription reads at once, at most.")
	s.Int(&c.DispatcherMinReadBatchSize, "dispatcherMinReadBatchSize", 1, 1, 100_000,
		"Entries that it reads at once right after a failed read; doubled with each success.")
	s.Int(&c.DispatcherMaxReadSizeBytes, "dispatcherMaxReadSizeBytes", 5<<20, 1024, 1<<30,
		"Bytes that a subscription reads at once. One entry may exceed it.")
	s.Int(&c.DispatcherMaxRoundRobinBatchSize, "dispatcherMaxRoundRobinBatchSize", 20, 1, 100_000,
		"Messages that a consumer of a Shared subscription gets before it is the next one's turn.")
	s.Int(&c.ReadFailureBackoffInitialMillis, "dispatcherReadFailureBackoffInitialTimeInMs", 100, 1, 600_000,
		"Milliseconds after which a subscription repeats a failed read; doubled with each failure.")
	s.Int(&c.ReadFailureBackoffMaxMillis, "dispatcherReadFailureBackoffMaxTimeInMs", 10_000, 1, 600_000,
		"Longest such wait, in milliseconds.")
	s.Int(&c.FailoverDelayMillis, "activeConsumerFailoverDelayTimeMillis", 1000, 0, 60_000,
		"Milliseconds that a Failover subscription waits before a new active consumer gets messages, so that others may still join.")
	s.Int(&c.MaxUnackedPerConsumer, "maxUnackedMessagesPerConsumer", 50_000, 0, 10_000_000,
		"Messages that a consumer of a Shared subscription may hold without acknowledging. At this many it gets no more until half are left. 0 = no limit.")
	s.Int(&c.MaxUnackedPerSubscription, "maxUnackedMessagesPerSubscription", 200_000, 0, 10_000_000,
		"The same for all consumers of a Shared subscription together. 0 = no limit.")

	s.Int(&c.StatsUpdateFrequencySeconds, "statsUpdateFrequencyInSecs", 10, 1, 3600,
		"Seconds over which rates in statistics and metrics are taken.")
	s.Bool(&c.ExposeTopicMetrics, "exposeTopicLevelMetricsInPrometheus", true,
		"Metrics of each topic and subscription. false = of the broker only.")
	s.Bool(&c.ExposeConsumerMetrics, "exposeConsumerLevelMetricsInPrometheus", false,
		"Metrics of each consumer as well.")
}

func millis(n int) time.Duration { return time.Duration(n) * time.Millisecond }
