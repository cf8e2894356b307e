package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/magnetar-io/magnetar/internal/handshake"
	"github.com/magnetar-io/magnetar/ledger"
)

// maxMembers bounds the addresses a pool learns beyond its seeds; a cluster has
// tens of bookies.
const maxMembers = 256

// errPoolClosed reports a call on a closed pool.
var errPoolClosed = fmt.Errorf("connection pool closed: %w", ledger.ErrUnavailable)

// Pool holds the connections of one node to the bookies of its cluster: one
// *grpc.ClientConn per address, opened when first used and opened again when
// broken. It also remembers who leads each group; that is only ever a hint.
type Pool struct {
	seeds []string
	log   *slog.Logger

	// mu guards everything below. Nothing blocks while holding it.
	mu      sync.Mutex
	self    handshake.Self // its ClusterID is learned at the first hello if empty
	conns   map[string]*grpc.ClientConn
	leaders map[uint32]string        // group → address
	members map[uint32][]string      // group → addresses of its members, by its leader
	asking  map[uint32]chan struct{} // group → closed when the round of questions ends
	groups  int                      // ledger groups; 0 = not learned yet
	closed  bool
}

// NewPool makes a pool that introduces itself as self and first knows the
// addresses in seeds, each host:port. If self has no cluster id, the pool takes
// the one of the first bookie it reaches and refuses others from then on. It
// does no I/O.
func NewPool(self handshake.Self, seeds []string, log *slog.Logger) *Pool {
	return &Pool{
		seeds: slices.Clone(seeds), log: log.With("component", "rpc"), self: self,
		conns: map[string]*grpc.ClientConn{}, leaders: map[uint32]string{},
		members: map[uint32][]string{}, asking: map[uint32]chan struct{}{},
	}
}

// Conn returns the pool's connection to addr. It does not wait for the
// connection to be there; calls on it fail at once while it cannot be made.
func (p *Pool) Conn(addr string) (*grpc.ClientConn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errPoolClosed
	}
	if conn := p.conns[addr]; conn != nil {
		return conn, nil
	}
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return nil, fmt.Errorf("bookie address %q: want host:port: %w", addr, ledger.ErrUnavailable)
	}
	conn, err := grpc.NewClient("passthrough:///"+addr, p.dialOptions()...)
	if err != nil {
		return nil, fmt.Errorf("connect to bookie %s: %w: %w", addr, err, ledger.ErrUnavailable)
	}
	p.conns[addr] = conn
	return conn, nil
}

func (p *Pool) dialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithContextDialer(p.dial),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(streamWindowBytes),
		grpc.WithInitialConnWindowSize(connectionWindowBytes),
		grpc.WithReadBufferSize(ioBufferBytes),
		grpc.WithWriteBufferSize(ioBufferBytes),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingAfter, Timeout: pingTimeout, PermitWithoutStream: true}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: 3 * time.Second,
		}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(MaxMessageBytes),
			grpc.MaxCallSendMsgSize(MaxMessageBytes),
			grpc.ForceCodecV2(codec{}),
		),
		grpc.WithChainUnaryInterceptor(errorUnary),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
	}
}

// dial opens one connection through the hello.
func (p *Pool) dial(ctx context.Context, addr string) (net.Conn, error) {
	p.mu.Lock()
	self := p.self
	p.mu.Unlock()
	conn, other, err := handshake.Dial(ctx, addr, self, handshake.Target{Service: handshake.Storage})
	if err == nil && !p.learnCluster(other) {
		_ = conn.Close()
		err = &handshake.RefusedError{Addr: addr, Reason: fmt.Sprintf("%v is of another cluster than the first bookie reached", other)}
	}
	if err != nil {
		if _, refused := errors.AsType[*handshake.RefusedError](err); refused { // a person must act; an unreachable bookie is logged by who needed it
			p.log.Warn("bookie refused the connection; will try again", "bookie", addr, "err", err)
		}
		return nil, err
	}
	if tcp, ok := conn.(interface {
		SetKeepAliveConfig(cfg net.KeepAliveConfig) error
	}); ok { // a host that vanished is noticed within 5 s even on an idle connection
		_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 3})
	}
	return conn, nil
}

// learnCluster takes other's cluster for the pool's if it has none yet, and
// reports whether it is the pool's. The hello cannot tell when several first ones
// are under way at once.
func (p *Pool) learnCluster(other handshake.Self) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.self.ClusterID == "" {
		p.self.ClusterID = other.ClusterID
	}
	return other.ClusterID == "" || other.ClusterID == p.self.ClusterID
}

// errorUnary turns the errors of unary calls into those of [FromStatus], and
// tells a call that was never sent from one that may have arrived.
func errorUnary(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	var sentTo peer.Peer // stays empty unless the call got a place on a connection
	err := invoke(ctx, method, req, reply, conn, append(opts, grpc.Peer(&sentTo))...)
	if err == nil {
		return nil
	}
	if st, ok := status.FromError(err); ok && sentTo.Addr == nil && st.Code() == codes.Unavailable {
		return &RemoteError{Failure_UNAVAILABLE, st.Message(), ledger.ErrUnavailable}
	}
	return FromStatus(err)
}

// Addrs returns every known bookie address: the seeds first, then the members
// learned from group leaders.
func (p *Pool) Addrs() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	addrs := slices.Clone(p.seeds)
	for _, group := range slices.Sorted(maps.Keys(p.members)) {
		for _, addr := range p.members[group] {
			if len(addrs) < len(p.seeds)+maxMembers && !slices.Contains(addrs, addr) {
				addrs = append(addrs, addr)
			}
		}
	}
	return addrs
}

// SetLeader remembers addr as the leader of group.
func (p *Pool) SetLeader(group uint32, addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leaders[group] = addr
}

// Forget drops addr as the leader of group, unless another is known by now.
func (p *Pool) Forget(group uint32, addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.leaders[group] == addr {
		delete(p.leaders, group)
	}
}

// GroupOf returns the group that ledger id lives in. Call [Pool.Groups] with
// success first; without it GroupOf panics.
func (p *Pool) GroupOf(id ledger.ID) uint32 {
	p.mu.Lock()
	groups := p.groups
	p.mu.Unlock()
	if groups < 1 || id < 1 {
		panic(fmt.Sprintf("rpc: GroupOf(%d) with %d ledger groups known: call Groups first; ids start at 1", id, groups))
	}
	return 1 + uint32((int64(id)-1)%int64(groups))
}

// Close closes every connection. Calls in flight end with an error.
func (p *Pool) Close() error {
	p.mu.Lock()
	p.closed = true
	conns := p.conns
	p.conns = map[string]*grpc.ClientConn{}
	p.mu.Unlock()
	var errs []error
	for _, conn := range conns {
		errs = append(errs, conn.Close())
	}
	return errors.Join(errs...)
}
