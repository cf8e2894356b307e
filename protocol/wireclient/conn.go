package wireclient

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// readBuffer is the size of a connection's read buffer in bytes.
const readBuffer = 64 << 10

// protocolVersion is what we announce.
const protocolVersion = int32(pulsarpb.ProtocolVersion_v21)

// conn is one connection to a broker after its handshake. Its read goroutine
// hands answers to whoever asked, and everything else to the producer or consumer
// it names; its write goroutine writes what has been queued and keeps it alive.
type conn struct {
	client     *Client
	address    string
	nc         net.Conn
	log        *slog.Logger
	maxMessage int           // bytes of a payload section that the broker takes
	wake       chan struct{} // capacity 1; tells the writer that out is not empty
	done       chan struct{} // closed by fail
	heard      atomic.Int64  // when the last frame was read, Unix nanoseconds

	mu        sync.Mutex // guards all below; taken last
	err       error      // why done is closed
	out       net.Buffers
	requests  map[uint64]chan<- *pulsarpb.BaseCommand // each has room for its answer
	producers map[uint64]*Producer
	consumers map[uint64]*Consumer
}

// open dials and shakes hands. ctx bounds the opening only.
func open(ctx context.Context, client *Client, address string) (*conn, error) {
	nc, err := client.options.Dial(ctx, address)
	if err != nil {
		return nil, err
	}
	if client.secure {
		config := client.options.TLS.Clone()
		if config == nil {
			config = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		if config.ServerName == "" {
			config.ServerName, _, _ = net.SplitHostPort(address)
		}
		nc = tls.Client(nc, config)
	}
	c := &conn{
		client: client, address: address, nc: nc, log: client.options.Log.With("broker", address),
		wake: make(chan struct{}, 1), done: make(chan struct{}),
		requests:  map[uint64]chan<- *pulsarpb.BaseCommand{},
		producers: map[uint64]*Producer{}, consumers: map[uint64]*Consumer{},
	}
	r := bufio.NewReaderSize(nc, readBuffer)
	stop := context.AfterFunc(ctx, func() { _ = nc.SetDeadline(time.Unix(1, 0)) }) // an error means that it is closed, which ends the handshake too
	err = c.handshake(r)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = nc.Close() // err says more
		return nil, err
	}
	c.heard.Store(time.Now().UnixNano())
	if !client.start(func() { c.read(r) }) || !client.start(c.write) {
		c.fail(fmt.Errorf("client: %w", ErrClosed))
		return nil, c.err
	}
	return c, nil
}

func (c *conn) handshake(r *bufio.Reader) error {
	o := &c.client.options
	version := "Magnetar-" + o.Name
	if o.Name == "" {
		version = "Magnetar"
	}
	connect := &pulsarpb.CommandConnect{
		ClientVersion: &version, ProtocolVersion: new(protocolVersion), AuthMethodName: &o.AuthMethod,
		FeatureFlags: &pulsarpb.FeatureFlags{SupportsBrokerEntryMetadata: new(true)},
	}
	if o.AuthData != nil {
		data, err := o.AuthData()
		if err != nil {
			return fmt.Errorf("credentials: %w", err)
		}
		connect.AuthData = data
	}
	frame := protocol.AppendFrame(nil, &pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_CONNECT.Enum(), Connect: connect})
	if _, err := c.nc.Write(frame); err != nil {
		return err
	}
	f, err := protocol.ReadFrame(r, protocol.FramePadding)
	if err != nil {
		return err
	}
	switch f.Command.GetType() {
	case pulsarpb.BaseCommand_CONNECTED:
		c.maxMessage = protocol.DefaultMaxMessageSize
		if n := f.Command.GetConnected().GetMaxMessageSize(); n > 0 {
			c.maxMessage = int(n)
		}
		return nil
	case pulsarpb.BaseCommand_ERROR:
		return &ServerError{f.Command.GetError().GetError(), f.Command.GetError().GetMessage(), c.address}
	default:
		return fmt.Errorf("%w handshake: the broker answers CONNECT with %v", protocol.ErrMalformed, f.Command.GetType())
	}
}

// fail ends the connection. The first reason counts.
func (c *conn) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	c.out = nil
	c.mu.Unlock()
	_ = c.nc.Close() // the reason is known
	close(c.done)
}

// reason returns why the connection ended; call it after done is closed.
func (c *conn) reason() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// send queues buffers to be written one after the other. It never blocks. The
// buffers belong to the connection until it ends.
func (c *conn) send(buffers ...[]byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return fmt.Errorf("%w: %w", ErrDisconnected, c.err)
	}
	c.out = append(c.out, buffers...)
	select {
	case c.wake <- struct{}{}:
	default:
	}
	return nil
}

func (c *conn) sendCommand(command *pulsarpb.BaseCommand) error {
	return c.send(protocol.AppendFrame(nil, command))
}

// write is the write goroutine: it writes what send queued, and pings.
func (c *conn) write() {
	tick := time.NewTicker(c.client.options.KeepAlive)
	defer tick.Stop()
	for {
		select {
		case <-c.wake:
			c.mu.Lock()
			out := c.out
			c.out = nil
			c.mu.Unlock()
			if _, err := out.WriteTo(c.nc); err != nil {
				c.fail(fmt.Errorf("write: %w", err))
				return
			}
		case now := <-tick.C:
			c.keepAlive(now.Sub(time.Unix(0, c.heard.Load())))
		case <-c.client.ctx.Done():
			c.fail(fmt.Errorf("client: %w", ErrClosed))
			return
		case <-c.done:
			return
		}
	}
}

func (c *conn) keepAlive(silent time.Duration) {
	interval := c.client.options.KeepAlive
	if silent < interval/2 {
		return
	}
	if silent >= 2*interval {
		c.fail(fmt.Errorf("the broker was silent for %v", silent.Round(time.Millisecond)))
		return
	}
	_ = c.sendCommand(&pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_PING.Enum(), Ping: &pulsarpb.CommandPing{}}) // fails only once the connection is over
}

// read is the read goroutine.
func (c *conn) read(r *bufio.Reader) {
	for {
		f, err := protocol.ReadFrame(r, max(c.maxMessage, protocol.DefaultMaxMessageSize)+protocol.FramePadding)
		if err != nil {
			c.fail(fmt.Errorf("read: %w", err))
			break
		}
		c.heard.Store(time.Now().UnixNano())
		c.handle(f)
	}
	if !errors.Is(c.reason(), ErrClosed) {
		c.log.Info("connection ended", "err", c.reason())
	}
}

func (c *conn) handle(f protocol.Frame) {
	command := f.Command
	switch command.GetType() {
	case pulsarpb.BaseCommand_PING:
		_ = c.sendCommand(&pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_PONG.Enum(), Pong: &pulsarpb.CommandPong{}}) // fails only once the connection is over
	case pulsarpb.BaseCommand_PONG:
	case pulsarpb.BaseCommand_SEND_RECEIPT:
		if p := c.producer(command.GetSendReceipt().GetProducerId()); p != nil {
			p.receipt(c, command.GetSendReceipt())
		}
	case pulsarpb.BaseCommand_SEND_ERROR:
		if p := c.producer(command.GetSendError().GetProducerId()); p != nil {
			p.sendError(c, command.GetSendError())
		}
	case pulsarpb.BaseCommand_CLOSE_PRODUCER:
		if p := c.producer(command.GetCloseProducer().GetProducerId()); p != nil {
			p.detach(c)
		}
	case pulsarpb.BaseCommand_MESSAGE:
		if k := c.consumer(command.GetMessage().GetConsumerId()); k != nil {
			k.message(c, command.GetMessage(), f.Payload)
		}
	case pulsarpb.BaseCommand_CLOSE_CONSUMER:
		if k := c.consumer(command.GetCloseConsumer().GetConsumerId()); k != nil {
			k.detach(c)
		}
	case pulsarpb.BaseCommand_REACHED_END_OF_TOPIC:
		if k := c.consumer(command.GetReachedEndOfTopic().GetConsumerId()); k != nil {
			k.reachedEnd()
		}
	default:
		c.answer(command)
	}
}

func (c *conn) producer(id uint64) *Producer {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.producers[id]
}

func (c *conn) consumer(id uint64) *Consumer {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.consumers[id]
}
