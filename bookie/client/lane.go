package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
)

const (
	minBackoff = 10 * time.Millisecond // between two streams of one group
	maxBackoff = 500 * time.Millisecond

	// openTimeout bounds the opening of a stream.
	openTimeout = 3 * time.Second

	// answerTimeout is how long a stream with unanswered appends may be silent
	// before another is tried. A leader that is cut off or stopped never answers.
	answerTimeout = 5 * time.Second
)

// lane carries the appends of one group's writers, over one stream to the
// group's leader at a time. One goroutine, run, opens streams and sends; while a
// stream is open a second receives.
type lane struct {
	client *Client
	group  uint32
	wake   chan struct{} // capacity 1: ready has got its first writer; never closed

	mu          sync.Mutex // guards what follows and the writers' state
	writers     map[ledger.ID]*Writer
	ended       bool      // by abandonAll: no more writers
	ready       []*Writer // writers with entries that the present stream has not carried
	outstanding int       // appends sent on the present stream and not answered
	stored      bool      // the present stream has stored something
	progress    time.Time // last answer, or when outstanding rose from 0
}

func newLane(c *Client, group uint32) *lane {
	return &lane{client: c, group: group, wake: make(chan struct{}, 1), writers: map[ledger.ID]*Writer{}}
}

// writer adds a writer, unless abandonAll came first.
func (l *lane) writer(id ledger.ID) (*Writer, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return nil, errClientClosed
	}
	w := &Writer{client: l.client, lane: l, id: id}
	l.writers[id] = w
	return w, nil
}

// listLocked puts w among the writers that have something to send.
func (l *lane) listLocked(w *Writer) {
	if w.listed {
		return
	}
	w.listed = true
	l.ready = append(l.ready, w)
	if len(l.ready) == 1 {
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}

// run opens a stream whenever there is something to send, until ctx ends.
func (l *lane) run(ctx context.Context) {
	wait, first := minBackoff, true
	for {
		select {
		case <-l.wake:
		case <-ctx.Done():
			return
		}
		for ctx.Err() == nil && l.rewind() {
			err := l.stream(ctx)
			if ctx.Err() != nil {
				return
			}
			level := slog.LevelDebug // one line for an outage, not one for each attempt in it
			if l.hasStored() || first {
				wait, level = minBackoff, slog.LevelInfo
			}
			first = false
			l.client.log.Log(ctx, level, "append stream ended; unanswered appends are sent again", "group", l.group, "err", err)
			sleep(ctx, &wait)
		}
	}
}

func (l *lane) hasStored() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stored
}

// sleep waits for about *wait and doubles it, up to maxBackoff.
func sleep(ctx context.Context, wait *time.Duration) {
	timer := time.NewTimer(*wait/2 + rand.N(*wait))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	*wait = min(2*(*wait), maxBackoff)
}

// rewind prepares for a new stream: everything unanswered is to be sent again.
// It reports whether there is anything.
func (l *lane) rewind() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.ready {
		l.ready[i].listed = false
		l.ready[i] = nil
	}
	l.ready = l.ready[:0]
	l.outstanding, l.stored = 0, false
	for _, w := range l.writers {
		w.sent = 0
		if len(w.queue) > 0 {
			l.listLocked(w)
		}
	}
	return len(l.ready) > 0
}

// stream opens one stream and uses it until it ends, with an error always. The
// leader that it used is forgotten, unless it redirected.
func (l *lane) stream(ctx context.Context) error {
	addr, err := l.client.pool.Leader(ctx, l.group)
	if err != nil {
		return err
	}
	conn, err := l.client.pool.Conn(addr)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	opening := time.AfterFunc(openTimeout, func() {
		cancel(fmt.Errorf("no stream within %v: %w", openTimeout, ledger.ErrUnavailable))
	})
	wire, err := bookiepb.NewLedgersClient(conn).Append(ctx)
	opening.Stop()
	if err == nil {
		l.client.metrics.streams.Inc()
		l.use(ctx, cancel, wire)
	} else {
		cancel(err)
	}
	err = rpc.FromStatus(context.Cause(ctx))
	l.client.pool.Forget(l.group, addr)
	var notLeader *rpc.NotLeader
	if errors.As(err, &notLeader) && notLeader.Addr != "" && notLeader.Addr != addr {
		l.client.pool.SetLeader(l.group, notLeader.Addr)
	}
	return fmt.Errorf("bookie %s: %w", addr, err)
}

// use sends and receives until ctx ends. Whoever finds the reason to end it
// cancels with that cause.
func (l *lane) use(ctx context.Context, cancel context.CancelCauseFunc, wire bookiepb.Ledgers_AppendClient) {
	received := make(chan struct{})
	go func() {
		defer close(received)
		cancel(l.receive(wire)) // ends a send that waits for the other side's window, too
	}()
	watch := &watchdog{lane: l, cancel: cancel}
	defer watch.stop()
	var out sendBuffer
	for ctx.Err() == nil {
		for l.take(&out) {
			watch.arm()
			if err := wire.Send(out.request()); err != nil {
				// Send knows only that the stream is over; receive knows why.
				<-received
				return
			}
		}
		select {
		case <-l.wake:
		case <-ctx.Done():
		}
	}
	<-received
}

// receive handles answers until the stream ends or an answer says that it is of
// no more use. The error is never nil.
func (l *lane) receive(wire bookiepb.Ledgers_AppendClient) error {
	for {
		reply, err := wire.Recv()
		if err != nil {
			return rpc.FromStatus(err)
		}
		l.mu.Lock()
		for _, a := range reply.GetAnswers() {
			if err = l.answerLocked(a); err != nil {
				break
			}
		}
		l.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// answerLocked takes one answer. An error ends the stream: the append, and what
// follows it, must be sent again.
func (l *lane) answerLocked(a *bookiepb.AppendAnswer) error {
	l.outstanding--
	l.progress = time.Now()
	w := l.writers[ledger.ID(a.GetLedger())]
	if w == nil {
		return nil // abandoned or failed meanwhile
	}
	err := a.GetFailure().Err()
	switch {
	case err == nil:
		oldest := w.next - ledger.EntryID(len(w.queue))
		n := int(ledger.EntryID(a.GetLast()) - oldest + 1)
		if ledger.EntryID(a.GetFirst()) != oldest || n < 1 || n > w.sent {
			return fmt.Errorf("ledger %d: answer for entries %d to %d, unanswered are %d to %d",
				w.id, a.GetFirst(), a.GetLast(), oldest, oldest+ledger.EntryID(w.sent)-1)
		}
		l.stored = true
		l.client.metrics.appends.Add(float64(n))
		w.popLocked(n, nil)
		return nil
	case errors.Is(err, ledger.ErrUnavailable), errors.Is(err, ledger.ErrUnknownOutcome),
		errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	default:
		w.failLocked(fmt.Errorf("append to ledger %d at entry %d: %w", w.id, a.GetFirst(), err))
		return nil
	}
}

// abandonAll ends every writer and refuses new ones.
func (l *lane) abandonAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.writers {
		w.abandonLocked()
	}
	l.ended = true
}

// watchdog ends a stream that owes answers and gives none for answerTimeout. It
// runs only while something is owed.
type watchdog struct {
	lane   *lane
	cancel context.CancelCauseFunc
	timer  *time.Timer // guarded by lane.mu; nil before the first arm
	armed  bool        // guarded by lane.mu
	ended  bool        // guarded by lane.mu
}

// arm begins to watch, if it is not watching.
func (d *watchdog) arm() {
	d.lane.mu.Lock()
	defer d.lane.mu.Unlock()
	switch {
	case d.armed || d.ended:
		return
	case d.timer == nil:
		d.timer = time.AfterFunc(answerTimeout, d.check)
	default:
		d.timer.Reset(answerTimeout)
	}
	d.armed = true
}

func (d *watchdog) check() {
	d.lane.mu.Lock()
	defer d.lane.mu.Unlock()
	if d.ended || d.lane.outstanding == 0 {
		d.armed = false
		return
	}
	if left := answerTimeout - time.Since(d.lane.progress); left > 0 {
		d.timer.Reset(left)
		return
	}
	d.cancel(fmt.Errorf("no answer for %v: %w", answerTimeout, ledger.ErrUnknownOutcome))
}

func (d *watchdog) stop() {
	d.lane.mu.Lock()
	defer d.lane.mu.Unlock()
	d.ended = true
	if d.timer != nil {
		d.timer.Stop()
	}
}
