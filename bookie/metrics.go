package bookie

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics are one bookie's instruments.
type metrics struct {
	entries     prometheus.Counter
	bytes       prometheus.Counter
	reads       *prometheus.CounterVec // by outcome, a fixed set: see readOutcomes
	readBytes   prometheus.Counter
	segments    prometheus.Gauge
	liveBytes   prometheus.Gauge
	checkpoint  prometheus.Histogram
	queueBytes  prometheus.Gauge
	commands    prometheus.Counter
	commandSize prometheus.Histogram
	refused     *prometheus.CounterVec // by reason, a fixed set: see refuseReasons
}

var (
	readOutcomes  = []string{"ok", "absent", "notyet", "damaged", "failed"}
	refuseReasons = []string{"disk", "notleader", "fenced", "closed", "gap", "absent", "other"}
)

// newMetrics registers the instruments with r; a nil r is fine.
func newMetrics(r prometheus.Registerer) *metrics {
	f := promauto.With(r)
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return f.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	m := &metrics{
		entries:   counter("bookie_entries_total", "Entries applied to ledgers on this bookie, as leader or follower."),
		bytes:     counter("bookie_entry_bytes_total", "Bytes of the entries applied to ledgers on this bookie."),
		readBytes: counter("bookie_read_bytes_total", "Bytes of entries read."),
		segments:  gauge("bookie_segments", "Segment files on disk."),
		liveBytes: gauge("bookie_segment_live_bytes", "Bytes in segments that belong to ledgers."),
		queueBytes: gauge("bookie_queue_bytes",
			"Bytes of appends that were admitted and are not answered, all groups."),
		commands: counter("bookie_commands_total", "Commands proposed by this bookie."),
		reads: f.NewCounterVec(prometheus.CounterOpts{
			Name: "bookie_reads_total", Help: "Read requests, by outcome.",
		}, []string{"outcome"}),
		checkpoint: f.NewHistogram(prometheus.HistogramOpts{
			Name: "bookie_checkpoint_seconds", Help: "Time of one checkpoint of one group.",
			Buckets: prometheus.ExponentialBuckets(1e-3, 4, 8),
		}),
		commandSize: f.NewHistogram(prometheus.HistogramOpts{
			Name: "bookie_command_bytes", Help: "Size of proposed commands.",
			Buckets: prometheus.ExponentialBuckets(256, 4, 9),
		}),
		refused: f.NewCounterVec(prometheus.CounterOpts{
			Name: "bookie_appends_refused_total", Help: "Appends answered with a failure, by reason.",
		}, []string{"reason"}),
	}
	for _, o := range readOutcomes {
		m.reads.WithLabelValues(o)
	}
	for _, r := range refuseReasons {
		m.refused.WithLabelValues(r)
	}
	return m
}
