package metadata

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"

	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/metadata/metadatapb"
)

const (
	// watchBuffer is how many events wait for a watch's reader. The rest waits
	// at the leader, which gives up on a reader that is too slow.
	watchBuffer = 16

	// watchSilence is how long a watch's leader may say nothing; it speaks every
	// second. Then it is taken for dead.
	watchSilence = 4 * time.Second

	// watchRetry is the rest between two attempts to find a leader to watch at.
	watchRetry = 50 * time.Millisecond
)

// Watch implements [Store].
func (c *Client) Watch(ctx context.Context, prefix string) (<-chan Event, error) {
	if err := CheckPrefix(prefix); err != nil {
		return nil, err
	}
	w := &watch{client: c, prefix: prefix, events: make(chan Event, watchBuffer)}
	go w.run(ctx)
	return w.events, nil
}

// watch is one Client.Watch; its goroutine ends with the watch's context.
type watch struct {
	client *Client
	prefix string
	events chan Event // run to the reader; closed by run

	synced  bool    // through is a revision to resume from
	through Version // every change up to here was told
}

func (w *watch) run(ctx context.Context) {
	defer close(w.events)
	for ctx.Err() == nil {
		addr, err := w.client.pool.Leader(ctx, group)
		if err != nil {
			w.rest(ctx) // the pool is closed, or ctx ended
			continue
		}
		before := w.through
		conn, err := w.client.pool.Conn(addr)
		if err == nil {
			w.follow(ctx, conn, addr)
		}
		if w.through == before { // it was of no use: do not hurry back
			w.rest(ctx)
		}
	}
}

func (w *watch) rest(ctx context.Context) {
	timer := time.NewTimer(watchRetry)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// follow passes on what one leader tells, until it stops telling.
func (w *watch) follow(outer context.Context, conn *grpc.ClientConn, addr string) {
	ctx, cancel := context.WithCancel(outer)
	defer cancel()
	silent := time.AfterFunc(watchSilence, cancel)
	defer silent.Stop()
	stream, err := metadatapb.NewMetadataClient(conn).Watch(ctx, &metadatapb.WatchRequest{
		Prefix: w.prefix, Resume: w.synced, From: int64(w.through),
	})
	if err != nil {
		w.redirect(outer, addr, err)
		return
	}
	for {
		silent.Reset(watchSilence)
		reply, err := stream.Recv()
		silent.Stop() // a reader that takes its time is not the leader's silence
		if err != nil {
			w.redirect(outer, addr, err)
			return
		}
		if !w.tell(ctx, reply) {
			return
		}
	}
}

// redirect forgets the node at addr as the leader, for whichever it named,
// unless the watch itself is over.
func (w *watch) redirect(ctx context.Context, addr string, err error) {
	if ctx.Err() != nil {
		return
	}
	w.client.pool.Forget(group, addr)
	var notLeader *rpc.NotLeader
	if errors.As(rpc.FromStatus(err), &notLeader) && notLeader.Addr != "" {
		w.client.pool.SetLeader(group, notLeader.Addr)
	}
}

// tell passes one message on. It reports false if ctx ended first.
func (w *watch) tell(ctx context.Context, reply *metadatapb.WatchReply) bool {
	if reply.GetReset_() {
		w.synced, w.through = false, 0
		if !w.send(ctx, Event{Type: EventReset}) {
			return false
		}
	}
	for _, change := range reply.GetChanges() {
		event := Event{Type: EventPut, KV: fromWire(change.GetKv())}
		if change.GetDeleted() {
			event = Event{Type: EventDelete, KV: KV{Key: event.KV.Key, Version: event.KV.Version}}
		}
		if !w.send(ctx, event) {
			return false
		}
	}
	if reply.GetSynced() {
		if !w.send(ctx, Event{Type: EventSynced}) {
			return false
		}
		w.synced = true
	}
	if w.synced {
		w.through = max(w.through, Version(reply.GetThrough()))
	}
	return true
}

func (w *watch) send(ctx context.Context, event Event) bool {
	select {
	case w.events <- event:
		return true
	case <-ctx.Done():
		return false
	}
}
