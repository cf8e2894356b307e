package broker

import "time"

// pace is how much to read at once and when to read again after a failure.
type pace struct {
	low, high   int           // entries
	first, last time.Duration // waits

	size    int // entries; 0 = high
	wait    time.Duration
	retryAt time.Time
}

// entries returns how many entries to read at once.
func (p *pace) entries() int {
	if p.size == 0 {
		return p.high
	}
	return p.size
}

func (p *pace) succeeded() {
	p.wait, p.retryAt = 0, time.Time{}
	if p.size != 0 {
		if p.size *= 2; p.size >= p.high {
			p.size = 0
		}
	}
}

func (p *pace) failed(now time.Time) {
	p.size = min(p.low, p.high)
	p.wait = min(max(2*p.wait, p.first), p.last)
	p.retryAt = now.Add(p.wait)
}
