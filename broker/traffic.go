package broker

import (
	"math"
	"sync/atomic"
	"time"
)

// traffic counts messages and bytes, and knows their recent rate. add is called
// by whoever moves messages, tick by the broker's ticker, the rest by anybody.
type traffic struct {
	messages atomic.Int64
	bytes    atomic.Int64

	lastMessages int64 // at the last tick; ticker only
	lastBytes    int64
	messageRate  atomic.Uint64 // float64 bits; per second
	byteRate     atomic.Uint64
}

func (t *traffic) add(messages, bytes int) {
	t.messages.Add(int64(messages))
	t.bytes.Add(int64(bytes))
}

// tick closes a period that took d.
func (t *traffic) tick(d time.Duration) {
	m, b := t.messages.Load(), t.bytes.Load()
	t.messageRate.Store(math.Float64bits(float64(m-t.lastMessages) / d.Seconds()))
	t.byteRate.Store(math.Float64bits(float64(b-t.lastBytes) / d.Seconds()))
	t.lastMessages, t.lastBytes = m, b
}

// rate returns messages and bytes per second over the last full period.
func (t *traffic) rate() (messages, bytes float64) {
	return math.Float64frombits(t.messageRate.Load()), math.Float64frombits(t.byteRate.Load())
}
