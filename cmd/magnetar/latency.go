package main

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// latencies is a histogram whose buckets grow by a hundredth, so that a quantile
// is right to about 1 % however many messages there are.
type latencies struct {
	counts []int64 // by bucketOf
	total  int64
	most   time.Duration
}

const bucketGrowth = 1.01

func (l *latencies) add(d time.Duration) {
	b := bucketOf(d)
	if b >= len(l.counts) {
		l.counts = slices.Grow(l.counts, b+1-len(l.counts))[:b+1]
	}
	l.counts[b]++
	l.total++
	l.most = max(l.most, d)
}

// milliseconds returns the quantile q, 0 < q <= 1.
func (l *latencies) milliseconds(q float64) string {
	rest := int64(float64(l.total)*(1-q)) + 1 // messages at or above it
	value := l.most
	if q < 1 {
		for b, n := range slices.Backward(l.counts) {
			if rest -= n; rest <= 0 {
				value = min(bucketTop(b), l.most)
				break
			}
		}
	}
	return fmt.Sprintf("%.3f", float64(value)/float64(time.Millisecond))
}

// bucketOf returns the bucket of a latency; the first is that of a microsecond.
func bucketOf(d time.Duration) int {
	return int(math.Log(float64(max(d, time.Microsecond))/float64(time.Microsecond)) / math.Log(bucketGrowth))
}

// bucketTop returns the latency at which a bucket ends.
func bucketTop(b int) time.Duration {
	return time.Duration(float64(time.Microsecond) * math.Pow(bucketGrowth, float64(b+1)))
}
