package raftlog

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/magnetar-io/magnetar/ledger"
)

// ReadBarrier returns once this node is the group's leader, was confirmed as
// such by a quorum after the call began, and has applied everything that was
// committed before it. A read of the machine that follows is linearizable.
//
// It costs a round of heartbeats, shared by all callers that wait, and no log
// write; while a member is joining, a shared log write instead. The error is a
// *[NotLeaderError], one that wraps ledger.ErrUnavailable, or ctx's.
func (g *Group) ReadBarrier(ctx context.Context) error {
	g.m.barriers.Inc()
	for {
		in := g.instance()
		if in == nil {
			return errStopped
		}
		l, err := g.awaitLeadership(ctx, in)
		if err != nil {
			return err
		}
		commit := Index(in.raft.CommitIndex())
		if err := in.verify.check(ctx, in.stop); err != nil {
			if isLost(err) {
				return in.notLeader()
			}
			return err
		}
		if !l.current() {
			continue // another term began meanwhile; commit was not its index
		}
		if g.node.pauses.recent() {
			// The quorum's answers may have waited in a socket while this process
			// was stopped, and another leader may have been elected since.
			if err := sleep(ctx, in.stop, pauseSettle); err != nil {
				return err
			}
			continue
		}
		return g.applied.wait(ctx, in.stop, commit)
	}
}

func isLost(err error) bool {
	return err == raft.ErrNotLeader || err == raft.ErrLeadershipLost //nolint:errorlint // raft returns them as they are
}

// awaitLeadership waits until a leader has applied its own barrier, without
// which its commit index may be older than what its predecessor answered.
func (g *Group) awaitLeadership(ctx context.Context, in *instance) (*leadership, error) {
	for {
		if in.raft.State() != raft.Leader {
			return nil, in.notLeader()
		}
		if l := g.lead.Load(); l != nil && l.in == in && l.current() {
			return l, nil
		}
		if err := sleep(ctx, in.stop, leadershipPoll); err != nil {
			return nil, err
		}
	}
}

// leadershipPoll is how often a read barrier looks whether the new leader is
// ready; it waits so only in the moments after an election.
const leadershipPoll = 5 * time.Millisecond

func sleep(ctx context.Context, stop <-chan struct{}, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-stop:
		return errStopped
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// verifier shares rounds of leadership verification among readers. A reader
// takes part in the next round to begin, never in one under way: its answers may
// be older than the reader's question.
type verifier struct {
	confirm func() error // asks a quorum whether this node leads
	m       *groupMetrics

	rounds sync.WaitGroup // run

	mu      sync.Mutex
	next    *round // guarded by mu: the round that has not begun, nil if nobody asks
	running bool   // guarded by mu: a goroutine works off rounds
	closed  bool   // guarded by mu
}

type round struct {
	done chan struct{} // closed by run
	err  error         // read only after done
}

func (v *verifier) check(ctx context.Context, stop <-chan struct{}) error {
	v.mu.Lock()
	if v.closed {
		v.mu.Unlock()
		return errStopped
	}
	if v.next == nil {
		v.next = &round{done: make(chan struct{})}
	}
	r := v.next
	if !v.running {
		v.running = true
		v.rounds.Go(v.run)
	}
	v.mu.Unlock()
	select {
	case <-r.done:
		return r.err
	case <-stop:
		return errStopped
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (v *verifier) run() {
	for {
		v.mu.Lock()
		r := v.next
		v.next = nil
		if r == nil {
			v.running = false
			v.mu.Unlock()
			return
		}
		v.mu.Unlock()
		v.m.readRounds.Inc()
		r.err = v.confirm()
		close(r.done)
	}
}

func (v *verifier) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
}

// confirm returns nil once a quorum took this node for the leader after the call
// began.
//
// hashicorp/raft counts the answers of non-voters as well: a leader that is cut off
// from the voters would be confirmed by a bookie that is joining. While there is a
// non-voter, a log entry that is committed takes the heartbeats' place.
func (in *instance) confirm() error {
	if !in.hasNonVoter() {
		if err := in.raft.VerifyLeader().Error(); err != nil || !in.hasNonVoter() {
			return err
		}
	}
	err := in.barrierNow(context.Background()) // ends with the instance, at the latest
	if errors.Is(err, ledger.ErrUnknownOutcome) {
		return raft.ErrLeadershipLost // whatever became of the entry, it is nobody's
	}
	return err
}

func (in *instance) hasNonVoter() bool {
	return slices.ContainsFunc(in.servers(), func(s raft.Server) bool { return s.Suffrage != raft.Voter })
}

const (
	pauseTick   = 50 * time.Millisecond
	pauseLimit  = 300 * time.Millisecond // well below the shortest lease that three bookies use
	pauseSettle = 100 * time.Millisecond // long enough for what waited in sockets to be read
)

// pauses notices that the process did not run for a while: stopped by a signal,
// a frozen machine, or no CPU. hashicorp/raft takes any heartbeat answer for a
// confirmation, however old it is when it is read.
type pauses struct {
	start time.Time
	last  atomic.Int64 // nanoseconds since start of the newest tick
	end   atomic.Int64 // of the end of the newest pause
}

func newPauses() *pauses {
	p := &pauses{start: time.Now()}
	p.end.Store(int64(-time.Hour))
	return p
}

// run ticks until ctx ends.
func (p *pauses) run(ctx context.Context) {
	t := time.NewTicker(pauseTick)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			now := int64(time.Since(p.start))
			if now-p.last.Load() > int64(pauseLimit) {
				p.end.Store(now)
			}
			p.last.Store(now)
		}
	}
}

// recent reports whether a pause is not long enough ago.
func (p *pauses) recent() bool {
	now := int64(time.Since(p.start))
	return now-p.last.Load() > int64(pauseLimit) || now-p.end.Load() < int64(pauseSettle)
}
