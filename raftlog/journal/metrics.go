package journal

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

type metrics struct {
	requests  prometheus.Counter
	syncs     prometheus.Counter
	bytes     prometheus.Counter
	relocated prometheus.Counter
	segments  prometheus.Gauge
	seconds   prometheus.Histogram
}

func newMetrics(r prometheus.Registerer) *metrics {
	f := promauto.With(r)
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	return &metrics{
		requests:  counter("journal_requests_total", "Changes of a group's log that were handed to the journal."),
		syncs:     counter("journal_syncs_total", "Frames written and synced; one serves all groups that wait."),
		bytes:     counter("journal_bytes_total", "Bytes of frames written."),
		relocated: counter("journal_relocated_bytes_total", "Bytes of records copied so that old segments could be given up."),
		segments:  f.NewGauge(prometheus.GaugeOpts{Name: "journal_segments", Help: "Segment files, spare ones left out."}),
		seconds: f.NewHistogram(prometheus.HistogramOpts{
			Name: "journal_sync_seconds", Help: "Time to write and sync one frame.",
			Buckets: prometheus.ExponentialBuckets(50e-6, 2, 18),
		}),
	}
}
