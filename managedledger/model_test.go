package managedledger

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata/metadatatest"
)

// readerModel is one durable cursor, and the dumbest possible picture of it.
type readerModel struct {
	t       *testing.T
	acked   map[ledger.Position]bool
	saved   map[ledger.Position]bool // acknowledged at the last flush
	entries []ledger.Entry           // everything that was ever added, in order
	next    int                      // index of the next delivery
	r       *Reader
}

// TestReaderMatchesModel appends, reads, acknowledges, rewinds, seeks, breaks
// ledgers and crashes at random. Every entry that is not acknowledged is
// delivered, in order, with its bytes; nothing acknowledged and saved is
// delivered again.
func TestReaderMatchesModel(t *testing.T) {
	rng := testRand(t)
	for round := range 6 {
		b, meta := newBookies(), metadatatest.NewMemory(t)
		cfg := testConfig()
		cfg.MaxEntriesPerLedger = 5 + rng.IntN(20)
		cfg.CacheSizeMB = rng.IntN(2)
		f := testFactory(t, b, meta, cfg)
		m := mustOpen(t, f, topic)
		model := &readerModel{t: t, acked: map[ledger.Position]bool{}, saved: map[ledger.Position]bool{}}
		model.open(m)
		for step := range 400 {
			var what string
			switch k := rng.IntN(100); {
			case k < 30:
				what = "append"
				model.append(m, 1+rng.IntN(8))
			case k < 60:
				what = "read"
				model.read(1 + rng.IntN(10))
			case k < 80:
				what = "ack"
				model.ack(rng.IntN(max(model.next, 1)))
			case k < 84:
				what = "cumulative"
				model.cumulative(rng.IntN(max(model.next, 1)))
			case k < 88:
				what = "rewind"
				model.r.Rewind()
				model.next = 0
			case k < 91:
				what = "seek"
				model.seek(rng.IntN(max(len(model.entries), 1)))
			case k < 94:
				what = "break"
				id := m.Stats().CurrentLedger
				b.set(func() {
					b.breakAt[id] = breakage{ledger.EntryID(len(b.ledgers[id].entries) + rng.IntN(4)), rng.IntN(2) == 0}
				})
			case k < 97:
				what = "flush"
				if err := model.r.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
				model.save()
			case k < 99:
				what = "close and reopen"
				if err := m.Close(t.Context()); err != nil {
					t.Fatal(err)
				}
				model.save()
				m = mustOpen(t, f, topic)
				model.open(m)
			default:
				what = "crash"
				f = testFactory(t, b, meta, cfg)
				m = mustOpen(t, f, topic)
				model.crash(m)
			}
			if os.Getenv("TEST_STEPS") != "" {
				t.Logf("step %d: %s: %+v", step, what, model.r.Stats())
			}
			if err := model.check(m); err != nil {
				t.Fatalf("round %d step %d, after %s: %v", round, step, what, err)
			}
		}
		model.drain()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		if err := m.Close(ctx); err != nil {
			t.Error(err)
		}
		cancel()
		noReadsInFlight(t, f)
	}
}

func (w *readerModel) open(m *ManagedLedger) {
	r, err := m.OpenCursor(w.t.Context(), "sub", Earliest)
	if err != nil {
		w.t.Fatal(err)
	}
	w.r, w.next = r, 0
}

// crash opens the cursor at another owner: it may have forgotten what was not
// saved, but nothing that was.
func (w *readerModel) crash(m *ManagedLedger) {
	w.open(m)
	for _, e := range w.entries {
		got := w.r.IsAcked(e.Position)
		if w.saved[e.Position] && w.acked[e.Position] && !got {
			w.t.Fatalf("%v was acknowledged and saved, and is not any more", e.Position)
		}
		if got && !w.acked[e.Position] && !w.saved[e.Position] {
			w.t.Fatalf("%v was never acknowledged, and is now", e.Position)
		}
		w.acked[e.Position] = got
	}
	w.save()
}

func (w *readerModel) save() {
	clear(w.saved)
	maps.Copy(w.saved, w.acked)
}

func (w *readerModel) append(m *ManagedLedger, n int) {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprint("entry ", len(w.entries)+i)
	}
	for i, p := range appendAll(w.t, m, names...) {
		w.entries = append(w.entries, ledger.Entry{Position: p, Data: []byte(names[i])})
	}
}

// read takes one batch, waiting for it if there must be one.
func (w *readerModel) read(limit int) (n int) {
	for w.next < len(w.entries) && w.acked[w.entries[w.next].Position] {
		w.next++
	}
	deadline := time.After(20 * time.Second)
	for {
		b, err := w.r.TryRead(Limit{Entries: limit})
		if errors.Is(err, ErrWouldBlock) {
			if w.next == len(w.entries) {
				return 0
			}
			select {
			case <-w.r.Ready():
				continue
			case <-deadline:
				w.t.Fatalf("nothing is delivered, the model has %v; %+v", w.entries[w.next].Position, w.r.Stats())
			}
		}
		if err != nil {
			w.t.Fatal(err)
		}
		for _, e := range b.Entries {
			for w.next < len(w.entries) && w.acked[w.entries[w.next].Position] {
				w.next++
			}
			if w.next == len(w.entries) || w.entries[w.next].Position != e.Position || string(w.entries[w.next].Data) != string(e.Data) {
				w.t.Fatalf("delivered %v %q, the model is at %d of %d", e.Position, e.Data, w.next, len(w.entries))
			}
			w.next++
		}
		b.Release()
		return len(b.Entries)
	}
}

func (w *readerModel) ack(i int) {
	if i >= len(w.entries) {
		return
	}
	if err := w.r.Ack([]ledger.Position{w.entries[i].Position}); err != nil {
		w.t.Fatal(err)
	}
	w.acked[w.entries[i].Position] = true
}

func (w *readerModel) cumulative(i int) {
	if i >= len(w.entries) {
		return
	}
	err := w.r.AckCumulative(w.entries[i].Position)
	if errors.Is(err, ErrBehind) {
		return
	}
	if err != nil {
		w.t.Fatal(err)
	}
	for _, e := range w.entries[:i+1] {
		w.acked[e.Position] = true
	}
}

// seek goes to entry i, or, if that is trimmed, to the first that is left.
func (w *readerModel) seek(i int) {
	if i >= len(w.entries) {
		return
	}
	if err := w.r.Seek(w.t.Context(), w.entries[i].Position); err != nil {
		w.t.Fatal(err)
	}
	start := w.r.ReadPosition()
	if start.Before(w.entries[i].Position) {
		w.t.Fatalf("seek to %v went to %v", w.entries[i].Position, start)
	}
	w.next = 0
	for k, e := range w.entries {
		w.acked[e.Position] = e.Position.Before(start)
		if w.acked[e.Position] {
			w.next = k + 1
		}
	}
	w.save()
}

func (w *readerModel) check(m *ManagedLedger) error {
	var left int64
	for _, e := range w.entries {
		if !w.acked[e.Position] {
			left++
		}
	}
	if got := w.r.Backlog(); got != left {
		return fmt.Errorf("backlog %d, want %d", got, left)
	}
	if n := len(w.entries); n > 0 && m.Stats().Entries > 0 && m.LastConfirmed() != w.entries[n-1].Position {
		return fmt.Errorf("last confirmed %v, want %v", m.LastConfirmed(), w.entries[n-1].Position)
	}
	return nil
}

// drain reads and acknowledges everything that is left.
func (w *readerModel) drain() {
	w.r.Rewind()
	w.next = 0
	for w.read(16) > 0 {
	}
	for i := range w.entries {
		w.ack(i)
	}
	if got := w.r.Backlog(); got != 0 {
		w.t.Errorf("backlog %d after acknowledging everything", got)
	}
}
