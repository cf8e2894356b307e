package client

import (
	"time"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
)

// sendBuffer makes requests, one after the other, in the same memory. A request
// is valid until the next one is made: Send has encoded it when it returns.
type sendBuffer struct {
	picked []pick
	data   [][]byte // of the entries picked, in order
	frames []byte
	parts  []bookiepb.LedgerAppend
	wire   bookiepb.AppendRequest
}

// pick is a part of a writer's queue that goes into a request.
type pick struct {
	ledger, first int64
	entries       int
}

// request encodes what was taken. It needs no lock: data is immutable.
func (b *sendBuffer) request() *bookiepb.AppendRequest {
	for len(b.parts) < len(b.picked) {
		b.parts = append(b.parts, bookiepb.LedgerAppend{})
	}
	if cap(b.frames) > 2*bookiepb.BatchBytes {
		b.frames = nil // a rare large entry need not stay in memory
	}
	b.frames = b.frames[:0]
	b.wire.Appends = b.wire.Appends[:0]
	at := 0
	for i, p := range b.picked {
		start := len(b.frames)
		for _, data := range b.data[at : at+p.entries] {
			b.frames = bookiepb.AppendFrame(b.frames, data)
		}
		at += p.entries
		part := &b.parts[i]
		part.Ledger, part.Epoch, part.First = p.ledger, firstEpoch, p.first
		part.Entries = b.frames[start:len(b.frames):len(b.frames)]
		b.wire.Appends = append(b.wire.Appends, part)
	}
	clear(b.data)
	return &b.wire
}

// take picks the entries of the next request: what waits, to
// bookiepb.BatchBytes and BatchEntries, or one larger entry. Writers take turns.
// It reports false when nothing waits.
func (l *lane) take(b *sendBuffer) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	b.picked, b.data = b.picked[:0], b.data[:0]
	entries, size := 0, 0
	for len(l.ready) > 0 && entries < bookiepb.BatchEntries && size < bookiepb.BatchBytes {
		w := l.ready[0]
		n := 0
		for _, p := range w.queue[w.sent:] {
			cost := bookiepb.FrameHeaderBytes + len(p.data)
			if entries == bookiepb.BatchEntries || (entries > 0 && size+cost > bookiepb.BatchBytes) {
				break
			}
			n, entries, size = n+1, entries+1, size+cost
		}
		if n > 0 {
			first := int64(w.next) - int64(len(w.queue)) + int64(w.sent)
			b.picked = append(b.picked, pick{int64(w.id), first, n})
			for _, p := range w.queue[w.sent : w.sent+n] {
				b.data = append(b.data, p.data)
			}
			l.countResends(w, n)
			w.sent += n
		}
		l.ready[0] = nil
		l.ready = l.ready[1:]
		w.listed = false
		if w.sent < len(w.queue) {
			w.listed = true
			l.ready = append(l.ready, w)
			if n == 0 {
				break // the request is full for whatever this writer has
			}
		}
	}
	if len(b.picked) == 0 {
		return false
	}
	if l.outstanding == 0 {
		l.progress = time.Now()
	}
	l.outstanding += len(b.picked)
	return true
}

func (l *lane) countResends(w *Writer, n int) {
	if again := min(n, w.tried-w.sent); again > 0 {
		l.client.metrics.resends.Add(float64(again))
	}
	w.tried = max(w.tried, w.sent+n)
}
