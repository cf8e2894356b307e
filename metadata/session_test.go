package metadata_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/metadata/metadatatest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	ttl = 6 * time.Second

	// reach is how long one renewal carries a session: its TTL less the part
	// given up because clocks differ.
	reach = ttl - ttl/100
)

// faultyStore fails or holds up renewals.
type faultyStore struct {
	metadata.Store

	mu      sync.Mutex
	request time.Duration // how long a renewal takes to get there
	reply   time.Duration // how long its answer takes to come back
	deaf    bool          // answers come even after the caller's context ended
	fail    error
	grants  time.Duration // how long the answer to a grant takes
	renewed int
}

func (f *faultyStore) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (f *faultyStore) GrantLease(ctx context.Context, ttl time.Duration) (metadata.LeaseID, error) {
	f.mu.Lock()
	wait := f.grants
	f.mu.Unlock()
	id, err := f.Store.GrantLease(ctx, ttl)
	if err := sleep(ctx, wait); err != nil {
		return 0, err
	}
	return id, err
}

func (f *faultyStore) KeepAlive(ctx context.Context, id metadata.LeaseID) error {
	f.mu.Lock()
	request, reply, fail, deaf := f.request, f.reply, f.fail, f.deaf
	f.renewed++
	f.mu.Unlock()
	if err := sleep(ctx, request); err != nil {
		return err
	}
	if fail != nil {
		return fail
	}
	err := f.Store.KeepAlive(ctx, id)
	if deaf {
		ctx = context.WithoutCancel(ctx)
	}
	if err := sleep(ctx, reply); err != nil {
		return err
	}
	return err
}

// exists asks the store, without renewing anything.
func exists(t *testing.T, s metadata.Store, key string) bool {
	t.Helper()
	_, err := s.Get(t.Context(), key)
	if err != nil && !errors.Is(err, metadata.ErrNotFound) {
		t.Fatal(err)
	}
	return err == nil
}

// inSession runs f in a bubble, with a session that holds the key "/mine".
func inSession(t *testing.T, f func(t *testing.T, store *faultyStore, s *metadata.Session)) {
	synctest.Test(t, func(t *testing.T) {
		store := &faultyStore{Store: metadatatest.NewMemory(t)}
		s, err := metadata.NewSession(t.Context(), store, ttl, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := store.Put(t.Context(), "/mine", nil, 0, s.Lease()); err != nil {
			t.Fatal(err)
		}
		f(t, store, s)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := s.Close(ctx); err != nil {
			t.Errorf("Close = %v", err)
		}
		if s.Valid() {
			t.Error("session valid after Close")
		}
	})
}

func lost(s *metadata.Session) bool {
	select {
	case <-s.Lost():
		return true
	default:
		return false
	}
}

// watchOver checks every millisecond of d that a valid session's lease exists,
// and returns how long the session stayed valid.
func watchOver(t *testing.T, store metadata.Store, s *metadata.Session, d time.Duration) (valid time.Duration) {
	t.Helper()
	was := true
	for start := time.Now(); time.Since(start) < d; time.Sleep(time.Millisecond) {
		is := s.Valid()
		if is && !exists(t, store, "/mine") {
			t.Fatalf("session valid without its lease, after %v", time.Since(start))
		}
		if is && !was {
			t.Fatalf("session valid again after %v", time.Since(start))
		}
		if was = is; is {
			valid = time.Since(start)
		}
	}
	return valid
}

func TestSessionIsRenewed(t *testing.T) {
	inSession(t, func(t *testing.T, store *faultyStore, s *metadata.Session) {
		time.Sleep(time.Hour)
		if !s.Valid() || lost(s) || !exists(t, store, "/mine") {
			t.Errorf("after an hour: valid %v, lost %v, key there %v", s.Valid(), lost(s), exists(t, store, "/mine"))
		}
		if want := int(3 * time.Hour / ttl); store.renewed < want-1 || store.renewed > want+1 {
			t.Errorf("%d renewals in an hour, want %d", store.renewed, want)
		}
	})
}

func TestSessionEndsWithoutRenewals(t *testing.T) {
	inSession(t, func(t *testing.T, store *faultyStore, s *metadata.Session) {
		time.Sleep(ttl / 3) // the first renewal is sent now
		synctest.Wait()
		store.set(func() { store.fail = errors.New("no way through") })
		if valid := watchOver(t, store, s, 2*ttl); valid > reach || valid < reach-2*time.Millisecond {
			t.Errorf("valid for %v after the last renewal was sent, want %v", valid, reach)
		}
		if !lost(s) {
			t.Error("session over, but Lost is open")
		}
	})
}

// TestSessionCountsFromSending: the store restarts the TTL when a renewal
// arrives; how long the way there and back takes must not matter.
func TestSessionCountsFromSending(t *testing.T) {
	for _, way := range []struct {
		name           string
		request, reply time.Duration
	}{
		{"slow-request", 1900 * time.Millisecond, 0},
		{"slow-reply", 0, 1900 * time.Millisecond},
		{"slow-both", 900 * time.Millisecond, 900 * time.Millisecond},
	} {
		t.Run(way.name, func(t *testing.T) {
			inSession(t, func(t *testing.T, store *faultyStore, s *metadata.Session) {
				store.set(func() { store.request, store.reply = way.request, way.reply })
				time.Sleep(ttl / 3)
				synctest.Wait() // a renewal is sent now, and will be granted
				sent := time.Now()
				time.Sleep(way.request + way.reply)
				synctest.Wait()
				store.set(func() { store.fail = errors.New("no way through") })
				watchOver(t, store, s, reach-time.Since(sent)-time.Millisecond)
				if !s.Valid() {
					t.Errorf("session over %v after its renewal was sent", time.Since(sent))
				}
				time.Sleep(time.Millisecond)
				if s.Valid() {
					t.Errorf("session valid %v after its last renewal was sent", time.Since(sent))
				}
			})
		})
	}
}

// TestSessionStaysOver is what happens to a process that is stopped while a
// granted renewal waits in its socket: it was seen to be over, so it stays so,
// though its lease lives.
func TestSessionStaysOver(t *testing.T) {
	inSession(t, func(t *testing.T, store *faultyStore, s *metadata.Session) {
		store.set(func() { store.reply, store.deaf = 5*time.Second, true })
		time.Sleep(ttl / 3)
		synctest.Wait() // sent, and granted
		watchOver(t, store, s, 5*time.Second+ttl/10)
		if s.Valid() || !lost(s) {
			t.Errorf("after the late answer: valid %v, lost %v", s.Valid(), lost(s))
		}
	})
}

// TestSessionSurvivesLostRenewals is what the three renewals per TTL are for.
func TestSessionSurvivesLostRenewals(t *testing.T) {
	inSession(t, func(t *testing.T, store *faultyStore, s *metadata.Session) {
		for range 20 {
			store.set(func() { store.reply = time.Hour })
			time.Sleep(ttl / 3)
			store.set(func() { store.reply = 0 })
			time.Sleep(2 * ttl / 3)
			if !s.Valid() {
				t.Fatal("session lost although two of three renewals got through")
			}
		}
	})
}

func TestSessionEndedByTheStore(t *testing.T) {
	inSession(t, func(t *testing.T, store *faultyStore, s *metadata.Session) {
		if err := store.RevokeLease(t.Context(), s.Lease()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(ttl/3 + time.Millisecond)
		if s.Valid() || !lost(s) {
			t.Errorf("a third of the TTL after the lease was revoked: valid %v, lost %v", s.Valid(), lost(s))
		}
	})
}

func TestSessionOutlivesALeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := metadatatest.NewMemory(t)
		s, err := metadata.NewSession(t.Context(), store, ttl, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		for range 10 {
			time.Sleep(time.Second)
			store.ChangeLeader()
		}
		if !s.Valid() {
			t.Error("session lost by changes of leader")
		}
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// TestSlowGrantIsRenewedFirst: a grant whose answer took most of the TTL is no
// base to stand on.
func TestSlowGrantIsRenewedFirst(t *testing.T) {
	for _, wait := range []time.Duration{ttl / 2, 2 * ttl} {
		synctest.Test(t, func(t *testing.T) {
			store := &faultyStore{Store: metadatatest.NewMemory(t), grants: wait}
			time.AfterFunc(wait, func() { store.set(func() { store.grants = 0 }) })
			s, err := metadata.NewSession(t.Context(), store, ttl, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			if !s.Valid() {
				t.Errorf("session new and over after a grant that took %v", wait)
			}
			time.Sleep(10 * ttl)
			if !s.Valid() {
				t.Errorf("session lost after a grant that took %v", wait)
			}
			if err := s.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestSessionNeedsAnsweringStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &faultyStore{Store: metadatatest.NewMemory(t), grants: time.Hour}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := metadata.NewSession(ctx, store, ttl, slog.New(slog.DiscardHandler)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("NewSession = %v, want DeadlineExceeded", err)
		}
	})
}

func BenchmarkSessionValid(b *testing.B) {
	s, err := metadata.NewSession(b.Context(), metadatatest.NewMemory(b), time.Minute, slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close(b.Context())
	b.ReportAllocs()
	for b.Loop() {
		s.Valid()
	}
}
