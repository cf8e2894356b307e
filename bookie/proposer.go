package bookie

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

const (
	// maxCommandsInFlight is how many commands of one group may be in the log and
	// not applied. More would only make them smaller: what waits is merged.
	maxCommandsInFlight = 4

	// queueBytes bounds the appends of one group that wait or are in flight.
	// Beyond it append streams are not read.
	queueBytes = 16 << 20

	// appendOverheadBytes is what an append costs besides its entries, so that
	// many tiny ones are bounded too.
	appendOverheadBytes = 256
)

// proposing is what a proposer needs of a Raft group.
type proposing interface {
	Propose(data []byte, done func(result any, err error))
}

// errStopping refuses work while the bookie shuts down.
var errStopping = fmt.Errorf("bookie is shutting down: %w", ledger.ErrUnavailable)

// proposer merges the operations of one group that wait into commands. No timer
// is involved: while the log writes, operations gather.
//
// One goroutine, begun by newProposer and ended by close, builds and proposes.
type proposer struct {
	group   proposing
	metrics *metrics
	room    *semaphore.Weighted // bytes of appends admitted, at most queueBytes

	mu       sync.Mutex // guards what follows
	wake     sync.Cond  // L is &mu; signalled when any of it changes
	queue    []task
	inFlight int
	closed   bool

	ended chan struct{} // closed once the goroutine has returned
}

// task is one operation and who wants to know.
type task struct {
	op      op
	entries int
	done    func(outcome) // called once, on any goroutine; must not block
}

func newProposer(g proposing, m *metrics) *proposer {
	p := &proposer{group: g, metrics: m, room: semaphore.NewWeighted(queueBytes), ended: make(chan struct{})}
	p.wake.L = &p.mu
	go p.loop()
	return p
}

// admit waits until an append of n bytes fits into the queue, or ctx ends. What
// was admitted must be given back with release.
func (p *proposer) admit(ctx context.Context, n int) error {
	if err := p.room.Acquire(ctx, admitted(n)); err != nil {
		return fmt.Errorf("wait for room in the queue: %w: %w", err, ledger.ErrUnavailable)
	}
	p.metrics.queueBytes.Add(float64(admitted(n)))
	return nil
}

func (p *proposer) release(n int) {
	p.metrics.queueBytes.Sub(float64(admitted(n)))
	p.room.Release(admitted(n))
}

func admitted(n int) int64 { return min(int64(n)+appendOverheadBytes, queueBytes) }

// submit queues one operation behind earlier ones. It does not block.
func (p *proposer) submit(t task) {
	p.mu.Lock()
	if !p.closed {
		p.queue = append(p.queue, t)
		p.wake.Signal()
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	t.done(outcome{err: errStopping})
}

// do submits o and waits for its outcome. When ctx ends first, the outcome is
// unknown.
func (p *proposer) do(ctx context.Context, o op) (outcome, error) {
	if err := o.validate(); err != nil {
		return outcome{}, fmt.Errorf("%w: %w", rpc.ErrInvalid, err)
	}
	answer := make(chan outcome, 1)
	p.submit(task{op: o, done: func(o outcome) { answer <- o }})
	select {
	case o := <-answer:
		return o, o.err
	case <-ctx.Done():
		return outcome{}, fmt.Errorf("ledger %d: %w: %w", o.ledger, ctx.Err(), ledger.ErrUnknownOutcome)
	}
}

// close refuses what waits, ends the goroutine and waits for it. Commands in
// flight are answered when the log answers them.
func (p *proposer) close() {
	p.mu.Lock()
	p.closed = true
	waiting := p.queue
	p.queue = nil
	p.wake.Signal()
	p.mu.Unlock()
	for _, t := range waiting {
		t.done(outcome{err: errStopping})
	}
	<-p.ended
}

func (p *proposer) loop() {
	defer close(p.ended)
	for {
		p.mu.Lock()
		for !p.closed && (len(p.queue) == 0 || p.inFlight >= maxCommandsInFlight) {
			p.wake.Wait()
		}
		if p.closed {
			p.mu.Unlock()
			return
		}
		tasks := p.takeLocked()
		p.inFlight++
		p.mu.Unlock()
		p.propose(tasks)
	}
}

// takeLocked takes the tasks of the next command off the queue: as many as fit
// into bookiepb.BatchBytes and BatchEntries, at least one.
func (p *proposer) takeLocked() []task {
	n, entries, size := 0, 0, 0
	for n < len(p.queue) && n < maxOps {
		t := &p.queue[n]
		entries, size = entries+t.entries, size+len(t.op.frames)
		if n > 0 && (entries > bookiepb.BatchEntries || size > bookiepb.BatchBytes) {
			break
		}
		n++
	}
	tasks := make([]task, n)
	copy(tasks, p.queue)
	rest := copy(p.queue, p.queue[n:])
	clear(p.queue[rest:]) // let the entries go with their command
	p.queue = p.queue[:rest]
	return tasks
}

func (p *proposer) propose(tasks []task) {
	ops := make([]op, len(tasks))
	for i := range tasks {
		ops[i] = tasks[i].op
	}
	data := appendCommand(make([]byte, 0, commandBytes(ops)), ops)
	for i := range tasks {
		tasks[i].op.frames = nil // data has them
	}
	p.metrics.commands.Inc()
	p.metrics.commandSize.Observe(float64(len(data)))
	p.group.Propose(data, func(result any, err error) {
		p.mu.Lock()
		p.inFlight--
		p.wake.Signal()
		p.mu.Unlock()
		outcomes, err := outcomesOf(result, err, len(tasks))
		for i, t := range tasks {
			if err != nil {
				t.done(outcome{err: err})
				continue
			}
			t.done(outcomes[i])
		}
	})
}

// outcomesOf makes sense of what a machine answered for a command of n
// operations.
func outcomesOf(result any, err error, n int) ([]outcome, error) {
	if err != nil {
		return nil, err
	}
	switch r := result.(type) {
	case []outcome:
		if len(r) == n {
			return r, nil
		}
		return nil, fmt.Errorf("%d outcomes for %d operations: %w", len(r), n, ledger.ErrUnknownOutcome)
	case error:
		return nil, r
	default:
		return nil, fmt.Errorf("answer of type %T: %w", result, ledger.ErrUnknownOutcome)
	}
}

// refusal names the reason of a refused append for the metrics.
func refusal(err error) string {
	var notLeader *raftlog.NotLeaderError
	switch {
	case errors.As(err, &notLeader):
		return "notleader"
	case errors.Is(err, errDiskFull):
		return "disk"
	case errors.Is(err, ledger.ErrFenced):
		return "fenced"
	case errors.Is(err, ledger.ErrClosed):
		return "closed"
	case errors.Is(err, ledger.ErrGap):
		return "gap"
	case errors.Is(err, ledger.ErrNoSuchLedger):
		return "absent"
	default:
		return "other"
	}
}
