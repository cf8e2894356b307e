package protocoltest

import (
	"bufio"
	"errors"
	"net"
	"sync"
	"testing"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// Cluster is the state that brokers share.
type Cluster struct {
	mu     sync.Mutex // guards all below, and the brokers' fields
	topics map[string]*topic
	owners map[string]*Broker // of topics; a topic not listed belongs to whoever is asked
	names  int
}

// NewCluster returns an empty cluster.
func NewCluster() *Cluster {
	return &Cluster{topics: map[string]*topic{}, owners: map[string]*Broker{}}
}

// SetOwner moves a topic: lookups at other brokers are redirected, and producers
// and consumers there are closed by their broker. A nil b frees the topic.
func (k *Cluster) SetOwner(name string, b *Broker) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.owners[name] = b
	t := k.topic(name)
	for c, ids := range t.producers {
		for id := range ids {
			delete(ids, id)
			c.send(&pulsarpb.BaseCommand{
				Type:          pulsarpb.BaseCommand_CLOSE_PRODUCER.Enum(),
				CloseProducer: &pulsarpb.CommandCloseProducer{ProducerId: new(id), RequestId: new(^uint64(0))},
			})
		}
	}
	for _, s := range t.subscriptions {
		for _, co := range s.consumers {
			s.remove(co)
			co.conn.send(&pulsarpb.BaseCommand{
				Type:          pulsarpb.BaseCommand_CLOSE_CONSUMER.Enum(),
				CloseConsumer: &pulsarpb.CommandCloseConsumer{ConsumerId: new(co.id), RequestId: new(^uint64(0))},
			})
		}
	}
}

// Entries returns the payload sections stored in a topic, oldest first.
func (k *Cluster) Entries(name string) [][]byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	return append([][]byte(nil), k.topic(name).entries...)
}

// Store adds an entry to a topic, as if a producer had sent it.
func (k *Cluster) Store(name string, payload []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	t := k.topic(name)
	t.entries = append(t.entries, payload)
	t.dispatch()
}

// Replace puts other bytes in the place of a stored entry.
func (k *Cluster) Replace(name string, entry int, payload []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.topic(name).entries[entry] = payload
}

// Unacknowledged returns how many entries of a subscription are not acknowledged.
func (k *Cluster) Unacknowledged(name, subscription string) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.topic(name).subscriptions[subscription]
	if s == nil {
		return 0
	}
	n := 0
	for i := s.from; i < len(s.topic.entries); i++ {
		if !s.acked[i] {
			n++
		}
	}
	return n
}

// Terminate ends a topic: consumers that are through with it are told so.
func (k *Cluster) Terminate(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	t := k.topic(name)
	t.terminated = true
	t.dispatch()
}

func (k *Cluster) topic(name string) *topic {
	t := k.topics[name]
	if t == nil {
		t = &topic{name: name, subscriptions: map[string]*subscription{}, producers: map[*Conn]map[uint64]string{}}
		k.topics[name] = t
	}
	return t
}

// Hook sees each command before the broker does. True means that the broker shall
// ignore it. It may use the connection, not the cluster.
type Hook func(c *Conn, f protocol.Frame) bool

// Broker is one broker of a cluster.
type Broker struct {
	cluster *Cluster
	address string
	hook    Hook
	conns   map[*Conn]struct{}
	down    bool
	wg      sync.WaitGroup
}

// NewBroker adds a broker that listens on a free loopback port until the test
// ends.
func (k *Cluster) NewBroker(t testing.TB) *Broker {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := k.NewPipeBroker(t, l.Addr().String())
	b.wg.Go(func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			if !b.serve(nc) {
				_ = nc.Close() // nobody is there to tell
			}
		}
	})
	t.Cleanup(func() {
		_ = l.Close() // the test is over
		b.stop()
	})
	return b
}

// NewPipeBroker adds a broker that is reached through [Broker.Pipe] alone, under
// an address made up by the caller.
func (k *Cluster) NewPipeBroker(t testing.TB, address string) *Broker {
	t.Helper()
	b := &Broker{cluster: k, address: address, conns: map[*Conn]struct{}{}}
	t.Cleanup(b.stop)
	return b
}

// URL returns the broker's service URL.
func (b *Broker) URL() string { return "pulsar://" + b.address }

// Address returns the broker's host and port.
func (b *Broker) Address() string { return b.address }

// Pipe connects through memory.
func (b *Broker) Pipe() (net.Conn, error) {
	ours, theirs := net.Pipe()
	if !b.serve(theirs) {
		return nil, errors.New("broker is down")
	}
	return ours, nil
}

// SetHook replaces the broker's hook; nil removes it.
func (b *Broker) SetHook(h Hook) {
	b.cluster.mu.Lock()
	defer b.cluster.mu.Unlock()
	b.hook = h
}

// Disconnect closes all connections.
func (b *Broker) Disconnect() {
	for _, c := range b.connections() {
		c.Close()
	}
}

// SetDown closes all connections and, while down, those that come.
func (b *Broker) SetDown(down bool) {
	b.cluster.mu.Lock()
	b.down = down
	b.cluster.mu.Unlock()
	if down {
		b.Disconnect()
	}
}

// Connections returns how many connections are open.
func (b *Broker) Connections() int { return len(b.connections()) }

func (b *Broker) connections() []*Conn {
	b.cluster.mu.Lock()
	defer b.cluster.mu.Unlock()
	var list []*Conn
	for c := range b.conns {
		list = append(list, c)
	}
	return list
}

func (b *Broker) stop() {
	b.SetDown(true)
	b.wg.Wait()
}

// Conn is a client's connection, seen from the broker.
type Conn struct {
	broker *Broker
	nc     net.Conn

	mu     sync.Mutex // guards out and closed
	out    [][]byte
	wake   chan struct{} // capacity 1
	closed chan struct{}
	once   sync.Once
}

func (b *Broker) serve(nc net.Conn) bool {
	c := &Conn{broker: b, nc: nc, wake: make(chan struct{}, 1), closed: make(chan struct{})}
	b.cluster.mu.Lock()
	defer b.cluster.mu.Unlock()
	if b.down {
		return false
	}
	b.conns[c] = struct{}{}
	b.wg.Go(c.write)
	b.wg.Go(c.read)
	return true
}

// Close cuts the connection.
func (c *Conn) Close() {
	c.once.Do(func() {
		close(c.closed)
		_ = c.nc.Close() // nobody is there to tell
	})
}

func (c *Conn) over() bool {
	select {
	case <-c.closed:
		return true
	default:
		return false
	}
}

// Send sends a command to the client.
func (c *Conn) Send(command *pulsarpb.BaseCommand) { c.send(command) }

func (c *Conn) send(command *pulsarpb.BaseCommand, payload ...byte) {
	c.SendRaw(append(protocol.AppendPayloadHeader(nil, command, len(payload)), payload...))
}

// SendRaw sends bytes that need not be a frame.
func (c *Conn) SendRaw(b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out = append(c.out, b)
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *Conn) write() {
	for {
		select {
		case <-c.closed:
			return
		case <-c.wake:
		}
		c.mu.Lock()
		out := net.Buffers(c.out)
		c.out = nil
		c.mu.Unlock()
		if _, err := out.WriteTo(c.nc); err != nil {
			c.Close()
			return
		}
	}
}

func (c *Conn) read() {
	r := bufio.NewReader(c.nc)
	for {
		f, err := protocol.ReadFrame(r, protocol.DefaultMaxMessageSize+protocol.FramePadding)
		if err != nil {
			break
		}
		k := c.broker.cluster
		k.mu.Lock()
		hook := c.broker.hook
		k.mu.Unlock()
		if hook != nil && hook(c, f) {
			continue
		}
		k.mu.Lock()
		if !c.over() {
			c.handle(f) // what was buffered when the connection was cut is lost
		}
		k.mu.Unlock()
	}
	c.Close()
	k := c.broker.cluster
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(c.broker.conns, c)
	for _, t := range k.topics {
		delete(t.producers, c)
		for _, s := range t.subscriptions {
			for _, co := range s.consumers {
				if co.conn == c {
					s.remove(co)
				}
			}
		}
		t.dispatch()
	}
}

// Refuse answers a request with ERROR.
func (c *Conn) Refuse(request uint64, code pulsarpb.ServerError, message string) {
	c.send(&pulsarpb.BaseCommand{
		Type:  pulsarpb.BaseCommand_ERROR.Enum(),
		Error: &pulsarpb.CommandError{RequestId: &request, Error: code.Enum(), Message: &message},
	})
}

func (c *Conn) success(request uint64) {
	c.send(&pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_SUCCESS.Enum(), Success: &pulsarpb.CommandSuccess{RequestId: new(request)}})
}
