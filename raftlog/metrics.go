package raftlog

import (
	"strconv"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics are a node's instruments, labelled by group.
type metrics struct {
	f promauto.Factory

	storeSeconds *prometheus.HistogramVec
	storeEntries *prometheus.CounterVec
	storeBytes   *prometheus.CounterVec
	inFlight     *prometheus.GaugeVec
	refused      *prometheus.CounterVec
	unknown      *prometheus.CounterVec
	leaderships  *prometheus.CounterVec
	restarts     *prometheus.CounterVec
	transfers    *prometheus.CounterVec
	barriers     *prometheus.CounterVec
	readRounds   *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer) *metrics {
	f := promauto.With(r)
	counter := func(name, help string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"group"})
	}
	return &metrics{
		f: f,
		storeSeconds: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "raft_group_store_logs_seconds", Help: "Time to make one batch of log entries durable.",
			Buckets: prometheus.ExponentialBuckets(50e-6, 2, 18),
		}, []string{"group"}),
		storeEntries: counter("raft_group_store_logs_entries_total", "Log entries made durable."),
		storeBytes:   counter("raft_group_store_logs_bytes_total", "Bytes of command data made durable in the log."),
		inFlight: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "raft_group_in_flight_bytes", Help: "Bytes of commands proposed here and not answered yet.",
		}, []string{"group"}),
		refused:     counter("raft_group_proposals_refused_total", "Commands refused before they were proposed."),
		unknown:     counter("raft_group_proposals_unknown_total", "Commands whose outcome was lost with the leadership."),
		leaderships: counter("raft_group_leaderships_total", "Times that this node became the leader."),
		restarts:    counter("raft_group_restarts_total", "Times that the group's Raft instance was replaced."),
		transfers:   counter("raft_group_transfers_total", "Leadership transfers to the preferred leader that were begun."),
		barriers:    counter("raft_group_read_barriers_total", "Read barriers asked for."),
		readRounds:  counter("raft_group_read_rounds_total", "Rounds of heartbeats that answered read barriers."),
	}
}

// groupMetrics are one group's instruments.
type groupMetrics struct {
	storeSeconds prometheus.Observer
	storeEntries prometheus.Counter
	storeBytes   prometheus.Counter
	inFlight     prometheus.Gauge
	refused      prometheus.Counter
	unknown      prometheus.Counter
	leaderships  prometheus.Counter
	restarts     prometheus.Counter
	transfers    prometheus.Counter
	barriers     prometheus.Counter
	readRounds   prometheus.Counter
}

func (m *metrics) group(id GroupID) *groupMetrics {
	g := strconv.FormatUint(uint64(id), 10)
	return &groupMetrics{
		storeSeconds: m.storeSeconds.WithLabelValues(g),
		storeEntries: m.storeEntries.WithLabelValues(g),
		storeBytes:   m.storeBytes.WithLabelValues(g),
		inFlight:     m.inFlight.WithLabelValues(g),
		refused:      m.refused.WithLabelValues(g),
		unknown:      m.unknown.WithLabelValues(g),
		leaderships:  m.leaderships.WithLabelValues(g),
		restarts:     m.restarts.WithLabelValues(g),
		transfers:    m.transfers.WithLabelValues(g),
		barriers:     m.barriers.WithLabelValues(g),
		readRounds:   m.readRounds.WithLabelValues(g),
	}
}

// watch exports what a group knows about itself, read when scraped.
func (m *metrics) watch(g *Group) {
	labels := prometheus.Labels{"group": strconv.FormatUint(uint64(g.id), 10)}
	gauge := func(name, help string, f func(*raft.Raft) float64) {
		m.f.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}, func() float64 {
			in := g.instance()
			if in == nil {
				return 0
			}
			return f(in.raft)
		})
	}
	gauge("raft_group_state", "0 follower, 1 candidate, 2 leader, 3 stopped.", func(r *raft.Raft) float64 { return float64(r.State()) })
	gauge("raft_group_leader", "1 while this node leads the group and has applied everything from before.", func(*raft.Raft) float64 {
		if g.IsLeader() {
			return 1
		}
		return 0
	})
	gauge("raft_group_term", "Current term.", func(r *raft.Raft) float64 { return float64(r.CurrentTerm()) })
	gauge("raft_group_commit_index", "Newest committed log entry known here.", func(r *raft.Raft) float64 { return float64(r.CommitIndex()) })
	gauge("raft_group_applied_index", "Newest log entry applied here.", func(*raft.Raft) float64 { return float64(g.applied.get()) })
	gauge("raft_group_last_log_index", "Newest log entry on disk here.", func(r *raft.Raft) float64 { return float64(r.LastIndex()) })
	gauge("raft_group_voters", "Voters in the group's configuration.", func(*raft.Raft) float64 { return float64(g.Voters()) })
}
