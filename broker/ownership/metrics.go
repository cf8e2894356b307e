package ownership

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics are this room's instruments.
type metrics struct {
	bundles  prometheus.Gauge
	acquired prometheus.Counter
	lost     prometheus.Counter
	valid    prometheus.Gauge
}

func newMetrics(r prometheus.Registerer) *metrics {
	f := promauto.With(r)
	return &metrics{
		bundles: f.NewGauge(prometheus.GaugeOpts{
			Name: "ownership_bundles",
			Help: "Namespace bundles this broker owns or is handing over.",
		}),
		acquired: f.NewCounter(prometheus.CounterOpts{
			Name: "ownership_bundles_acquired_total",
			Help: "Namespace bundles this broker has taken.",
		}),
		lost: f.NewCounter(prometheus.CounterOpts{
			Name: "ownership_sessions_lost_total",
			Help: "Sessions with metadata that ran out, each giving up every bundle.",
		}),
		valid: f.NewGauge(prometheus.GaugeOpts{
			Name: "ownership_session_valid",
			Help: "1 while this broker has a session with metadata, else 0.",
		}),
	}
}
