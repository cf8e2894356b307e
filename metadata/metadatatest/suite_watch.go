package metadatatest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/magnetar-io/magnetar/metadata"
)

// next takes events until one of type until, spelled "type key=value".
func (s scope) next(t *testing.T, events <-chan metadata.Event, n int) []string {
	t.Helper()
	var got []string
	for len(got) < n {
		select {
		case e, ok := <-events:
			if !ok {
				t.Fatalf("watch closed after %q", got)
			}
			text := e.Type.String()
			if e.KV.Key != "" {
				text += " " + strings.TrimPrefix(e.KV.Key, s.prefix)
			}
			if e.Type == metadata.EventPut {
				text += "=" + string(e.KV.Value)
			}
			got = append(got, text)
		case <-s.ctx.Done():
			t.Fatalf("watch said only %q, want %d events", got, n)
		}
	}
	return got
}

func testWatch(t *testing.T, s scope) {
	s.put(t, "w/a", "1", 0, 0)
	s.put(t, "w/b", "2", 0, 0)
	s.put(t, "x", "other", 0, 0)
	events, err := s.store.Watch(s.ctx, s.prefix+"w/")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"reset", "put w/a=1", "put w/b=2", "synced"}, s.next(t, events, 4)); diff != "" {
		t.Fatalf("first events: (-want +got)\n%s", diff)
	}
	lease, err := s.store.GrantLease(s.ctx, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	s.put(t, "w/c", "3", 0, lease)
	s.put(t, "x", "other", metadata.AnyVersion, 0)
	v := s.put(t, "w/a", "4", metadata.AnyVersion, 0)
	_, _ = s.store.Put(s.ctx, s.prefix+"w/a", []byte("refused"), 0, 0)
	if err := s.store.Delete(s.ctx, s.prefix+"w/b", metadata.AnyVersion); err != nil {
		t.Fatal(err)
	}
	if err := s.store.RevokeLease(s.ctx, lease); err != nil {
		t.Fatal(err)
	}
	want := []string{"put w/c=3", "put w/a=4", "delete w/b", "delete w/c"}
	if diff := cmp.Diff(want, s.next(t, events, 4)); diff != "" {
		t.Fatalf("changes: (-want +got)\n%s", diff)
	}

	empty, err := s.store.Watch(s.ctx, s.prefix+"none/")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"reset", "synced"}, s.next(t, empty, 2)); diff != "" {
		t.Fatalf("watch of nothing: (-want +got)\n%s", diff)
	}
	second, err := s.store.Watch(s.ctx, s.prefix+"w/")
	if err != nil {
		t.Fatal(err)
	}
	s.next(t, second, 1)
	if e := <-second; e.KV.Version != v || e.KV.Key != s.prefix+"w/a" {
		t.Errorf("second watch told %+v, want version %d", e, v)
	}
}

func testWatchEnds(t *testing.T, s scope) {
	ctx, cancel := context.WithCancel(s.ctx)
	events, err := s.store.Watch(ctx, s.prefix)
	if err != nil {
		t.Fatal(err)
	}
	s.next(t, events, 2)
	cancel()
	for {
		select {
		case _, ok := <-events:
			if !ok {
				return
			}
		case <-s.ctx.Done():
			t.Fatal("watch not closed after its context ended")
		}
	}
}

// testSlowWatch writes more than any history keeps while nobody reads, and then
// wants the watch to arrive at what is there.
func testSlowWatch(t *testing.T, s scope) {
	events, err := s.store.Watch(s.ctx, s.prefix)
	if err != nil {
		t.Fatal(err)
	}
	value := bytes.Repeat([]byte("v"), metadata.MaxValueBytes)
	for i := range 60 {
		if _, err := s.store.Put(s.ctx, fmt.Sprintf("%s%d", s.prefix, i%7), value, metadata.AnyVersion, 0); err != nil {
			t.Fatal(err)
		}
		if i%7 == 3 {
			if err := s.store.Delete(s.ctx, fmt.Sprintf("%s%d", s.prefix, i%7), metadata.AnyVersion); err != nil {
				t.Fatal(err)
			}
		}
	}
	last := s.put(t, "end", "x", 0, 0)
	seen, resets := map[string]metadata.Version{}, 0
	for synced := false; !synced || seen[s.prefix+"end"] != last; {
		select {
		case e := <-events:
			switch e.Type {
			case metadata.EventReset:
				resets++
				clear(seen)
				synced = false
			case metadata.EventPut:
				seen[e.KV.Key] = e.KV.Version
			case metadata.EventDelete:
				delete(seen, e.KV.Key)
			case metadata.EventSynced:
				synced = true
			}
		case <-s.ctx.Done():
			t.Fatalf("slow watch did not arrive; it knows %v", seen)
		}
	}
	kvs, err := s.store.Range(s.ctx, s.prefix, "", metadata.MaxRange)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]metadata.Version{}
	for _, kv := range kvs {
		want[kv.Key] = kv.Version
	}
	if diff := cmp.Diff(want, seen); diff != "" {
		t.Errorf("slow watch after %d resets: (-want +got)\n%s", resets, diff)
	}
	if resets < 2 {
		t.Errorf("slow watch was reset %d times, want more than its start", resets)
	}
}

func (s scope) grant(t *testing.T, ttl time.Duration) metadata.LeaseID {
	t.Helper()
	id, err := s.store.GrantLease(s.ctx, ttl)
	if err != nil || id < 1 {
		t.Fatalf("GrantLease(%v) = %d, %v", ttl, id, err)
	}
	return id
}

func testRevoke(t *testing.T, s scope) {
	lease := s.grant(t, time.Minute)
	if other := s.grant(t, time.Minute); other == lease {
		t.Errorf("lease %d granted twice", lease)
	}
	s.put(t, "a", "x", 0, lease)
	s.put(t, "b", "x", 0, 0)
	if kv := s.wantValue(t, "a", "x"); kv.Lease != lease {
		t.Errorf("key attached to lease %d names lease %d", lease, kv.Lease)
	}
	if err := s.store.RevokeLease(s.ctx, lease); err != nil {
		t.Fatal(err)
	}
	s.wantAbsent(t, "a")
	s.wantValue(t, "b", "x")
	if err := s.store.RevokeLease(s.ctx, lease); err != nil {
		t.Errorf("second RevokeLease = %v", err)
	}
	wantError(t, "KeepAlive of a revoked lease", s.store.KeepAlive(s.ctx, lease), metadata.ErrLeaseExpired, fmt.Sprint(lease))
	_, err := s.store.Put(s.ctx, s.prefix+"a", nil, 0, lease)
	wantError(t, "Put with a revoked lease", err, metadata.ErrLeaseExpired, s.prefix+"a", fmt.Sprint(lease))
	_, err = s.store.Put(s.ctx, s.prefix+"b", nil, 0, lease)
	wantError(t, "Put with a bad version and a revoked lease", err, metadata.ErrBadVersion)
	s.wantAbsent(t, "a")
}

func testAttach(t *testing.T, s scope) {
	one, two := s.grant(t, time.Minute), s.grant(t, time.Minute)
	s.put(t, "kept", "x", 0, one)
	s.put(t, "kept", "y", metadata.AnyVersion, 0) // detaches
	s.put(t, "moved", "x", 0, one)
	s.put(t, "moved", "y", metadata.AnyVersion, two)
	s.put(t, "deleted", "x", 0, one)
	if err := s.store.Delete(s.ctx, s.prefix+"deleted", metadata.AnyVersion); err != nil {
		t.Fatal(err)
	}
	s.put(t, "deleted", "again", 0, 0)
	s.put(t, "gone", "x", 0, one)
	s.put(t, "gone", "y", metadata.AnyVersion, one)
	if err := s.store.RevokeLease(s.ctx, one); err != nil {
		t.Fatal(err)
	}
	s.wantValue(t, "kept", "y")
	s.wantValue(t, "moved", "y")
	s.wantValue(t, "deleted", "again")
	s.wantAbsent(t, "gone")
	if err := s.store.RevokeLease(s.ctx, two); err != nil {
		t.Fatal(err)
	}
	s.wantAbsent(t, "moved")
}

func testExpiry(t *testing.T, s scope) {
	events, err := s.store.Watch(s.ctx, s.prefix)
	if err != nil {
		t.Fatal(err)
	}
	s.next(t, events, 2)
	start := time.Now()
	const ttl = 300 * time.Millisecond
	lease := s.grant(t, ttl)
	s.put(t, "a", "x", 0, lease)
	s.put(t, "b", "x", 0, lease)
	want := []string{"put a=x", "put b=x", "delete a", "delete b"}
	if diff := cmp.Diff(want, s.next(t, events, 4)); diff != "" {
		t.Fatalf("changes: (-want +got)\n%s", diff)
	}
	if took := time.Since(start); took < ttl {
		t.Errorf("lease of %v expired after %v", ttl, took)
	}
	wantError(t, "KeepAlive of an expired lease", s.store.KeepAlive(s.ctx, lease), metadata.ErrLeaseExpired)
	s.wantAbsent(t, "a")
}

func testKeepAlive(t *testing.T, s scope) {
	const ttl = time.Second
	lease := s.grant(t, ttl)
	s.put(t, "a", "x", 0, lease)
	start := time.Now()
	for time.Since(start) < 3*ttl/2 {
		sent := time.Now()
		if err := s.store.KeepAlive(s.ctx, lease); err != nil {
			t.Fatal(err)
		}
		for time.Since(sent) < ttl/10 { // not renewed for a while, and there all the same
			if _, err := s.store.Get(s.ctx, s.prefix+"a"); err != nil && time.Since(sent) < ttl {
				t.Fatalf("%v after a renewal: %v", time.Since(sent), err)
			}
		}
	}
	for { // no renewals any more
		_, err := s.store.Get(s.ctx, s.prefix+"a")
		if errors.Is(err, metadata.ErrNotFound) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}
