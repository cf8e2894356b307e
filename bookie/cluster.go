package bookie

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"

	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

// cluster implements the service Cluster over one node.
type cluster struct {
	rpc.UnimplementedClusterServer
	node *raftlog.Node
}

var _ rpc.ClusterServer = (*cluster)(nil)

// Status implements the RPC.
func (c *cluster) Status(context.Context, *rpc.StatusRequest) (*rpc.StatusReply, error) {
	id := c.node.Identity()
	reply := &rpc.StatusReply{Cluster: id.Cluster, ClusterId: id.ClusterID, Node: id.Node()}
	for _, g := range c.node.Groups() {
		s := g.Status()
		group := &rpc.GroupStatus{
			Id: uint32(s.ID), State: s.State, LeaderNode: s.Leader, LeaderAddress: s.LeaderAddr,
			Term: uint64(s.Term), Commit: uint64(s.Commit), Applied: uint64(s.Applied), LastLog: uint64(s.LastLog),
		}
		for _, m := range s.Members {
			group.Members = append(group.Members, &rpc.Member{Node: m.Node, Address: m.Addr, Voter: m.Voter})
			if m.Node == reply.GetNode() {
				reply.Address = m.Addr
			}
		}
		reply.Groups = append(reply.Groups, group)
	}
	return reply, nil
}

// Join implements the RPC.
func (c *cluster) Join(ctx context.Context, r *rpc.JoinRequest) (*rpc.JoinReply, error) {
	reply, err := c.node.HandleJoin(ctx, raftlog.JoinRequest{
		Cluster: r.GetCluster(), ClusterID: r.GetClusterId(), Node: r.GetNode(), Addr: r.GetAddress(),
		Group: raftlog.GroupID(r.GetGroup()), Promote: r.GetPromote(), Applied: raftlog.Index(r.GetApplied()),
	})
	if refused, ok := errors.AsType[*raftlog.JoinRefusedError](err); ok {
		return nil, fmt.Errorf("%s: %w", refused.Reason, rpc.ErrInvalid)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, ledger.ErrUnavailable)
	}
	return &rpc.JoinReply{
		ClusterId: reply.ClusterID, GroupCount: uint32(reply.Groups), Voter: reply.Voter, Commit: uint64(reply.Commit),
		LeaderNode: reply.Leader, LeaderAddress: reply.LeaderAddr,
	}, nil
}

// Join asks the bookie at the other end of conn for membership. It is what
// raftlog.Config.JoinVia needs. A refusal is a *[raftlog.JoinRefusedError].
func Join(ctx context.Context, conn *grpc.ClientConn, r raftlog.JoinRequest) (raftlog.JoinReply, error) {
	reply, err := rpc.NewClusterClient(conn).Join(ctx, &rpc.JoinRequest{
		Cluster: r.Cluster, ClusterId: r.ClusterID, Node: r.Node, Address: r.Addr,
		Group: uint32(r.Group), Promote: r.Promote, Applied: uint64(r.Applied),
	})
	if err != nil {
		err = rpc.FromStatus(err)
		if errors.Is(err, rpc.ErrInvalid) {
			return raftlog.JoinReply{}, &raftlog.JoinRefusedError{Reason: err.Error()}
		}
		return raftlog.JoinReply{}, err
	}
	return raftlog.JoinReply{
		ClusterID: reply.GetClusterId(), Groups: int(reply.GetGroupCount()), Voter: reply.GetVoter(),
		Commit: raftlog.Index(reply.GetCommit()), Leader: reply.GetLeaderNode(), LeaderAddr: reply.GetLeaderAddress(),
	}, nil
}
