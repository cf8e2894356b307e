package raftlog

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/magnetar-io/magnetar/internal/handshake"
	"github.com/magnetar-io/magnetar/internal/vfs"
	"github.com/magnetar-io/magnetar/raftlog/journal"
)

const (
	logFile    = "raft.db"
	journalDir = "journal"

	// handOverTimeout bounds how long Close tries to give its leaderships away.
	handOverTimeout = 3 * time.Second
)

// Node is one bookie's membership in all groups of its cluster.
type Node struct {
	cfg      Config
	log      *slog.Logger
	metrics  *metrics
	identity Identity // ClusterID is empty until the node has joined; final once Open returned
	known    atomic.Pointer[handshake.Self]
	lock     *os.File
	mux      *handshake.Mux
	journal  *journal.Journal // nil with LogStore BoltDB
	groups   []*Group         // by id; final once Open returned
	pauses   *pauses

	cancel    context.CancelFunc // ends background
	ctx       context.Context    // the node's life: its loops outlive the ctx of Open
	loops     sync.WaitGroup     // joiner, balancer, supervisors
	notifiers sync.WaitGroup     // end last, so that watchers hear the end of a leadership
	stopNotes context.CancelFunc
	serving   chan error // the mux's Serve
	closing   sync.Once
	closeErr  error
}

// Open opens cfg.Dir and takes part in every group, over connections that l
// accepts; l belongs to the Node from the call on, also if it fails. A formatted
// directory needs nobody else. An empty one asks cfg.Bookies, until one answers
// or ctx ends, which cluster it is to join; Open then returns, and the node
// becomes a voter of every group in the background. ctx bounds only the opening.
func Open(ctx context.Context, cfg Config, l net.Listener) (_ *Node, err error) {
	if err := cfg.validate(); err != nil {
		_ = l.Close()
		return nil, err
	}
	n := &Node{cfg: cfg, log: cfg.Log.With("component", "raftlog"), metrics: newMetrics(cfg.Registerer), pauses: newPauses(), serving: make(chan error, 1)}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.mux = handshake.NewMux(l, n.self, cfg.Log)
	defer func() {
		if err != nil {
			n.abort()
		}
	}()
	if err := os.MkdirAll(cfg.Dir, dirMode); err != nil {
		return nil, fmt.Errorf("open bookie directory: %w", err)
	}
	if n.lock, err = lockDir(cfg.Dir); err != nil {
		return nil, err
	}
	rec, ok, err := loadIdentity(cfg.Dir)
	if err != nil {
		return nil, err
	}
	if !ok {
		rec = identityRecord{Cluster: cfg.Cluster, Name: cfg.Name, Disk: newUUID()}
	}
	if rec.Cluster != cfg.Cluster || rec.Name != cfg.Name {
		return nil, fmt.Errorf("directory %s belongs to bookie %q of cluster %q, but this is configured as bookie %q of cluster %q: use the right directory or the right names", cfg.Dir, rec.Name, rec.Cluster, cfg.Name, cfg.Cluster)
	}
	n.setIdentity(rec.identity())
	go func() { n.serving <- n.mux.Serve() }()
	if !ok {
		if err := n.learn(ctx, &rec); err != nil {
			return nil, err
		}
		n.setIdentity(rec.identity())
		if err := saveIdentity(cfg.Dir, rec); err != nil {
			return nil, err
		}
	}
	if err := n.openGroups(rec); err != nil {
		return nil, err
	}
	if err := n.run(); err != nil { //nolint:contextcheck // ctx bounds the opening, not the loops
		return nil, err
	}
	n.log.Info("bookie opened", "node", n.identity.Node(), "cluster", n.identity.Cluster, "clusterId", n.identity.ClusterID, "groups", len(n.groups))
	return n, nil
}

// openGroups opens every group's files. A directory that is not ready yet gets
// them made; from then on a missing one is damage.
func (n *Node) openGroups(rec identityRecord) error {
	if err := n.openJournal(rec.Ready); err != nil {
		return err
	}
	for id := range GroupID(rec.Groups + 1) {
		g, err := openGroup(n, id, !rec.Ready, rec.Founder && !rec.Ready)
		if err != nil {
			return err
		}
		n.groups = append(n.groups, g)
	}
	if !rec.Ready {
		rec.Ready = true
		return saveIdentity(n.cfg.Dir, rec)
	}
	return nil
}

// run starts everything that runs.
func (n *Node) run() error {
	notes, stop := context.WithCancel(context.Background())
	n.stopNotes = stop
	for _, g := range n.groups {
		n.notifiers.Go(func() { g.notifyWatchers(notes) })
		if err := g.start(); err != nil {
			return err
		}
		n.metrics.watch(g)
		n.loops.Go(func() { g.supervise(n.ctx) })
	}
	n.loops.Go(func() { n.pauses.run(n.ctx) })
	n.loops.Go(func() { n.join(n.ctx) })
	n.loops.Go(func() { n.balance(n.ctx) })
	return nil
}

func (n *Node) setIdentity(id Identity) {
	n.identity = id
	n.known.Store(&handshake.Self{Cluster: id.Cluster, ClusterID: id.ClusterID, Node: id.Node()})
}

// self is how the node introduces itself at this moment.
func (n *Node) self() handshake.Self {
	if s := n.known.Load(); s != nil {
		return *s
	}
	return handshake.Self{Cluster: n.cfg.Cluster, Node: n.cfg.Name}
}

// Identity returns which member of which cluster this node is.
func (n *Node) Identity() Identity { return n.identity }

// Mux returns the node's port, for the services that share it. The Node closes
// it.
func (n *Node) Mux() *handshake.Mux { return n.mux }

// Group returns one group, or nil if the cluster does not have it.
func (n *Node) Group(id GroupID) *Group {
	if int64(id) >= int64(len(n.groups)) {
		return nil
	}
	return n.groups[id]
}

// Groups returns all groups, by id. The slice must not be changed.
func (n *Node) Groups() []*Group { return n.groups }

// Close hands every leadership to another voter, as far as that is possible
// within ctx and a few seconds, then ends the groups, closes their machines and
// the port. It may be called twice.
func (n *Node) Close(ctx context.Context) error {
	n.closing.Do(func() {
		n.cancel()
		n.loops.Wait()
		n.handOver(ctx)
		n.closeErr = n.shut()
	})
	return n.closeErr
}

// abort undoes a failed Open.
func (n *Node) abort() {
	n.closing.Do(func() {
		n.cancel()
		n.loops.Wait()
		n.closeErr = n.shut()
	})
}

func (n *Node) shut() error {
	var ends sync.WaitGroup
	for _, g := range n.groups {
		ends.Go(g.close)
	}
	ends.Wait()
	if n.stopNotes != nil {
		n.stopNotes()
	}
	n.notifiers.Wait()
	err := n.mux.Close()
	if n.journal != nil {
		if jerr := n.journal.Close(); jerr != nil {
			n.log.Error("journal not closed cleanly", "err", jerr)
		}
	}
	if n.known.Load() != nil { // Serve was started
		err = errors.Join(err, <-n.serving)
	}
	if n.lock != nil {
		err = errors.Join(err, n.lock.Close())
	}
	return err
}

// handOver gives every leadership to the most advanced other voter.
func (n *Node) handOver(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, handOverTimeout)
	defer cancel()
	var all sync.WaitGroup
	for _, g := range n.groups {
		in := g.instance()
		if ctx.Err() != nil || in == nil || in.raft.State() != raft.Leader || g.Voters() < 2 {
			continue
		}
		all.Go(func() {
			if err := in.await(ctx, in.raft.LeadershipTransfer()); err != nil {
				g.log.Warn("leadership not handed over; the others elect a leader by themselves", "err", err)
			}
		})
	}
	all.Wait()
}

// openJournal opens the journal, if the logs are to be there. A directory whose
// logs are of the other kind is refused; ready says that it has logs.
func (n *Node) openJournal(ready bool) error {
	dir := filepath.Join(n.cfg.Dir, journalDir)
	there, err := journal.Exists(vfs.OS, dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	const instead = "or empty the bookie's directory and let it rejoin as a new one"
	switch {
	case n.cfg.LogStore == BoltDB && there:
		return fmt.Errorf("directory %s was written with raftLogStore=%s, but this is raftLogStore=%s: set it back, %s", n.cfg.Dir, Journal, BoltDB, instead)
	case n.cfg.LogStore == BoltDB:
		return nil
	case ready && !there:
		return fmt.Errorf("directory %s has no journal: it was written with raftLogStore=%s, or its journal is gone: set raftLogStore back if so, %s", n.cfg.Dir, BoltDB, instead)
	}
	n.journal, err = journal.Open(dir, journal.Options{
		SegmentBytes: n.cfg.segmentBytes, Log: n.log, Registerer: n.cfg.Registerer, Failed: n.cfg.Fatal,
	})
	if err != nil {
		return err
	}
	return syncDir(n.cfg.Dir)
}

// openLog opens a group's log, and its term and vote.
func (n *Node) openLog(id GroupID, dir string, fresh bool) (backend, error) {
	file, err := openLogFile(dir, fresh)
	if err != nil || n.journal == nil {
		return file, err
	}
	switch last, err := file.LastIndex(); {
	case err != nil:
		return nil, errors.Join(err, file.Close())
	case last != 0:
		return nil, errors.Join(fmt.Errorf("%s holds log entries: the directory was written with raftLogStore=%s: set it back, or empty the bookie's directory and let it rejoin as a new one", filepath.Join(dir, logFile), BoltDB), file.Close())
	}
	return &journalBackend{Log: n.journal.Group(journal.Group(id)), StableStore: file, file: file}, nil
}

// openLogFile opens a group's raft-boltdb file. Only a fresh directory may lack it.
func openLogFile(dir string, fresh bool) (backend, error) {
	path := filepath.Join(dir, logFile)
	if fresh {
		if err := os.MkdirAll(dir, dirMode); err != nil {
			return nil, err
		}
	} else if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("the log is gone: %w: this disk forgot what it promised; empty the bookie's directory and let it rejoin as a new one", err)
	}
	b, err := openBolt(path)
	if err != nil {
		return nil, err
	}
	if fresh {
		all := filepath.Dir(dir)
		if err := errors.Join(syncDir(dir), syncDir(all), syncDir(filepath.Dir(all))); err != nil {
			return nil, errors.Join(err, b.Close())
		}
	}
	return b, nil
}

// bootstrap makes self the only voter of a group that has no history.
func bootstrap(s *guardedStore, self raft.Server) error {
	conf := raft.DefaultConfig()
	conf.LocalID = self.ID
	err := raft.BootstrapCluster(conf, s, s, raft.NewDiscardSnapshotStore(), nil, raft.Configuration{Servers: []raft.Server{self}})
	if errors.Is(err, raft.ErrCantBootstrap) {
		return nil // done before a crash; the identity is only marked ready afterwards
	}
	return err
}
