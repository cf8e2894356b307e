package raftlog

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/magnetar-io/magnetar/ledger"
)

// Group is this node's member of one Raft group.
type Group struct {
	id      GroupID
	node    *Node
	log     *slog.Logger
	m       *groupMetrics
	machine Machine
	store   *guardedStore
	snaps   *snapshots
	fsm     *fsm
	applied *tracker

	lead     atomic.Pointer[leadership] // nil unless this node leads and is ready
	restarts chan string                // requestRestart to supervise; capacity 1
	joining  chan struct{}              // capacity 1: held while HandleJoin changes the members

	mu     sync.Mutex
	in     *instance // guarded by mu; nil while the group restarts and after close
	events []event   // guarded by mu: what the notifier has to tell
	wake   chan struct{}

	// pending is what a joiner must have applied before it may vote. Guarded by
	// joining; forgotten with the leadership.
	pending map[string]pendingJoin
}

// leadership is one term that this node leads.
type leadership struct {
	in    *instance
	term  Term
	since time.Time
}

// current reports whether raft still agrees.
func (l *leadership) current() bool {
	return l.in.raft.State() == raft.Leader && Term(l.in.raft.CurrentTerm()) == l.term
}

// event is a change of leadership, or a watcher that begins.
type event struct {
	leading bool
	watcher func(leading bool)
}

// openGroup opens a group's log and machine and finishes what a crash
// interrupted. It starts nothing.
func openGroup(n *Node, id GroupID, fresh, founder bool) (_ *Group, err error) {
	g := &Group{
		id: id, node: n, log: n.log.With("group", uint32(id)), m: n.metrics.group(id), applied: &tracker{},
		restarts: make(chan string, 1), joining: make(chan struct{}, 1), wake: make(chan struct{}, 1),
		pending: map[string]pendingJoin{},
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("open group %d: %w", id, err)
			g.closeFiles()
		}
	}()
	dir := groupDir(n.cfg.Dir, id)
	b, err := n.openLog(id, dir, fresh)
	if err != nil {
		return nil, err
	}
	if n.cfg.wrapStore != nil {
		b = n.cfg.wrapStore(id, b)
	}
	g.store = newGuardedStore(b, n.cfg.Timing.StoreHang, g.m, g.fatal)
	if n.cfg.LogStore == Journal {
		g.store.chunk = math.MaxInt64
	}
	if founder {
		if err := bootstrap(g.store, raft.Server{ID: raft.ServerID(n.identity.Node()), Address: raft.ServerAddress(raftAddress(n.identity.Node(), n.cfg.Advertised))}); err != nil {
			return nil, err
		}
	}
	if g.machine, err = n.cfg.Machine(id, n.identity); err != nil {
		return nil, err
	}
	if at := g.machine.Applied(); fresh && at > 0 {
		return nil, fmt.Errorf("the directory has no log yet, but the state already holds command %d: it belongs to another life of this bookie; empty both", at)
	}
	if g.snaps, err = openSnapshots(dir, g.machine); err != nil {
		return nil, err
	}
	if done, dropped, err := g.snaps.finish(g.store); err != nil {
		return nil, err
	} else if dropped != nil {
		g.log.Warn("state received before the restart is dropped; the leader will send another", "err", dropped)
	} else if done {
		g.log.Info("state received before the restart was installed", "index", uint64(g.snaps.current().index), "applied", uint64(g.machine.Applied()))
	}
	p := g.snaps.current()
	if at := g.machine.Applied(); at < p.applied {
		return nil, fmt.Errorf("the snapshot pointer promises command %d, but the state ends at %d: the state lost what was durable; empty this bookie's directory and let it rejoin", p.applied, at)
	}
	g.fsm = &fsm{
		machine: g.machine, snaps: g.snaps, log: g.store, applied: g.applied, floor: g.machine.Applied(),
		restart: g.requestRestart, fatal: g.fatal,
	}
	if n.cfg.staged != nil {
		g.fsm.staged = func() error { return n.cfg.staged(id) }
	}
	g.applied.advance(max(g.fsm.floor, p.index))
	return g, nil
}

func groupDir(dir string, id GroupID) string {
	return filepath.Join(dir, groupsDir, fmt.Sprintf("%03d", id))
}

// ID returns the group's number.
func (g *Group) ID() GroupID { return g.id }

func (g *Group) instance() *instance {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.in
}

// Propose proposes one command, of 1 to [MaxCommandBytes] bytes. It never
// blocks and never calls done itself: done is called exactly once, on a
// goroutine of the group, in the order of the proposals, and must not block.
// data is immutable from the call on.
//
// With a nil error, result is what the machine returned for the command. A
// *[NotLeaderError] and an error that wraps ledger.ErrUnavailable mean that the
// command was not proposed; one that wraps ledger.ErrUnknownOutcome means that
// it may or may not be applied one day. A command of a wrong size gets an error
// that wraps none of these: no retry helps.
//
// Proposals from one goroutine enter the log in their order.
func (g *Group) Propose(data []byte, done func(result any, err error)) {
	pr := &proposal{log: raft.Log{Data: data}, done: done}
	in := g.instance()
	switch {
	case in == nil:
	case len(data) == 0 || len(data) > MaxCommandBytes:
		pr.refused = fmt.Errorf("group %d: command of %d bytes: want 1 to %d", g.id, len(data), MaxCommandBytes)
	case in.raft.State() != raft.Leader:
		pr.refused = in.notLeader()
	}
	if in == nil || !in.pipe.submit(pr) {
		g.m.refused.Inc()
		go done(nil, errStopped) // there is no order any more to keep
	}
}

// IsLeader reports whether this node leads the group and has applied everything
// committed before its term. It may be wrong by the time it returns: use
// ReadBarrier for reads that must not be stale.
func (g *Group) IsLeader() bool {
	l := g.lead.Load()
	return l != nil && l.current()
}

// Leader returns the leader's node identity and host:port as far as this node
// knows, or "" twice.
func (g *Group) Leader() (node, addr string) {
	in := g.instance()
	if in == nil {
		return "", ""
	}
	a, id := in.raft.LeaderWithID()
	if id == "" {
		return "", ""
	}
	_, addr, _ = parseRaftAddress(string(a))
	return string(id), addr
}

// Watch calls f after every change of leadership, in order, on a goroutine of
// the group; f must not block. true means that this node leads and has applied
// everything committed before its term. If that is so already, f(true) comes
// first.
func (g *Group) Watch(f func(leading bool)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tell(event{watcher: f})
}

// tell queues an event for the notifier. The caller holds mu.
func (g *Group) tell(e event) {
	g.events = append(g.events, e)
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// setLeadership makes l, or nobody for nil, what IsLeader and watchers see.
func (g *Group) setLeadership(l *leadership) {
	g.mu.Lock()
	defer g.mu.Unlock()
	was := g.lead.Swap(l)
	if was != nil {
		g.tell(event{leading: false})
		g.log.Info("leadership lost", "term", uint64(was.term), "took", time.Since(was.since))
	}
	if l != nil {
		g.tell(event{leading: true})
		g.log.Info("leadership taken", "term", uint64(l.term))
	}
}

// notifyWatchers tells watchers what happened, until ctx ends.
func (g *Group) notifyWatchers(ctx context.Context) {
	var watchers []func(bool)
	leading := false
	for last := false; ; {
		g.mu.Lock()
		events := g.events
		g.events = nil
		g.mu.Unlock()
		for _, e := range events {
			if e.watcher != nil {
				watchers = append(watchers, e.watcher)
				if leading {
					e.watcher(true)
				}
				continue
			}
			leading = e.leading
			for _, w := range watchers {
				w(leading)
			}
		}
		if last {
			return
		}
		select {
		case <-g.wake:
		case <-ctx.Done():
			last = true // one more look: the end of the leadership must be told
		}
	}
}

// Status returns what this node knows about the group.
func (g *Group) Status() Status {
	s := Status{ID: g.id, State: "stopped", Applied: g.applied.get()}
	in := g.instance()
	if in == nil {
		return s
	}
	switch in.raft.State() {
	case raft.Leader:
		s.State = "leader"
	case raft.Candidate:
		s.State = "candidate"
	case raft.Follower:
		s.State = "follower"
	case raft.Shutdown:
	}
	s.Leader, s.LeaderAddr = g.Leader()
	s.Term, s.Commit, s.LastLog = Term(in.raft.CurrentTerm()), Index(in.raft.CommitIndex()), Index(in.raft.LastIndex())
	for _, srv := range in.servers() {
		_, addr, _ := parseRaftAddress(string(srv.Address))
		s.Members = append(s.Members, Member{Node: string(srv.ID), Addr: addr, Voter: srv.Suffrage == raft.Voter})
	}
	return s
}

// Voters returns the number of voters in the newest configuration known here.
func (g *Group) Voters() int {
	in := g.instance()
	if in == nil {
		return 0
	}
	n := 0
	for _, s := range in.servers() {
		if s.Suffrage == raft.Voter {
			n++
		}
	}
	return n
}

// servers returns the newest configuration, committed or not.
func (in *instance) servers() []raft.Server {
	return in.raft.GetConfiguration().Configuration().Servers // never fails and never waits in this version
}

// fatal ends the process; see Config.Fatal.
func (g *Group) fatal(err error) {
	err = fmt.Errorf("group %d: %w", g.id, err)
	g.log.Error("bookie must stop", "err", err)
	g.node.cfg.Fatal(err)
}

// stuckAfter is how long a transfer may make a leader refuse commands.
func (g *Group) stuckAfter() time.Duration { return 3 * g.node.cfg.Timing.Election }

// requestRestart asks for another raft instance and returns at once.
func (g *Group) requestRestart(reason string) {
	select {
	case g.restarts <- reason:
	default: // one is asked for already
	}
}

// supervise replaces the instance when asked to, until ctx ends.
func (g *Group) supervise(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case reason := <-g.restarts:
			g.log.Warn("raft instance is replaced", "reason", reason)
			g.m.restarts.Inc()
			g.mu.Lock()
			old := g.in
			g.in = nil
			g.mu.Unlock()
			if old != nil {
				old.close()
			}
			if err := g.start(); err != nil {
				g.fatal(fmt.Errorf("restart after %s: %w", reason, err))
				return
			}
		}
	}
}

// start runs the first or the next instance.
func (g *Group) start() error {
	in, err := g.startInstance()
	if err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.in = in
	return nil
}

// close ends the group. The supervisor must have ended before.
func (g *Group) close() {
	g.mu.Lock()
	in := g.in
	g.in = nil
	g.mu.Unlock()
	if in != nil {
		in.close()
	}
	g.closeFiles()
}

func (g *Group) closeFiles() {
	if g.machine != nil {
		if err := g.machine.Close(); err != nil {
			g.log.Error("state not closed cleanly", "err", err)
		}
	}
	if g.store != nil {
		if err := g.store.Close(); err != nil {
			g.log.Error("log not closed cleanly", "err", err)
		}
	}
}

// barrierNow proposes a barrier and waits for it; it is how a leader checks that
// commands get through.
func (in *instance) barrierNow(ctx context.Context) error {
	end := make(chan error, 1)
	if !in.pipe.submit(&proposal{log: raft.Log{Extensions: barrierMark}, done: func(_ any, err error) { end <- err }}) {
		return errStopped
	}
	select {
	case err := <-end:
		return err
	case <-ctx.Done():
		return fmt.Errorf("group %d: barrier: %w: %w", in.g.id, context.Cause(ctx), ledger.ErrUnknownOutcome)
	}
}
