package metadata

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/metadata/metadatapb"
)

const (
	// group is the Raft group that keeps the store.
	group = 0

	// maxLanes bounds the changes that one client has under way at once; more
	// wait for their turn. The store remembers the last command of 4096 lanes.
	maxLanes = 64

	// attemptTimeout bounds one attempt of a read or a change: a leader that
	// hangs must not use up the caller's time.
	attemptTimeout = 2 * time.Second

	// renewTimeout bounds one attempt of a renewal, of which a session wants
	// several within its TTL.
	renewTimeout = time.Second
)

// Client is the Store of a cluster, over gRPC.
//
// Changes go through lanes. A lane has one change under way at a time and numbers
// its changes, so that the store, which remembers the last change of each lane,
// recognises a repeat. That is why the client may resend a change of which it
// does not know what became.
type Client struct {
	pool  *rpc.Pool
	known atomic.Int64  // highest store revision seen
	idle  chan *lane    // lanes without a change under way; capacity maxLanes
	slots chan struct{} // one for each lane that may still be made
}

// lane is owned by the call that took it from idle.
type lane struct {
	id       []byte
	sequence uint64 // of the last change
}

var _ Store = (*Client)(nil)

// NewClient returns the Store that the bookies of pool keep. It does no I/O and
// needs no Close; the pool belongs to the caller.
func NewClient(pool *rpc.Pool) *Client {
	c := &Client{pool: pool, idle: make(chan *lane, maxLanes), slots: make(chan struct{}, maxLanes)}
	for range maxLanes {
		c.slots <- struct{}{}
	}
	return c
}

// Get implements [Store].
func (c *Client) Get(ctx context.Context, key string) (KV, error) {
	if err := CheckKey(key); err != nil {
		return KV{}, err
	}
	var reply *metadatapb.GetReply
	err := c.call(ctx, attemptTimeout, func(ctx context.Context, s metadatapb.MetadataClient) (err error) {
		reply, err = s.Get(ctx, &metadatapb.GetRequest{Key: key})
		return err
	})
	if err != nil {
		return KV{}, explain(ctx, err, "get %q", key)
	}
	return fromWire(reply.GetKv()), nil
}

// Range implements [Store].
func (c *Client) Range(ctx context.Context, prefix, after string, limit int) ([]KV, error) {
	if err := errors.Join(CheckPrefix(prefix), CheckPrefix(after), CheckLimit(limit)); err != nil {
		return nil, err
	}
	var kvs []KV
	for {
		var reply *metadatapb.RangeReply
		err := c.call(ctx, attemptTimeout, func(ctx context.Context, s metadatapb.MetadataClient) (err error) {
			reply, err = s.Range(ctx, &metadatapb.RangeRequest{Prefix: prefix, After: after, Limit: uint32(limit - len(kvs))})
			return err
		})
		if err != nil {
			return nil, explain(ctx, err, "range over %q", prefix)
		}
		for _, kv := range reply.GetKvs() {
			kvs = append(kvs, fromWire(kv))
			after = kv.GetKey()
		}
		if !reply.GetMore() || len(kvs) >= limit {
			return kvs, nil
		}
	}
}

// Put implements [Store].
func (c *Client) Put(ctx context.Context, key string, value []byte, if_ Version, lease LeaseID) (Version, error) {
	if err := errors.Join(CheckKey(key), CheckValue(key, value), CheckIf(key, if_)); err != nil {
		return 0, err
	}
	reply, err := c.change(ctx, &metadatapb.ChangeRequest{
		Kind: metadatapb.ChangeRequest_PUT, Key: key, Value: value, IfVersion: int64(if_), Lease: int64(lease),
	})
	if err != nil {
		return 0, explain(ctx, err, "put %q", key)
	}
	return Version(reply.GetVersion()), nil
}

// PutSequential implements [Store].
func (c *Client) PutSequential(ctx context.Context, prefix string, value []byte) (int64, error) {
	if err := errors.Join(CheckPrefix(prefix), CheckValue(prefix, value)); err != nil {
		return 0, err
	}
	reply, err := c.change(ctx, &metadatapb.ChangeRequest{
		Kind: metadatapb.ChangeRequest_SEQUENTIAL, Key: prefix, Value: value,
	})
	if err != nil {
		return 0, explain(ctx, err, "put next of %q", prefix)
	}
	return reply.GetNumber(), nil
}

// Delete implements [Store].
func (c *Client) Delete(ctx context.Context, key string, if_ Version) error {
	if err := errors.Join(CheckKey(key), CheckIf(key, if_)); err != nil {
		return err
	}
	_, err := c.change(ctx, &metadatapb.ChangeRequest{
		Kind: metadatapb.ChangeRequest_DELETE, Key: key, IfVersion: int64(if_),
	})
	return explain(ctx, err, "delete %q", key)
}

// GrantLease implements [Store].
func (c *Client) GrantLease(ctx context.Context, ttl time.Duration) (LeaseID, error) {
	if err := CheckTTL(ttl); err != nil {
		return 0, err
	}
	reply, err := c.change(ctx, &metadatapb.ChangeRequest{
		Kind: metadatapb.ChangeRequest_GRANT, TtlMillis: ttl.Milliseconds(),
	})
	if err != nil {
		return 0, explain(ctx, err, "grant lease of %v", ttl)
	}
	return LeaseID(reply.GetLease()), nil
}

// KeepAlive implements [Store].
func (c *Client) KeepAlive(ctx context.Context, id LeaseID) error {
	err := c.call(ctx, renewTimeout, func(ctx context.Context, s metadatapb.MetadataClient) error {
		_, err := s.KeepAlive(ctx, &metadatapb.KeepAliveRequest{Lease: int64(id)})
		return err
	})
	return explain(ctx, err, "keep lease %d alive", id)
}

// RevokeLease implements [Store].
func (c *Client) RevokeLease(ctx context.Context, id LeaseID) error {
	_, err := c.change(ctx, &metadatapb.ChangeRequest{Kind: metadatapb.ChangeRequest_REVOKE, Lease: int64(id)})
	return explain(ctx, err, "revoke lease %d", id)
}

func (c *Client) call(ctx context.Context, attempt time.Duration, fn func(context.Context, metadatapb.MetadataClient) error) error {
	return c.pool.CallWithin(ctx, group, attempt, func(ctx context.Context, conn *grpc.ClientConn) error {
		return fn(ctx, metadatapb.NewMetadataClient(conn))
	})
}

// change sends one change until it is answered or ctx ends.
func (c *Client) change(ctx context.Context, r *metadatapb.ChangeRequest) (*metadatapb.ChangeReply, error) {
	l, err := c.take(ctx)
	if err != nil {
		return nil, err
	}
	// Whatever became of the change, the lane's next one outranks it: a sending
	// that is still on its way is then refused.
	defer func() { c.idle <- l }()
	if c.known.Load() == 0 {
		if err := c.learnRevision(ctx); err != nil {
			return nil, err
		}
	}
	l.sequence++
	r.Client, r.Sequence, r.Known = l.id, l.sequence, c.known.Load()
	var reply *metadatapb.ChangeReply
	err = c.call(ctx, attemptTimeout, func(ctx context.Context, s metadatapb.MetadataClient) (err error) {
		reply, err = s.Change(ctx, r)
		r.Resend = true
		return err
	})
	if err != nil {
		return nil, err
	}
	c.learn(reply.GetRevision())
	if reply.GetForgotten() {
		return nil, fmt.Errorf("the store forgot this client while it waited for an answer: %w", ErrUnknownOutcome)
	}
	return reply, nil
}

// take returns an idle lane, a new one, or waits for one.
func (c *Client) take(ctx context.Context) (*lane, error) {
	select {
	case l := <-c.idle:
		return l, nil
	default:
	}
	select {
	case l := <-c.idle:
		return l, nil
	case <-c.slots:
		id := make([]byte, 16)
		rand.Read(id) // never fails
		return &lane{id: id}, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("%d changes are under way already: %w: %w", maxLanes, ctx.Err(), ErrUnavailable)
	}
}

// learnRevision asks for a first revision to be known, once per client: without
// one the store, if it has forgotten any client, could not tell whether it has
// forgotten this one.
func (c *Client) learnRevision(ctx context.Context) error {
	return c.call(ctx, attemptTimeout, func(ctx context.Context, s metadatapb.MetadataClient) error {
		reply, err := s.Revision(ctx, &metadatapb.RevisionRequest{})
		c.learn(reply.GetRevision())
		return err
	})
}

func (c *Client) learn(revision int64) {
	for {
		known := c.known.Load()
		if revision <= known || c.known.CompareAndSwap(known, revision) {
			return
		}
	}
}

// explain adds what was asked for to errors that the store did not word itself.
func explain(ctx context.Context, err error, format string, args ...any) error {
	var remote *rpc.RemoteError
	if err == nil || ctx.Err() == nil && errors.As(err, &remote) {
		return err
	}
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), err)
}

func fromWire(kv *metadatapb.KV) KV {
	return KV{Key: kv.GetKey(), Value: kv.GetValue(), Version: Version(kv.GetVersion()), Lease: LeaseID(kv.GetLease())}
}
