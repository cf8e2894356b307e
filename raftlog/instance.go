package raftlog

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/magnetar-io/magnetar/internal/handshake"
	"github.com/magnetar-io/magnetar/ledger"
)

const (
	// drainTimeout bounds how long a closing instance waits for raft to answer
	// what it was asked. A leader without a quorum steps down much earlier.
	drainTimeout = 3 * time.Second

	// shutdownTimeout bounds how long raft's goroutines may take to end.
	shutdownTimeout = 10 * time.Second

	// barrierRetry is the pause before a new leader tries its barrier again.
	barrierRetry = 50 * time.Millisecond
)

// instance is one run of hashicorp/raft for a group. A group replaces it when
// raft has got stuck in a way that only a restart heals.
type instance struct {
	g      *Group
	raft   *raft.Raft
	trans  *raft.NetworkTransport
	pipe   *pipeline
	verify *verifier
	floor  Index // what the machine held when the instance started

	notify   chan bool       // raft to lead; never closed
	barriers chan barrierEnd // completer to lead; never closed
	stop     chan struct{}   // closed when close begins
	loops    sync.WaitGroup  // lead
	closing  sync.Once

	mu     sync.Mutex
	closed bool           // guarded by mu: await takes nothing more
	calls  sync.WaitGroup // futures that somebody waits for; Add under mu
}

type barrierEnd struct {
	epoch int
	at    barrierApplied
	err   error
}

// startInstance runs raft on the group's store.
func (g *Group) startInstance() (*instance, error) {
	n, t := g.node, g.node.cfg.Timing
	layer := newStreamLayer(n.mux.Listener(handshake.Raft, uint32(g.id)), n.self(), n.cfg.Advertised, g.id, t.Dial)
	logger := newRaftLogger(g.log)
	// raft starts over at the snapshot pointer, the machine does not.
	g.fsm.floor = g.machine.Applied()
	in := &instance{
		g: g, floor: g.fsm.floor,
		notify: make(chan bool, 32), barriers: make(chan barrierEnd, 1), stop: make(chan struct{}),
	}
	// In flight 1: with more, one refused append can leave sender and decoder
	// waiting for each other until the leader changes (hashicorp/raft #612).
	in.trans = raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream: layer, MaxPool: 3, MaxRPCsInFlight: 1, Timeout: t.RPC, Logger: logger,
	})
	conf := raft.DefaultConfig()
	conf.LocalID = raft.ServerID(n.identity.Node())
	conf.HeartbeatTimeout, conf.ElectionTimeout, conf.LeaderLeaseTimeout, conf.CommitTimeout = t.Heartbeat, t.Election, t.Lease, t.Commit
	conf.MaxAppendEntries, conf.BatchApplyCh = MaxAppendEntries, true
	conf.TrailingLogs, conf.SnapshotThreshold, conf.SnapshotInterval = t.TrailingLogs, t.SnapshotThreshold, t.SnapshotInterval
	conf.NoSnapshotRestoreOnStart = true // the machine keeps its own state
	conf.NoLegacyTelemetry = true
	conf.ShutdownOnRemove = false
	conf.NotifyCh = in.notify
	conf.Logger = logger
	r, err := raft.NewRaft(conf, g.fsm, g.store, g.store, g.snaps, in.trans)
	if err != nil {
		_ = in.trans.Close()
		return nil, fmt.Errorf("start group %d: %w", g.id, err)
	}
	in.raft = r
	in.verify = &verifier{confirm: in.confirm, m: g.m}
	in.pipe = newPipeline(r, g.id, g.m, in.explain)
	in.pipe.start()
	in.loops.Go(in.lead)
	return in, nil
}

// explain turns an error of raft into one that says whether the command may
// have happened.
func (in *instance) explain(err error) error {
	switch {
	case errors.Is(err, raft.ErrNotLeader):
		return in.notLeader()
	case errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return fmt.Errorf("group %d: %w: try again: %w", in.g.id, err, ledger.ErrUnavailable)
	default:
		return fmt.Errorf("group %d: %w: %w", in.g.id, err, ledger.ErrUnknownOutcome)
	}
}

func (in *instance) notLeader() error {
	e := &NotLeaderError{Group: in.g.id}
	if addr, id := in.raft.LeaderWithID(); id != "" && string(id) != in.g.node.identity.Node() {
		e.Leader = string(id)
		_, e.Addr, _ = parseRaftAddress(string(addr))
	}
	return e
}

// lead follows raft's leadership and announces it once it is worth something:
// when a barrier of the new term is applied here.
func (in *instance) lead() {
	var (
		leading bool
		epoch   int       // counts changes, so that the end of an old barrier is told apart
		stuck   time.Time // since when barriers fail because of a transfer
		retry   <-chan time.Time
	)
	for {
		select {
		case <-in.stop:
			return
		case leading = <-in.notify:
			epoch++
			retry, stuck = nil, time.Time{}
			if leading {
				in.barrier(epoch)
			} else {
				in.g.setLeadership(nil)
			}
		case <-retry:
			retry = nil
			if leading {
				in.barrier(epoch)
			}
		case b := <-in.barriers:
			if b.epoch != epoch || !leading {
				continue
			}
			if b.err == nil {
				in.leads(b.at)
				continue
			}
			retry = time.After(barrierRetry)
			if !errors.Is(b.err, raft.ErrLeadershipTransferInProgress) {
				stuck = time.Time{}
			} else if stuck.IsZero() {
				stuck = time.Now()
			} else if took := time.Since(stuck); took > in.g.stuckAfter() {
				in.g.log.Error("leader refuses commands because of a transfer that never ended; the group is restarted", "took", took)
				in.g.requestRestart("a leadership transfer never ended")
				retry = nil
			}
		}
	}
}

// barrier proposes a barrier whose end reaches lead.
func (in *instance) barrier(epoch int) {
	in.pipe.submit(&proposal{
		log: raft.Log{Extensions: barrierMark},
		done: func(result any, err error) {
			at, _ := result.(barrierApplied)
			select {
			case in.barriers <- barrierEnd{epoch, at, err}:
			case <-in.stop:
			}
		},
	})
}

func (in *instance) leads(at barrierApplied) {
	if at.index <= in.floor {
		in.g.fatal(fmt.Errorf("group %d: this node leads with a log that ends at %d, but its state already holds command %d: the log lost committed entries; empty this bookie's directory and let it rejoin", in.g.id, at.index, in.floor))
		return
	}
	in.g.m.leaderships.Inc()
	in.g.setLeadership(&leadership{in: in, term: at.term, since: time.Now()})
}

// await waits for a future of raft. If ctx ends first the future is left to
// itself; raft answers it as long as it runs.
func (in *instance) await(ctx context.Context, f raft.Future) error {
	in.mu.Lock()
	if in.closed {
		in.mu.Unlock()
		return errStopped
	}
	end := make(chan error, 1)
	in.calls.Go(func() { end <- f.Error() })
	in.mu.Unlock()
	select {
	case err := <-end:
		return err
	case <-in.stop:
		return errStopped
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// close ends the instance: what was proposed is answered, nothing it still has
// to say leaves the process, and its goroutines end. It may be called twice.
func (in *instance) close() {
	in.closing.Do(in.shutdown)
}

func (in *instance) shutdown() {
	close(in.stop)
	in.loops.Wait()
	in.g.setLeadership(nil) // only now: lead may have been about to announce one
	in.mu.Lock()
	in.closed = true
	in.mu.Unlock()
	idle := in.pipe.close()
	in.verify.close()
	deadline := time.After(drainTimeout)
	waitFor(deadline, idle)
	waitFor(deadline, waited(&in.verify.rounds))
	waitFor(deadline, waited(&in.calls))

	f := in.raft.Shutdown()
	_ = in.trans.Close() // ends every connection: RPCs in flight, and answers that must not leave
	in.g.store.release()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = f.Error()
	}()
	if !waitFor(time.After(shutdownTimeout), ended) {
		in.g.log.Error("raft does not end; its goroutines are left behind", "took", shutdownTimeout)
	}
	in.trans.CloseStreams()
	in.pipe.abandon(idle, fmt.Errorf("group %d stopped on this node before it answered: %w", in.g.id, ledger.ErrUnknownOutcome))
}

func waited(wg *sync.WaitGroup) <-chan struct{} {
	c := make(chan struct{})
	go func() {
		wg.Wait()
		close(c)
	}()
	return c
}

// waitFor reports whether c was closed before the deadline.
func waitFor(deadline <-chan time.Time, c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
	}
	select {
	case <-c:
		return true
	case <-deadline:
		return false
	}
}
