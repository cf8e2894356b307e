package client

import (
	"context"
	"fmt"
	"slices"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/ledger"
)

// Writer appends to one ledger. It is the only one that ever does.
type Writer struct {
	client *Client
	lane   *lane
	id     ledger.ID

	// The rest is guarded by lane.mu.

	next    ledger.EntryID // id of the next entry appended
	queue   []pending      // not answered, oldest first: entries next-len(queue) to next-1
	sent    int            // of queue, on the present stream
	tried   int            // of queue, on any stream
	listed  bool           // in lane.ready
	failure error          // final; set once
	closing bool           // failure came from Close, everything before is stored
	drained chan struct{}  // closed when queue is empty or failure set; nil unless somebody waits

	answers    []answer // to be delivered, in order
	delivering bool     // whether a goroutine does
}

// pending is an entry that was appended and not answered.
type pending struct {
	data []byte
	done func(ledger.EntryID, error)
}

// answer is an entry's end, on its way to the caller.
type answer struct {
	id   ledger.EntryID
	err  error
	done func(ledger.EntryID, error)
}

func (c *Client) newWriter(id ledger.ID) (*Writer, error) {
	l, err := c.lane(c.pool.GroupOf(id))
	if err != nil {
		return nil, err
	}
	return l.writer(id)
}

// ID returns the ledger's id.
func (w *Writer) ID() ledger.ID { return w.id }

// Append appends data as the ledger's next entry; ids count from 0. It never
// blocks. data must not change afterwards.
//
// done is called exactly once, in the order of the appends, by one goroutine at
// a time that holds no lock. It may call any method of w. After an error every
// later append fails too.
func (w *Writer) Append(data []byte, done func(ledger.EntryID, error)) {
	l := w.lane
	l.mu.Lock()
	defer l.mu.Unlock()
	id := w.next
	w.next++
	if w.failure == nil && len(data) > bookiepb.MaxEntryBytes {
		w.failLocked(fmt.Errorf("ledger %d, entry %d: %d bytes, want at most %d", w.id, id, len(data), bookiepb.MaxEntryBytes))
	}
	if w.failure != nil {
		w.client.metrics.failed.Inc()
		w.answerLocked(answer{id, w.failure, done})
		w.deliverLocked()
		return
	}
	w.queue = append(w.queue, pending{data, done})
	w.client.metrics.pendingBytes.Add(float64(len(data)))
	l.listLocked(w)
}

// Close waits until every append is answered, closes the ledger and returns its
// last entry. Appends after Close fail with [ledger.ErrClosed]. The error is the
// writer's failure if it has one; then, or when ctx ends, the ledger is not known
// to be closed. Closing again is fine.
func (w *Writer) Close(ctx context.Context) (ledger.EntryID, error) {
	l := w.lane
	l.mu.Lock()
	if w.drained == nil {
		w.drained = make(chan struct{})
	}
	drained := w.drained
	w.settleLocked()
	l.mu.Unlock()
	select {
	case <-drained:
	case <-ctx.Done():
		return 0, fmt.Errorf("close ledger %d: appends are not answered: %w", w.id, ctx.Err())
	}

	l.mu.Lock()
	if w.failure != nil && !w.closing {
		defer l.mu.Unlock()
		return 0, fmt.Errorf("close ledger %d: %w", w.id, w.failure)
	}
	w.closing = true
	w.failLocked(fmt.Errorf("ledger %d: writer closed: %w", w.id, ledger.ErrClosed))
	l.mu.Unlock()

	var reply *bookiepb.EndReply
	err := w.client.call(ctx, w.id, func(ctx context.Context, c bookiepb.LedgersClient) (err error) {
		reply, err = c.Close(ctx, &bookiepb.CloseRequest{Ledger: int64(w.id), Epoch: firstEpoch})
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("close ledger %d: %w", w.id, err)
	}
	return ledger.EntryID(reply.GetLast()), nil
}

// Abandon drops the handle without closing the ledger. Unanswered appends end
// with [ledger.ErrUnknownOutcome].
func (w *Writer) Abandon() {
	w.lane.mu.Lock()
	defer w.lane.mu.Unlock()
	w.abandonLocked()
}

func (w *Writer) abandonLocked() {
	w.failLocked(fmt.Errorf("ledger %d: writer abandoned: %w", w.id, ledger.ErrUnknownOutcome))
}

// failLocked ends the writer: everything unanswered gets err.
func (w *Writer) failLocked(err error) {
	if w.failure != nil {
		return
	}
	w.failure = err
	w.client.metrics.failed.Add(float64(len(w.queue)))
	w.popLocked(len(w.queue), err)
	delete(w.lane.writers, w.id)
}

// popLocked answers the n oldest entries.
func (w *Writer) popLocked(n int, err error) {
	id := w.next - ledger.EntryID(len(w.queue))
	w.answers = slices.Grow(w.answers, n)
	for i := range w.queue[:n] {
		p := &w.queue[i]
		w.client.metrics.pendingBytes.Sub(float64(len(p.data)))
		w.answerLocked(answer{id + ledger.EntryID(i), err, p.done})
	}
	clear(w.queue[:n]) // let the data go
	w.queue = w.queue[n:]
	w.sent, w.tried = max(0, w.sent-n), max(0, w.tried-n)
	w.settleLocked()
	w.deliverLocked()
}

func (w *Writer) answerLocked(a answer) { w.answers = append(w.answers, a) }

// settleLocked wakes Close once nothing is unanswered.
func (w *Writer) settleLocked() {
	if w.drained == nil || (len(w.queue) > 0 && w.failure == nil) {
		return
	}
	select {
	case <-w.drained:
	default:
		close(w.drained)
	}
}

// deliverLocked sees to it that a goroutine delivers the answers.
func (w *Writer) deliverLocked() {
	if w.delivering || len(w.answers) == 0 {
		return
	}
	w.delivering = true
	if w.lane.ended {
		go w.deliver() // refusals of a closed client, whose Close waits or has waited already
		return
	}
	w.client.running.Go(w.deliver)
}

func (w *Writer) deliver() {
	var batch []answer // swapped with answers, so the lock is taken once per batch
	for {
		w.lane.mu.Lock()
		clear(batch)
		batch, w.answers = w.answers, batch[:0]
		if len(batch) == 0 {
			w.delivering = false
			w.lane.mu.Unlock()
			return
		}
		w.lane.mu.Unlock()
		for _, a := range batch {
			a.done(a.id, a.err)
		}
	}
}
