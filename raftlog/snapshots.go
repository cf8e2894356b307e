package raftlog

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/hashicorp/raft"
)

const (
	pointerFile = "snapshot"
	stagedFile  = "staged"
	stagedID    = "staged"
)

// snapshots is a group's [raft.SnapshotStore]. It keeps one pointer, and for the
// time between receiving a stream and having installed it, one staged stream:
//
//	takeSnapshot:     Create, Machine.Checkpoint, Close        → pointer
//	installSnapshot:  Create, Write…, Close                    → staged
//	                  Open(staged), Machine.Install            → pointer, staged gone
//	sending:          Open(pointer)                            → header, Machine.Stream, checksum
type snapshots struct {
	dir     string
	machine Machine

	mu  sync.Mutex
	cur pointer // guarded by mu; index 0: none yet
}

// openSnapshots reads the pointer in dir.
func openSnapshots(dir string, machine Machine) (*snapshots, error) {
	s := &snapshots{dir: dir, machine: machine}
	// What was being received or written when the process ended is worthless.
	for _, name := range []string{pointerFile + ".tmp", stagedFile + ".tmp"} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	b, err := os.ReadFile(filepath.Join(dir, pointerFile))
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read snapshot pointer: %w", err)
	}
	if s.cur, err = readPointer(bytes.NewReader(b)); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, pointerFile), err)
	}
	return s, nil
}

// current returns the pointer. Its index is 0 if there is none.
func (s *snapshots) current() pointer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cur
}

// save makes p the pointer, durably. It refuses to go back.
func (s *snapshots) save(p pointer) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.index < s.cur.index {
		return fmt.Errorf("snapshot at index %d: a newer one at %d was installed meanwhile", p.index, s.cur.index)
	}
	if err := replaceFile(filepath.Join(s.dir, pointerFile), p.encode()); err != nil {
		return fmt.Errorf("write snapshot pointer: %w", err)
	}
	s.cur = p
	return nil
}

func (p pointer) meta(id string, size int64) *raft.SnapshotMeta {
	return &raft.SnapshotMeta{
		Version: 1, ID: id, Index: uint64(p.index), Term: uint64(p.term),
		Configuration: p.config, ConfigurationIndex: uint64(p.configIndex), Size: size,
	}
}

func (p pointer) id() string { return fmt.Sprintf("%d-%d", p.term, p.index) }

// List implements [raft.SnapshotStore]: the pointer, if there is one.
func (s *snapshots) List() ([]*raft.SnapshotMeta, error) {
	p := s.current()
	if p.index == 0 {
		return nil, nil
	}
	return []*raft.SnapshotMeta{p.meta(p.id(), 0)}, nil
}

// Open implements [raft.SnapshotStore]. For the pointer it opens the machine's
// stream, which may well be newer than the pointer: whoever receives it drops
// the commands that it already holds.
func (s *snapshots) Open(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	if id == stagedID {
		st, err := s.openStaged()
		if err != nil {
			return nil, nil, err
		}
		return st.pointer.meta(stagedID, st.size), st, nil
	}
	p := s.current() // before the stream: a pointer must not be newer than the state behind it
	if p.index == 0 {
		return nil, nil, errors.New("no snapshot")
	}
	src, err := s.machine.Stream()
	if err != nil {
		return nil, nil, fmt.Errorf("stream the state: %w", err)
	}
	r := newStreamReader(src)
	return p.meta(p.id(), r.size()), r, nil
}

// staged is a received stream in its file, read behind the pointer in front.
type staged struct {
	*bufio.Reader
	f       *os.File
	pointer pointer
	size    int64 // bytes behind the pointer
}

// Close implements [io.Closer].
func (s *staged) Close() error { return s.f.Close() }

func (s *snapshots) openStaged() (*staged, error) {
	f, err := os.Open(filepath.Join(s.dir, stagedFile))
	if err != nil {
		return nil, fmt.Errorf("open staged stream: %w", err)
	}
	st := &staged{f: f, Reader: bufio.NewReaderSize(f, 256<<10)}
	info, err := f.Stat()
	if err == nil {
		st.pointer, err = readPointer(st.Reader)
	}
	at := int64(0)
	if err == nil {
		at, err = f.Seek(0, io.SeekCurrent)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("open staged stream: %w", err)
	}
	st.size = info.Size() - at + int64(st.Buffered())
	return st, nil
}

// dropStaged removes the staged stream.
func (s *snapshots) dropStaged() error {
	if err := os.Remove(filepath.Join(s.dir, stagedFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove staged stream: %w", err)
	}
	return syncDir(s.dir)
}

// install makes the staged stream, read from r behind its pointer, the machine's
// state, and its pointer the current one. A crash anywhere in it is repeated by
// the next open. log is cut as the pointer demands; restart reports that raft's
// memory of the log is wrong now, so that the instance must be replaced.
func (s *snapshots) install(p pointer, r io.Reader, size int64, log raft.LogStore) (restart bool, err error) {
	head := make([]byte, streamHead)
	if _, err := io.ReadFull(r, head); err != nil {
		return false, fmt.Errorf("state stream: %w", err)
	}
	applied, err := parseStreamHead(head)
	if err != nil {
		return false, err
	}
	if s.machine.Applied() < applied {
		body := &bodyReader{r: r, left: size - streamHead - streamTail}
		if err := s.machine.Install(body, applied); err != nil {
			return false, fmt.Errorf("install state of index %d: %w", applied, err)
		}
		if got := s.machine.Applied(); got != applied {
			return false, fmt.Errorf("install state of index %d: the machine says it is at %d", applied, got)
		}
		if !errors.Is(body.err, io.EOF) {
			return false, fmt.Errorf("install state of index %d: the machine did not read it to the end", applied)
		}
	} else if err := s.machine.Checkpoint(); err != nil { // it holds all of that already
		return false, fmt.Errorf("checkpoint instead of an older state: %w", err)
	}
	p.applied = s.machine.Applied()
	if err := s.save(p); err != nil {
		return false, err
	}
	if restart, err = alignLog(log, p); err != nil {
		return false, err
	}
	return restart, s.dropStaged()
}

// finish installs a stream that was staged when the process ended, and reports
// whether there was one. It runs before raft starts. A stream that cannot be
// installed and changed nothing is dropped, with the reason in dropped: nobody
// was told that we have it, and the leader sends another.
func (s *snapshots) finish(log raft.LogStore) (done bool, dropped, err error) {
	st, err := s.openStaged()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil, nil
	case err != nil:
		return false, err, s.dropStaged()
	}
	defer func() { _ = st.Close() }()
	if st.pointer.index < s.current().index {
		return false, fmt.Errorf("staged state of index %d is older than the snapshot at %d", st.pointer.index, s.current().index), s.dropStaged()
	}
	before := s.machine.Applied()
	if _, err = s.install(st.pointer, st, st.size, log); err != nil && s.machine.Applied() == before {
		return false, err, s.dropStaged()
	}
	return err == nil, nil, err
}

// alignLog makes the log fit a pointer that came from another member.
//
//	log   [first ......... last]
//	               ^ pointer, same term: the log goes on from here, keep it all
//	               ^ other term:  the tail conflicts, and the rest is covered
//	                      ^ pointer behind last, or a hole there: all is covered
//
// In the last two cases everything goes. Left in place, old entries in front of
// a gap would one day be sent to a lagging member as if they were committed.
// restart: raft still believes in a last entry behind the pointer, refuses what
// the leader sends and is sent the same snapshot for ever (hashicorp/raft #697).
func alignLog(log raft.LogStore, p pointer) (restart bool, err error) {
	first, err := log.FirstIndex()
	if err != nil {
		return false, err
	}
	last, err := log.LastIndex()
	if err != nil || last == 0 {
		return false, err
	}
	var at raft.Log
	switch err := log.GetLog(uint64(p.index), &at); {
	case err == nil && at.Term == uint64(p.term):
		return false, nil
	case err != nil && !errors.Is(err, raft.ErrLogNotFound):
		return false, err
	}
	return last >= uint64(p.index), log.DeleteRange(first, last)
}

// Create implements [raft.SnapshotStore].
func (s *snapshots) Create(_ raft.SnapshotVersion, index, term uint64, c raft.Configuration, configIndex uint64, _ raft.Transport) (raft.SnapshotSink, error) {
	return &sink{s: s, p: pointer{index: Index(index), term: Term(term), config: c, configIndex: Index(configIndex)}}, nil
}

// sink receives a stream, or the mark that the machine has made a checkpoint.
type sink struct {
	s *snapshots
	p pointer

	checkpoint bool // set by Persist: there are no bytes, only a pointer to write
	f          *os.File
	w          *bufio.Writer
}

// ID implements [raft.SnapshotSink].
func (k *sink) ID() string {
	if k.checkpoint {
		return k.p.id()
	}
	return stagedID
}

// Write implements [io.Writer].
func (k *sink) Write(b []byte) (int, error) {
	if k.f == nil {
		f, err := os.OpenFile(k.tmp(), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, fileMode)
		if err != nil {
			return 0, fmt.Errorf("stage a stream: %w", err)
		}
		k.f, k.w = f, bufio.NewWriterSize(f, 256<<10)
		if _, err := k.w.Write(k.p.encode()); err != nil {
			return 0, fmt.Errorf("stage a stream: %w", err)
		}
	}
	n, err := k.w.Write(b)
	if err != nil {
		return n, fmt.Errorf("stage a stream: %w", err)
	}
	return n, nil
}

func (k *sink) tmp() string { return filepath.Join(k.s.dir, stagedFile+".tmp") }

// Close implements [io.Closer]: the pointer, or the whole stream, is durable.
func (k *sink) Close() error {
	if k.checkpoint {
		return k.s.save(k.p)
	}
	if k.f == nil {
		return errors.New("stage a stream: it is empty")
	}
	err := k.w.Flush()
	if err == nil {
		err = k.f.Sync()
	}
	if cerr := k.f.Close(); err == nil {
		err = cerr
	}
	k.f = nil
	if err == nil {
		err = os.Rename(k.tmp(), filepath.Join(k.s.dir, stagedFile))
	}
	if err == nil {
		err = syncDir(k.s.dir)
	}
	if err != nil {
		_ = os.Remove(k.tmp())
		return fmt.Errorf("stage a stream: %w", err)
	}
	return nil
}

// Cancel implements [raft.SnapshotSink].
func (k *sink) Cancel() error {
	if k.f == nil {
		return nil
	}
	_ = k.f.Close()
	k.f = nil
	return os.Remove(k.tmp())
}
