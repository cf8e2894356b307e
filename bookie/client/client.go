package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata"
)

// recordPrefix is where metadata keeps a record per ledger: its owner.
const recordPrefix = "/ledgers/"

// firstEpoch is the epoch of a ledger's only writer. Fences use fenceEpoch.
const (
	firstEpoch uint64 = 1
	fenceEpoch uint64 = math.MaxUint64
)

// errClientClosed refuses work on a closed client.
var errClientClosed = fmt.Errorf("ledger client closed: %w", ledger.ErrUnavailable)

// Client creates, appends to, reads, recovers and deletes ledgers.
type Client struct {
	pool    *rpc.Pool
	meta    metadata.Store
	log     *slog.Logger
	metrics *metrics

	ctx     context.Context // ended by Close
	cancel  context.CancelFunc
	running sync.WaitGroup // lanes and deliveries

	mu     sync.Mutex // guards what follows
	lanes  map[uint32]*lane
	closed bool
}

// metrics are one client's instruments.
type metrics struct {
	appends, resends, failed prometheus.Counter
	pendingBytes             prometheus.Gauge
	streams                  prometheus.Counter
	reads, readFailures      prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	f := promauto.With(reg)
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	return &metrics{
		appends:      counter("bookie_client_appends_total", "Entries stored."),
		resends:      counter("bookie_client_resends_total", "Entries sent again after a stream ended."),
		failed:       counter("bookie_client_failed_appends_total", "Entries whose append failed for good."),
		streams:      counter("bookie_client_streams_total", "Append streams opened."),
		reads:        counter("bookie_client_reads_total", "Reads answered with entries."),
		readFailures: counter("bookie_client_read_failures_total", "Reads that failed for good."),
		pendingBytes: f.NewGauge(prometheus.GaugeOpts{
			Name: "bookie_client_pending_bytes", Help: "Bytes of appended entries that are not answered.",
		}),
	}
}

// New returns a client of the bookies that pool knows. It takes ledger ids from
// meta. It does no I/O; pool and meta outlive the client.
func New(pool *rpc.Pool, meta metadata.Store, log *slog.Logger, reg prometheus.Registerer) *Client {
	c := &Client{
		pool: pool, meta: meta, log: log.With("component", "bookie-client"), metrics: newMetrics(reg),
		lanes: map[uint32]*lane{},
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c
}

// Create allocates a ledger id, records owner under it, and creates the ledger.
// When it fails, a ledger without entries may stay behind; its record says whose.
func (c *Client) Create(ctx context.Context, owner string) (*Writer, error) {
	if _, err := c.pool.Groups(ctx); err != nil {
		return nil, fmt.Errorf("create a ledger for %q: %w", owner, err)
	}
	n, err := c.meta.PutSequential(ctx, recordPrefix, []byte(owner))
	if err != nil {
		return nil, fmt.Errorf("create a ledger for %q: allocate an id: %w", owner, err)
	}
	id := ledger.ID(n)
	err = c.call(ctx, id, func(ctx context.Context, l bookiepb.LedgersClient) error {
		_, err := l.Create(ctx, &bookiepb.CreateRequest{Ledger: n, Epoch: firstEpoch, Owner: owner})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("create ledger %d for %q: %w", id, owner, err)
	}
	return c.newWriter(id)
}

// Closed is the exact end of a ledger that can grow no more.
type Closed struct {
	Last  ledger.EntryID // ledger.BeforeFirst if it is empty
	Bytes int64          // sum of the entries' lengths
}

// Recover fences a ledger, which stops its writer for good wherever it is, and
// returns its exact end. The error wraps [ledger.ErrNoSuchLedger] if there is
// none. Recovering again is fine.
func (c *Client) Recover(ctx context.Context, id ledger.ID) (Closed, error) {
	var reply *bookiepb.EndReply
	err := c.call(ctx, id, func(ctx context.Context, l bookiepb.LedgersClient) (err error) {
		reply, err = l.Fence(ctx, &bookiepb.FenceRequest{Ledger: int64(id), Epoch: fenceEpoch})
		return err
	})
	if err != nil {
		return Closed{}, fmt.Errorf("recover ledger %d: %w", id, err)
	}
	return Closed{ledger.EntryID(reply.GetLast()), reply.GetBytes()}, nil
}

// Delete removes a ledger and its record. Deleting it again is fine.
func (c *Client) Delete(ctx context.Context, id ledger.ID) error {
	err := c.call(ctx, id, func(ctx context.Context, l bookiepb.LedgersClient) error {
		_, err := l.Delete(ctx, &bookiepb.DeleteRequest{Ledger: int64(id)})
		return err
	})
	if err != nil {
		return fmt.Errorf("delete ledger %d: %w", id, err)
	}
	err = c.meta.Delete(ctx, fmt.Sprintf("%s%019d", recordPrefix, id), metadata.AnyVersion)
	if err != nil && !errors.Is(err, metadata.ErrNotFound) {
		return fmt.Errorf("delete the record of ledger %d: %w", id, err)
	}
	return nil
}

// call runs an idempotent call against the leader of the ledger's group.
func (c *Client) call(ctx context.Context, id ledger.ID, fn func(context.Context, bookiepb.LedgersClient) error) error {
	group, err := c.groupOf(ctx, id)
	if err != nil {
		return err
	}
	return c.pool.Call(ctx, group, func(ctx context.Context, conn *grpc.ClientConn) error {
		return fn(ctx, bookiepb.NewLedgersClient(conn))
	})
}

func (c *Client) groupOf(ctx context.Context, id ledger.ID) (uint32, error) {
	if id < 1 {
		return 0, fmt.Errorf("ledger id %d: ids start at 1: %w", id, ledger.ErrNoSuchLedger)
	}
	if _, err := c.pool.Groups(ctx); err != nil {
		return 0, err
	}
	return c.pool.GroupOf(id), nil
}

// lane returns the group's lane, begun if need be.
func (c *Client) lane(group uint32) (*lane, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errClientClosed
	}
	l := c.lanes[group]
	if l == nil {
		l = newLane(c, group)
		c.lanes[group] = l
		c.running.Go(func() { l.run(c.ctx) })
	}
	return l, nil
}

// Close ends the client. Unanswered appends end with [ledger.ErrUnknownOutcome];
// Close returns after the last of them was told. It may be called twice.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	lanes := c.lanes
	c.mu.Unlock()
	c.cancel()
	for _, l := range lanes {
		l.abandonAll()
	}
	c.running.Wait()
	return nil
}
