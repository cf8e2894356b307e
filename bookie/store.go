package bookie

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	pebblevfs "github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/magnetar-io/magnetar/internal/vfs"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

const (
	// DefaultDiskReserveBytes is the free space below which appends are refused,
	// so that logs, indexes and snapshots can still be written.
	DefaultDiskReserveBytes = 512 << 20

	// diskCheckInterval is how long an answer about free space is believed.
	diskCheckInterval = time.Second
)

// StoreConfig says how a [Store] is opened. The zero value of everything but
// Log and Fatal is good.
type StoreConfig struct {
	SegmentBytes     int64 // 0 = DefaultSegmentBytes
	DiskReserveBytes int64 // 0 = DefaultDiskReserveBytes; negative = no reserve

	Log        *slog.Logger
	Registerer prometheus.Registerer // nil = nobody scrapes

	// Fatal is called, from any goroutine and possibly more than once, when the
	// store can no longer keep up its promises: a failed write or sync, or a
	// command that it cannot decide. A program logs and exits. Until then the
	// store applies nothing more and answers reads as it can.
	Fatal func(error)

	FS      vfs.FS       // segments; nil = the operating system's
	IndexFS pebblevfs.FS // index; nil = the operating system's
}

// Store is one bookie's storage: the segments that all groups share and their
// index. Make one with [NewStore].
type Store struct {
	log      *slog.Logger
	metrics  *metrics
	fatal    func(error)
	fs       vfs.FS
	dir      string
	segments *segments
	index    *index
	reserve  int64
	buffers  sync.Pool // *[]byte, for writes and reads

	diskMu sync.Mutex // guards free and checked
	free   int64
	asked  time.Time

	mu       sync.Mutex // guards machines
	machines map[raftlog.GroupID]*Machine
}

// NewStore opens the store in dir, making it if need be. Files in dir that the
// index does not refer to are removed: they are what a crash left.
func NewStore(dir string, cfg StoreConfig) (*Store, error) {
	if cfg.FS == nil {
		cfg.FS = vfs.OS
	}
	if cfg.IndexFS == nil {
		cfg.IndexFS = pebblevfs.Default
	}
	if cfg.SegmentBytes == 0 {
		cfg.SegmentBytes = DefaultSegmentBytes
	}
	if cfg.DiskReserveBytes == 0 {
		cfg.DiskReserveBytes = DefaultDiskReserveBytes
	}
	s := &Store{
		log: cfg.Log.With("component", "store"), metrics: newMetrics(cfg.Registerer), fatal: cfg.Fatal,
		fs: cfg.FS, dir: dir, reserve: cfg.DiskReserveBytes, machines: map[raftlog.GroupID]*Machine{},
	}
	if err := cfg.FS.MkdirAll(dir); err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	var err error
	if s.index, err = openIndex(cfg.IndexFS, filepath.Join(dir, "index"), s.log, cfg.Fatal); err != nil {
		return nil, err
	}
	if err := s.openSegments(cfg.SegmentBytes); err != nil {
		return nil, errors.Join(err, s.index.db.Close())
	}
	return s, nil
}

func (s *Store) openSegments(maxBytes int64) error {
	next, err := s.index.nextSegment()
	if err != nil {
		return err
	}
	live, err := allLiveBytes(s.index.db)
	if err != nil {
		return fmt.Errorf("entry index: live bytes: %w", err)
	}
	s.segments, err = openSegments(s.fs, filepath.Join(s.dir, "segments"), maxBytes, live, next, s.metrics)
	return err
}

// Machine returns the state machine of a ledger group, at its last checkpoint.
// A group has one machine; asking twice while the first is open is an error.
func (s *Store) Machine(group raftlog.GroupID) (*Machine, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.machines[group] != nil {
		return nil, fmt.Errorf("group %d: its machine is already open", group)
	}
	m, err := openMachine(s, group)
	if err != nil {
		return nil, err
	}
	s.machines[group] = m
	return m, nil
}

// machine returns the open machine of a group, or nil.
func (s *Store) machine(group raftlog.GroupID) *Machine {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.machines[group]
}

func (s *Store) forget(group raftlog.GroupID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.machines, group)
}

// errDiskFull refuses what would grow the disk's use into the reserve.
var errDiskFull = errors.New("less than the reserve")

// admit returns an error that wraps [ledger.ErrUnavailable] when the disk has
// less free space than the reserve. It asks the disk at most once a second.
func (s *Store) admit() error {
	s.diskMu.Lock()
	defer s.diskMu.Unlock()
	if now := time.Now(); now.Sub(s.asked) >= diskCheckInterval {
		free, err := s.fs.Free(s.dir)
		if err != nil {
			return fmt.Errorf("free space of %s: %w: %w", s.dir, err, ledger.ErrUnavailable)
		}
		s.free, s.asked = free, now
	}
	if s.free < s.reserve {
		return fmt.Errorf("disk of %s has %d MiB free, %w of %d MiB: free space or add bookies: %w",
			s.dir, s.free>>20, errDiskFull, s.reserve>>20, ledger.ErrUnavailable)
	}
	return nil
}

// maxPooledBytes keeps a rare large entry from staying in memory.
const maxPooledBytes = 2 << 20

// buffer returns an empty buffer with room for n bytes if one is at hand.
func (s *Store) buffer() *[]byte {
	if b, ok := s.buffers.Get().(*[]byte); ok {
		return b
	}
	return new([]byte)
}

// recycle takes a buffer back. Nobody may hold a part of it.
func (s *Store) recycle(b *[]byte) {
	if cap(*b) <= maxPooledBytes {
		*b = (*b)[:0]
		s.buffers.Put(b)
	}
}

// Close closes the files. Close the machines first, and every stream: what is
// not checkpointed is replayed by the Raft log.
func (s *Store) Close() error {
	return errors.Join(s.index.db.Close(), s.segments.close())
}
