package bookie

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"google.golang.org/grpc"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

// maxReadBytes bounds the data of one read's answer, apart from a first entry
// that is larger alone.
const maxReadBytes = 4 << 20

// raftGroup is what the services need of a Raft group; *raftlog.Group is one.
type raftGroup interface {
	proposing
	ReadBarrier(ctx context.Context) error
	IsLeader() bool
}

// Service is the gRPC side of one bookie. Make one with [Register].
type Service struct{ ledgers *ledgersServer }

// Close refuses new operations, ends the append streams and the proposers, and
// waits for their goroutines. Operations in the log are answered by the log.
func (s *Service) Close() { s.ledgers.shutdown() }

// ledgersServer implements the service Ledgers.
type ledgersServer struct {
	bookiepb.UnimplementedLedgersServer

	groups  []served // index 0 is ledger group 1
	store   *Store
	metrics *metrics
	log     *slog.Logger

	closing context.Context // ended by shutdown: append streams end with it
	end     context.CancelFunc
	streams sync.WaitGroup // goroutines that receive

	mu     sync.Mutex // guards closed
	closed bool       // no more streams
}

// served is one ledger group.
type served struct {
	raft     raftGroup
	machine  *Machine
	proposer *proposer
}

var _ bookiepb.LedgersServer = (*ledgersServer)(nil)

// Register puts the services Ledgers and Cluster on server. node's ledger groups
// must have been opened with machines of store. Close the Service before the
// node; the order of Service.Close and the server's Stop does not matter.
func Register(server *grpc.Server, node *raftlog.Node, store *Store, log *slog.Logger) (*Service, error) {
	var groups []served
	for _, g := range node.Groups() {
		if g.ID() == raftlog.Metadata {
			continue
		}
		m := store.machine(g.ID())
		if m == nil || int(g.ID()) != len(groups)+1 {
			return nil, fmt.Errorf("bookie: ledger group %d has no machine in the store, or is out of order", g.ID())
		}
		groups = append(groups, served{raft: g, machine: m})
	}
	s := newLedgersServer(groups, store, log)
	bookiepb.RegisterLedgersServer(server, s)
	rpc.RegisterClusterServer(server, &cluster{node: node})
	return &Service{s}, nil
}

func newLedgersServer(groups []served, store *Store, log *slog.Logger) *ledgersServer {
	s := &ledgersServer{groups: groups, store: store, metrics: store.metrics, log: log.With("component", "ledgers")}
	for i := range groups {
		groups[i].proposer = newProposer(groups[i].raft, store.metrics)
	}
	s.closing, s.end = context.WithCancel(context.Background())
	return s
}

func (s *ledgersServer) shutdown() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.end()
	for _, g := range s.groups {
		g.proposer.close()
	}
	s.streams.Wait()
}

// begin runs receive on a goroutine that shutdown waits for, unless shutdown has
// begun.
func (s *ledgersServer) begin(receive func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.streams.Go(receive)
	return true
}

// group returns the group that a ledger belongs to, or an error for an id that
// is none.
func (s *ledgersServer) group(id int64) (*served, error) {
	if id < 1 {
		return nil, fmt.Errorf("ledger id %d: ids start at 1: %w", id, rpc.ErrInvalid)
	}
	return s.groupOf(ledger.ID(id)), nil
}

// groupOf is group for an id that was checked.
func (s *ledgersServer) groupOf(id ledger.ID) *served {
	return &s.groups[(int64(id)-1)%int64(len(s.groups))]
}

func (s *ledgersServer) do(ctx context.Context, o op) (outcome, error) {
	g, err := s.group(int64(o.ledger))
	if err != nil {
		return outcome{}, err
	}
	return g.proposer.do(ctx, o)
}

// Create implements the RPC.
func (s *ledgersServer) Create(ctx context.Context, r *bookiepb.CreateRequest) (*bookiepb.CreateReply, error) {
	if err := s.store.admit(); err != nil {
		return nil, err
	}
	_, err := s.do(ctx, op{kind: opCreate, ledger: ledger.ID(r.GetLedger()), epoch: r.GetEpoch(), owner: r.GetOwner()})
	if err != nil {
		return nil, err
	}
	return &bookiepb.CreateReply{}, nil
}

// Fence implements the RPC.
func (s *ledgersServer) Fence(ctx context.Context, r *bookiepb.FenceRequest) (*bookiepb.EndReply, error) {
	return endReply(s.do(ctx, op{kind: opFence, ledger: ledger.ID(r.GetLedger()), epoch: r.GetEpoch()}))
}

// Close implements the RPC.
func (s *ledgersServer) Close(ctx context.Context, r *bookiepb.CloseRequest) (*bookiepb.EndReply, error) {
	return endReply(s.do(ctx, op{kind: opClose, ledger: ledger.ID(r.GetLedger()), epoch: r.GetEpoch()}))
}

func endReply(o outcome, err error) (*bookiepb.EndReply, error) {
	if err != nil {
		return nil, err
	}
	return &bookiepb.EndReply{Last: int64(o.last), Bytes: o.bytes}, nil
}

// Delete implements the RPC.
func (s *ledgersServer) Delete(ctx context.Context, r *bookiepb.DeleteRequest) (*bookiepb.DeleteReply, error) {
	if _, err := s.do(ctx, op{kind: opDelete, ledger: ledger.ID(r.GetLedger())}); err != nil {
		return nil, err
	}
	return &bookiepb.DeleteReply{}, nil
}

var wireStates = map[state]bookiepb.InfoReply_State{
	stateOpen: bookiepb.InfoReply_OPEN, stateFenced: bookiepb.InfoReply_FENCED, stateClosed: bookiepb.InfoReply_CLOSED,
}

// Info implements the RPC.
func (s *ledgersServer) Info(ctx context.Context, r *bookiepb.InfoRequest) (*bookiepb.InfoReply, error) {
	g, err := s.group(r.GetLedger())
	if err != nil {
		return nil, err
	}
	if err := g.raft.ReadBarrier(ctx); err != nil {
		return nil, err
	}
	f, ok, err := g.machine.lookup(ledger.ID(r.GetLedger()))
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, fmt.Errorf("ledger %d: %w", r.GetLedger(), ledger.ErrNoSuchLedger)
	}
	return &bookiepb.InfoReply{
		Ledger: r.GetLedger(), Owner: f.owner, Epoch: f.epoch, State: wireStates[f.state],
		Last: int64(f.last()), Bytes: f.bytes,
	}, nil
}

// Read implements the RPC.
func (s *ledgersServer) Read(ctx context.Context, r *bookiepb.ReadRequest) (*bookiepb.ReadReply, error) {
	g, err := s.group(r.GetLedger())
	if err != nil {
		return nil, err
	}
	if r.GetFirst() < 0 || r.GetLast() < r.GetFirst() {
		return nil, fmt.Errorf("ledger %d: read of entries %d to %d: want 0 or more, in order: %w", r.GetLedger(), r.GetFirst(), r.GetLast(), rpc.ErrInvalid)
	}
	frames, err := s.read(ctx, g, r)
	s.metrics.reads.WithLabelValues(readOutcome(err)).Inc()
	if err != nil {
		return nil, err
	}
	s.metrics.readBytes.Add(float64(len(frames)))
	return &bookiepb.ReadReply{First: r.GetFirst(), Entries: frames}, nil
}

// read answers from what is here. Only where that says "absent" does it matter
// who leads: a leader makes sure, another replica says "not yet".
func (s *ledgersServer) read(ctx context.Context, g *served, r *bookiepb.ReadRequest) ([]byte, error) {
	b := readBuffer{out: new([]byte), limit: max(1, min(r.GetMaxBytes(), maxReadBytes))}
	id, first, last := ledger.ID(r.GetLedger()), ledger.EntryID(r.GetFirst()), ledger.EntryID(r.GetLast())
	_, err := g.machine.read(id, first, last, &b)
	if !errors.Is(err, ledger.ErrNoSuchLedger) && !errors.Is(err, ledger.ErrNoSuchEntry) {
		return *b.out, err
	}
	if !g.raft.IsLeader() {
		return nil, fmt.Errorf("%w: this replica has no entry %d of ledger %d", ledger.ErrNotYet, first, id)
	}
	if errBarrier := g.raft.ReadBarrier(ctx); errBarrier != nil {
		return nil, fmt.Errorf("%w: this replica has no entry %d of ledger %d, and no more leads: %s", ledger.ErrNotYet, first, id, errBarrier.Error())
	}
	_, err = g.machine.read(id, first, last, &b)
	return *b.out, err
}

func readOutcome(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, ledger.ErrNoSuchLedger), errors.Is(err, ledger.ErrNoSuchEntry):
		return "absent"
	case errors.Is(err, ledger.ErrNotYet):
		return "notyet"
	case errors.Is(err, ledger.ErrDamaged):
		return "damaged"
	default:
		return "failed"
	}
}
