package client_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"testing"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/bookie/client"
	"github.com/magnetar-io/magnetar/internal/handshake"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata/metadatatest"
)

// fakeBookie leads one ledger group and does with append streams what a test
// says. It counts streams from 0.
type fakeBookie struct {
	bookiepb.UnimplementedLedgersServer
	rpc.UnimplementedClusterServer
	addr   string
	stream func(n int, s bookiepb.Ledgers_AppendServer) error

	mu      sync.Mutex
	streams int
}

func (f *fakeBookie) Status(context.Context, *rpc.StatusRequest) (*rpc.StatusReply, error) {
	return &rpc.StatusReply{Groups: []*rpc.GroupStatus{{Id: 0}, {Id: 1, State: "leader", LeaderAddress: f.addr, Term: 1}}}, nil
}

func (f *fakeBookie) Create(context.Context, *bookiepb.CreateRequest) (*bookiepb.CreateReply, error) {
	return &bookiepb.CreateReply{}, nil
}

func (f *fakeBookie) Append(s bookiepb.Ledgers_AppendServer) error {
	f.mu.Lock()
	n := f.streams
	f.streams++
	f.mu.Unlock()
	return f.stream(n, s)
}

// newFake starts a fake bookie and a client of it.
func newFake(t *testing.T, stream func(n int, s bookiepb.Ledgers_AppendServer) error) (*fakeBookie, *client.Client) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	f := &fakeBookie{addr: l.Addr().String(), stream: stream}
	log := slog.New(slog.DiscardHandler)
	mux := handshake.NewMux(l, func() handshake.Self { return handshake.Self{Cluster: "test", Node: "bookie-1@x"} }, log)
	server := rpc.NewServer()
	bookiepb.RegisterLedgersServer(server, f)
	rpc.RegisterClusterServer(server, f)
	var running sync.WaitGroup
	running.Go(func() { mux.Serve() })
	running.Go(func() { server.Serve(mux.Listener(handshake.Storage, 0)) })
	pool := rpc.NewPool(handshake.Self{Cluster: "test", Node: "broker-1"}, []string{f.addr}, log)
	c := client.New(pool, metadatatest.NewMemory(t), log, nil)
	t.Cleanup(func() {
		c.Close()
		pool.Close()
		server.Stop()
		mux.Close()
		running.Wait()
	})
	return f, c
}

// received is what a stream has carried of one ledger.
type received struct {
	next int64 // the entry that must come next
	data []string
}

// take adds an append, which must follow what came before on this stream.
func (r *received) take(a *bookiepb.LedgerAppend) error {
	if len(r.data) > 0 && a.GetFirst() != r.next {
		return fmt.Errorf("append at entry %d after %d", a.GetFirst(), r.next-1)
	}
	r.next = a.GetFirst()
	for rest := a.GetEntries(); len(rest) > 0; r.next++ {
		data, _, after, err := bookiepb.Next(rest)
		if err != nil {
			return err
		}
		r.data, rest = append(r.data, string(data)), after
	}
	return nil
}

func stored(a *bookiepb.LedgerAppend, r *received) *bookiepb.AppendReply {
	return &bookiepb.AppendReply{Answers: []*bookiepb.AppendAnswer{{Ledger: a.GetLedger(), First: a.GetFirst(), Last: r.next - 1}}}
}

// TestUnansweredIsSentAgain ends streams in every way there is and looks at what
// the next one carries: everything that was not answered, under the same ids.
func TestUnansweredIsSentAgain(t *testing.T) {
	failure := func(a *bookiepb.LedgerAppend, err error) *bookiepb.AppendReply {
		return &bookiepb.AppendReply{Answers: []*bookiepb.AppendAnswer{{Ledger: a.GetLedger(), First: a.GetFirst(), Failure: rpc.ToFailure(err)}}}
	}
	for _, tt := range []struct {
		name string
		end  func(s bookiepb.Ledgers_AppendServer, a *bookiepb.LedgerAppend) error
	}{
		{"broken", func(bookiepb.Ledgers_AppendServer, *bookiepb.LedgerAppend) error { return errors.New("gone") }},
		{"closed", func(bookiepb.Ledgers_AppendServer, *bookiepb.LedgerAppend) error { return nil }},
		{"unknown", func(s bookiepb.Ledgers_AppendServer, a *bookiepb.LedgerAppend) error {
			s.Send(failure(a, ledger.ErrUnknownOutcome))
			<-s.Context().Done() // the client ends it
			return nil
		}},
		{"not-leader", func(s bookiepb.Ledgers_AppendServer, a *bookiepb.LedgerAppend) error {
			s.Send(failure(a, &rpc.NotLeader{Group: 1}))
			<-s.Context().Done()
			return nil
		}},
		{"nonsense", func(s bookiepb.Ledgers_AppendServer, a *bookiepb.LedgerAppend) error {
			s.Send(&bookiepb.AppendReply{Answers: []*bookiepb.AppendAnswer{{Ledger: a.GetLedger(), First: a.GetFirst(), Last: 1 << 40}}})
			<-s.Context().Done()
			return nil
		}},
		{"silent", func(s bookiepb.Ledgers_AppendServer, _ *bookiepb.LedgerAppend) error {
			<-s.Context().Done() // after 5 s
			return nil
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, c := newFake(t, func(n int, s bookiepb.Ledgers_AppendServer) error {
				var got received
				for i := 0; ; i++ {
					request, err := s.Recv()
					if err != nil {
						return err
					}
					for _, a := range request.GetAppends() {
						if n == 0 && i == 1 {
							return tt.end(s, a)
						}
						if n > 0 && len(got.data) == 0 && a.GetFirst() > 64 {
							t.Errorf("the second stream begins at entry %d", a.GetFirst())
						}
						if err := got.take(a); err != nil {
							t.Error(err)
							return err
						}
						for j, data := range got.data {
							if want := strconv.FormatInt(got.next-int64(len(got.data))+int64(j), 10); data != want {
								t.Errorf("entry %s sent as entry %s", data, want)
							}
						}
						if err := s.Send(stored(a, &got)); err != nil {
							return err
						}
					}
				}
			})
			w, err := c.Create(t.Context(), "a topic")
			must(t, err)
			var mu sync.Mutex
			next := ledger.EntryID(0)
			done := make(chan struct{})
			for i := range 300 {
				w.Append([]byte(strconv.Itoa(i)), func(id ledger.EntryID, err error) {
					mu.Lock()
					defer mu.Unlock()
					if err != nil || id != next || int(id) != i {
						t.Errorf("append %d answered as entry %d, %v, want entry %d", i, id, err, next)
					}
					if next++; next == 300 {
						close(done)
					}
				})
			}
			<-done
		})
	}
}

// TestRefusalEndsOneWriter refuses one ledger's append; its neighbour on the same
// stream goes on.
func TestRefusalEndsOneWriter(t *testing.T) {
	_, c := newFake(t, func(_ int, s bookiepb.Ledgers_AppendServer) error {
		got := map[int64]*received{}
		for {
			request, err := s.Recv()
			if err != nil {
				return err
			}
			for _, a := range request.GetAppends() {
				if a.GetLedger() == 1 {
					s.Send(&bookiepb.AppendReply{Answers: []*bookiepb.AppendAnswer{{Ledger: 1, First: a.GetFirst(), Failure: rpc.ToFailure(ledger.ErrFenced)}}})
					continue
				}
				if got[a.GetLedger()] == nil {
					got[a.GetLedger()] = &received{}
				}
				if err := got[a.GetLedger()].take(a); err != nil {
					t.Error(err)
					return err
				}
				if err := s.Send(stored(a, got[a.GetLedger()])); err != nil {
					return err
				}
			}
		}
	})
	all := create(t, c, 2)
	for range 200 {
		all[0].append()
		all[1].append()
	}
	if _, err := all[0].settle(); !errors.Is(err, ledger.ErrFenced) {
		t.Errorf("refused writer: %v, want ErrFenced", err)
	}
	if n, err := all[1].settle(); n != 200 || err != nil {
		t.Errorf("its neighbour stored %d, %v, want 200", n, err)
	}
	if _, err := all[0].w.Close(t.Context()); !errors.Is(err, ledger.ErrFenced) {
		t.Errorf("Close of the refused writer: %v, want ErrFenced", err)
	}
}
