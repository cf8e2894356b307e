package raftlog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hashicorp/raft"
)

// joinCall bounds one question to one bookie.
const joinCall = 10 * time.Second

// joinComplaint is how often a joiner that does not get on says so.
const joinComplaint = 30 * time.Second

// seeds returns the configured bookies without this one.
func (n *Node) seeds() []string {
	return slices.DeleteFunc(slices.Clone(n.cfg.Bookies), func(a string) bool { return a == n.cfg.Advertised })
}

// learn asks the seeds which cluster an empty directory is to join, until one
// answers, one refuses, or ctx ends.
func (n *Node) learn(ctx context.Context, rec *identityRecord) error {
	seeds := n.seeds()
	if len(seeds) == 0 || n.cfg.JoinVia == nil {
		return fmt.Errorf("directory %s is empty and no other bookie is configured to join through: format exactly one bookie of a new cluster, or list the cluster's bookies", n.cfg.Dir)
	}
	n.log.Info("empty directory; asking to join", "bookies", seeds)
	for {
		var failed []error
		for _, seed := range seeds {
			reply, err := n.ask(ctx, seed, JoinRequest{Cluster: rec.Cluster, Node: rec.identity().Node(), Addr: n.cfg.Advertised, Group: Metadata})
			var refused *JoinRefusedError
			switch {
			case errors.As(err, &refused):
				return fmt.Errorf("join through %s: %w", seed, err)
			case err != nil:
				failed = append(failed, fmt.Errorf("join through %s: %w", seed, err))
			case reply.ClusterID == "" || reply.Groups < 2 || reply.Groups > MaxGroups+1:
				failed = append(failed, fmt.Errorf("join through %s: it is not a member itself yet", seed))
			default:
				rec.ClusterID, rec.Groups = reply.ClusterID, reply.Groups-1
				return nil
			}
		}
		if err := sleep(ctx, n.ctx.Done(), n.cfg.Timing.Join); err != nil {
			return fmt.Errorf("directory %s is empty and no bookie let it join: %w", n.cfg.Dir, errors.Join(append(failed, err)...))
		}
	}
}

func (n *Node) ask(ctx context.Context, addr string, req JoinRequest) (JoinReply, error) {
	ctx, cancel := context.WithTimeout(ctx, joinCall)
	defer cancel()
	return n.cfg.JoinVia(ctx, addr, req)
}

// join keeps this node a voter of every group, at its present address, and the
// only one of its name: it asks the leaders as long as its own newest
// configuration says otherwise.
func (n *Node) join(ctx context.Context) {
	goals := make([]Index, len(n.groups)) // what a leader wants applied before it promotes us; 0: not told yet
	var complained time.Time
	for {
		unsettled := 0
		var lastErr error
		for i, g := range n.groups {
			if g.settled() {
				goals[i] = 0
				continue
			}
			unsettled++
			reply, err := n.joinGroup(ctx, g, goals[i])
			if err != nil {
				lastErr = err
				continue
			}
			goals[i] = reply.Commit
		}
		if lastErr != nil && ctx.Err() == nil && time.Since(complained) > joinComplaint {
			complained = time.Now()
			n.log.Warn("not a voter of every group yet; asking on", "groups", unsettled, "err", lastErr)
		}
		pause := n.cfg.Timing.Join
		if unsettled == 0 {
			pause = n.cfg.Timing.JoinSettled
		}
		if sleep(ctx, nil, pause) != nil {
			return
		}
	}
}

// settled reports whether the newest configuration known here has this node as
// it should be.
func (g *Group) settled() bool {
	in := g.instance()
	if in == nil {
		return true // it restarts; look again later
	}
	id := g.node.identity
	voter := false
	for _, s := range in.servers() {
		switch {
		case string(s.ID) == id.Node():
			voter = s.Suffrage == raft.Voter && string(s.Address) == raftAddress(id.Node(), g.node.cfg.Advertised)
		case nameOf(string(s.ID)) == id.Name:
			return false // a former self is left
		}
	}
	return voter
}

// joinGroup asks for the next step in one group: the leader if it is known, else
// whoever answers, following the hint to the leader.
func (n *Node) joinGroup(ctx context.Context, g *Group, goal Index) (JoinReply, error) {
	applied := g.applied.get()
	req := JoinRequest{
		Cluster: n.identity.Cluster, ClusterID: n.identity.ClusterID, Node: n.identity.Node(), Addr: n.cfg.Advertised,
		Group: g.id, Promote: goal > 0 && applied >= goal, Applied: applied,
	}
	if g.IsLeader() {
		ctx, cancel := context.WithTimeout(ctx, joinCall)
		defer cancel()
		return n.HandleJoin(ctx, req)
	}
	if n.cfg.JoinVia == nil {
		return JoinReply{}, fmt.Errorf("group %d: no way to ask another bookie", g.id)
	}
	var failed []error
	asked := map[string]bool{n.cfg.Advertised: true}
	queue := g.candidates()
	for len(queue) > 0 && ctx.Err() == nil {
		addr := queue[0]
		queue = queue[1:]
		if addr == "" || asked[addr] {
			continue
		}
		asked[addr] = true
		reply, err := n.ask(ctx, addr, req)
		switch {
		case err != nil:
			failed = append(failed, fmt.Errorf("group %d through %s: %w", g.id, addr, err))
		case reply.Voter || reply.Commit > 0:
			return reply, nil // the leader spoke
		default:
			queue = append([]string{reply.LeaderAddr}, queue...)
		}
	}
	return JoinReply{}, errors.Join(append(failed, fmt.Errorf("group %d: no leader answered", g.id))...)
}

// candidates lists whom to ask for a group's leader: the leader as known here,
// the seeds, the members.
func (g *Group) candidates() []string {
	_, leader := g.Leader()
	addrs := append([]string{leader}, g.node.seeds()...)
	if in := g.instance(); in != nil {
		for _, s := range in.servers() {
			_, addr, _ := parseRaftAddress(string(s.Address))
			addrs = append(addrs, addr)
		}
	}
	return addrs
}
