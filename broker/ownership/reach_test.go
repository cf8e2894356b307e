package ownership

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/metadata/metadatatest"
)

func TestLookupDoesNotNameABrokerThatIsGone(t *testing.T) {
	store := metadatatest.NewMemory(t)
	bootstrap(t, store)
	owner := start(t, store, "broker-1", nil)
	acquire(t, owner, myTopic)
	s := start(t, store, "broker-2", nil)
	eventually(t, "broker-2 knows the owner", func() bool {
		a, err := s.Lookup(t.Context(), topic(t, myTopic))
		return err == nil && a.Broker == info("broker-1")
	})

	var gone atomic.Bool
	var asked atomic.Int32
	s.reach.listens = func(_ context.Context, b BrokerInfo) error {
		asked.Add(1)
		if b != info("broker-1") {
			t.Errorf("asked for %v, want broker-1", b)
		}
		if gone.Load() {
			return errors.New("refused")
		}
		return nil
	}
	for range 100 {
		if a, err := s.Lookup(t.Context(), topic(t, myTopic)); err != nil || a.Broker != info("broker-1") {
			t.Fatalf("Lookup = %v, %v, want broker-1", a, err)
		}
	}
	if n := asked.Load(); n < 1 || n > 10 {
		t.Errorf("100 lookups looked %d times whether the owner is there, want about one a second", n)
	}
	gone.Store(true)
	eventually(t, "the lookup notices that the owner is gone", func() bool {
		_, err := s.Lookup(t.Context(), topic(t, myTopic))
		return errors.Is(err, ErrNotReady) && strings.Contains(err.Error(), "broker-1")
	})
	if err := owner.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "broker-2 takes the topic", func() bool {
		a, err := s.Lookup(t.Context(), topic(t, myTopic))
		return err == nil && a.Mine
	})
}

func TestListens(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := BrokerInfo{ID: "b", WebServiceURL: "http://" + l.Addr().String()}
	if err := Listens(t.Context(), b); err != nil {
		t.Errorf("Listens = %v of a broker that does", err)
	}
	l.Close()
	if err := Listens(t.Context(), b); err == nil {
		t.Error("Listens = nil where nobody listens")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Listens(ctx, b); err != nil {
		t.Errorf("Listens = %v without an answer; want nil, as silence proves nothing", err)
	}
}

func TestReachForgets(t *testing.T) {
	r := reach{listens: func(context.Context, BrokerInfo) error { return nil }}
	for _, id := range []string{"a", "b", "c"} {
		r.keep(info(id), look{at: time.Now().Add(-time.Minute)})
	}
	if err := r.check(t.Context(), info("d")); err != nil {
		t.Fatal(err)
	}
	if len(r.looks) != 1 {
		t.Errorf("%d looks are kept, want the last one: %v", len(r.looks), r.looks)
	}
}
