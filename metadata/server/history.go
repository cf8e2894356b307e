package server

import (
	"slices"
	"strings"
	"sync"

	"github.com/magnetar-io/magnetar/metadata"
)

const (
	// MaxHistoryBytes bounds the changes kept for watches. A watch that falls
	// further behind starts over.
	MaxHistoryBytes = 16 << 20

	// MaxHistoryEvents bounds their number.
	MaxHistoryEvents = 1 << 16

	eventBytes = 128 // what an event weighs besides key and value
)

// history is the ring of recent changes. One goroutine adds; any number read.
type history struct {
	mu      sync.Mutex       // guards all below
	events  []metadata.Event // in order of revision; never changed in place
	bytes   int64
	floor   metadata.Version // changes up to here are not in events (any more)
	through metadata.Version // changes up to here have been added
	changed chan struct{}    // closed by the next add; nil if nobody waits
}

func weight(e *metadata.Event) int64 { return eventBytes + int64(len(e.KV.Key)+len(e.KV.Value)) }

// reset drops everything: changes up to revision at are unknown.
func (h *history) reset(at metadata.Version) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events, h.bytes, h.floor, h.through = nil, 0, at, at
	h.wakeLocked()
}

// add appends the changes of all commands up to revision through.
func (h *history) add(events []metadata.Event, through metadata.Version) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range events {
		h.bytes += weight(&events[i])
	}
	h.events = append(h.events, events...)
	h.through = through
	drop := 0
	for drop < len(h.events) && (h.bytes > MaxHistoryBytes || len(h.events)-drop > MaxHistoryEvents) {
		// A revision goes as a whole, so that floor stays exact.
		h.floor = h.events[drop].KV.Version
		for drop < len(h.events) && h.events[drop].KV.Version == h.floor {
			h.bytes -= weight(&h.events[drop])
			drop++
		}
	}
	if drop > 0 {
		clear(h.events[:drop]) // let the values go; readers have copies
		h.events = h.events[drop:]
	}
	h.wakeLocked()
}

func (h *history) wakeLocked() {
	if h.changed != nil {
		close(h.changed)
		h.changed = nil
	}
}

// after returns the changes under prefix later than revision from, in whole
// revisions, about maxBytes of them; through is the revision that they are
// complete up to. ok is false if some are lost. If there is nothing new, wait is
// closed once there is.
func (h *history) after(from metadata.Version, prefix string, maxBytes int64) (events []metadata.Event, through metadata.Version, wait <-chan struct{}, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if from < h.floor {
		return nil, from, nil, false
	}
	start, _ := slices.BinarySearchFunc(h.events, from+1, func(e metadata.Event, v metadata.Version) int {
		return int(e.KV.Version - v)
	})
	through = max(from, h.through)
	size := int64(0)
	for i := start; i < len(h.events); i++ {
		e := &h.events[i]
		if size >= maxBytes && e.KV.Version != h.events[i-1].KV.Version {
			through = h.events[i-1].KV.Version
			break
		}
		if strings.HasPrefix(e.KV.Key, prefix) {
			events = append(events, *e)
			size += weight(e)
		}
	}
	if through == from {
		if h.changed == nil {
			h.changed = make(chan struct{})
		}
		wait = h.changed
	}
	return events, through, wait, true
}
