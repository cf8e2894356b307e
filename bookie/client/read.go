package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
)

const (
	// leaderPatience is how long a read looks for a leader before it asks any
	// replica.
	leaderPatience = time.Second

	// replicaTimeout bounds the question to one bookie.
	replicaTimeout = 3 * time.Second
)

// Read returns entries of a ledger from first on, at most to last: a prefix of
// them that is not empty, bounded by maxBytes of data except that the first
// entry always comes. It asks the group's leader; where none answers, any replica
// that has the entries will do.
//
// The error wraps [ledger.ErrNoSuchLedger] or [ledger.ErrNoSuchEntry] if the
// leader says so, [ledger.ErrDamaged] if the copy of every replica that answers is
// damaged, or [ledger.ErrUnavailable] and ctx's error if ctx ended before
// anybody could serve.
func (c *Client) Read(ctx context.Context, id ledger.ID, first, last ledger.EntryID, maxBytes int) ([]ledger.Entry, error) {
	if first < 0 || last < first {
		return nil, fmt.Errorf("read ledger %d, entries %d to %d: want 0 or more, in order: %w", id, first, last, rpc.ErrInvalid)
	}
	group, err := c.groupOf(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("read ledger %d: %w", id, err)
	}
	r := reader{c: c, group: group, last: errors.New("nobody was asked"), request: &bookiepb.ReadRequest{
		Ledger: int64(id), First: int64(first), Last: int64(last), MaxBytes: int64(maxBytes),
	}}
	for wait := minBackoff; ; sleep(ctx, &wait) {
		if ctx.Err() != nil {
			c.metrics.readFailures.Inc()
			return nil, fmt.Errorf("read ledger %d at entry %d: %w: %w (last: %w)", id, first, ctx.Err(), ledger.ErrUnavailable, r.last)
		}
		entries, err := r.round(ctx)
		if err == nil {
			c.metrics.reads.Inc()
			return entries, nil
		}
		if final(err) {
			c.metrics.readFailures.Inc()
			return nil, fmt.Errorf("read ledger %d at entry %d: %w", id, first, err)
		}
		r.last = err
	}
}

// final reports whether asking again cannot help.
func final(err error) bool {
	return errors.Is(err, ledger.ErrNoSuchLedger) || errors.Is(err, ledger.ErrNoSuchEntry) ||
		errors.Is(err, ledger.ErrDamaged) || errors.Is(err, rpc.ErrInvalid)
}

// reader is the state of one Read.
type reader struct {
	c       *Client
	group   uint32
	request *bookiepb.ReadRequest
	last    error // of the round before
}

// round asks the leader, and everybody else if it cannot serve.
func (r *reader) round(ctx context.Context) ([]ledger.Entry, error) {
	var damaged, behind error
	leader, err := r.leader(ctx)
	if err == nil {
		var entries []ledger.Entry
		entries, err = r.ask(ctx, leader)
		if err == nil || (final(err) && !errors.Is(err, ledger.ErrDamaged)) {
			return entries, err
		}
		if errors.Is(err, ledger.ErrDamaged) {
			damaged = err
		} else {
			r.c.pool.Forget(r.group, leader)
		}
	}
	for _, addr := range slices.DeleteFunc(r.c.pool.Addrs(), func(a string) bool { return a == leader }) {
		entries, errReplica := r.ask(ctx, addr)
		switch {
		case errReplica == nil:
			return entries, nil
		case errors.Is(errReplica, ledger.ErrNoSuchLedger), errors.Is(errReplica, ledger.ErrNoSuchEntry):
			return nil, errReplica // only a leader says so: leadership moved there
		case errors.Is(errReplica, ledger.ErrDamaged):
			damaged = errReplica
		case errors.Is(errReplica, ledger.ErrNotYet):
			behind = errReplica
		}
	}
	switch {
	case damaged != nil && behind != nil: // a good copy may be on its way
		return nil, fmt.Errorf("%w; other replicas: %s", behind, damaged.Error())
	case damaged != nil:
		return nil, damaged
	default:
		return nil, err
	}
}

func (r *reader) leader(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, leaderPatience)
	defer cancel()
	return r.c.pool.Leader(ctx, r.group)
}

// ask reads from one bookie.
func (r *reader) ask(ctx context.Context, addr string) ([]ledger.Entry, error) {
	ctx, cancel := context.WithTimeout(ctx, replicaTimeout)
	defer cancel()
	conn, err := r.c.pool.Conn(addr)
	if err != nil {
		return nil, err
	}
	reply, err := bookiepb.NewLedgersClient(conn).Read(ctx, r.request)
	if err != nil {
		return nil, fmt.Errorf("bookie %s: %w", addr, rpc.FromStatus(err))
	}
	entries, err := parse(reply, r.request)
	if err != nil {
		return nil, fmt.Errorf("bookie %s: %w", addr, err)
	}
	return entries, nil
}

// parse cuts a reply into entries and checks each one's checksum. The entries
// keep the reply's memory.
func parse(reply *bookiepb.ReadReply, request *bookiepb.ReadRequest) ([]ledger.Entry, error) {
	count, _, err := bookiepb.Check(reply.GetEntries())
	if err == nil && (count < 1 || reply.GetFirst() != request.GetFirst() || int64(count) > request.GetLast()-request.GetFirst()+1) {
		err = fmt.Errorf("%d entries from %d on: want 1 or more of %d to %d", count, reply.GetFirst(), request.GetFirst(), request.GetLast())
	}
	if err != nil {
		return nil, fmt.Errorf("answer to a read: %w: %w", err, ledger.ErrDamaged)
	}
	entries := make([]ledger.Entry, count)
	rest := reply.GetEntries()
	for i := range entries {
		entries[i].Position = ledger.Position{Ledger: ledger.ID(request.GetLedger()), Entry: ledger.EntryID(request.GetFirst() + int64(i))}
		if entries[i].Data, _, rest, err = bookiepb.Next(rest); err != nil {
			return nil, err
		}
	}
	return entries, nil
}
