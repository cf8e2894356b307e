package broker

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// noRequest is the request id of what answers no request.
const noRequest = ^uint64(0)

// conn is one client's connection.
//
// One goroutine, serve, reads it and ends it; a second writes what is in out.
// Slow requests run on goroutines of their own, bounded by slots, and serve waits
// for all of them. Cancelling ctx ends everything.
type conn struct {
	b        *Broker
	nc       net.Conn
	address  string
	out      *outgoing
	ctx      context.Context // of the connection; ends with it
	cancel   context.CancelCauseFunc
	log      *slog.Logger
	done     chan struct{}       // closed once nothing of the connection is left
	written  chan struct{}       // closed once the writer has returned
	requests sync.WaitGroup      // slow requests under way
	slots    chan struct{}       // a token for each; maxPendingRequests
	publish  *semaphore.Weighted // maxPendingPublishRequestsPerConnection
	bytes    *semaphore.Weighted // maxPublishBytesPerConnection

	keepAlive *time.Timer
	born      time.Time
	lastHeard atomic.Int64 // nanoseconds from born to the last frame
	paused    atomic.Bool  // the reader waits for publishes or replies, not for the peer

	// Reader only, until connected; constant then.
	connected bool
	version   int32
	client    string // the client's version, for statistics

	mu        sync.Mutex // guards the following
	producers map[uint64]*producerSlot
	consumers map[uint64]*consumerSlot
	listeners []chan struct{} // closed at the next frame: who asked for a sign of life
	gone      bool            // nothing may be opened any more
}

// violation is an error that costs the connection: the peer does not speak the
// protocol, or not to us.
type violation struct {
	request uint64
	code    pulsarpb.ServerError
	err     error
}

// Error says what the peer did.
func (v *violation) Error() string { return v.err.Error() }

// Unwrap returns what it did.
func (v *violation) Unwrap() error { return v.err }

func newConn(b *Broker, nc net.Conn) *conn {
	ctx, cancel := context.WithCancelCause(b.ctx)
	c := &conn{
		b: b, nc: nc, address: nc.RemoteAddr().String(), born: time.Now(), out: newOutgoing(), ctx: ctx, cancel: cancel,
		done: make(chan struct{}), written: make(chan struct{}),
		slots:     make(chan struct{}, maxPendingRequests),
		publish:   semaphore.NewWeighted(int64(b.cfg.MaxPendingPublishRequests)),
		bytes:     semaphore.NewWeighted(maxPublishBytesPerConnection),
		producers: map[uint64]*producerSlot{}, consumers: map[uint64]*consumerSlot{},
	}
	c.log = b.log.With("address", c.address)
	c.heard()
	return c
}

// serve runs the connection to its end.
func (c *conn) serve() {
	defer close(c.done)
	go func() {
		defer close(c.written)
		if err := c.out.write(c.nc); err != nil {
			c.close(fmt.Errorf("write: %w", err))
			return
		}
		// All is said. Close our side only: closing the socket while the peer's
		// bytes are unread would reset it, and could take our last words along.
		if tcp, ok := c.nc.(interface{ CloseWrite() error }); ok {
			_ = tcp.CloseWrite() // the close that follows tells
		}
	}()
	err := c.read()
	c.part(err)
	c.release()
}

// read handles commands until the connection ends or the peer misbehaves.
func (c *conn) read() error {
	r := bufio.NewReaderSize(c.nc, 32<<10)
	if err := c.nc.SetReadDeadline(time.Now().Add(connectTimeout)); err != nil {
		return err
	}
	if c.ctx.Err() != nil { // shutdown's deadline may have been overwritten
		return context.Cause(c.ctx)
	}
	limit := maxFrameBeforeConnect
	for {
		f, err := protocol.ReadFrame(r, limit)
		if err != nil {
			return c.readError(err)
		}
		c.heard()
		before := c.connected
		if err := c.handle(f); err != nil {
			return err
		}
		if !before && c.connected {
			c.b.connecting.Add(-1)
			if err := c.nc.SetReadDeadline(time.Time{}); err != nil {
				return err
			}
			if c.ctx.Err() != nil { // shutdown's deadline may have been lifted
				return context.Cause(c.ctx)
			}
			limit = c.b.cfg.MaxMessageSize + protocol.FramePadding
			c.startKeepAlive()
		}
		if err := c.waitForReplies(); err != nil {
			return err
		}
	}
}

func (c *conn) readError(err error) error {
	var large *protocol.FrameTooLargeError
	switch {
	case errors.As(err, &large):
		return &violation{noRequest, pulsarpb.ServerError_NotAllowedError, err}
	case errors.Is(err, protocol.ErrMalformed):
		return &violation{noRequest, pulsarpb.ServerError_UnsupportedVersionError, err}
	case !c.connected && errors.Is(err, os.ErrDeadlineExceeded):
		return &violation{
			noRequest, pulsarpb.ServerError_NotAllowedError,
			fmt.Errorf("no CONNECT within %v", connectTimeout),
		}
	default:
		return err
	}
}

// handle runs one command.
func (c *conn) handle(f protocol.Frame) error {
	kind := f.Command.GetType()
	if !c.connected && kind != pulsarpb.BaseCommand_CONNECT {
		return &violation{
			noRequest, pulsarpb.ServerError_NotAllowedError,
			fmt.Errorf("%v before CONNECT: a connection must introduce itself first", kind),
		}
	}
	h, ok := handlers[kind]
	if !ok {
		return &violation{
			noRequest, pulsarpb.ServerError_UnsupportedVersionError,
			fmt.Errorf("command %v (number %d) is unknown here: this broker speaks protocol version %d", kind, int32(kind), protocolVersion),
		}
	}
	return h(c, f)
}

// waitForReplies holds the reader while the peer does not take its answers, for as
// long as a silent peer is kept. Meanwhile the keep-alive cannot judge the peer.
func (c *conn) waitForReplies() error {
	drained := c.out.backlog()
	if drained == nil {
		return nil
	}
	defer c.pause()()
	limit := 2 * time.Duration(c.b.cfg.KeepAliveIntervalSeconds) * time.Second
	timeout := time.NewTimer(limit)
	defer timeout.Stop()
	select {
	case <-drained:
		return nil
	case <-timeout.C:
		c.b.metrics.silent.Inc()
		c.log.Info("connection closed: the peer does not read its answers", "waited", limit)
		return fmt.Errorf("answers not read for %v", limit)
	case <-c.ctx.Done():
		return context.Cause(c.ctx)
	}
}

// pause marks that silence is our doing, until the returned func is called.
func (c *conn) pause() func() {
	c.paused.Store(true)
	return func() {
		c.heard()
		c.paused.Store(false)
	}
}

// part says goodbye: with an ERROR if the peer misbehaved, else at once.
func (c *conn) part(err error) {
	var bad *violation
	switch {
	case errors.As(err, &bad):
		c.b.metrics.refused.Inc()
		c.log.Warn("connection closed", "err", err)
		c.fail(bad.request, bad.code, bad.err)
		c.linger()
	case errors.Is(context.Cause(c.ctx), errShutdown):
		c.linger()
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed):
		c.log.Debug("connection closed", "cause", context.Cause(c.ctx))
	default:
		c.log.Debug("connection lost", "err", err)
	}
	c.close(err)
	<-c.written
}

// linger lets what is queued reach the peer, within lingerTimeout.
func (c *conn) linger() {
	until := time.Now().Add(lingerTimeout)
	c.out.close(false)
	if c.nc.SetDeadline(until) != nil {
		return
	}
	<-c.written
	// What the peer still sends is of no interest, but must not be in the way.
	if c.nc.SetReadDeadline(time.Now().Add(lingerRead)) != nil {
		return
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(c.nc, 16<<20)) // ends by deadline at the latest
}

// release gives up all that the connection held.
func (c *conn) release() {
	c.requests.Wait()
	c.mu.Lock()
	c.gone = true
	producers, consumers := c.producers, c.consumers
	c.producers, c.consumers = nil, nil
	listeners := c.listeners
	c.listeners = nil
	c.mu.Unlock()
	for _, l := range listeners {
		close(l)
	}
	for _, s := range producers {
		if s.producer != nil {
			s.producer.drop()
		}
	}
	var left sync.WaitGroup
	for _, s := range consumers {
		if s.consumer != nil {
			left.Add(1)
			s.sub.remove(s.consumer, left.Done)
		}
	}
	left.Wait() // loops never wait for a connection, so this is quick
	if !c.connected {
		c.b.connecting.Add(-1)
	}
}

// close ends the connection without a word. It may be called by anybody, often.
func (c *conn) close(cause error) {
	c.cancel(cause)
	c.mu.Lock()
	if c.keepAlive != nil {
		c.keepAlive.Stop()
	}
	c.mu.Unlock()
	c.out.close(true)
	_ = c.nc.Close() // only ever the first close counts
}

// shutdown ends the connection in good order: what is queued is still written.
func (c *conn) shutdown() {
	c.cancel(errShutdown)
	_ = c.nc.SetReadDeadline(time.Unix(1, 0)) // wakes the reader, which parts
}

// errShutdown is the cause of a connection's end when the broker closes.
var errShutdown = errors.New("broker is shutting down")

// async runs a slow request beside the reader. Too many of them hold the reader.
func (c *conn) async(request func(ctx context.Context)) error {
	select {
	case c.slots <- struct{}{}:
	default:
		resume := c.pause()
		select {
		case c.slots <- struct{}{}:
			resume()
		case <-c.ctx.Done():
			return context.Cause(c.ctx)
		}
	}
	c.requests.Go(func() {
		defer func() { <-c.slots }()
		ctx, cancel := context.WithTimeout(c.ctx, requestTimeout)
		defer cancel()
		request(ctx)
	})
	return nil
}

// fail answers a request with an ERROR.
func (c *conn) fail(request uint64, code pulsarpb.ServerError, err error) {
	text := err.Error()
	c.out.reply(&pulsarpb.BaseCommand{
		Type:  pulsarpb.BaseCommand_ERROR.Enum(),
		Error: &pulsarpb.CommandError{RequestId: &request, Error: &code, Message: &text},
	})
}

// refuse answers a request with an ERROR of the code that err has.
func (c *conn) refuse(request uint64, err error) {
	c.log.Debug("request refused", "request", request, "err", err)
	c.fail(request, serverError(err), err)
}

// succeed answers a request with SUCCESS.
func (c *conn) succeed(request uint64) {
	c.out.reply(&pulsarpb.BaseCommand{
		Type:    pulsarpb.BaseCommand_SUCCESS.Enum(),
		Success: &pulsarpb.CommandSuccess{RequestId: &request},
	})
}
