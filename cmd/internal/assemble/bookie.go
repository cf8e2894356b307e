package assemble

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"

	"github.com/magnetar-io/magnetar/bookie"
	"github.com/magnetar-io/magnetar/internal/config"
	"github.com/magnetar-io/magnetar/internal/handshake"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/metadata/server"
	"github.com/magnetar-io/magnetar/raftlog"
)

// BookieConfig are the keys of a bookie.
type BookieConfig struct {
	Common

	ClusterName      string
	BookieID         string
	Bookies          []string
	ExpectedBookies  int
	LedgerGroups     int
	BookiePort       int
	HTTPServerPort   int
	JournalDirectory string
	RaftLogStore     string
	DiskReserveMB    int

	formatEmpty bool // an empty directory becomes a new cluster: standalone only
	noWeb       bool // the other half of the process serves HTTP
}

// Keys registers the keys and returns their set. It gives every field its default.
func (c *BookieConfig) Keys() *config.Set {
	s := config.NewSet()
	c.registerShared(s)
	s.Section("Network")
	s.Int(&c.HTTPServerPort, "httpServerPort", 8000, 0, 65535,
		"Port of /metrics and /health. 0 = any free port.")
	return s
}

// registerShared registers the keys that a standalone has as well.
func (c *BookieConfig) registerShared(s *config.Set) {
	s.Section("Cluster")
	registerClusterName(s, &c.ClusterName)
	s.String(&c.BookieID, "bookieId", "bookie-1",
		"Name of this bookie, unique in the cluster and the same for ever, also after its disk was replaced.")
	registerBookies(s, &c.Bookies)
	s.Int(&c.ExpectedBookies, "expectedBookies", 3, 1, 9,
		"How many bookies the cluster is meant to have. 1 = a lone bookie, with short timers.")
	s.Int(&c.LedgerGroups, "ledgerGroups", 3, 1, raftlog.MaxGroups,
		"How many Raft groups hold ledgers, besides the one for metadata. Counts when the cluster is formatted and is fixed from then on.")
	s.Section("Network")
	s.Int(&c.BookiePort, "bookiePort", 3181, 0, 65535,
		"Port of everything between nodes: bookie to bookie and broker to bookie. 0 = any free port, which only a lone bookie can use.")
	c.Register(s)
	s.Section("Storage")
	s.String(&c.JournalDirectory, "journalDirectory", "data/bookie",
		"Directory with everything that this bookie keeps. It belongs to one bookie of one cluster.")
	s.Choice(&c.RaftLogStore, "raftLogStore", string(raftlog.BoltDB), []string{string(raftlog.BoltDB), string(raftlog.Journal)},
		"Where the Raft groups keep their logs: boltdb = a file for each, journal = one segment log that all share. A directory keeps the kind that it was first started with.")
	s.Int(&c.DiskReserveMB, "diskReserveMB", bookie.DefaultDiskReserveBytes>>20, 0, 1<<20,
		"Megabytes of free disk space below which new entries are refused, so that logs and indexes can still be written.")
}

// reserveBytes is the reserve as the store wants it, where 0 means its own default.
func (c *BookieConfig) reserveBytes() int64 {
	if c.DiskReserveMB == 0 {
		return -1
	}
	return int64(c.DiskReserveMB) << 20
}

// Directory is where the bookie's data is.
func (c *BookieConfig) Directory() string { return c.JournalDirectory }

// Format makes a new cluster on the bookie's directory, which must be empty.
func Format(c BookieConfig) (raftlog.Identity, error) {
	return raftlog.Format(c.JournalDirectory, c.ClusterName, c.BookieID, c.LedgerGroups)
}

// Bookie is a bookie that runs.
type Bookie struct {
	log     *slog.Logger
	node    *raftlog.Node
	address string
	web     string
	closing closer
	serving sync.WaitGroup // the gRPC server
}

// StartBookie starts a bookie and returns once it takes part in its groups. A bookie
// on an empty directory joins first, for which it waits as long as ctx allows.
func StartBookie(ctx context.Context, c BookieConfig, log *slog.Logger, reg *prometheus.Registry) (*Bookie, error) {
	if err := c.Check(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUsage, err)
	}
	b := &Bookie{log: log}
	if err := b.start(ctx, c, reg); err != nil {
		return nil, errors.Join(interrupted(ctx, err), b.closing.close(ctx, log))
	}
	return b, nil
}

func (b *Bookie) start(ctx context.Context, c BookieConfig, reg *prometheus.Registry) error {
	var site *web
	if !c.noWeb {
		l, err := c.listen("httpServerPort", c.HTTPServerPort)
		if err != nil {
			return err
		}
		site = newWeb(l, reg, b.log)
		b.web = c.advertised(l)
		b.closing.add("the HTTP server", site.close)
	}
	listener, err := c.listen("bookiePort", c.BookiePort)
	if err != nil {
		return err
	}
	b.closing.add("the inter-node port", func(context.Context) error { return closed(listener.Close()) })
	b.address = c.advertised(listener)
	if err := c.prepare(b.address); err != nil {
		return err
	}
	if site != nil {
		site.wait("opening the Raft groups, or waiting to join them")
	}

	disk := &disk{dir: c.JournalDirectory, reserve: c.reserveBytes(), log: b.log, reg: reg}
	b.closing.add("the store", func(context.Context) error { return disk.close() })
	b.node, err = raftlog.Open(ctx, raftlog.Config{
		Dir: c.JournalDirectory, Cluster: c.ClusterName, Name: c.BookieID, Advertised: b.address,
		Bookies: c.Bookies, ExpectedBookies: c.ExpectedBookies,
		LogStore: raftlog.LogStore(c.RaftLogStore),
		Log:      b.log, Registerer: reg,
		Machine: disk.machine, JoinVia: joinVia(b.log), Fatal: Fatal(b.log),
	}, listener)
	if err != nil {
		return err
	}
	b.closing.add("the Raft groups", b.node.Close)
	if err := b.serve(disk); err != nil { //nolint:contextcheck // the services outlive the start; Close ends them
		return err
	}
	if site != nil {
		site.ready(b.handler(reg))
	}
	return nil
}

// prepare makes sure that the directory is a cluster's, or may become part of one.
func (c *BookieConfig) prepare(address string) error {
	_, formatted, err := raftlog.OpenIdentity(c.JournalDirectory)
	if err != nil || formatted {
		return err
	}
	if c.formatEmpty {
		_, err := Format(*c)
		return err
	}
	others := slices.DeleteFunc(slices.Clone(c.Bookies), func(a string) bool { return a == address })
	if len(others) == 0 {
		return fmt.Errorf("%w: the directory %s holds no bookie yet, and bookies=%v names no other bookie to join: make a new cluster here with `bookie format`, or name the bookies of the one to join",
			ErrUsage, c.JournalDirectory, c.Bookies)
	}
	return nil
}

// disk opens what the groups' state machines keep on this bookie's disk.
type disk struct {
	dir      string
	reserve  int64
	log      *slog.Logger
	reg      prometheus.Registerer
	store    *bookie.Store
	metadata *server.Machine
}

// machine opens the state machine of a group, the metadata group's first.
func (d *disk) machine(group raftlog.GroupID, _ raftlog.Identity) (raftlog.Machine, error) {
	if group == raftlog.Metadata {
		m, err := server.NewMachine(filepath.Join(d.dir, "metadata"), d.log)
		d.metadata = m
		return m, err
	}
	if d.store == nil {
		store, err := bookie.NewStore(filepath.Join(d.dir, "ledgers"), bookie.StoreConfig{
			DiskReserveBytes: d.reserve, Log: d.log, Registerer: d.reg, Fatal: Fatal(d.log),
		})
		if err != nil {
			return nil, err
		}
		d.store = store
	}
	return d.store.Machine(group)
}

func (d *disk) close() error {
	if d.store == nil {
		return nil
	}
	return d.store.Close()
}

// serve offers the gRPC services to brokers and to other bookies.
func (b *Bookie) serve(d *disk) error {
	grpcServer := rpc.NewServer()
	ledgers, err := bookie.Register(grpcServer, b.node, d.store, b.log)
	if err != nil {
		return err
	}
	b.closing.add("the ledger service", func(context.Context) error { ledgers.Close(); return nil })
	keys := server.Register(grpcServer, b.node.Group(raftlog.Metadata), d.metadata, b.log)
	b.closing.add("the metadata service", func(context.Context) error { keys.Close(); return nil })
	l := b.node.Mux().Listener(handshake.Storage, 0)
	b.serving.Go(func() {
		if err := grpcServer.Serve(l); err != nil {
			b.log.Warn("gRPC server ended", "err", err)
		}
	})
	b.closing.add("the gRPC server", func(context.Context) error {
		stop(grpcServer)
		b.serving.Wait()
		return nil
	})
	return nil
}

// stopTimeout is how long calls under way get when a bookie ends. Append streams and
// watches never end by themselves, and clients follow to another bookie at once.
const stopTimeout = 200 * time.Millisecond

func stop(s *grpc.Server) {
	timer := time.AfterFunc(stopTimeout, s.Stop)
	defer timer.Stop()
	s.GracefulStop()
}

// joinVia asks the bookie at addr for membership.
func joinVia(log *slog.Logger) func(context.Context, string, raftlog.JoinRequest) (raftlog.JoinReply, error) {
	return func(ctx context.Context, addr string, r raftlog.JoinRequest) (raftlog.JoinReply, error) {
		pool := rpc.NewPool(handshake.Self{Cluster: r.Cluster, ClusterID: r.ClusterID, Node: r.Node}, nil, log)
		defer func() { _ = pool.Close() }() // its one answer was read
		conn, err := pool.Conn(addr)
		if err != nil {
			return raftlog.JoinReply{}, err
		}
		return bookie.Join(ctx, conn, r)
	}
}

// handler serves /metrics and /health.
func (b *Bookie) handler(gatherer prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(gatherer, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		h := b.health()
		code := http.StatusOK
		if h.State != "ready" {
			code = http.StatusServiceUnavailable
		}
		answer(w, code, h)
	})
	return mux
}

// health says how the bookie's groups are. It is ready if it has a vote in each of
// them and each has a leader.
func (b *Bookie) health() health {
	h := health{State: "ready", Node: b.Node()}
	for _, g := range b.node.Groups() {
		s := g.Status()
		one := groupHealth{
			ID: uint32(s.ID), State: s.State, Leader: s.Leader, Term: uint64(s.Term), Commit: uint64(s.Commit),
			Applied: uint64(s.Applied), LastLog: uint64(s.LastLog), Members: make([]memberHealth, 0, len(s.Members)),
		}
		votes := false
		for _, m := range s.Members {
			one.Members = append(one.Members, memberHealth{m.Node, m.Addr, m.Voter})
			votes = votes || m.Voter && m.Node == h.Node
		}
		h.Groups = append(h.Groups, one)
		switch {
		case h.State != "ready":
		case s.Leader == "":
			h.State = fmt.Sprintf("group %d has no leader", s.ID)
		case !votes:
			h.State = fmt.Sprintf("catching up in group %d: no vote there yet", s.ID)
		}
	}
	return h
}

// lead waits until the bookie leads every group, as a lone one does, or ctx ends.
func (b *Bookie) lead(ctx context.Context) error {
	for _, g := range b.node.Groups() {
		leads := make(chan struct{})
		var once sync.Once
		g.Watch(func(leading bool) {
			if leading {
				once.Do(func() { close(leads) })
			}
		})
		select {
		case <-leads:
		case <-ctx.Done():
			return fmt.Errorf("group %d: wait for its leader: %w", g.ID(), context.Cause(ctx))
		}
	}
	return nil
}

// Node is the bookie's identity, name@disk.
func (b *Bookie) Node() string { return b.node.Identity().Node() }

// Address is where other nodes reach the bookie, host:port.
func (b *Bookie) Address() string { return b.address }

// WebAddress is where the bookie's HTTP server is reached; "" if it has none.
func (b *Bookie) WebAddress() string { return b.web }

// Close ends the bookie in order: it hands its leaderships over, and everything that
// it acknowledged is on its disk. It does so although ctx was cancelled.
func (b *Bookie) Close(ctx context.Context) error { return b.closing.close(ctx, b.log) }
