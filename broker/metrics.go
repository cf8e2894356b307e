package broker

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics are the broker's instruments, and the collector of what is kept with
// the topics.
type metrics struct {
	created, succeeded, failed, closed prometheus.Counter // connections

	refused        prometheus.Counter // connections whose peer broke the protocol
	silent         prometheus.Counter // connections whose peer fell silent
	publishRefused prometheus.Counter // SENDs answered with SEND_ERROR
	publishFailed  prometheus.Counter // SENDs that storage failed
	publishPaused  prometheus.Counter // times a connection waited for the broker's publish buffer
}

func newMetrics(b *Broker, r prometheus.Registerer) *metrics {
	labels := prometheus.Labels{"cluster": b.cfg.ClusterName}
	f := promauto.With(r)
	// Pulsar's connection counters have no _total at their end; its dashboards
	// know them by these names.
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels})
	}
	m := &metrics{
		created:        counter("pulsar_connection_created_total_count", "Connections that clients opened."),
		succeeded:      counter("pulsar_connection_create_success_count", "Connections that were admitted."),
		failed:         counter("pulsar_connection_create_fail_count", "Connections that were turned away because a limit was reached."),
		closed:         counter("pulsar_connection_closed_total_count", "Admitted connections that ended."),
		refused:        counter("broker_protocol_violations_total", "Connections closed because their peer broke the protocol."),
		silent:         counter("broker_silent_connections_total", "Connections closed because their peer was silent for two keep-alive intervals."),
		publishRefused: counter("broker_publish_refused_total", "Publishes refused because of what they hold; nothing was stored."),
		publishFailed:  counter("broker_publish_failed_total", "Publishes that ended without being known to be stored; their producers were sent to reconnect."),
		publishPaused:  counter("broker_publish_paused_total", "Times that reading a connection paused because the broker's publish buffer was full."),
	}
	if r != nil {
		r.MustRegister(&topicCollector{b: b, labels: labels}) // a closed broker has no topics, so it may stay
	}
	return m
}

// topicCollector reads the figures of topics when it is scraped, so that a topic
// that closes leaves no series behind.
type topicCollector struct {
	b      *Broker
	labels prometheus.Labels
}

// Describe implements prometheus.Collector. The collector is unchecked: which
// series it has depends on the topics.
func (c *topicCollector) Describe(chan<- *prometheus.Desc) {}

// Names of labels, outermost first.
var (
	topicLabels        = []string{"namespace", "topic"}
	subscriptionLabels = append(topicLabels[:2:2], "subscription")
	consumerLabels     = append(subscriptionLabels[:3:3], "consumer_name", "consumer_id")
)

// Collect implements prometheus.Collector.
func (c *topicCollector) Collect(out chan<- prometheus.Metric) {
	c.b.mu.Lock()
	connections := len(c.b.conns)
	c.b.mu.Unlock()
	e := emitter{out, c.labels, nil, nil}
	e.gauge("pulsar_active_connections", "Connections of clients.", float64(connections))

	topics := c.b.topics.all()
	perTopic := c.b.cfg.ExposeTopicMetrics
	counts := topicCounts{}
	for _, t := range topics {
		t.collect(emitter{out, c.labels, topicLabels, []string{t.name.NamespaceName(), t.full}}, &counts, perTopic, c.b.cfg.ExposeConsumerMetrics)
	}
	e.gauge("pulsar_broker_topics_count", "Topics open on this broker.", float64(len(topics)))
	e.gauge("pulsar_broker_subscriptions_count", "Subscriptions of topics open on this broker.", float64(counts.subscriptions))
	e.gauge("pulsar_broker_producers_count", "Producers connected to this broker.", float64(counts.producers))
	e.gauge("pulsar_broker_consumers_count", "Consumers connected to this broker.", float64(counts.consumers))
	e.gauge("pulsar_broker_msg_backlog", "Entries that subscriptions of this broker have not acknowledged.", float64(counts.backlog))
	e.gauge("pulsar_broker_rate_in", "Messages per second that came in.", counts.rateIn)
	e.gauge("pulsar_broker_throughput_in", "Bytes per second that came in.", counts.bytesIn)
	e.gauge("pulsar_broker_rate_out", "Messages per second that went out.", counts.rateOut)
	e.gauge("pulsar_broker_throughput_out", "Bytes per second that went out.", counts.bytesOut)
}

// topicCounts sums up over topics.
type topicCounts struct {
	subscriptions, producers, consumers int
	backlog                             int64
	rateIn, bytesIn, rateOut, bytesOut  float64
}

// emitter makes metrics that share labels.
type emitter struct {
	out    chan<- prometheus.Metric
	fixed  prometheus.Labels
	names  []string
	values []string
}

func (e emitter) gauge(name, help string, v float64) { e.emit(name, help, prometheus.GaugeValue, v) }

func (e emitter) counter(name, help string, v float64) {
	e.emit(name, help, prometheus.CounterValue, v)
}

func (e emitter) emit(name, help string, kind prometheus.ValueType, v float64) {
	desc := prometheus.NewDesc(name, help, e.names, e.fixed)
	e.out <- prometheus.MustNewConstMetric(desc, kind, v, e.values...)
}

func (t *topic) collect(e emitter, sum *topicCounts, topics, consumers bool) {
	t.mu.Lock()
	producers := len(t.producers)
	t.mu.Unlock()
	subs := t.subs()
	rateIn, bytesIn := t.in.rate()
	var members int
	var backlog int64
	var rateOut, bytesOut, ackRate float64
	messagesOut, sizeOut := t.removedOut.messages.Load(), t.removedOut.bytes.Load()
	for _, s := range subs {
		n, m := s.reader.Backlog(), int(s.members.Load())
		members += m
		backlog += n
		r, b := s.out.rate()
		a, _ := s.acks.rate()
		rateOut, bytesOut, ackRate = rateOut+r, bytesOut+b, ackRate+a
		messagesOut += s.out.messages.Load()
		sizeOut += s.out.bytes.Load()
		if topics {
			s.collect(emitter{e.out, e.fixed, subscriptionLabels, append(e.values[:2:2], s.name)}, n, consumers)
		}
	}
	sum.subscriptions += len(subs)
	sum.producers += producers
	sum.consumers += members
	sum.backlog += backlog
	sum.rateIn, sum.bytesIn = sum.rateIn+rateIn, sum.bytesIn+bytesIn
	sum.rateOut, sum.bytesOut = sum.rateOut+rateOut, sum.bytesOut+bytesOut
	if !topics {
		return
	}
	ml := t.ml.Stats()
	e.gauge("pulsar_subscriptions_count", "Subscriptions of the topic.", float64(len(subs)))
	e.gauge("pulsar_producers_count", "Producers connected to the topic.", float64(producers))
	e.gauge("pulsar_consumers_count", "Consumers connected to the topic.", float64(members))
	e.gauge("pulsar_rate_in", "Messages per second that came in.", rateIn)
	e.gauge("pulsar_rate_out", "Messages per second that went out.", rateOut)
	e.gauge("pulsar_throughput_in", "Bytes per second that came in.", bytesIn)
	e.gauge("pulsar_throughput_out", "Bytes per second that went out.", bytesOut)
	e.counter("pulsar_in_messages_total", "Messages that came in.", float64(t.in.messages.Load()))
	e.counter("pulsar_in_bytes_total", "Bytes that came in.", float64(t.in.bytes.Load()))
	e.counter("pulsar_out_messages_total", "Messages that went out.", float64(messagesOut))
	e.counter("pulsar_out_bytes_total", "Bytes that went out.", float64(sizeOut))
	e.gauge("pulsar_msg_backlog", "Entries that the topic's subscriptions have not acknowledged.", float64(backlog))
	e.gauge("pulsar_consumer_msg_ack_rate", "Acknowledgements per second.", ackRate)
	e.gauge("pulsar_storage_size", "Bytes that the topic takes in storage, one copy.", float64(ml.Bytes))
	e.gauge("pulsar_storage_logical_size", "Bytes that the topic takes in storage, one copy.", float64(ml.Bytes))
	e.gauge("pulsar_storage_backlog_size", "Bytes that the slowest subscription has not acknowledged, about.", float64(t.slowest(subs))*ratio(ml.Bytes, ml.Entries))
}

// slowest returns the longest backlog in entries.
func (t *topic) slowest(subs []*subscription) int64 {
	var n int64
	for _, s := range subs {
		n = max(n, s.reader.Backlog())
	}
	return n
}

func (s *subscription) collect(e emitter, backlog int64, consumers bool) {
	rate, bytes := s.out.rate()
	again, _ := s.redeliver.rate()
	acks, _ := s.acks.rate()
	blocked := 0.0
	if s.blocked.Load() {
		blocked = 1
	}
	e.gauge("pulsar_subscription_back_log", "Entries that the subscription has not acknowledged.", float64(backlog))
	e.gauge("pulsar_subscription_back_log_no_delayed", "The same without those that are to be delivered later.", float64(backlog))
	e.gauge("pulsar_subscription_unacked_messages", "Messages delivered and not acknowledged; Shared only.", float64(s.unacked.Load()))
	e.gauge("pulsar_subscription_blocked_on_unacked_messages", "1 while delivery stopped because too many messages are unacknowledged.", blocked)
	e.gauge("pulsar_subscription_msg_rate_out", "Messages per second that went out.", rate)
	e.gauge("pulsar_subscription_msg_throughput_out", "Bytes per second that went out.", bytes)
	e.gauge("pulsar_subscription_msg_rate_redeliver", "Messages per second that went out again.", again)
	e.gauge("pulsar_subscription_msg_ack_rate", "Acknowledgements per second.", acks)
	e.gauge("pulsar_subscription_consumers_count", "Consumers of the subscription.", float64(s.members.Load()))
	if consumers {
		s.collectConsumers(e)
	}
}

// collectConsumers asks the loop, which always answers soon.
func (s *subscription) collectConsumers(e emitter) {
	all := make(chan []*consumer, 1)
	if !s.box.post(func() { all <- append([]*consumer(nil), s.consumers...) }) {
		return
	}
	for _, c := range <-all {
		rate, bytes := c.out.rate()
		again, _ := c.redeliver.rate()
		acks, _ := c.acks.rate()
		blocked := 0.0
		if c.blocked.Load() {
			blocked = 1
		}
		one := emitter{e.out, e.fixed, consumerLabels, append(e.values[:3:3], c.name, c.label())}
		one.gauge("pulsar_consumer_msg_rate_out", "Messages per second that went out.", rate)
		one.gauge("pulsar_consumer_msg_throughput_out", "Bytes per second that went out.", bytes)
		one.gauge("pulsar_consumer_msg_rate_redeliver", "Messages per second that went out again.", again)
		one.gauge("pulsar_consumer_msg_ack_rate", "Acknowledgements per second.", acks)
		one.gauge("pulsar_consumer_unacked_messages", "Messages delivered and not acknowledged; Shared only.", float64(c.unacked.Load()))
		one.gauge("pulsar_consumer_blocked_on_unacked_messages", "1 while it gets nothing because too many messages are unacknowledged.", blocked)
		one.gauge("pulsar_consumer_available_permits", "Messages that the client has room for.", float64(c.available.Load()))
	}
}
