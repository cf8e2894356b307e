package server

import (
	"fmt"
	"testing"

	"github.com/magnetar-io/magnetar/metadata"
)

func change(key string, revision metadata.Version, bytes int) metadata.Event {
	return metadata.Event{Type: metadata.EventPut, KV: metadata.KV{Key: key, Version: revision, Value: make([]byte, bytes)}}
}

func TestHistoryBounds(t *testing.T) {
	tests := []struct {
		name  string
		size  int
		count int
	}{
		{"bytes", 1 << 20, 40},
		{"events", 0, MaxHistoryEvents + 1000},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var h history
			for i := range tt.count {
				v := metadata.Version(i + 1)
				h.add([]metadata.Event{change("a", v, tt.size)}, v)
			}
			if h.bytes > MaxHistoryBytes || len(h.events) > MaxHistoryEvents {
				t.Errorf("history holds %d events of %d bytes", len(h.events), h.bytes)
			}
			if h.floor < 1 || h.events[0].KV.Version != h.floor+1 {
				t.Errorf("floor is %d, first event %d", h.floor, h.events[0].KV.Version)
			}
			if _, _, _, ok := h.after(h.floor-1, "", 1); ok {
				t.Error("changes below the floor are said to be there")
			}
			events, _, _, ok := h.after(h.floor, "", 1)
			if !ok || len(events) != 1 || events[0].KV.Version != h.floor+1 {
				t.Errorf("after the floor: %v, %v", events, ok)
			}
		})
	}
}

func TestHistoryKeepsRevisionsWhole(t *testing.T) {
	var h history
	for v := metadata.Version(1); v <= 3; v++ {
		var events []metadata.Event
		for i := range 10 {
			events = append(events, change(fmt.Sprintf("%c/%d", 'a'+i%2, i), v, 100))
		}
		h.add(events, v)
	}
	events, through, wait, ok := h.after(1, "", 300)
	if len(events) != 10 || through != 2 || wait != nil || !ok {
		t.Errorf("after 1, a few bytes: %d events through %d, wait %v, ok %v; want the 10 of revision 2", len(events), through, wait, ok)
	}
	events, through, _, _ = h.after(0, "a/", 1<<20)
	if len(events) != 15 || through != 3 {
		t.Errorf("under a prefix: %d events through %d, want 15 through 3", len(events), through)
	}
	events, through, _, _ = h.after(0, "none/", 1)
	if len(events) != 0 || through != 3 {
		t.Errorf("under another prefix: %d events through %d, want none through 3", len(events), through)
	}
}

func TestHistoryWakes(t *testing.T) {
	var h history
	_, _, wait, ok := h.after(0, "", 1)
	if wait == nil || !ok {
		t.Fatalf("nothing new: wait %v, ok %v", wait, ok)
	}
	h.add(nil, 1) // a command without changes still moves the revision on
	<-wait
	_, through, _, _ := h.after(0, "", 1)
	if through != 1 {
		t.Errorf("through %d after revision 1", through)
	}
	_, _, wait, _ = h.after(1, "", 1)
	h.reset(5)
	<-wait
	if _, _, _, ok := h.after(1, "", 1); ok {
		t.Error("changes from before an installed state are said to be there")
	}
}
