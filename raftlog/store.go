package raftlog

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	"go.etcd.io/bbolt"

	"github.com/magnetar-io/magnetar/raftlog/journal"
)

// backend is where a group's log, term and vote rest.
type backend interface {
	raft.LogStore
	raft.StableStore
	Close() error
}

// journalBackend keeps the log in the bookie's journal, term and vote in a file of
// the group's own.
type journalBackend struct {
	*journal.Log
	raft.StableStore
	file backend // where term and vote are
}

// Close closes the file. The journal is the Node's.
func (b *journalBackend) Close() error { return b.file.Close() }

// logMapBytes is the address space that a log file starts with; growing it
// blocks readers for a moment.
const logMapBytes = 64 << 20

// deleteChunk bounds how many entries one transaction deletes, so that a cut
// of the log never holds an append up for long. The journal cuts in one record.
const deleteChunk = 512

// slowestDisk is what a disk writes at least, in bytes a second, that works.
const slowestDisk = 4 << 20

// openBolt opens a group's log file, and makes it if there is none.
//
// Without NoFreelistSync every append after a large cut of the log writes the
// whole list of free pages (743 KiB an append were measured).
func openBolt(path string) (backend, error) {
	s, err := raftboltdb.New(raftboltdb.Options{Path: path, BoltOptions: &bbolt.Options{
		Timeout:         time.Second, // the directory's lock keeps others out; do not wait for ever on the file's
		NoFreelistSync:  true,
		FreelistType:    bbolt.FreelistMapType,
		InitialMmapSize: logMapBytes,
	}})
	if err != nil {
		return nil, fmt.Errorf("open log %s: %w", path, err)
	}
	return s, nil
}

// guardedStore is a group's log and stable store as raft sees it: a cache of the
// newest entries in front, and a guard around every write.
//
// The guard's rule: no write is ever answered with an error. raft would carry on
// after one, while the disk may hold more or less than raft believes, and it
// panics where a term cannot be saved. Instead Config.Fatal is called, and if
// that returns, the write waits until the group closes.
//
// It does not pass on that the journal is monotonic. raft would empty the log
// after every installed stream, also where it goes on behind the stream's index
// with entries that this member acknowledged; alignLog leaves no gap either way.
type guardedStore struct {
	b     backend
	cache logCache
	m     *groupMetrics
	hang  time.Duration
	fatal func(error)
	chunk uint64 // entries that one cut of the front may take

	once     sync.Once     // fatal is called once
	failed   chan struct{} // closed by the first failure
	released chan struct{} // closed by release: the group is closing, nothing it says leaves the process
	relOnce  sync.Once
}

func newGuardedStore(b backend, hang time.Duration, m *groupMetrics, fatal func(error)) *guardedStore {
	return &guardedStore{
		b: b, chunk: deleteChunk, cache: logCache{limit: logCacheBytes}, m: m, hang: hang, fatal: fatal,
		failed: make(chan struct{}), released: make(chan struct{}),
	}
}

// errReleased answers writes that were caught by a failure, once the group's
// connections are closed.
var errReleased = errors.New("the log failed before; the group is closing")

// release lets writes go that wait behind a failure. Call it only after the
// group's connections are closed.
func (s *guardedStore) release() { s.relOnce.Do(func() { close(s.released) }) }

// fail reports a failure and parks the caller until release.
func (s *guardedStore) fail(err error) error {
	s.report(err)
	<-s.released
	return errReleased
}

func (s *guardedStore) report(err error) {
	s.once.Do(func() {
		close(s.failed)
		s.fatal(err)
	})
}

// broken reports whether a write failed before; nothing touches the file then.
func (s *guardedStore) broken() bool {
	select {
	case <-s.failed:
		return true
	default:
		return false
	}
}

// write runs one change of the file, of that many bytes, under the watchdog.
func (s *guardedStore) write(what string, size int64, f func() error) error {
	if s.broken() {
		return s.fail(nil)
	}
	// A batch of the largest commands may be half a gigabyte: it is slow long
	// before the disk hangs.
	limit := s.hang + time.Duration(size/slowestDisk)*time.Second
	stop := watch(limit, func() {
		s.report(fmt.Errorf("%s (%d bytes) hangs for more than %v: the disk does not answer, so this node must not go on leading or voting", what, size, limit))
	})
	err := f()
	stop()
	if err != nil {
		return s.fail(fmt.Errorf("%s: %w: the disk failed, and what it holds is unknown", what, err))
	}
	if s.broken() {
		return s.fail(nil) // the watchdog fired while we wrote
	}
	return nil
}

// watchSteps is in how many steps a watchdog waits.
const watchSteps = 10

// watch calls expired once limit has passed, unless stop is called before. Time in
// which the process did not run (it was stopped, or its machine was paused) counts
// for one step at most: the disk may have answered long ago, only nobody was there
// to hear it.
func watch(limit time.Duration, expired func()) (stop func()) {
	step := limit / watchSteps
	var (
		mu    sync.Mutex // guards the rest, and timer before it is set
		left  = watchSteps
		timer *time.Timer
	)
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(step, func() {
		mu.Lock()
		left--
		last := left == 0
		if left > 0 {
			timer.Reset(step)
		}
		mu.Unlock()
		if last {
			expired()
		}
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		left = 0 // a step that is just beginning becomes -1, which is not the last
		timer.Stop()
	}
}

// FirstIndex implements [raft.LogStore].
func (s *guardedStore) FirstIndex() (uint64, error) { return s.b.FirstIndex() }

// LastIndex implements [raft.LogStore].
func (s *guardedStore) LastIndex() (uint64, error) { return s.b.LastIndex() }

// GetLog implements [raft.LogStore]. A missing entry is raft.ErrLogNotFound, any
// other failure is fatal: raft would panic on it.
func (s *guardedStore) GetLog(index uint64, log *raft.Log) error {
	if s.cache.get(index, log) {
		return nil
	}
	err := s.b.GetLog(index, log)
	if err != nil && !errors.Is(err, raft.ErrLogNotFound) {
		return s.fail(fmt.Errorf("read log entry %d: %w", index, err))
	}
	return err
}

// StoreLog implements [raft.LogStore].
func (s *guardedStore) StoreLog(log *raft.Log) error { return s.StoreLogs([]*raft.Log{log}) }

// StoreLogs implements [raft.LogStore].
func (s *guardedStore) StoreLogs(logs []*raft.Log) error {
	start, n := time.Now(), int64(0)
	for _, l := range logs {
		n += int64(len(l.Data))
	}
	if err := s.write("append to the log", n, func() error { return s.b.StoreLogs(logs) }); err != nil {
		return err
	}
	s.cache.add(logs)
	s.m.storeSeconds.Observe(time.Since(start).Seconds())
	s.m.storeEntries.Add(float64(len(logs)))
	s.m.storeBytes.Add(float64(n))
	return nil
}

// DeleteRange implements [raft.LogStore]. The front of the log is cut in pieces,
// each of which leaves a contiguous log and is watched for itself: a minute of
// small commands takes longer to cut than a disk may hang. A conflicting tail goes
// in one.
func (s *guardedStore) DeleteRange(low, high uint64) error {
	s.cache.remove(low, high)
	for more := true; more; {
		err := s.write("cut the log", 0, func() (err error) {
			more, err = s.cutOnce(low, high)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// cutOnce deletes the first piece of low to high, and reports whether more is left.
func (s *guardedStore) cutOnce(low, high uint64) (more bool, err error) {
	first, err := s.b.FirstIndex()
	if err != nil || first == 0 || first > high {
		return false, err
	}
	if low > first {
		return false, s.b.DeleteRange(low, high)
	}
	last, err := s.b.LastIndex()
	if err != nil {
		return false, err
	}
	end := min(high, last)
	piece := min(first+s.chunk-1, end)
	return piece < end, s.b.DeleteRange(first, piece)
}

// Set implements [raft.StableStore]. After a failure it reports success, once
// the group's connections are closed: raft panics otherwise, and a promise that
// nobody hears binds nobody.
func (s *guardedStore) Set(key, val []byte) error {
	if err := s.write("save term or vote", 0, func() error { return s.b.Set(key, val) }); !errors.Is(err, errReleased) {
		return err
	}
	return nil
}

// SetUint64 implements [raft.StableStore]; see Set.
func (s *guardedStore) SetUint64(key []byte, val uint64) error {
	if err := s.write("save term or vote", 0, func() error { return s.b.SetUint64(key, val) }); !errors.Is(err, errReleased) {
		return err
	}
	return nil
}

// Get implements [raft.StableStore].
func (s *guardedStore) Get(key []byte) ([]byte, error) { return s.b.Get(key) }

// GetUint64 implements [raft.StableStore].
func (s *guardedStore) GetUint64(key []byte) (uint64, error) { return s.b.GetUint64(key) }

// Close closes the file.
func (s *guardedStore) Close() error {
	s.release()
	return s.b.Close()
}
