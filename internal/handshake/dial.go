package handshake

import (
	"context"
	"fmt"
	"net"
	"time"
)

// RefusedError reports a peer that answered and does not want the connection,
// or that turned out not to be the one wanted. Trying again helps only if the
// peer changes.
type RefusedError struct {
	Addr   string // host:port that was dialled
	Reason string // a sentence that names both sides
}

// Error is written for the operator.
func (e *RefusedError) Error() string {
	return "connection to " + e.Addr + " refused: " + e.Reason
}

// Dial connects to addr (host:port), says hello as self and demands to. It
// returns the connection, which the caller closes, and how the other side
// introduced itself. ctx bounds the whole of it, and [HelloTimeout] the part
// after the TCP connect. The error is a *[RefusedError] if the other side
// refused, or is of another cluster or another node than wanted.
func Dial(ctx context.Context, addr string, self Self, to Target) (net.Conn, Self, error) {
	if err := self.verify(); err != nil {
		return nil, Self{}, err
	}
	if len(to.Node) > MaxField {
		return nil, Self{}, fmt.Errorf("wanted node %.32q… has %d bytes: want at most %d", to.Node, len(to.Node), MaxField)
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, Self{}, fmt.Errorf("dial %s: %w", addr, err)
	}
	// A cancelled ctx must also end a hello that waits for a silent peer.
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	peer, err := greet(conn, addr, self, to)
	if !stop() && err == nil {
		err = fmt.Errorf("hello with %s: %w", addr, context.Cause(ctx))
	}
	if err != nil {
		_ = conn.Close()
		if cause := context.Cause(ctx); cause != nil {
			err = fmt.Errorf("%w (%w)", err, cause)
		}
		return nil, Self{}, err
	}
	_ = conn.SetDeadline(time.Time{})
	return conn, peer, nil
}

// Probe reports who listens at addr, and that it is node (or anybody, for "").
// Nothing is left open. Errors are those of [Dial].
func Probe(ctx context.Context, addr string, self Self, node string) (Self, error) {
	conn, peer, err := Dial(ctx, addr, self, Target{Node: node, Service: probe})
	if err != nil {
		return Self{}, err
	}
	_ = conn.Close()
	return peer, nil
}

func greet(conn net.Conn, addr string, self Self, to Target) (Self, error) {
	_ = conn.SetDeadline(time.Now().Add(HelloTimeout))
	if err := writeFrame(conn, kindHello, hello{self, to}.encode()); err != nil {
		return Self{}, fmt.Errorf("hello to %s: %w", addr, err)
	}
	kind, body, err := readFrame(conn)
	if err != nil {
		return Self{}, fmt.Errorf("hello answer of %s: %w", addr, err)
	}
	switch kind {
	case kindRefusal:
		reason, err := parseRefusal(body)
		if err != nil {
			return Self{}, fmt.Errorf("hello answer of %s: %w", addr, err)
		}
		return Self{}, &RefusedError{Addr: addr, Reason: reason}
	case kindWelcome:
		peer, err := parseWelcome(body)
		if err != nil {
			return Self{}, fmt.Errorf("hello answer of %s: %w", addr, err)
		}
		// The listener has judged already; we judge too, so that neither side
		// depends on the other's care.
		if reason := mismatch(self, peer); reason != "" {
			return Self{}, &RefusedError{Addr: addr, Reason: reason}
		}
		if to.Node != "" && peer.Node != to.Node {
			return Self{}, &RefusedError{Addr: addr, Reason: fmt.Sprintf("%v wanted node %q, and %v answered", self, to.Node, peer)}
		}
		return peer, nil
	default:
		return Self{}, fmt.Errorf("hello answer of %s: frame kind %d: want %d or %d", addr, kind, kindWelcome, kindRefusal)
	}
}
