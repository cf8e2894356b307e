package entrycache

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// blockOverhead is what a block costs besides the bytes of its entries: its slots
// and links.
const blockOverhead = 1024

// Cache is the broker's entry cache. Use [New].
type Cache struct {
	budget int64
	used   atomic.Int64 // bytes of all blocks in the list
	count  atomic.Int64 // entries of all blocks in the list

	metrics metrics
	rates   rates

	// mu orders the blocks that come and go. Lock it after nothing and hold it
	// over nothing but list work.
	mu    sync.Mutex
	front *block // guarded by mu: begun first, evicted first
	back  *block // guarded by mu
}

type metrics struct {
	inserted, evicted      prometheus.Counter
	hits, misses           prometheus.Counter
	hitBytes, missBytes    prometheus.Counter
	hitsRate, missesRate   prometheus.Gauge
	hitsBytes, missesBytes prometheus.Gauge
}

// rates is what the rate gauges are made of.
type rates struct {
	hits, hitBytes, misses, missBytes atomic.Int64

	mu   sync.Mutex
	last time.Time // guarded by mu, as are the values seen then
	seen [4]int64
}

// New makes a cache of at most budget bytes; 0 turns it off. reg may be nil.
func New(budget int64, reg prometheus.Registerer) *Cache {
	c := &Cache{budget: budget}
	f := promauto.With(reg)
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return f.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "pulsar_ml_cache_used_size", Help: "Bytes of entries in the cache, with their bookkeeping.",
	}, func() float64 { return float64(c.used.Load()) })
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "pulsar_ml_cache_max_size", Help: "Bytes that the cache may hold (managedLedgerCacheSizeMB).",
	}, func() float64 { return float64(c.budget) })
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "pulsar_ml_cache_entries", Help: "Entries in the cache.",
	}, func() float64 { return float64(c.count.Load()) })
	c.metrics = metrics{
		inserted:    counter("pulsar_ml_cache_inserted_entries_total", "Entries put into the cache."),
		evicted:     counter("pulsar_ml_cache_evicted_entries_total", "Entries that left the cache because it was over its size."),
		hits:        counter("pulsar_ml_cache_hits_total", "Entries that a reader found in the cache."),
		misses:      counter("pulsar_ml_cache_misses_total", "Entries that were read from a bookie."),
		hitBytes:    counter("pulsar_ml_cache_hits_bytes_total", "Bytes that readers found in the cache."),
		missBytes:   counter("pulsar_ml_cache_misses_bytes_total", "Bytes that were read from bookies."),
		hitsRate:    gauge("pulsar_ml_cache_hits_rate", "Entries a second found in the cache, over the last period."),
		missesRate:  gauge("pulsar_ml_cache_misses_rate", "Entries a second read from bookies, over the last period."),
		hitsBytes:   gauge("pulsar_ml_cache_hits_throughput", "Bytes a second found in the cache, over the last period."),
		missesBytes: gauge("pulsar_ml_cache_misses_throughput", "Bytes a second read from bookies, over the last period."),
	}
	c.rates.last = time.Now()
	return c
}

// Hit counts entries that a reader was served from the cache.
func (c *Cache) Hit(entries int, bytes int64) {
	c.metrics.hits.Add(float64(entries))
	c.metrics.hitBytes.Add(float64(bytes))
	c.rates.hits.Add(int64(entries))
	c.rates.hitBytes.Add(bytes)
}

// Miss counts entries that had to be read from a bookie.
func (c *Cache) Miss(entries int, bytes int64) {
	c.metrics.misses.Add(float64(entries))
	c.metrics.missBytes.Add(float64(bytes))
	c.rates.misses.Add(int64(entries))
	c.rates.missBytes.Add(bytes)
}

// UpdateRates sets the rate gauges to the averages since the call before.
func (c *Cache) UpdateRates() {
	r := &c.rates
	r.mu.Lock()
	defer r.mu.Unlock()
	seconds := time.Since(r.last).Seconds()
	if seconds <= 0 {
		return
	}
	r.last = time.Now()
	gauges := []prometheus.Gauge{c.metrics.hitsRate, c.metrics.hitsBytes, c.metrics.missesRate, c.metrics.missesBytes}
	for i, now := range []int64{r.hits.Load(), r.hitBytes.Load(), r.misses.Load(), r.missBytes.Load()} {
		gauges[i].Set(float64(now-r.seen[i]) / seconds)
		r.seen[i] = now
	}
}

// Used returns how many bytes the cache holds, and Entries how many entries.
func (c *Cache) Used() int64 { return c.used.Load() }

// Entries returns how many entries the cache holds.
func (c *Cache) Entries() int64 { return c.count.Load() }

// addLocked puts b at the back of the list.
func (c *Cache) addLocked(b *block) {
	b.prev = c.back
	if c.back != nil {
		c.back.next = b
	} else {
		c.front = b
	}
	c.back = b
	b.listed = true
}

// removeLocked takes b out of the list, hides it from readers, and gives its
// bytes back to the budget. It returns how many entries that were.
func (c *Cache) removeLocked(b *block) int64 {
	if b.prev != nil {
		b.prev.next = b.next
	} else {
		c.front = b.next
	}
	if b.next != nil {
		b.next.prev = b.prev
	} else {
		c.back = b.prev
	}
	b.prev, b.next, b.listed = nil, nil, false
	b.tail.hide(b)
	c.used.Add(-b.bytes)
	c.count.Add(-b.entries)
	return b.entries
}

// chargeLocked counts an entry of b, then evicts until the cache is within its
// budget. b itself may go, if everything older has gone.
func (c *Cache) chargeLocked(b *block, bytes int64) {
	b.bytes += bytes
	b.entries++
	c.used.Add(bytes)
	c.count.Add(1)
	for c.front != nil && c.used.Load() > c.budget {
		c.metrics.evicted.Add(float64(c.removeLocked(c.front)))
	}
}
