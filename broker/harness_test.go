package broker

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/managedledger"
	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/metadata/metadatatest"
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// memStorage keeps ledgers in memory.
type memStorage struct {
	mu      sync.Mutex
	last    ledger.ID
	ledgers map[ledger.ID]*memLedger
	hold    chan struct{} // while not nil, appends wait for its end
	added   int           // entries ever
}

type memLedger struct {
	entries [][]byte
	fenced  bool
}

func newMemStorage() *memStorage { return &memStorage{ledgers: map[ledger.ID]*memLedger{}} }

// pause makes appends wait until the returned func is called.
func (s *memStorage) pause() (resume func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	hold := make(chan struct{})
	s.hold = hold
	return sync.OnceFunc(func() {
		s.mu.Lock()
		s.hold = nil
		s.mu.Unlock()
		close(hold)
	})
}

func (s *memStorage) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.added
}

func (s *memStorage) Create(context.Context, string) (managedledger.Writer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last++
	l := &memLedger{}
	s.ledgers[s.last] = l
	w := &memWriter{s: s, l: l, id: s.last, work: make(chan memAppend, 1<<16), done: make(chan struct{})}
	go w.run()
	return w, nil
}

func (s *memStorage) Recover(_ context.Context, id ledger.ID) (managedledger.Closed, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.ledgers[id]
	if l == nil {
		return managedledger.Closed{}, ledger.ErrNoSuchLedger
	}
	l.fenced = true
	size := 0
	for _, e := range l.entries {
		size += len(e)
	}
	return managedledger.Closed{Last: ledger.EntryID(len(l.entries) - 1), Bytes: int64(size)}, nil
}

func (s *memStorage) Read(_ context.Context, id ledger.ID, first, last ledger.EntryID, maxBytes int) ([]ledger.Entry, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.ledgers[id]
	if l == nil {
		return nil, ledger.ErrNoSuchLedger
	}
	if int(first) >= len(l.entries) {
		return nil, ledger.ErrNoSuchEntry
	}
	var out []ledger.Entry
	for e := first; e <= last && int(e) < len(l.entries) && (maxBytes > 0 || len(out) == 0); e++ {
		out = append(out, ledger.Entry{Position: ledger.Position{Ledger: id, Entry: e}, Data: l.entries[e]})
		maxBytes -= len(l.entries[e])
	}
	return out, nil
}

func (s *memStorage) Delete(_ context.Context, id ledger.ID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.ledgers, id)
	return nil
}

type memAppend struct {
	data []byte
	done func(ledger.EntryID, error)
}

type memWriter struct {
	s    *memStorage
	l    *memLedger
	id   ledger.ID
	work chan memAppend
	once sync.Once
	done chan struct{}
}

func (w *memWriter) ID() ledger.ID { return w.id }

func (w *memWriter) Append(data []byte, done func(ledger.EntryID, error)) {
	w.work <- memAppend{data, done}
}

func (w *memWriter) run() {
	defer close(w.done)
	for a := range w.work {
		w.s.mu.Lock()
		for hold := w.s.hold; hold != nil; hold = w.s.hold {
			w.s.mu.Unlock()
			<-hold
			w.s.mu.Lock()
		}
		fenced := w.l.fenced
		if !fenced {
			w.l.entries = append(w.l.entries, a.data)
			w.s.added++
		}
		id := ledger.EntryID(len(w.l.entries) - 1)
		w.s.mu.Unlock()
		if fenced {
			a.done(0, ledger.ErrFenced)
		} else {
			a.done(id, nil)
		}
	}
}

func (w *memWriter) Close(context.Context) (ledger.EntryID, error) {
	w.once.Do(func() { close(w.work) })
	<-w.done
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	w.l.fenced = true
	return ledger.EntryID(len(w.l.entries) - 1), nil
}

func (w *memWriter) Abandon() { w.once.Do(func() { close(w.work) }) }

// bed is what brokers of one test share.
type bed struct {
	t       *testing.T
	store   metadata.Store
	storage *memStorage
}

func newBed(t *testing.T) *bed {
	return &bed{t: t, store: metadatatest.NewMemory(t), storage: newMemStorage()}
}

// node is one broker with what is below it.
type node struct {
	*Broker
	t       *testing.T
	addr    string
	own     *ownership.Service
	ns      *ownership.Namespaces
	factory *managedledger.Factory
	mem     *memStorage
	store   metadata.Store
	reg     *prometheus.Registry
	served  chan error
	once    sync.Once
}

func newNode(t *testing.T, overrides ...string) *node {
	return newBed(t).node("broker-1", overrides...)
}

func (d *bed) node(id string, overrides ...string) *node {
	d.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		d.t.Fatal(err)
	}
	n := &node{t: d.t, addr: l.Addr().String(), mem: d.storage, store: d.store, reg: prometheus.NewRegistry(), served: make(chan error, 1)}
	n.factory = managedledger.NewFactory(d.storage, d.store, managedledger.DefaultConfig(), quiet(), n.reg)
	n.own = ownership.New(ownership.Config{}, d.store, ownership.BrokerInfo{ID: id, ServiceURL: "pulsar://" + n.addr}, quiet())
	n.ns = ownership.NewNamespaces(ownership.Config{}, d.store, quiet())
	n.Broker = New(testConfig(d.t, overrides...), Deps{Factory: n.factory, Ownership: n.own, Namespaces: n.ns, Log: quiet(), Registerer: n.reg})
	if err := n.ns.Bootstrap(d.t.Context()); err != nil {
		d.t.Fatal(err)
	}
	if err := n.own.Start(d.t.Context()); err != nil {
		d.t.Fatal(err)
	}
	go func() { n.served <- n.Serve(l) }()
	d.t.Cleanup(n.stop)
	return n
}

// stop closes everything, from the top down.
func (n *node) stop() {
	n.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := n.Close(ctx); err != nil {
			n.t.Errorf("close broker: %v", err)
		}
		if err := <-n.served; err != nil {
			n.t.Errorf("serve: %v", err)
		}
		if err := n.own.Close(ctx); err != nil {
			n.t.Errorf("close ownership: %v", err)
		}
		if err := n.factory.Close(ctx); err != nil {
			n.t.Errorf("close factory: %v", err)
		}
	})
}

// client speaks raw frames.
type client struct {
	t       *testing.T
	nc      net.Conn
	r       *bufio.Reader
	request uint64
	held    []protocol.Frame // frames that came while another was awaited
	mute    bool             // do not answer PINGs
}

// dial opens a connection that has not introduced itself.
func (n *node) dial() *client {
	n.t.Helper()
	nc, err := net.Dial("tcp", n.addr)
	if err != nil {
		n.t.Fatal(err)
	}
	c := &client{t: n.t, nc: nc, r: bufio.NewReaderSize(nc, 32<<10)}
	n.t.Cleanup(func() { _ = nc.Close() })
	return c
}

// connect opens a connection and introduces itself.
func (n *node) connect() *client {
	n.t.Helper()
	c := n.dial()
	c.write(connectCommand(20))
	c.expect(pulsarpb.BaseCommand_CONNECTED)
	return c
}

func connectCommand(version int32) *pulsarpb.BaseCommand {
	name := "test"
	return &pulsarpb.BaseCommand{
		Type:    pulsarpb.BaseCommand_CONNECT.Enum(),
		Connect: &pulsarpb.CommandConnect{ClientVersion: &name, ProtocolVersion: &version},
	}
}

func (c *client) write(cmd *pulsarpb.BaseCommand) { c.writeRaw(protocol.AppendFrame(nil, cmd)) }

func (c *client) writeRaw(b []byte) {
	c.t.Helper()
	if _, err := c.nc.Write(b); err != nil {
		c.t.Fatal(err)
	}
}

// next returns the next frame that is not a PING.
func (c *client) next() (protocol.Frame, error) {
	for {
		_ = c.nc.SetReadDeadline(time.Now().Add(10 * time.Second))
		f, err := protocol.ReadFrame(c.r, 64<<20)
		if err == nil && f.Command.GetType() == pulsarpb.BaseCommand_PING {
			if !c.mute {
				c.write(pong())
			}
			continue
		}
		return f, err
	}
}

// expect returns the next frame of a type; others are kept for later.
func (c *client) expect(kind pulsarpb.BaseCommand_Type) protocol.Frame {
	c.t.Helper()
	return c.expectWhere(kind.String(), func(cmd *pulsarpb.BaseCommand) bool { return cmd.GetType() == kind })
}

func (c *client) expectWhere(what string, which func(*pulsarpb.BaseCommand) bool) protocol.Frame {
	c.t.Helper()
	for i, f := range c.held {
		if which(f.Command) {
			c.held = slices.Delete(c.held, i, i+1)
			return f
		}
	}
	for {
		f, err := c.next()
		if err != nil {
			c.t.Fatalf("waiting for %s: %v; meanwhile came %v", what, err, c.heldTypes())
		}
		if which(f.Command) {
			return f
		}
		c.held = append(c.held, f)
	}
}

// alive keeps this client answering PINGs until do returns.
func (c *client) alive(do func()) {
	c.t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	for {
		c.works()
		select {
		case <-done:
			return
		case <-time.After(time.Millisecond):
		}
	}
}

func (c *client) heldTypes() (s []string) {
	for _, f := range c.held {
		s = append(s, f.Command.String())
	}
	return s
}

// expectError returns the next ERROR and checks its code.
func (c *client) expectError(code pulsarpb.ServerError) *pulsarpb.CommandError {
	c.t.Helper()
	e := c.expect(pulsarpb.BaseCommand_ERROR).Command.GetError()
	if e.GetError() != code {
		c.t.Fatalf("ERROR is %v (%s), want %v", e.GetError(), e.GetMessage(), code)
	}
	return e
}

// expectClosed reads until the broker closes the connection.
func (c *client) expectClosed() {
	c.t.Helper()
	for {
		if _, err := c.next(); err != nil {
			var timeout net.Error
			if errors.As(err, &timeout) && timeout.Timeout() {
				c.t.Fatal("the connection is still open")
			}
			return
		}
	}
}

// nothing checks that no frame comes within d, apart from those held.
func (c *client) nothing(d time.Duration) {
	c.t.Helper()
	_ = c.nc.SetReadDeadline(time.Now().Add(d))
	if f, err := protocol.ReadFrame(c.r, 64<<20); err == nil {
		c.t.Fatalf("unexpected %v", f.Command)
	}
}

func (c *client) id() *uint64 {
	c.request++
	id := c.request
	return &id
}

// produce opens a producer and returns its name.
func (c *client) produce(topic string, id uint64, change ...func(*pulsarpb.CommandProducer)) string {
	c.t.Helper()
	c.write(producerCommand(topic, id, c.id(), change...))
	return c.expect(pulsarpb.BaseCommand_PRODUCER_SUCCESS).Command.GetProducerSuccess().GetProducerName()
}

func producerCommand(topic string, id uint64, request *uint64, change ...func(*pulsarpb.CommandProducer)) *pulsarpb.BaseCommand {
	p := &pulsarpb.CommandProducer{Topic: &topic, ProducerId: &id, RequestId: request}
	for _, f := range change {
		f(p)
	}
	return &pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_PRODUCER.Enum(), Producer: p}
}

func named(name string, epoch uint64) func(*pulsarpb.CommandProducer) {
	return func(p *pulsarpb.CommandProducer) {
		user := true
		p.ProducerName, p.Epoch, p.UserProvidedProducerName = &name, &epoch, &user
	}
}

// send sends one message without waiting.
func (c *client) send(producer, sequence uint64, data []byte) {
	c.t.Helper()
	cmd := &pulsarpb.BaseCommand{
		Type: pulsarpb.BaseCommand_SEND.Enum(),
		Send: &pulsarpb.CommandSend{ProducerId: &producer, SequenceId: &sequence},
	}
	c.writeRaw(append(protocol.AppendPayloadHeader(nil, cmd, len(data)), data...))
}

// receipt returns the next receipt.
func (c *client) receipt() *pulsarpb.CommandSendReceipt {
	c.t.Helper()
	return c.expect(pulsarpb.BaseCommand_SEND_RECEIPT).Command.GetSendReceipt()
}

// publish sends messages named by number and waits for their receipts.
func (c *client) publish(producer uint64, from, to int) (last ledger.Position) {
	c.t.Helper()
	for i := from; i < to; i++ {
		c.send(producer, uint64(i), payload(strconv.Itoa(i), 1))
	}
	for i := from; i < to; i++ {
		r := c.receipt()
		if r.GetSequenceId() != uint64(i) || r.GetProducerId() != producer {
			c.t.Fatalf("receipt %v, want sequence %d of producer %d", r, i, producer)
		}
		last = positionOf(r.GetMessageId())
	}
	return last
}

func subscribeCommand(topic, sub string, kind subType, id uint64, request *uint64, change ...func(*pulsarpb.CommandSubscribe)) *pulsarpb.BaseCommand {
	s := &pulsarpb.CommandSubscribe{
		Topic: &topic, Subscription: &sub, SubType: &kind, ConsumerId: &id, RequestId: request,
		InitialPosition: pulsarpb.CommandSubscribe_Earliest.Enum(),
	}
	for _, f := range change {
		f(s)
	}
	return &pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_SUBSCRIBE.Enum(), Subscribe: s}
}

// subscribe opens a consumer, from the earliest message on.
func (c *client) subscribe(topic, sub string, kind subType, id uint64, change ...func(*pulsarpb.CommandSubscribe)) {
	c.t.Helper()
	c.write(subscribeCommand(topic, sub, kind, id, c.id(), change...))
	c.succeeded()
}

func (c *client) succeeded() {
	c.t.Helper()
	if got := c.expect(pulsarpb.BaseCommand_SUCCESS).Command.GetSuccess().GetRequestId(); got != c.request {
		c.t.Fatalf("SUCCESS of request %d, want %d", got, c.request)
	}
}

func (c *client) flow(consumer uint64, permits uint32) {
	c.t.Helper()
	c.write(&pulsarpb.BaseCommand{
		Type: pulsarpb.BaseCommand_FLOW.Enum(),
		Flow: &pulsarpb.CommandFlow{ConsumerId: &consumer, MessagePermits: &permits},
	})
}

// message returns the next message of a consumer.
func (c *client) message(consumer uint64) (string, *pulsarpb.CommandMessage) {
	c.t.Helper()
	f := c.expectWhere(fmt.Sprintf("a message of consumer %d", consumer), func(cmd *pulsarpb.BaseCommand) bool {
		return cmd.GetType() == pulsarpb.BaseCommand_MESSAGE && cmd.GetMessage().GetConsumerId() == consumer
	})
	if err := protocol.CheckPayload(f.Payload); err != nil {
		c.t.Fatal(err)
	}
	return text(f.Payload), f.Command.GetMessage()
}

// receive checks the next messages of a consumer, and returns their ids.
func (c *client) receive(consumer uint64, want ...string) (ids []*pulsarpb.MessageIdData) {
	c.t.Helper()
	for _, w := range want {
		got, m := c.message(consumer)
		if got != w {
			c.t.Fatalf("got %q, want %q of %v", got, w, want)
		}
		ids = append(ids, m.GetMessageId())
	}
	return ids
}

func ackCommand(consumer uint64, kind pulsarpb.CommandAck_AckType, request *uint64, ids ...*pulsarpb.MessageIdData) *pulsarpb.BaseCommand {
	return &pulsarpb.BaseCommand{
		Type: pulsarpb.BaseCommand_ACK.Enum(),
		Ack:  &pulsarpb.CommandAck{ConsumerId: &consumer, AckType: &kind, MessageId: ids, RequestId: request},
	}
}

// ack acknowledges one by one and waits for the answer.
func (c *client) ack(consumer uint64, ids ...*pulsarpb.MessageIdData) {
	c.t.Helper()
	c.write(ackCommand(consumer, pulsarpb.CommandAck_Individual, c.id(), ids...))
	c.ackAnswered("")
}

func (c *client) ackAnswered(wantMessage string) *pulsarpb.CommandAckResponse {
	c.t.Helper()
	r := c.expect(pulsarpb.BaseCommand_ACK_RESPONSE).Command.GetAckResponse()
	if r.GetRequestId() != c.request || (r.GetMessage() == "") != (wantMessage == "") {
		c.t.Fatalf("ACK_RESPONSE %v", r)
	}
	return r
}

func (c *client) closeConsumer(id uint64) {
	c.t.Helper()
	c.write(&pulsarpb.BaseCommand{
		Type:          pulsarpb.BaseCommand_CLOSE_CONSUMER.Enum(),
		CloseConsumer: &pulsarpb.CommandCloseConsumer{ConsumerId: &id, RequestId: c.id()},
	})
	c.succeeded()
}

func (c *client) closeProducer(id uint64) {
	c.t.Helper()
	c.write(&pulsarpb.BaseCommand{
		Type:          pulsarpb.BaseCommand_CLOSE_PRODUCER.Enum(),
		CloseProducer: &pulsarpb.CommandCloseProducer{ProducerId: &id, RequestId: c.id()},
	})
	c.succeeded()
}

// works checks that the connection still does what it should.
func (c *client) works() {
	c.t.Helper()
	c.write(&pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_PING.Enum(), Ping: &pulsarpb.CommandPing{}})
	c.expect(pulsarpb.BaseCommand_PONG)
}

// stats returns a topic's statistics.
func (n *node) stats(topic string) *TopicStats {
	n.t.Helper()
	name, err := protocol.ParseTopic(topic)
	if err != nil {
		n.t.Fatal(err)
	}
	s, err := n.Stats(n.t.Context(), name)
	if err != nil {
		n.t.Fatal(err)
	}
	return s
}

// nonDurable makes a SUBSCRIBE a reader's, from an entry on.
func nonDurable(l, e uint64) func(*pulsarpb.CommandSubscribe) {
	return func(s *pulsarpb.CommandSubscribe) {
		durable := false
		s.Durable, s.StartMessageId = &durable, &pulsarpb.MessageIdData{LedgerId: &l, EntryId: &e}
	}
}

const (
	wireEarliest = math.MaxUint64
	wireLatest   = math.MaxInt64
)
