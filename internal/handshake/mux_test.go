package handshake

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newMux(t *testing.T, self Self) *Mux {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := NewMux(l, func() Self { return self }, slog.New(slog.DiscardHandler))
	served := make(chan error, 1)
	go func() { served <- m.Serve() }()
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	return m
}

func shortCtx(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestDialReachesTheWantedService(t *testing.T) {
	server := Self{Cluster: "c", ClusterID: "id", Node: "b1@x"}
	m := newMux(t, server)
	l3 := m.Listener(Raft, 3)
	l4 := m.Listener(Raft, 4)
	ls := m.Listener(Storage, 0)
	for _, tt := range []struct {
		name string
		l    net.Listener
		to   Target
	}{
		{"raft-3", l3, Target{"b1@x", Raft, 3}},
		{"raft-4", l4, Target{"", Raft, 4}},
		{"storage", ls, Target{"", Storage, 0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, peer, err := Dial(shortCtx(t), m.Addr().String(), Self{Cluster: "c", Node: "b2@y"}, tt.to)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if peer != server {
				t.Errorf("peer is %v, want %v", peer, server)
			}
			s, err := tt.l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			// Both directions, at once behind the hello: nothing was read too far.
			if _, err := c.Write([]byte("ping")); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Write([]byte("pong")); err != nil {
				t.Fatal(err)
			}
			for conn, want := range map[net.Conn]string{s: "ping", c: "pong"} {
				b := make([]byte, 4)
				if _, err := io.ReadFull(conn, b); err != nil || string(b) != want {
					t.Errorf("read %q, %v, want %q", b, err, want)
				}
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	m := newMux(t, Self{Cluster: "c", ClusterID: "id-1", Node: "b1@x"})
	m.Listener(Raft, 0)
	tests := []struct {
		name string
		self Self
		to   Target
		want []string // parts of the sentence; none = accepted
	}{
		{"other-cluster-name", Self{"d", "", "b2@y"}, Target{"", Raft, 0}, []string{`"c"`, `"d"`, "b1@x", "b2@y", "names differ"}},
		{"other-cluster-id", Self{"c", "id-2", "b2@y"}, Target{"", Raft, 0}, []string{"id-1", "id-2", "formatted apart"}},
		{"old-identity", Self{"c", "id-1", "b2@y"}, Target{"b1@old", Raft, 0}, []string{"b1@old", "b1@x", "b2@y"}},
		{"unknown-group", Self{"c", "id-1", "b2@y"}, Target{"", Raft, 9}, []string{"raft group 9", "b1@x", "b2@y"}},
		{"id-not-known-yet", Self{"c", "", "b2@y"}, Target{"b1@x", Raft, 0}, nil},
		{"same-id", Self{"c", "id-1", "b2@y"}, Target{"", Raft, 0}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, _, err := Dial(shortCtx(t), m.Addr().String(), tt.self, tt.to)
			if len(tt.want) == 0 {
				if err != nil {
					t.Fatal(err)
				}
				c.Close()
				return
			}
			if _, ok := errors.AsType[*RefusedError](err); !ok {
				t.Fatalf("Dial = %v, want a RefusedError", err)
			}
			for _, part := range tt.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("refusal %q does not name %q", err, part)
				}
			}
		})
	}
}

func TestProbe(t *testing.T) {
	m := newMux(t, Self{Cluster: "c", ClusterID: "id-1", Node: "b1@x"})
	self := Self{Cluster: "c", Node: "b2@y"}
	if peer, err := Probe(shortCtx(t), m.Addr().String(), self, "b1@x"); err != nil || peer.Node != "b1@x" {
		t.Errorf("Probe of the right node = %v, %v", peer, err)
	}
	var refused *RefusedError
	if _, err := Probe(shortCtx(t), m.Addr().String(), self, "b1@old"); !errors.As(err, &refused) {
		t.Errorf("Probe of an old identity = %v, want a RefusedError", err)
	}
}

func TestOtherVersionIsToldWhich(t *testing.T) {
	m := newMux(t, Self{Cluster: "c", Node: "b1@x"})
	c, err := net.Dial("tcp", m.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := c.Write([]byte("MGNT\x63\x01\x00\x00")); err != nil {
		t.Fatal(err)
	}
	kind, body, err := readFrame(c)
	if err != nil || kind != kindRefusal {
		t.Fatalf("answer is kind %d, %v, want a refusal", kind, err)
	}
	if reason, _ := parseRefusal(body); !strings.Contains(reason, "you speak 99") {
		t.Errorf("refusal %q does not name version 99", reason)
	}
}

func TestStrangerIsClosed(t *testing.T) {
	m := newMux(t, Self{Cluster: "c", Node: "b1@x"})
	c, err := net.Dial("tcp", m.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := c.Write([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(c); len(b) > 0 || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a stranger got %q, %v, want a closed connection", b, err)
	}
}

func TestCloseEndsSilentHellosAndAccepts(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := NewMux(l, func() Self { return Self{Cluster: "c", Node: "n"} }, slog.New(slog.DiscardHandler))
	served := make(chan error, 1)
	go func() { served <- m.Serve() }()
	raft := m.Listener(Raft, 1)
	silent, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	start := time.Now()
	accepted := make(chan error, 1)
	go func() { _, err := raft.Accept(); accepted <- err }()
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-accepted; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept after Close = %v, want net.ErrClosed", err)
	}
	if err := <-served; err != nil {
		t.Errorf("Serve after Close = %v, want nil", err)
	}
	if took := time.Since(start); took >= HelloTimeout {
		t.Errorf("Close took %v: it waited for a silent hello", took)
	}
	if _, err := m.Listener(Raft, 1).Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a listener of a closed Mux accepts: %v", err)
	}
}

func TestDialHonoursContext(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // never answers
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, _, err = Dial(ctx, l.Addr().String(), Self{Cluster: "c", Node: "n"}, Target{Service: Storage})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Dial of a silent peer = %v, want the context's error", err)
	}
}

func TestRouteCanBeRegisteredAgainAfterClose(t *testing.T) {
	m := newMux(t, Self{Cluster: "c", Node: "b1@x"})
	first := m.Listener(Raft, 1)
	first.Close()
	second := m.Listener(Raft, 1)
	c, _, err := Dial(shortCtx(t), m.Addr().String(), Self{Cluster: "c", Node: "n"}, Target{"", Raft, 1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := second.Accept()
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	if _, err := first.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed listener accepts: %v", err)
	}
}
