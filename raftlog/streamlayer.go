package raftlog

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/magnetar-io/magnetar/internal/handshake"
)

// streamLayer is one group's share of the node's port, as raft's transport wants
// it. It knows every connection of the group, in both directions, so that Close
// ends them all: what a closed group still wants to say must not leave.
type streamLayer struct {
	l      net.Listener
	self   handshake.Self
	addr   raftAddr
	group  GroupID
	dial   time.Duration
	ctx    context.Context // the layer's life: raft calls Dial without a context
	cancel context.CancelFunc

	mu    sync.Mutex
	conns map[*trackedConn]struct{} // guarded by mu; nil once closed
}

var _ raft.StreamLayer = (*streamLayer)(nil)

// raftAddr is a member's ServerAddress as a [net.Addr].
type raftAddr string

// Network implements [net.Addr].
func (raftAddr) Network() string { return "raft" }

// String implements [net.Addr].
func (a raftAddr) String() string { return string(a) }

func newStreamLayer(l net.Listener, self handshake.Self, advertised string, group GroupID, dial time.Duration) *streamLayer {
	ctx, cancel := context.WithCancel(context.Background())
	return &streamLayer{
		l: l, self: self, addr: raftAddr(raftAddress(self.Node, advertised)), group: group, dial: dial,
		ctx: ctx, cancel: cancel, conns: map[*trackedConn]struct{}{},
	}
}

// Dial implements [raft.StreamLayer]. It reaches the member that address names
// or nobody.
func (s *streamLayer) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	node, addr, ok := parseRaftAddress(string(address))
	if !ok {
		return nil, fmt.Errorf("raft address %q: want name@disk/host:port", address)
	}
	if timeout <= 0 || timeout > s.dial {
		timeout = s.dial
	}
	ctx, cancel := context.WithTimeout(s.ctx, timeout)
	defer cancel()
	conn, _, err := handshake.Dial(ctx, addr, s.self, handshake.Target{Node: node, Service: handshake.Raft, Group: uint32(s.group)})
	if err != nil {
		return nil, err
	}
	return s.track(conn)
}

// Accept implements [net.Listener].
func (s *streamLayer) Accept() (net.Conn, error) {
	conn, err := s.l.Accept()
	if err != nil {
		return nil, err
	}
	return s.track(conn)
}

// Addr implements [net.Listener]: this node's ServerAddress.
func (s *streamLayer) Addr() net.Addr { return s.addr }

// Close implements [net.Listener] and closes every connection. It may be called
// twice.
func (s *streamLayer) Close() error {
	s.cancel()
	err := s.l.Close()
	s.mu.Lock()
	conns := s.conns
	s.conns = nil
	s.mu.Unlock()
	for c := range conns {
		_ = c.Conn.Close()
	}
	return err
}

func (s *streamLayer) track(conn net.Conn) (net.Conn, error) {
	c := &trackedConn{Conn: conn, layer: s}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns == nil {
		_ = conn.Close()
		return nil, net.ErrClosed
	}
	s.conns[c] = struct{}{}
	return c, nil
}

type trackedConn struct {
	net.Conn
	layer *streamLayer
}

// Close implements [net.Conn].
func (c *trackedConn) Close() error {
	c.layer.mu.Lock()
	delete(c.layer.conns, c) // of a nil map: nothing
	c.layer.mu.Unlock()
	return c.Conn.Close()
}
