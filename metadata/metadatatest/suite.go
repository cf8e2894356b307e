package metadatatest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/magnetar-io/magnetar/metadata"
)

// patience bounds every wait of the suite.
const patience = 30 * time.Second

// Run holds a store to the contract of [metadata.Store]. Each test works under a
// prefix of its own, so open may return the same store again.
func Run(t *testing.T, open func() metadata.Store) {
	tests := []struct {
		name string
		run  func(*testing.T, scope)
	}{
		{"get-and-put", testGetPut},
		{"conditions", testConditions},
		{"versions-never-repeat", testVersions},
		{"delete", testDelete},
		{"limits", testLimits},
		{"sequential", testSequential},
		{"range", testRange},
		{"large-range", testLargeRange},
		{"compare-and-set-counts-exactly", testConcurrentIncrements},
		{"ended-context", testEndedContext},
		{"watch", testWatch},
		{"watch-ends", testWatchEnds},
		{"slow-watch", testSlowWatch},
		{"revoke", testRevoke},
		{"attach-and-detach", testAttach},
		{"expiry", testExpiry},
		{"keep-alive", testKeepAlive},
		{"session", testSession},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			tt.run(t, scope{ctx, open(), "/" + tt.name + "/"})
		})
	}
}

// scope is what one test of the suite works with.
type scope struct {
	ctx    context.Context //nolint:containedctx // a test's bundle of arguments
	store  metadata.Store
	prefix string
}

func (s scope) put(t *testing.T, key, value string, if_ metadata.Version, lease metadata.LeaseID) metadata.Version {
	t.Helper()
	v, err := s.store.Put(s.ctx, s.prefix+key, []byte(value), if_, lease)
	if err != nil {
		t.Fatalf("Put(%q, if %d) = %v", s.prefix+key, if_, err)
	}
	return v
}

func (s scope) wantAbsent(t *testing.T, key string) {
	t.Helper()
	if kv, err := s.store.Get(s.ctx, s.prefix+key); !errors.Is(err, metadata.ErrNotFound) {
		t.Errorf("Get(%q) = %v, %v, want ErrNotFound", s.prefix+key, kv, err)
	}
}

func (s scope) wantValue(t *testing.T, key, value string) metadata.KV {
	t.Helper()
	kv, err := s.store.Get(s.ctx, s.prefix+key)
	if err != nil || string(kv.Value) != value || kv.Key != s.prefix+key {
		t.Errorf("Get(%q) = %v, %v, want value %q", s.prefix+key, kv, err, value)
	}
	return kv
}

// wantError checks the sentinel, and that the text names what an operator needs.
func wantError(t *testing.T, call string, err, want error, names ...string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s = %v, want %v", call, err, want)
		return
	}
	for _, name := range names {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("%s = %q, which does not name %q", call, err, name)
		}
	}
}

func testGetPut(t *testing.T, s scope) {
	s.wantAbsent(t, "a")
	v := s.put(t, "a", "one", metadata.AnyVersion, 0)
	if kv := s.wantValue(t, "a", "one"); kv.Version != v || v < 1 || kv.Lease != 0 {
		t.Errorf("Put = version %d, Get = %+v", v, kv)
	}
	if w := s.put(t, "a", "", metadata.AnyVersion, 0); w <= v {
		t.Errorf("second Put = version %d, after %d", w, v)
	}
	if kv := s.wantValue(t, "a", ""); len(kv.Value) != 0 {
		t.Errorf("empty value came back as %q", kv.Value)
	}
	_, err := s.store.Get(s.ctx, s.prefix+"none")
	wantError(t, "Get of an absent key", err, metadata.ErrNotFound, s.prefix+"none")
}

func testConditions(t *testing.T, s scope) {
	v := s.put(t, "a", "one", 0, 0)
	_, err := s.store.Put(s.ctx, s.prefix+"a", nil, 0, 0)
	wantError(t, "Put of a present key, if absent", err, metadata.ErrBadVersion, s.prefix+"a", "want version 0", fmt.Sprintf("found %d", v))
	_, err = s.store.Put(s.ctx, s.prefix+"b", nil, v, 0)
	wantError(t, "Put of an absent key, if at a version", err, metadata.ErrBadVersion, fmt.Sprintf("want version %d", v), "found 0")
	_, err = s.store.Put(s.ctx, s.prefix+"a", nil, v+1000000, 0)
	wantError(t, "Put at another version", err, metadata.ErrBadVersion)
	s.wantAbsent(t, "b")
	s.wantValue(t, "a", "one")
	w := s.put(t, "a", "two", v, 0)
	_, err = s.store.Put(s.ctx, s.prefix+"a", nil, v, 0)
	wantError(t, "Put at the version before", err, metadata.ErrBadVersion, fmt.Sprintf("found %d", w))
	s.wantValue(t, "a", "two")
}

func testVersions(t *testing.T, s scope) {
	seen := map[metadata.Version]bool{}
	for range 5 {
		v := s.put(t, "a", "x", 0, 0)
		if seen[v] {
			t.Fatalf("version %d given twice", v)
		}
		seen[v] = true
		if err := s.store.Delete(s.ctx, s.prefix+"a", v); err != nil {
			t.Fatal(err)
		}
	}
}

func testDelete(t *testing.T, s scope) {
	err := s.store.Delete(s.ctx, s.prefix+"a", metadata.AnyVersion)
	wantError(t, "Delete of an absent key", err, metadata.ErrNotFound, s.prefix+"a")
	err = s.store.Delete(s.ctx, s.prefix+"a", 7)
	wantError(t, "Delete of an absent key at a version", err, metadata.ErrNotFound)
	v := s.put(t, "a", "x", 0, 0)
	err = s.store.Delete(s.ctx, s.prefix+"a", v+1)
	wantError(t, "Delete at another version", err, metadata.ErrBadVersion, s.prefix+"a", fmt.Sprintf("found %d", v))
	if err := s.store.Delete(s.ctx, s.prefix+"a", v); err != nil {
		t.Errorf("Delete at the version = %v", err)
	}
	s.put(t, "a", "x", 0, 0)
	if err := s.store.Delete(s.ctx, s.prefix+"a", metadata.AnyVersion); err != nil {
		t.Errorf("Delete at any version = %v", err)
	}
	s.wantAbsent(t, "a")
}

func testLimits(t *testing.T, s scope) {
	pad := func(n int) string { return s.prefix + strings.Repeat("k", n-len(s.prefix)) }
	ctx, put := s.ctx, func(key string, value []byte, if_ metadata.Version) error {
		_, err := s.store.Put(s.ctx, key, value, if_, 0)
		return err
	}
	if err := put(pad(metadata.MaxKeyBytes), make([]byte, metadata.MaxValueBytes), 0); err != nil {
		t.Errorf("largest key and value: %v", err)
	}
	_, sequential := s.store.PutSequential(ctx, pad(metadata.MaxKeyBytes), nil)
	_, rangeZero := s.store.Range(ctx, s.prefix, "", 0)
	_, rangeMore := s.store.Range(ctx, s.prefix, "", metadata.MaxRange+1)
	_, short := s.store.GrantLease(ctx, metadata.MinTTL-time.Millisecond)
	_, long := s.store.GrantLease(ctx, metadata.MaxTTL+time.Millisecond)
	_, get := s.store.Get(ctx, "")
	_, watch := s.store.Watch(ctx, "\xff")
	for name, err := range map[string]error{
		"key-too-long":        put(pad(metadata.MaxKeyBytes+1), nil, 0),
		"value-too-long":      put(s.prefix+"v", make([]byte, metadata.MaxValueBytes+1), 0),
		"key-empty":           put("", nil, 0),
		"key-not-utf8":        put(s.prefix+"\xff", nil, 0),
		"condition-below-any": put(s.prefix+"c", nil, -2),
		"sequential-too-long": sequential,
		"range-of-none":       rangeZero,
		"range-of-too-many":   rangeMore,
		"ttl-too-short":       short,
		"ttl-too-long":        long,
		"get-empty":           get,
		"delete-empty":        s.store.Delete(ctx, "", metadata.AnyVersion),
		"watch-not-utf8":      watch,
	} {
		wantError(t, name, err, metadata.ErrInvalid)
	}
}

func testSequential(t *testing.T, s scope) {
	next := func(prefix string, want int64) {
		t.Helper()
		n, err := s.store.PutSequential(s.ctx, s.prefix+prefix, []byte(prefix))
		if err != nil || n != want {
			t.Fatalf("PutSequential(%q) = %d, %v, want %d", prefix, n, err, want)
		}
		s.wantValue(t, fmt.Sprintf("%s%019d", prefix, n), prefix)
	}
	next("a/", 1)
	next("a/", 2)
	next("b/", 1)
	for _, n := range []string{"0000000000000000001", "0000000000000000002"} {
		if err := s.store.Delete(s.ctx, s.prefix+"a/"+n, metadata.AnyVersion); err != nil {
			t.Fatal(err)
		}
	}
	next("a/", 3) // never again, even if deleted
	s.put(t, "a/0000000000000000004", "in the way", 0, 0)
	next("a/", 5)
	s.wantValue(t, "a/0000000000000000004", "in the way")

	var mu sync.Mutex
	given := map[int64]bool{}
	var writers sync.WaitGroup
	for range 8 {
		writers.Go(func() {
			for range 10 {
				n, err := s.store.PutSequential(s.ctx, s.prefix+"c/", nil)
				mu.Lock()
				if err != nil || given[n] {
					t.Errorf("PutSequential = %d, %v; given before: %v", n, err, given[n])
				}
				given[n] = true
				mu.Unlock()
			}
		})
	}
	writers.Wait()
	if want := slices.Collect(func(yield func(int64) bool) {
		for n := int64(1); n <= 80 && yield(n); n++ {
		}
	}); !slices.Equal(slices.Sorted(maps.Keys(given)), want) {
		t.Errorf("80 numbers given are %v", slices.Sorted(maps.Keys(given)))
	}
}

func testRange(t *testing.T, s scope) {
	for _, key := range []string{"b/2", "a", "b/1", "b", "c", "b/3", "b0"} {
		s.put(t, key, key, 0, 0)
	}
	tests := []struct {
		name, prefix, after string
		limit               int
		want                []string
	}{
		{"all", "", "", 1000, []string{"a", "b", "b/1", "b/2", "b/3", "b0", "c"}},
		{"prefix", "b/", "", 1000, []string{"b/1", "b/2", "b/3"}},
		{"limit", "b/", "", 2, []string{"b/1", "b/2"}},
		{"after", "b/", "b/1", 1000, []string{"b/2", "b/3"}},
		{"after-absent", "b/", "b/15", 1000, []string{"b/2", "b/3"}},
		{"after-last", "b/", "b/3", 1000, nil},
		{"after-beyond-prefix", "b/", "c", 1000, nil},
		{"after-below-prefix", "b/", "a", 1000, []string{"b/1", "b/2", "b/3"}},
		{"none", "d", "", 1000, nil},
		{"prefix-is-a-key", "b", "b", 1000, []string{"b/1", "b/2", "b/3", "b0"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			after := tt.after
			if after != "" {
				after = s.prefix + after
			}
			kvs, err := s.store.Range(s.ctx, s.prefix+tt.prefix, after, tt.limit)
			if err != nil {
				t.Fatal(err)
			}
			var keys []string
			for _, kv := range kvs {
				keys = append(keys, strings.TrimPrefix(kv.Key, s.prefix))
				if s.prefix+string(kv.Value) != kv.Key || kv.Version < 1 {
					t.Errorf("Range gave %+v", kv)
				}
			}
			if diff := cmp.Diff(tt.want, keys); diff != "" {
				t.Errorf("Range(%q, %q, %d): (-want +got)\n%s", tt.prefix, tt.after, tt.limit, diff)
			}
		})
	}
}

// testLargeRange ranges over more than fits into one message.
func testLargeRange(t *testing.T, s scope) {
	value := bytes.Repeat([]byte("v"), metadata.MaxValueBytes/2)
	for i := range 20 {
		if _, err := s.store.Put(s.ctx, fmt.Sprintf("%s%02d", s.prefix, i), value, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	for _, limit := range []int{1000, 20, 19, 9, 8, 7} {
		kvs, err := s.store.Range(s.ctx, s.prefix, "", limit)
		if err != nil || len(kvs) != min(limit, 20) {
			t.Errorf("Range with limit %d gave %d keys, %v", limit, len(kvs), err)
		}
	}
	all, err := metadata.List(s.ctx, s.store, s.prefix)
	if err != nil || len(all) != 20 || !bytes.Equal(all[19].Value, value) {
		t.Errorf("List gave %d keys, %v", len(all), err)
	}
}

func testConcurrentIncrements(t *testing.T, s scope) {
	const writers, each = 6, 15
	key := s.prefix + "counter"
	var running sync.WaitGroup
	for range writers {
		running.Go(func() {
			for done := 0; done < each; {
				kv, err := s.store.Get(s.ctx, key)
				if err != nil && !errors.Is(err, metadata.ErrNotFound) {
					t.Error(err)
					return
				}
				_, err = s.store.Put(s.ctx, key, append(bytes.Clone(kv.Value), 'x'), kv.Version, 0)
				switch {
				case err == nil:
					done++
				case !errors.Is(err, metadata.ErrBadVersion):
					t.Error(err)
					return
				}
			}
		})
	}
	running.Wait()
	s.wantValue(t, "counter", strings.Repeat("x", writers*each))
}

func testEndedContext(t *testing.T, s scope) {
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	_, get := s.store.Get(ctx, s.prefix+"a")
	_, put := s.store.Put(ctx, s.prefix+"a", nil, metadata.AnyVersion, 0)
	_, sequential := s.store.PutSequential(ctx, s.prefix, nil)
	_, list := s.store.Range(ctx, s.prefix, "", 1)
	_, grant := s.store.GrantLease(ctx, time.Minute)
	for name, err := range map[string]error{
		"Get": get, "Put": put, "PutSequential": sequential, "Range": list, "GrantLease": grant,
		"Delete": s.store.Delete(ctx, s.prefix+"a", metadata.AnyVersion), "KeepAlive": s.store.KeepAlive(ctx, 1),
	} {
		wantError(t, name, err, context.Canceled)
	}
	wantError(t, "Put", put, metadata.ErrUnavailable) // nothing was sent, so nothing was changed
	s.wantAbsent(t, "a")
}

func testSession(t *testing.T, s scope) {
	session, err := metadata.NewSession(s.ctx, s.store, time.Second, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	s.put(t, "mine", "x", 0, session.Lease())
	for start := time.Now(); time.Since(start) < 1500*time.Millisecond; time.Sleep(50 * time.Millisecond) {
		if !session.Valid() { // renewed beyond its TTL
			t.Fatal("session lost while it was renewed")
		}
	}
	s.wantValue(t, "mine", "x")
	if err := session.Close(s.ctx); err != nil {
		t.Fatal(err)
	}
	s.wantAbsent(t, "mine")
	if session.Valid() {
		t.Error("session valid after Close")
	}

	session, err = metadata.NewSession(s.ctx, s.store, time.Second, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.store.RevokeLease(s.ctx, session.Lease()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-session.Lost():
	case <-s.ctx.Done():
		t.Fatal("session whose lease was revoked is not lost")
	}
	if session.Valid() {
		t.Error("lost session is valid")
	}
	if err := session.Close(s.ctx); err != nil {
		t.Errorf("Close of a lost session = %v", err)
	}
}
