package managedledger

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics are the factory's instruments. Rates per topic are package broker's.
type metrics struct {
	added, addedBytes, resent   prometheus.Counter
	addSeconds                  prometheus.Histogram
	switches                    *prometheus.CounterVec // by reason: see switchReasons
	fenced, deleted             prometheus.Counter
	reads, readFailures, joined prometheus.Counter
	readSeconds                 prometheus.Histogram
	overflows                   prometheus.Counter
}

const (
	switchFull   = "full"
	switchAge    = "age"
	switchFailed = "failed"
)

var switchReasons = []string{switchFull, switchAge, switchFailed}

func newMetrics(f *Factory, reg prometheus.Registerer) *metrics {
	p := promauto.With(reg)
	counter := func(name, help string) prometheus.Counter {
		return p.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string, value func() float64) {
		p.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)
	}
	seconds := func(name, help string) prometheus.Histogram {
		return p.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(100e-6, 2, 18)})
	}
	gauge("pulsar_ml_count", "Managed ledgers that are open.", func() float64 { return float64(len(f.handles())) })
	gauge("pulsar_ml_reads_inflight_bytes", "Bytes being read from bookies or held by readers.", func() float64 {
		used, _ := f.reads.inUse()
		return float64(used)
	})
	gauge("pulsar_ml_reads_available_inflight_bytes", "Bytes left of managedLedgerMaxReadsInFlightSizeInMB.", func() float64 {
		used, _ := f.reads.inUse()
		return float64(max(f.reads.limit-used, 0))
	})
	gauge("managedledger_reads_waiting", "Reads that wait for a share of managedLedgerMaxReadsInFlightSizeInMB.", func() float64 {
		_, waiting := f.reads.inUse()
		return float64(waiting)
	})
	gauge("managedledger_pending_add_bytes", "Bytes of entries that were added and not answered.", func() float64 {
		var sum int64
		for _, m := range f.handles() {
			sum += m.PendingBytes()
		}
		return float64(sum)
	})
	m := &metrics{
		added:        counter("managedledger_added_entries_total", "Entries stored and confirmed."),
		addedBytes:   counter("managedledger_added_bytes_total", "Bytes of entries stored and confirmed."),
		resent:       counter("managedledger_resent_entries_total", "Entries sent again to a new ledger because the old one failed."),
		addSeconds:   seconds("managedledger_add_seconds", "Time from Append to confirmed."),
		fenced:       counter("managedledger_fenced_total", "Managed ledgers that another owner took over."),
		deleted:      counter("managedledger_deleted_ledgers_total", "Ledgers deleted, because they were consumed, empty or of a deleted topic."),
		reads:        counter("managedledger_bookie_reads_total", "Reads sent to bookies."),
		readFailures: counter("managedledger_bookie_read_failures_total", "Reads from bookies that failed."),
		joined:       counter("managedledger_joined_reads_total", "Reads that joined an equal one in flight."),
		readSeconds:  seconds("managedledger_bookie_read_seconds", "Time of a read from the bookies."),
		overflows:    counter("managedledger_read_completion_overflows_total", "Completions of cached reads that went to the pool because they nested too deep."),
		switches: p.NewCounterVec(prometheus.CounterOpts{
			Name: "managedledger_switches_total", Help: "Times a managed ledger went on in a new ledger, by reason.",
		}, []string{"reason"}),
	}
	for _, reason := range switchReasons {
		m.switches.WithLabelValues(reason) // a series at 0 can be alerted on; a missing one cannot
	}
	return m
}
