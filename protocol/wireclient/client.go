package wireclient

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// maxRedirects bounds how often one lookup is sent on.
const maxRedirects = 20

// Client is a set of connections to the brokers of one cluster.
type Client struct {
	options Options
	hosts   []string
	secure  bool

	ctx    context.Context // ends at Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // every goroutine of the client

	requestID atomic.Uint64
	handleID  atomic.Uint64 // producers and consumers
	host      atomic.Uint64 // index of the service host in use

	mu     sync.Mutex // guards all below
	closed bool
	conns  map[connKey]*dialing
	open   map[closer]struct{} // producers and consumers
}

// connKey names a connection: a broker's address, and which of several to it.
type connKey struct {
	address string
	slot    int
}

type closer interface{ abandon() }

// dialing is a connection, or one on its way.
type dialing struct {
	done chan struct{} // closed once conn or err is set
	conn *conn
	err  error
}

// Dial makes a client for serviceURL, "pulsar://host[:port][,host...]", and waits
// until one of the hosts answers or ctx ends.
func Dial(ctx context.Context, serviceURL string, options Options) (*Client, error) {
	hosts, secure, err := parseServiceURL(serviceURL)
	if err != nil {
		return nil, err
	}
	options.setDefaults()
	c := &Client{
		options: options, hosts: hosts, secure: secure,
		conns: map[connKey]*dialing{}, open: map[closer]struct{}{},
	}
	c.ctx, c.cancel = context.WithCancel(context.WithoutCancel(ctx))
	err = c.retry(ctx, func(ctx context.Context) error {
		_, err := c.service(ctx)
		return err
	})
	if err != nil {
		_ = c.Close() // never fails
		return nil, err
	}
	return c, nil
}

// Close closes all connections and waits for every goroutine of the client.
// Messages without a receipt fail with ErrClosed; close producers first to flush
// them. It may be called more than once.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	open := make([]closer, 0, len(c.open))
	for o := range c.open {
		open = append(open, o)
	}
	c.mu.Unlock()
	c.cancel()
	for _, o := range open {
		o.abandon()
	}
	c.wg.Wait()
	return nil
}

// start runs f on a goroutine of the client, unless the client is closed.
func (c *Client) start(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.wg.Go(f)
	return true
}

func (c *Client) register(o closer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("client: %w", ErrClosed)
	}
	c.open[o] = struct{}{}
	return nil
}

func (c *Client) unregister(o closer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, o)
}

// retry calls op until it succeeds, fails for good, or ctx ends.
func (c *Client) retry(ctx context.Context, op func(ctx context.Context) error) error {
	b := c.backoff()
	var last error // that says more than that the time is up
	for {
		attempt, cancel := context.WithTimeout(ctx, c.options.OperationTimeout)
		err := op(attempt)
		cancel()
		if err == nil || permanent(err) {
			return err
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		if !b.wait(ctx) {
			return fmt.Errorf("%w; %w", last, context.Cause(ctx))
		}
	}
}

// backoff is a pause that doubles, with up to a quarter of jitter.
type backoff struct{ next, most time.Duration }

func (c *Client) backoff() *backoff {
	return &backoff{c.options.BackoffMin, c.options.BackoffMax}
}

// wait reports false if ctx ended first.
func (b *backoff) wait(ctx context.Context) bool {
	t := time.NewTimer(b.next - rand.N(b.next/4+1))
	defer t.Stop()
	b.next = min(2*b.next, b.most)
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// service returns a connection to one of the service hosts, trying each once.
func (c *Client) service(ctx context.Context) (*conn, error) {
	var errs []error
	for range c.hosts {
		i := c.host.Load()
		host := c.hosts[i%uint64(len(c.hosts))]
		cn, err := c.conn(ctx, connKey{host, 0})
		if err == nil {
			return cn, nil
		}
		errs = append(errs, err)
		c.host.CompareAndSwap(i, i+1)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// conn returns the live connection of that key, or dials it. Callers of the same
// key share one dial.
func (c *Client) conn(ctx context.Context, key connKey) (*conn, error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, fmt.Errorf("client: %w", ErrClosed)
	}
	d := c.conns[key]
	if d == nil || d.over() {
		d = &dialing{done: make(chan struct{})}
		c.conns[key] = d
		c.wg.Go(func() { c.dial(d, key) }) //nolint:contextcheck // callers share the dial; it ends with the client
	}
	c.mu.Unlock()
	select {
	case <-d.done:
		return d.conn, d.err
	case <-ctx.Done():
		return nil, fmt.Errorf("connect to %s: %w", key.address, context.Cause(ctx))
	}
}

// over reports whether the dial failed or its connection is gone.
func (d *dialing) over() bool {
	select {
	case <-d.done:
	default:
		return false
	}
	if d.err != nil {
		return true
	}
	select {
	case <-d.conn.done:
		return true
	default:
		return false
	}
}

func (c *Client) dial(d *dialing, key connKey) {
	ctx, cancel := context.WithTimeout(c.ctx, c.options.ConnectTimeout)
	defer cancel()
	d.conn, d.err = open(ctx, c, key.address)
	if d.err != nil {
		d.err = fmt.Errorf("connect to %s: %w", key.address, d.err)
	}
	close(d.done)
}

// Partitions returns how many partitions the topic has; 0 if it is not
// partitioned or does not exist.
func (c *Client) Partitions(ctx context.Context, topic string) (int, error) {
	var n int
	err := c.retry(ctx, func(ctx context.Context) error {
		cn, err := c.service(ctx)
		if err != nil {
			return err
		}
		answer, err := cn.request(ctx, func(id uint64) *pulsarpb.BaseCommand {
			return &pulsarpb.BaseCommand{
				Type:              pulsarpb.BaseCommand_PARTITIONED_METADATA.Enum(),
				PartitionMetadata: &pulsarpb.CommandPartitionedTopicMetadata{RequestId: &id, Topic: &topic},
			}
		})
		if err != nil {
			return err
		}
		r := answer.GetPartitionMetadataResponse()
		if r.GetResponse() != pulsarpb.CommandPartitionedTopicMetadataResponse_Success {
			return &ServerError{r.GetError(), r.GetMessage(), cn.address}
		}
		n = int(r.GetPartitions())
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("partitions of %s: %w", topic, err)
	}
	return n, nil
}

// lookup returns the address of the broker that owns topic. It does not retry.
func (c *Client) lookup(ctx context.Context, topic protocol.TopicName) (string, error) {
	cn, err := c.service(ctx)
	if err != nil {
		return "", fmt.Errorf("look up: %w", err)
	}
	authoritative := false
	for range maxRedirects {
		answer, err := cn.request(ctx, func(id uint64) *pulsarpb.BaseCommand {
			return &pulsarpb.BaseCommand{
				Type:        pulsarpb.BaseCommand_LOOKUP.Enum(),
				LookupTopic: &pulsarpb.CommandLookupTopic{RequestId: &id, Topic: new(topic.String()), Authoritative: &authoritative},
			}
		})
		if err != nil {
			return "", fmt.Errorf("look up: %w", err)
		}
		r := answer.GetLookupTopicResponse()
		target := r.GetBrokerServiceUrl()
		if c.secure {
			target = r.GetBrokerServiceUrlTls()
		}
		switch r.GetResponse() {
		case pulsarpb.CommandLookupTopicResponse_Connect:
			if r.GetProxyThroughServiceUrl() {
				return "", errors.New("look up: the broker is behind a proxy, which this client cannot use")
			}
			return brokerAddress(target)
		case pulsarpb.CommandLookupTopicResponse_Redirect:
			address, err := brokerAddress(target)
			if err != nil {
				return "", err
			}
			authoritative = r.GetAuthoritative()
			if cn, err = c.conn(ctx, connKey{address, 0}); err != nil {
				return "", fmt.Errorf("look up, redirected: %w", err)
			}
		default:
			return "", fmt.Errorf("look up: %w", &ServerError{r.GetError(), r.GetMessage(), cn.address})
		}
	}
	return "", fmt.Errorf("look up: redirected %d times, last by %s", maxRedirects, cn.address)
}

// broker returns a connection to the broker that owns topic. Handles with
// different ids spread over the connections to one broker.
func (c *Client) broker(ctx context.Context, topic protocol.TopicName, handle uint64) (*conn, error) {
	address, err := c.lookup(ctx, topic)
	if err != nil {
		return nil, err
	}
	return c.conn(ctx, connKey{address, int(handle % uint64(c.options.ConnectionsPerBroker))})
}
