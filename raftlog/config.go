package raftlog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Config is what [Open] needs. Dir, Cluster, Name, Advertised, Log and Machine
// are required.
type Config struct {
	// Dir holds the identity and each group's log. It belongs to the Node while
	// that is open; a lock in it keeps a second process out.
	Dir string

	// Cluster is the cluster's name. A node of another name is never talked to.
	Cluster string

	// Name is this bookie's name, unique in the cluster and the same for ever,
	// also after its disk was replaced. No "@" and no "/" in it.
	Name string

	// Advertised is the host:port at which other nodes reach this one. It may
	// change between runs.
	Advertised string

	// Bookies are the host:port addresses through which an empty node joins, and
	// a moved one tells its new address. Its own may be among them.
	Bookies []string

	// ExpectedBookies is how many bookies the cluster is meant to have. 1 selects
	// short timers; see [DefaultTiming].
	ExpectedBookies int

	// LogStore selects where the groups' logs are. A directory keeps the kind that
	// it was first opened with. "" means BoltDB.
	LogStore LogStore

	// Timing is for tests and unusual networks. The zero value means
	// DefaultTiming(ExpectedBookies).
	Timing Timing

	Log        *slog.Logger
	Registerer prometheus.Registerer // nil: nobody scrapes

	// Machine makes a group's state machine, for each group in order. The Node
	// closes it.
	Machine func(GroupID, Identity) (Machine, error)

	// JoinVia sends a JoinRequest to the bookie at addr, which answers it with
	// its Node.HandleJoin. nil: this node can join nothing and cannot tell its
	// new address.
	JoinVia func(ctx context.Context, addr string, req JoinRequest) (JoinReply, error)

	// Fatal ends the process: the disk failed or hangs, or the state is broken.
	// It is called at most once per group. If it returns, the group takes no
	// part any more until Close. nil: panic.
	Fatal func(error)

	// segmentBytes lets a test have small segments; 0 = the default.
	segmentBytes int64
	// wrapStore lets a test fail a group's log.
	wrapStore func(GroupID, backend) backend
	// staged lets a test stop between staging a stream and installing it.
	staged func(GroupID) error
}

// LogStore is a kind of log. Term and vote are in a raft-boltdb file per group
// with either.
type LogStore string

// The kinds of log.
const (
	BoltDB  LogStore = "boltdb"  // a raft-boltdb file per group
	Journal LogStore = "journal" // one segment log for all groups; see package journal
)

// Timing is every duration and threshold of a Node that a test may want small.
type Timing struct {
	Heartbeat time.Duration // follower waits this long without a leader before it asks for an election
	Election  time.Duration // a candidate waits this long; at least Heartbeat
	Lease     time.Duration // a leader without a quorum steps down after this; at most Heartbeat
	Commit    time.Duration // followers of an idle leader learn of the last commit after this to twice this

	SnapshotInterval  time.Duration // between checks whether to write a snapshot pointer
	SnapshotThreshold uint64        // log entries since the last pointer that make one due
	TrailingLogs      uint64        // log entries kept behind a pointer, for members that lag

	RPC       time.Duration // one message to a member; for a stream, per 256 KiB
	Dial      time.Duration // one connection to a member
	Probe     time.Duration // the question whether a node is alive
	StoreHang time.Duration // a log write that takes longer ends the process; one second more per 4 MiB

	Join            time.Duration // between two attempts to become a member
	JoinSettled     time.Duration // between two looks at a membership that is as it should be
	Balance         time.Duration // between two looks at who leads what
	StableLeader    time.Duration // leadership younger than this is not moved
	TransferBackoff time.Duration // after a failed transfer; doubles up to 16 times this
}

// DefaultTiming returns the timers of a cluster of that many bookies. A lone
// bookie has nobody to wait for and elects itself in a tenth of a second.
func DefaultTiming(expectedBookies int) Timing {
	t := Timing{
		Heartbeat: time.Second, Election: time.Second, Lease: 500 * time.Millisecond, Commit: 500 * time.Millisecond,
		SnapshotInterval: 30 * time.Second, SnapshotThreshold: 4096, TrailingLogs: 2048,
		RPC: 10 * time.Second, Dial: 2 * time.Second, Probe: time.Second, StoreHang: 10 * time.Second,
		Join: 500 * time.Millisecond, JoinSettled: 10 * time.Second,
		Balance: time.Second, StableLeader: 5 * time.Second, TransferBackoff: 30 * time.Second,
	}
	if expectedBookies == 1 {
		t.Heartbeat, t.Election, t.Lease, t.Commit = 100*time.Millisecond, 100*time.Millisecond, 100*time.Millisecond, 100*time.Millisecond
	}
	return t
}

func (c *Config) validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Dir == "" {
		bad("raftlog: Dir is empty: want the directory of the bookie's identity and logs")
	}
	if err := checkName("cluster name", c.Cluster); err != nil {
		errs = append(errs, err)
	}
	if err := checkName("bookie name", c.Name); err != nil {
		errs = append(errs, err)
	}
	if host, port, err := net.SplitHostPort(c.Advertised); err != nil || host == "" || port == "" || port == "0" {
		bad("advertised address is %q: want host:port at which other nodes reach this one", c.Advertised)
	}
	if c.Log == nil || c.Machine == nil {
		bad("raftlog: Log and Machine must be set")
	}
	switch c.LogStore {
	case "":
		c.LogStore = BoltDB
	case BoltDB, Journal:
	default:
		bad("log store is %q: want %q or %q", c.LogStore, BoltDB, Journal)
	}
	if c.Timing == (Timing{}) {
		c.Timing = DefaultTiming(c.ExpectedBookies)
	}
	if c.Fatal == nil {
		c.Fatal = func(err error) { panic(err) }
	}
	return errors.Join(errs...)
}

// maxName bounds, in bytes, a cluster's and a bookie's name: with "@" and a UUID
// behind it a name must fit into a hello.
const maxName = 128

func checkName(what, name string) error {
	if name == "" || len(name) > maxName || strings.ContainsAny(name, "@/ \t\r\n") {
		return fmt.Errorf("%s is %q: want 1 to %d bytes without \"@\", \"/\" and spaces", what, name, maxName)
	}
	return nil
}
