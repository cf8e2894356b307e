package journal

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/magnetar-io/magnetar/internal/vfs"
)

const (
	segmentSuffix = ".segment"
	spareSuffix   = ".spare"
)

// DamageError reports bytes that are not what was written and synced there. The
// journal cannot be opened, or the entry not be read, without losing something
// that was promised.
type DamageError struct {
	Path   string
	Offset int64
	Cause  error
}

// Error is written for the operator.
func (e *DamageError) Error() string {
	return fmt.Sprintf("journal segment %s is damaged at offset %d: %v", e.Path, e.Offset, e.Cause)
}

// Unwrap lets errors.Is see the cause.
func (e *DamageError) Unwrap() error { return e.Cause }

// segment is one file of the journal, open for reading.
type segment struct {
	header

	path string
	file vfs.File

	end     int64 // where its frames end; committer only
	sealed  bool  // committer only
	stuck   bool  // a live entry in it does not check, so it is not relocated; committer only
	entries atomic.Int64
	bytes   atomic.Int64 // of records of live entries
	total   *atomic.Int64

	refs  atomic.Int64
	dead  atomic.Bool // no slot names it any more: the last reader closes it
	close sync.Once
}

func (s *segment) count(entries, bytes int64) {
	s.entries.Add(entries)
	s.bytes.Add(bytes)
	s.total.Add(bytes)
}

func (s *segment) release() {
	if s.refs.Add(-1) == 0 && s.dead.Load() {
		s.closeFile()
	}
}

// retire lets the file be closed. It reports whether nobody reads it any more.
func (s *segment) retire() bool {
	s.dead.Store(true)
	if s.refs.Load() > 0 {
		return false
	}
	s.closeFile()
	return true
}

func (s *segment) closeFile() { s.close.Do(func() { _ = s.file.Close() }) }

func (s *segment) damage(offset int64, err error) error {
	return &DamageError{Path: s.path, Offset: offset, Cause: err}
}

// read reads one entry and checks that it is the one that was asked for.
func (s *segment) read(group Group, index uint64, at slot) (record, error) {
	b := make([]byte, at.length)
	if err := readFull(s.file, b, int64(at.offset)); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return record{}, s.damage(int64(at.offset), err)
		}
		return record{}, fmt.Errorf("read %s: %w", s.path, err)
	}
	r, err := parseRecord(b)
	switch {
	case err != nil:
	case r.size() != len(b) || !r.kind.holdsEntry():
		err = badFormat("record of kind %d and %d bytes, want an entry of %d", r.kind, r.size(), len(b))
	case r.gen != uint32(s.generation):
		err = badFormat("record of another use of the file")
	case r.group != group || r.index != index || r.term != at.term:
		err = badFormat("record of group %d, index %d, term %d, want group %d, index %d, term %d", r.group, r.index, r.term, group, index, at.term)
	}
	if err != nil {
		return record{}, s.damage(int64(at.offset), err)
	}
	return r, nil
}

// readFull fills b. Bytes behind the end of the file are io.ErrUnexpectedEOF.
func readFull(f vfs.File, b []byte, offset int64) error {
	n, err := f.ReadAt(b, offset)
	if n == len(b) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// writeFull writes all of b.
func writeFull(f vfs.File, b []byte, offset int64) error {
	n, err := f.WriteAt(b, offset)
	if err == nil && n < len(b) {
		return io.ErrShortWrite
	}
	return err
}

func (j *Journal) path(number uint32, suffix string) string {
	return filepath.Join(j.dir, fmt.Sprintf("%016d%s", number, suffix))
}

// parseName returns the number in a file's name, if it is one of ours.
func parseName(name, suffix string) (uint32, bool) {
	digits, ok := strings.CutSuffix(name, suffix)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	if err != nil || n == 0 || fmt.Sprintf("%016d", n) != digits {
		return 0, false
	}
	return uint32(n), true
}

// segment returns an open segment, or nil.
func (j *Journal) segment(number uint32) *segment {
	j.segMu.RLock()
	defer j.segMu.RUnlock()
	return j.segments[number]
}

// acquire returns a segment that stays readable until its release, or nil.
func (j *Journal) acquire(number uint32) *segment {
	j.segMu.RLock()
	defer j.segMu.RUnlock()
	s := j.segments[number]
	if s == nil || s.dead.Load() {
		return nil
	}
	s.refs.Add(1)
	return s
}
