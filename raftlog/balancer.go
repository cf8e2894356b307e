package raftlog

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"github.com/magnetar-io/magnetar/ledger"
)

// balance moves each ledger group that this node leads to its preferred leader, one
// at a time, until ctx ends. So each bookie leads its share of the groups.
//
// The metadata group stays where it is: it costs its leader little, and each new
// leader gives every lease its whole time again. A broker that dies around such a
// move would be replaced that much later.
func (n *Node) balance(ctx context.Context) {
	type pause struct {
		until time.Time
		next  time.Duration
	}
	pauses := make([]pause, len(n.groups)) // after failed transfers
	for sleep(ctx, nil, n.cfg.Timing.Balance) == nil {
		for i, g := range n.groups {
			to := g.betterLeader()
			p := &pauses[i]
			if to == nil || time.Now().Before(p.until) {
				continue
			}
			if _, addr, _ := parseRaftAddress(string(to.Address)); !n.alive(ctx, string(to.ID), addr) {
				continue // the preferred leader is down: leave things as they are
			}
			if err := g.transfer(ctx, *to); err != nil && ctx.Err() == nil {
				p.next = min(max(2*p.next, n.cfg.Timing.TransferBackoff), 16*n.cfg.Timing.TransferBackoff)
				p.until = time.Now().Add(p.next)
				g.log.Warn("leadership not moved; will try again", "to", string(to.ID), "wait", p.next, "err", err)
			} else {
				*p = pause{}
			}
		}
	}
}

// betterLeader returns whom this node should hand the group to, nil for nobody:
// it is the metadata group, or this node does not lead, has not led for long, or is
// the preferred leader itself.
func (g *Group) betterLeader() *raft.Server {
	l := g.lead.Load()
	if g.id == Metadata || l == nil || !l.current() || time.Since(l.since) < g.node.cfg.Timing.StableLeader {
		return nil
	}
	to := preferredLeader(g.id, l.in.servers())
	if to == nil || string(to.ID) == g.node.identity.Node() {
		return nil
	}
	return to
}

// preferredLeader returns the voter that should lead a group: of the voters,
// sorted by name, the one at the group's number. While two voters have one name,
// because a wiped bookie is being replaced, nobody is preferred.
func preferredLeader(id GroupID, servers []raft.Server) *raft.Server {
	var voters []raft.Server
	for _, s := range servers {
		if s.Suffrage == raft.Voter {
			voters = append(voters, s)
		}
	}
	slices.SortFunc(voters, func(a, b raft.Server) int {
		return cmp.Or(cmp.Compare(nameOf(string(a.ID)), nameOf(string(b.ID))), cmp.Compare(a.ID, b.ID))
	})
	for i := 1; i < len(voters); i++ {
		if nameOf(string(voters[i].ID)) == nameOf(string(voters[i-1].ID)) {
			return nil
		}
	}
	if len(voters) == 0 {
		return nil
	}
	return &voters[int(id)%len(voters)]
}

// transfer hands the group to one voter and, if that fails, sees to it that this
// node takes commands again.
func (g *Group) transfer(ctx context.Context, to raft.Server) error {
	in := g.instance()
	if in == nil {
		return errStopped
	}
	g.m.transfers.Inc()
	g.log.Info("leadership is moved to the preferred leader", "to", string(to.ID))
	// raft answers within twice the election timeout. Do not leave before: a
	// second transfer must not begin beside this one.
	if err := in.await(context.WithoutCancel(ctx), in.raft.LeadershipTransferToServer(to.ID, to.Address)); err != nil {
		g.checkUnstuck(ctx, in)
		return err
	}
	return nil
}

// checkUnstuck restarts the group if, after a failed transfer, it leads on and
// refuses commands for ever (hashicorp/raft #696).
func (g *Group) checkUnstuck(ctx context.Context, in *instance) {
	ctx, cancel := context.WithTimeout(ctx, g.stuckAfter())
	defer cancel()
	start := time.Now()
	for {
		err := in.barrierNow(ctx)
		var elsewhere *NotLeaderError
		switch {
		case err == nil, errors.As(err, &elsewhere), errors.Is(err, errStopped):
			return
		case errors.Is(err, ledger.ErrUnknownOutcome) && ctx.Err() == nil:
			return // it was proposed: commands get through
		}
		if sleep(ctx, in.stop, barrierRetry) == nil {
			continue
		}
		if context.Cause(ctx) == context.DeadlineExceeded && errors.Is(err, raft.ErrLeadershipTransferInProgress) { //nolint:errorlint // the cause is the value itself
			g.log.Error("leader refuses commands because of a transfer that never ended; the group is restarted", "took", time.Since(start))
			g.requestRestart("a leadership transfer never ended")
		}
		return
	}
}
