package raftlog

import (
	"fmt"
	"io"
	"strings"
)

// GroupID names one Raft group of the cluster: [Metadata], then the ledger
// groups, counting from 1.
type GroupID uint32

// Metadata is the group that holds the cluster's metadata.
const Metadata GroupID = 0

// Index is a position in one group's log, counting from 1.
type Index uint64

// Term is a Raft term.
type Term uint64

const (
	// MaxCommandBytes bounds one command. It holds the largest message a client
	// may publish (5 MiB) with what is wrapped around it.
	MaxCommandBytes = 8 << 20

	// MaxInFlightBytes bounds the commands of one group that are proposed and not
	// answered yet. Propose refuses what goes beyond.
	MaxInFlightBytes = 64 << 20

	// MaxAppendEntries bounds the commands that share one write and one message
	// to a follower. It counts commands, never bytes.
	MaxAppendEntries = 64
)

// Command is one committed command. Data is immutable.
type Command struct {
	Index Index
	Term  Term
	Data  []byte
}

// Machine is one group's replicated state. raftlog calls Apply and Install on
// the group's apply goroutine, one at a time; the other methods may run beside
// them and beside each other.
type Machine interface {
	// Apply applies commands in order and returns one result for each. What it
	// does may depend on the commands and on earlier ones, on nothing else. It
	// never sees a command twice: raftlog drops those up to Applied after a
	// restart or an installed stream.
	Apply(batch []Command) []any

	// Applied is the index of the newest command in the state; right after open,
	// of the newest one that survived. 0 is an empty state.
	Applied() Index

	// Checkpoint makes everything durable that was applied before the call. The
	// log may be cut once it returned nil.
	Checkpoint() error

	// Stream returns a consistent copy of the state for another member.
	Stream() (Stream, error)

	// Install replaces the whole state by a stream's, atomically and durably: a
	// crash leaves the old state or the new one. It reads r to io.EOF and changes
	// nothing if r ends with another error. Afterwards Applied returns applied.
	Install(r io.Reader, applied Index) error

	// Close frees what the machine holds. Nothing else is called afterwards.
	Close() error
}

// Stream is a machine's state on its way to another member. Whoever got it
// closes it.
type Stream struct {
	io.ReadCloser
	Size    int64 // bytes that it yields, exactly
	Applied Index // newest command in it
}

// Member is one server in a group's configuration.
type Member struct {
	Node  string // name@diskUUID
	Addr  string // host:port
	Voter bool
}

// Status is what this node knows about a group, without asking anybody.
type Status struct {
	ID         GroupID
	State      string // "leader", "follower", "candidate", or "stopped" while the group restarts or closes
	Leader     string // the leader's node identity, "" if unknown
	LeaderAddr string // its host:port
	Term       Term
	Commit     Index
	Applied    Index // newest entry that the machine has seen here
	LastLog    Index
	Members    []Member
}

// NotLeaderError refuses a command or a read barrier on a node that does not
// lead the group. Nothing was proposed. Ask Addr, or look for the leader.
type NotLeaderError struct {
	Group  GroupID
	Leader string // node identity, "" if unknown
	Addr   string // host:port, "" if unknown
}

// Error names the leader if it is known.
func (e *NotLeaderError) Error() string {
	if e.Leader == "" {
		return fmt.Sprintf("group %d has no known leader: try again", e.Group)
	}
	return fmt.Sprintf("group %d is led by %s at %s: ask there", e.Group, e.Leader, e.Addr)
}

// LeaderHint is how package internal/rpc carries the leader to a client.
func (e *NotLeaderError) LeaderHint() (node, addr string) { return e.Leader, e.Addr }

// JoinRefusedError refuses a bookie that asks to join. Asking again helps only
// after somebody changed something.
type JoinRefusedError struct{ Reason string }

// Error is the sentence for the operator of the joining bookie.
func (e *JoinRefusedError) Error() string { return "join refused: " + e.Reason }

// nameOf returns the name part of a node identity name@diskUUID.
func nameOf(node string) string {
	name, _, _ := strings.Cut(node, "@")
	return name
}

// raftAddress is a member's Raft ServerAddress: node identity and host:port, so
// that a wiped bookie has another address than its former self at the same port.
func raftAddress(node, addr string) string { return node + "/" + addr }

// parseRaftAddress is the inverse of raftAddress.
func parseRaftAddress(s string) (node, addr string, ok bool) {
	return strings.Cut(s, "/")
}
