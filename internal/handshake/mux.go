package handshake

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"
)

const (
	// MaxHellos bounds the connections whose hello is not finished. One more is
	// closed at once.
	MaxHellos = 1024

	// backlog is how many greeted connections wait in one listener for Accept.
	backlog = 64
)

// Mux shares one listener among services. It greets every connection and hands
// it to the [net.Listener] registered for the service and group that it asks for.
type Mux struct {
	l    net.Listener
	self func() Self
	log  *slog.Logger

	closed chan struct{} // closed by Close
	hellos sync.WaitGroup

	mu        sync.Mutex // guards what follows
	closing   bool
	listeners map[route]*listener
	greeting  map[net.Conn]struct{} // connections in their hello; at most MaxHellos
}

type route struct {
	service Service
	group   uint32
}

// NewMux wires a Mux over l, which it owns from then on. self is asked once per
// connection, so that a node may learn its cluster id while it runs. It starts
// nothing: call Serve.
func NewMux(l net.Listener, self func() Self, log *slog.Logger) *Mux {
	return &Mux{
		l: l, self: self, log: log.With("component", "handshake"),
		closed:    make(chan struct{}),
		listeners: map[route]*listener{},
		greeting:  map[net.Conn]struct{}{},
	}
}

// Addr is the address that the Mux listens on.
func (m *Mux) Addr() net.Addr { return m.l.Addr() }

// Listener returns the listener of one service and group, from before or after
// Serve on. Closing it lets the route be registered again; until then a second
// call for the same route panics. Closing the Mux closes it.
func (m *Mux) Listener(s Service, group uint32) net.Listener {
	l := &listener{mux: m, route: route{s, group}, conns: make(chan net.Conn, backlog), closed: make(chan struct{})}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.listeners[l.route]; ok {
		panic(fmt.Sprintf("handshake: %v group %d is registered twice", s, group))
	}
	if m.closing {
		close(l.closed)
		return l
	}
	m.listeners[l.route] = l
	return l
}

// Serve accepts until Close, which makes it return nil, or until the listener
// fails for good. Call it once.
func (m *Mux) Serve() error {
	wait := time.Duration(0)
	for {
		conn, err := m.l.Accept()
		select {
		case <-m.closed:
			if err == nil {
				_ = conn.Close()
			}
			return nil
		default:
		}
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return fmt.Errorf("accept inter-node connections: %w", err)
			}
			// Out of file descriptors, or a connection that died in the queue: the
			// listener is alive, so wait a little instead of giving the port up.
			wait = min(max(2*wait, 5*time.Millisecond), time.Second)
			m.log.Warn("accept failed; will try again", "err", err, "wait", wait)
			select {
			case <-time.After(wait):
			case <-m.closed:
				return nil
			}
			continue
		}
		wait = 0
		if !m.admit(conn) {
			_ = conn.Close()
			continue
		}
		go func() {
			defer m.hellos.Done()
			m.greet(conn)
		}()
	}
}

// Close closes the listener, every listener handed out, and connections still
// in their hello, then waits for their goroutines. It may be called twice.
func (m *Mux) Close() error {
	m.mu.Lock()
	var err error
	if !m.closing {
		m.closing = true
		close(m.closed)
		err = m.l.Close()
	}
	var open []*listener
	for _, l := range m.listeners {
		open = append(open, l)
	}
	for c := range m.greeting {
		_ = c.Close()
	}
	m.mu.Unlock()
	for _, l := range open {
		_ = l.Close()
	}
	m.hellos.Wait()
	return err
}

func (m *Mux) admit(conn net.Conn) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing {
		return false
	}
	if len(m.greeting) >= MaxHellos {
		m.log.Warn("connection closed: too many have not finished their hello", "peer", conn.RemoteAddr().String(), "limit", MaxHellos)
		return false
	}
	m.greeting[conn] = struct{}{}
	m.hellos.Add(1)
	return true
}

// greet runs one connection's hello. It leaves the connection with a listener or
// closed.
func (m *Mux) greet(conn net.Conn) {
	l, err := m.answer(conn)
	m.mu.Lock()
	delete(m.greeting, conn)
	m.mu.Unlock()
	if err != nil {
		m.log.Warn("inter-node connection refused", "peer", conn.RemoteAddr().String(), "err", err)
	}
	if err != nil || l == nil || !l.deliver(conn) {
		_ = conn.Close()
	}
}

// answer reads the hello and answers it. It returns the listener to deliver to,
// nil if there is nothing to deliver.
func (m *Mux) answer(conn net.Conn) (*listener, error) {
	_ = conn.SetDeadline(time.Now().Add(HelloTimeout))
	self := m.self()
	kind, body, err := readFrame(conn)
	var wrong *versionError
	switch {
	case errors.As(err, &wrong):
		return nil, m.refuse(conn, fmt.Sprintf("%v speaks inter-node protocol version %d, you speak %d: run versions that agree", self, Version, wrong.theirs))
	case err != nil:
		return nil, err // not one of us, or a broken line: nobody would read an answer
	case kind != kindHello:
		return nil, fmt.Errorf("hello frame kind %d: want %d", kind, kindHello)
	}
	h, err := parseHello(body)
	if err != nil {
		return nil, err
	}
	if err := h.self.verify(); err != nil {
		return nil, m.refuse(conn, err.Error())
	}
	if reason := mismatch(self, h.self); reason != "" {
		return nil, m.refuse(conn, reason)
	}
	if h.to.Node != "" && h.to.Node != self.Node {
		return nil, m.refuse(conn, fmt.Sprintf("%v refuses %v, which wanted node %q", self, h.self, h.to.Node))
	}
	m.mu.Lock()
	l := m.listeners[route{h.to.Service, h.to.Group}]
	m.mu.Unlock()
	if l == nil && h.to.Service != probe {
		return nil, m.refuse(conn, fmt.Sprintf("%v does not serve %v group %d, which %v wanted", self, h.to.Service, h.to.Group, h.self))
	}
	if err := writeFrame(conn, kindWelcome, appendSelf(nil, self)); err != nil {
		return nil, fmt.Errorf("answer hello of %v: %w", h.self, err)
	}
	_ = conn.SetDeadline(time.Time{})
	return l, nil
}

func (m *Mux) refuse(conn net.Conn, reason string) error {
	if len(reason) > maxReason {
		reason = reason[:maxReason]
	}
	_ = writeFrame(conn, kindRefusal, appendString(nil, reason)) // the peer may be gone; the log has the sentence
	return errors.New(reason)
}

// listener is the [net.Listener] of one route.
type listener struct {
	mux   *Mux
	route route
	conns chan net.Conn // deliver to Accept; never closed

	once   sync.Once
	closed chan struct{} // closed by Close
	// mu makes deliver and Close exclude each other, so that no connection
	// enters conns after Close has emptied it.
	mu sync.Mutex
}

// deliver hands conn to Accept. It reports false if the listener is closed or
// its backlog is full; the caller then closes conn.
func (l *listener) deliver(conn net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.closed:
		return false
	default:
	}
	select {
	case l.conns <- conn:
		return true
	default:
		l.mux.log.Warn("connection closed: its service does not accept", "service", l.route.service.String(), "group", l.route.group, "limit", backlog)
		return false
	}
}

// Accept implements [net.Listener]. After Close it returns net.ErrClosed.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case <-l.closed:
		return nil, net.ErrClosed
	default:
	}
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements [net.Listener]: it ends Accept, closes connections that were
// not accepted yet, and frees the route.
func (l *listener) Close() error {
	l.once.Do(func() {
		l.mux.mu.Lock()
		if l.mux.listeners[l.route] == l {
			delete(l.mux.listeners, l.route)
		}
		l.mux.mu.Unlock()

		l.mu.Lock()
		defer l.mu.Unlock()
		select {
		case <-l.closed:
			return // made by a closed Mux
		default:
		}
		close(l.closed)
		for {
			select {
			case c := <-l.conns:
				_ = c.Close()
			default:
				return
			}
		}
	})
	return nil
}

// Addr implements [net.Listener].
func (l *listener) Addr() net.Addr { return l.mux.l.Addr() }
