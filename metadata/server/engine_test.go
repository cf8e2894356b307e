package server

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata"
)

// TestNothingIsAnsweredWithoutABarrier: a node that was the leader a moment ago
// must not answer from what it has.
func TestNothingIsAnsweredWithoutABarrier(t *testing.T) {
	bubble(t, func(t *testing.T, e *Engine, g *loneGroup) {
		id := grant(t, e, time.Minute)
		deposed := &deposedError{}
		g.mu.Lock()
		g.barrier = deposed
		g.mu.Unlock()
		ctx := t.Context()
		_, get := e.Get(ctx, "/a")
		_, _, ranged := e.Range(ctx, "", "", 1)
		_, revision := e.Revision(ctx)
		for name, err := range map[string]error{
			"Get": get, "Range": ranged, "Revision": revision, "KeepAlive": e.KeepAlive(ctx, id),
			"Watch": e.Watch(ctx, "", false, 0, func(Told) error { return errors.New("told") }),
		} {
			if !errors.Is(err, deposed) {
				t.Errorf("%s without a barrier = %v", name, err)
			}
		}
	})
}

type deposedError struct{}

func (*deposedError) Error() string { return "not the leader" }

func TestChangeIsRefusedBeforeProposing(t *testing.T) {
	bubble(t, func(t *testing.T, e *Engine, g *loneGroup) {
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		put := &Command{Kind: KindPut, Key: "/a", If: metadata.AnyVersion}
		if _, err := e.Change(ended, put); !errors.Is(err, context.Canceled) || !errors.Is(err, ledger.ErrUnavailable) {
			t.Errorf("change that came too late = %v", err)
		}
		e.proposed.Store(MaxProposedBytes)
		if _, err := e.Change(t.Context(), put); !errors.Is(err, ledger.ErrUnavailable) {
			t.Errorf("change beyond the bytes that may wait = %v", err)
		}
		e.proposed.Store(0)
		full := g.machine.State()
		full.bytes = MaxStateBytes
		g.machine.state.Store(&full)
		if _, err := e.Change(t.Context(), put); !errors.Is(err, ledger.ErrUnavailable) || !strings.Contains(err.Error(), "/a") {
			t.Errorf("put into a full store = %v", err)
		}
		if n := g.proposed(KindPut); n != 0 {
			t.Errorf("%d puts were proposed", n)
		}
		if err := e.admit(t.Context(), &Command{Kind: KindDelete, Key: "/a", If: metadata.AnyVersion}); err != nil {
			t.Errorf("delete from a full store = %v, want it tried", err)
		}
		if n := e.proposed.Load(); n != 0 {
			t.Errorf("%d bytes counted as proposed with nothing under way", n)
		}
	})
}

// TestWatchBeats: silence would be taken for death.
func TestWatchBeats(t *testing.T) {
	bubble(t, func(t *testing.T, e *Engine, _ *loneGroup) {
		ctx, cancel := context.WithCancel(t.Context())
		start := time.Now()
		var at []time.Duration
		done := make(chan error, 1)
		go func() {
			done <- e.Watch(ctx, "/w/", false, 0, func(told Told) error {
				if len(told.Events) == 0 && !told.Reset {
					at = append(at, time.Since(start))
				}
				return nil
			})
		}()
		time.Sleep(3*WatchBeat + 1)
		synctest.Wait()
		if len(at) != 3 || at[0] != WatchBeat {
			t.Errorf("beats at %v, want one each %v", at, WatchBeat)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Watch = %v", err)
		}
	})
}

func TestWatchEndsWithTheLeadership(t *testing.T) {
	bubble(t, func(t *testing.T, e *Engine, g *loneGroup) {
		done := make(chan error, 1)
		go func() { done <- e.Watch(t.Context(), "", false, 0, func(Told) error { return nil }) }()
		synctest.Wait()
		g.changed(false)
		if err := <-done; !errors.Is(err, metadata.ErrUnavailable) {
			t.Errorf("Watch = %v, want ErrUnavailable", err)
		}
	})
}

// TestWatchResumes continues where another leader's watch stopped, and starts
// over where it cannot.
func TestWatchResumes(t *testing.T) {
	bubble(t, func(t *testing.T, e *Engine, g *loneGroup) {
		var versions []metadata.Version
		for _, key := range []string{"/w/a", "/x", "/w/b", "/w/c"} {
			r, err := e.Change(t.Context(), &Command{Kind: KindPut, Key: key, If: metadata.AnyVersion})
			if err != nil {
				t.Fatal(err)
			}
			versions = append(versions, r.Version)
		}
		enough := errors.New("enough")
		first := func(from metadata.Version) (got Told) {
			err := e.Watch(t.Context(), "/w/", true, from, func(told Told) error {
				got = told
				return enough
			})
			if !errors.Is(err, enough) {
				t.Fatal(err)
			}
			return got
		}
		if got := first(versions[1]); got.Reset || len(got.Events) != 2 || got.Events[0].KV.Key != "/w/b" || got.Through != versions[3] {
			t.Errorf("resumed after revision %d: %+v", versions[1], got)
		}
		if got := first(versions[3] + 100); !got.Reset || !got.Synced || len(got.Events) != 3 {
			t.Errorf("resumed after a revision of another store: %+v", got)
		}
		g.machine.history.reset(versions[3])
		if got := first(versions[1]); !got.Reset || len(got.Events) != 3 {
			t.Errorf("resumed after a revision that is not kept: %+v", got)
		}
	})
}
