package raftlog

import (
	"context"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"github.com/magnetar-io/magnetar/internal/handshake"
)

// JoinRequest asks for membership in one group. Without ClusterID it only asks
// which cluster this is.
type JoinRequest struct {
	Cluster   string // the cluster's name, as the joiner is configured
	ClusterID string // "" as long as the joiner does not know it
	Node      string // the joiner's identity, name@diskUUID
	Addr      string // host:port at which others reach the joiner
	Group     GroupID
	Promote   bool  // the joiner has applied what an earlier reply named
	Applied   Index // the newest entry that the joiner has applied
}

// JoinReply is the answer of one bookie. Only the group's leader changes
// anything; the others say who leads.
type JoinReply struct {
	ClusterID  string
	Groups     int    // groups of the cluster, the metadata group included
	Voter      bool   // the joiner is a voter, and its former selves are removed
	Commit     Index  // to be applied before the joiner is made a voter
	Leader     string // node identity, "" if unknown
	LeaderAddr string // host:port
}

// pendingJoin is a non-voter on its way.
type pendingJoin struct {
	term   Term  // the leader's; another term starts over
	commit Index // what it must have applied
}

// configTimeout bounds the wait for a change of members to be accepted by raft
// and committed.
const configTimeout = 5 * time.Second

// HandleJoin answers a JoinRequest that reached this node. A *[JoinRefusedError]
// says why the joiner will not become a member; another error means that it may
// ask again.
func (n *Node) HandleJoin(ctx context.Context, req JoinRequest) (JoinReply, error) {
	id := n.identity
	if err := n.checkJoin(req); err != nil {
		return JoinReply{}, err
	}
	g := n.Group(req.Group)
	if g == nil {
		return JoinReply{}, &JoinRefusedError{fmt.Sprintf("cluster %q has no group %d, only 0 to %d", id.Cluster, req.Group, id.Groups)}
	}
	reply := JoinReply{ClusterID: id.ClusterID, Groups: len(n.groups)}
	reply.Leader, reply.LeaderAddr = g.Leader()
	if req.ClusterID == "" {
		in := g.instance()
		if in == nil {
			return JoinReply{}, errStopped
		}
		_, err := g.formerSelves(ctx, in.servers(), req)
		return reply, err
	}
	if !g.IsLeader() {
		return reply, nil
	}
	return g.admit(ctx, req, reply)
}

func (n *Node) checkJoin(req JoinRequest) error {
	id := n.identity
	switch {
	case req.Cluster != id.Cluster:
		return &JoinRefusedError{fmt.Sprintf("node %q wants to join cluster %q, but %q at %s belongs to cluster %q", req.Node, req.Cluster, id.Node(), n.cfg.Advertised, id.Cluster)}
	case req.ClusterID != "" && req.ClusterID != id.ClusterID:
		return &JoinRefusedError{fmt.Sprintf("node %q belongs to cluster id %s, but %q belongs to cluster id %s: the names (%q) agree, but these clusters were formatted apart", req.Node, req.ClusterID, id.Node(), id.ClusterID, id.Cluster)}
	case checkName("bookie name", nameOf(req.Node)) != nil || len(req.Node) <= len(nameOf(req.Node))+1 || len(req.Node) > handshake.MaxField:
		return &JoinRefusedError{fmt.Sprintf("node identity is %q: want name@diskUUID", req.Node)}
	case req.Addr == "":
		return &JoinRefusedError{fmt.Sprintf("node %q names no address at which it can be reached", req.Node)}
	}
	return nil
}

// admit moves a joiner one step on: non-voter, voter, only one of its name.
func (g *Group) admit(ctx context.Context, req JoinRequest, reply JoinReply) (JoinReply, error) {
	select {
	case g.joining <- struct{}{}:
		defer func() { <-g.joining }()
	case <-ctx.Done():
		return JoinReply{}, context.Cause(ctx)
	}
	in := g.instance()
	if in == nil {
		return JoinReply{}, errStopped
	}
	servers := in.servers()
	former, err := g.formerSelves(ctx, servers, req)
	if err != nil {
		return JoinReply{}, err
	}
	sid, addr := raft.ServerID(req.Node), raft.ServerAddress(raftAddress(req.Node, req.Addr))
	var me *raft.Server
	for i := range servers {
		if servers[i].ID == sid {
			me = &servers[i]
		}
	}
	change := func(f raft.IndexFuture, what string) error {
		if err := in.await(ctx, f); err != nil {
			if isLost(err) {
				return in.notLeader()
			}
			return fmt.Errorf("group %d: %s %s: %w", g.id, what, req.Node, err)
		}
		g.log.Info("members changed", "change", what, "node", req.Node, "addr", req.Addr)
		return nil
	}
	term, commit := Term(in.raft.CurrentTerm()), Index(in.raft.CommitIndex())
	switch {
	case me == nil:
		if err := change(in.raft.AddNonvoter(sid, addr, 0, configTimeout), "added as non-voter"); err != nil {
			return JoinReply{}, err
		}
		g.pending[req.Node] = pendingJoin{term, commit}
		reply.Commit = commit
		return reply, nil
	case me.Suffrage == raft.Voter && me.Address == addr:
	case me.Suffrage == raft.Voter:
		if err := change(in.raft.AddVoter(sid, addr, 0, configTimeout), "address changed of voter"); err != nil {
			return JoinReply{}, err
		}
	default:
		if me.Address != addr {
			if err := change(in.raft.AddNonvoter(sid, addr, 0, configTimeout), "address changed of non-voter"); err != nil {
				return JoinReply{}, err
			}
		}
		p, ok := g.pending[req.Node]
		if !ok || p.term != term {
			p = pendingJoin{term, commit}
			g.pending[req.Node] = p
		} else if req.Promote && req.Applied >= p.commit {
			if err := change(in.raft.AddVoter(sid, addr, 0, configTimeout), "made a voter"); err != nil {
				return JoinReply{}, err
			}
			delete(g.pending, req.Node)
			break
		}
		reply.Commit = p.commit
		return reply, nil
	}
	for _, old := range former {
		if err := change(in.raft.RemoveServer(old.ID, 0, configTimeout), "former self removed ("+string(old.ID)+") of"); err != nil {
			return JoinReply{}, err
		}
	}
	reply.Voter = true
	return reply, nil
}

// formerSelves returns the members of the joiner's name with another disk. It
// refuses the joiner if one of them is alive: two bookies have one name, or the
// joiner is itself the former one.
func (g *Group) formerSelves(ctx context.Context, servers []raft.Server, req JoinRequest) ([]raft.Server, error) {
	var former []raft.Server
	for _, s := range servers {
		if string(s.ID) == req.Node || nameOf(string(s.ID)) != nameOf(req.Node) {
			continue
		}
		_, addr, _ := parseRaftAddress(string(s.Address))
		if g.node.alive(ctx, string(s.ID), addr) {
			return nil, &JoinRefusedError{fmt.Sprintf("%q at %s wants to join, but %q at %s has the same name and is alive: give every bookie its own name, or stop the other one", req.Node, req.Addr, s.ID, addr)}
		}
		former = append(former, s)
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx) // what did not answer may be alive
	}
	return former, nil
}

// alive reports whether node answers at addr.
func (n *Node) alive(ctx context.Context, node, addr string) bool {
	if node == n.identity.Node() {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, n.cfg.Timing.Probe)
	defer cancel()
	_, err := handshake.Probe(ctx, addr, n.self(), node)
	return err == nil
}
