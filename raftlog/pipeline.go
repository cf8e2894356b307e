package raftlog

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/magnetar-io/magnetar/ledger"
)

// errStopped ends waits in a group that restarts or closes.
var errStopped = fmt.Errorf("the group is stopping on this node: %w", ledger.ErrUnavailable)

// proposal is one command on its way. Its done is called exactly once.
type proposal struct {
	log     raft.Log
	refused error // set at admission: it takes its place in the order but is not proposed
	done    func(result any, err error)
	future  raft.ApplyFuture
	settled atomic.Bool // done was called, or is being called
}

// pipeline carries proposals into one raft instance and their results out, both
// in order. Two goroutines work it, from start to close: the proposer hands
// commands to raft, which may wait there; the completer waits for the oldest
// answer.
//
//	Propose → queue → proposer → raft.ApplyLog → sent → completer → done
type pipeline struct {
	raft    *raft.Raft
	group   GroupID
	m       *groupMetrics
	explain func(error) error // maps raft's errors

	mu     sync.Mutex
	wake   sync.Cond   // L is &mu; signalled when queue or closed changes
	queue  []*proposal // guarded by mu
	closed bool        // guarded by mu: nothing new is admitted
	bytes  int64       // guarded by mu: of proposals that are not settled
	open   int         // guarded by mu: proposals that are not settled
	idle   chan struct{}

	sent      chan *proposal           // proposer to completer; closed by the proposer
	current   atomic.Pointer[proposal] // what the completer waits for
	proposer  sync.WaitGroup
	completer chan struct{} // closed when the completer has ended
}

// maxSent bounds how far the proposer runs ahead of the completer, in commands.
const maxSent = 4096

func newPipeline(r *raft.Raft, group GroupID, m *groupMetrics, explain func(error) error) *pipeline {
	p := &pipeline{
		raft: r, group: group, m: m, explain: explain,
		sent: make(chan *proposal, maxSent), completer: make(chan struct{}),
	}
	p.wake.L = &p.mu
	return p
}

func (p *pipeline) start() {
	p.proposer.Go(p.propose)
	go p.complete()
}

// submit queues one command. refused, if set, is what it is answered with. It
// returns false, and does nothing, once the pipeline is closed.
func (p *pipeline) submit(pr *proposal) bool {
	size := int64(len(pr.log.Data))
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	if pr.refused == nil && p.bytes+size > MaxInFlightBytes {
		pr.refused = fmt.Errorf("group %d has %d bytes of commands in flight, the limit is %d: wait for answers: %w", p.group, p.bytes, int64(MaxInFlightBytes), ledger.ErrUnavailable)
	}
	if pr.refused != nil {
		pr.log.Data = nil // nobody needs it any more, and the queue is bounded in bytes
		p.m.refused.Inc()
	} else {
		p.bytes += size
		p.m.inFlight.Set(float64(p.bytes))
	}
	p.open++
	p.queue = append(p.queue, pr)
	p.wake.Signal()
	return true
}

func (p *pipeline) propose() {
	defer close(p.sent)
	var batch []*proposal // swapped with queue, so the lock is taken once per batch
	for {
		p.mu.Lock()
		for len(p.queue) == 0 && !p.closed {
			p.wake.Wait()
		}
		batch, p.queue = p.queue, batch[:0]
		p.mu.Unlock()
		if len(batch) == 0 {
			return // closed and drained
		}
		for i, pr := range batch {
			batch[i] = nil
			if pr.refused == nil {
				pr.future = p.raft.ApplyLog(pr.log, 0)
			}
			p.sent <- pr
		}
	}
}

func (p *pipeline) complete() {
	defer close(p.completer)
	for pr := range p.sent {
		p.current.Store(pr)
		if pr.refused != nil {
			p.settle(pr, nil, pr.refused)
		} else if err := pr.future.Error(); err != nil {
			p.settle(pr, nil, p.explain(err))
		} else {
			p.settle(pr, pr.future.Response(), nil)
		}
	}
}

// settle answers one proposal, unless it was answered already.
func (p *pipeline) settle(pr *proposal, result any, err error) {
	if pr.settled.Swap(true) {
		return
	}
	if errors.Is(err, ledger.ErrUnknownOutcome) {
		p.m.unknown.Inc()
	}
	size := int64(len(pr.log.Data))
	pr.done(result, err)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bytes -= size
	p.open--
	p.m.inFlight.Set(float64(p.bytes))
	if p.open == 0 && p.idle != nil {
		close(p.idle)
		p.idle = nil
	}
}

// close admits nothing more and returns a channel that is closed once every
// admitted proposal is settled.
func (p *pipeline) close() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.wake.Signal()
	idle := make(chan struct{})
	if p.open == 0 {
		close(idle)
	} else {
		p.idle = idle
	}
	return idle
}

// abandon settles what raft has not answered and, now that it is shut down,
// never will: hashicorp/raft forgets what waits in its channels. idle is what
// close returned. The goroutines end, except a completer that waits for such a
// forgotten answer.
func (p *pipeline) abandon(idle <-chan struct{}, err error) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		// The completer may take another one at any moment, so look until all are
		// settled, not until there is none in sight.
		if pr := p.current.Load(); pr != nil {
			p.settle(pr, nil, err)
		}
		select {
		case <-idle:
			p.proposer.Wait()
			return
		case pr, ok := <-p.sent:
			if ok {
				p.settle(pr, nil, err)
			}
		case <-tick.C:
		}
	}
}
