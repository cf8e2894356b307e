package client

import (
	"errors"
	"log/slog"
	"sync"
	"testing"

	"github.com/magnetar-io/magnetar/internal/handshake"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
)

// A Create that was answered while Close ran must not leave a writer whose
// appends nobody ever answers.
func TestWriterMadeWhileClosing(t *testing.T) {
	pool := rpc.NewPool(handshake.Self{Cluster: "c", Node: "n"}, nil, slog.New(slog.DiscardHandler))
	defer pool.Close()
	c := New(pool, nil, slog.New(slog.DiscardHandler), nil)
	l, err := c.lane(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	w, err := l.writer(1)
	if w != nil || !errors.Is(err, ledger.ErrUnavailable) {
		t.Errorf("a writer of a closed client: %v, %v, want a refusal", w, err)
	}
}

// Close waits for what was appended before it, never for the refusals after it.
func TestAppendsBesideClose(t *testing.T) {
	for range 50 {
		pool := rpc.NewPool(handshake.Self{Cluster: "c", Node: "n"}, nil, slog.New(slog.DiscardHandler))
		c := New(pool, nil, slog.New(slog.DiscardHandler), nil)
		l, err := c.lane(1)
		if err != nil {
			t.Fatal(err)
		}
		w, err := l.writer(1)
		if err != nil {
			t.Fatal(err)
		}
		w.Abandon()
		var appends sync.WaitGroup
		for range 2 {
			appends.Go(func() {
				for range 50 {
					w.Append([]byte("x"), func(ledger.EntryID, error) {})
				}
			})
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		appends.Wait()
		_ = pool.Close()
	}
}
