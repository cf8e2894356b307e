package bookie

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/magnetar-io/magnetar/internal/vfs"
	"github.com/magnetar-io/magnetar/ledger"
)

const (
	// DefaultSegmentBytes is the size at which a segment is sealed.
	DefaultSegmentBytes = 128 << 20

	segmentSuffix = ".segment"

	// maxIdleHandles bounds the sealed segments that stay open for readers.
	maxIdleHandles = 128
)

// errSegmentGone reports a segment that was removed because nothing in it is
// live any more.
var errSegmentGone = errors.New("segment removed")

// segments are the files that hold the entries of all groups of one bookie. All
// writers share one active segment.
//
// A segment lives while it holds live bytes, is active, or is pinned. Live
// bytes are counted as they are written and released, by run.
type segments struct {
	fs      vfs.FS
	dir     string
	max     int64
	metrics *metrics

	syncMu sync.Mutex // serialises sync, so that its callers' bytes are down when it returns

	mu       sync.Mutex // guards what follows; never held across a read, write or sync of a segment
	all      map[uint64]*segment
	active   *segment
	next     uint64 // number of the next segment; higher than any ever referred to
	dirty    map[uint64]*segment
	dirtyDir bool
	idle     int // open handles of sealed segments
	failed   error
}

type segment struct {
	number uint64
	file   vfs.File // nil while closed
	end    int64    // where the next record goes; active segment only
	live   int64    // bytes of records that some group's runs refer to
	pins   int      // readers, writers and syncs in progress, and streams
}

// openSegments opens the folder dir, in which live says how many bytes of which
// segment are referred to. Files without live bytes are left-overs of a crash
// and are removed. Writing begins in a new segment, numbered at least next.
func openSegments(fsys vfs.FS, dir string, maxBytes int64, live map[uint64]int64, next uint64, m *metrics) (*segments, error) {
	if err := fsys.MkdirAll(dir); err != nil {
		return nil, fmt.Errorf("segments: %w", err)
	}
	if err := fsys.SyncDir(filepath.Dir(dir)); err != nil { // else the folder may go, and every synced segment with it
		return nil, fmt.Errorf("segments: %w", err)
	}
	s := &segments{
		fs: fsys, dir: dir, max: maxBytes, metrics: m, next: max(next, 1),
		all: map[uint64]*segment{}, dirty: map[uint64]*segment{},
	}
	names, err := fsys.List(dir)
	if err != nil {
		return nil, fmt.Errorf("segments: %w", err)
	}
	for _, name := range names {
		if err := s.adopt(name, live); err != nil {
			return nil, err
		}
	}
	for number, n := range live {
		if s.all[number] == nil {
			return nil, fmt.Errorf("segment %d is missing from %s, and %d bytes of entries in it are in use: "+
				"put the file back, or empty this bookie's directory and let it join again", number, dir, n)
		}
		m.liveBytes.Add(float64(n))
	}
	m.segments.Set(float64(len(s.all)))
	return s, nil
}

func (s *segments) adopt(name string, live map[uint64]int64) error {
	digits, ok := strings.CutSuffix(name, segmentSuffix)
	number, err := strconv.ParseUint(digits, 10, 64)
	if !ok || err != nil {
		return fmt.Errorf("segments: %s in %s is not a segment; move it elsewhere", name, s.dir)
	}
	s.next = max(s.next, number+1)
	if live[number] == 0 {
		s.dirtyDir = true
		return s.fs.Remove(filepath.Join(s.dir, name))
	}
	s.all[number] = &segment{number: number, live: live[number]}
	return nil
}

func (s *segments) path(number uint64) string {
	return filepath.Join(s.dir, fmt.Sprintf("%016d%s", number, segmentSuffix))
}

// write appends b, which the caller counts as live from then on, to the active
// segment. finish is called with the segment's number before the bytes go out,
// to fill in what depends on it. A failure is final for the whole store.
func (s *segments) write(b []byte, finish func(number uint64)) (number uint64, offset int64, err error) {
	s.mu.Lock()
	seg, err := s.reserve(int64(len(b)))
	if err != nil {
		s.mu.Unlock()
		return 0, 0, err
	}
	offset = seg.end
	seg.end += int64(len(b))
	seg.live += int64(len(b))
	seg.pins++
	s.mu.Unlock()

	finish(seg.number)
	_, err = seg.file.WriteAt(b, offset)

	s.mu.Lock()
	defer s.mu.Unlock()
	s.unpinLocked(seg)
	if err != nil {
		return 0, 0, s.failLocked(fmt.Errorf("write %d bytes to segment %d at %d: %w", len(b), seg.number, offset, err))
	}
	s.dirty[seg.number] = seg // only now: a sync that ran meanwhile did not cover the bytes
	s.metrics.liveBytes.Add(float64(len(b)))
	return seg.number, offset, nil
}

// reserve returns a segment with room for n bytes, a new one if need be. A
// record larger than a segment gets one of its own.
func (s *segments) reserve(n int64) (*segment, error) {
	if s.failed != nil {
		return nil, s.failed
	}
	if a := s.active; a != nil && (a.end+n <= s.max || a.end == segmentHeaderBytes) {
		return a, nil
	}
	number := s.next
	file, err := s.fs.Create(s.path(number))
	if err == nil {
		_, err = file.WriteAt(segmentHeader(number), 0)
	}
	if err != nil {
		return nil, s.failLocked(fmt.Errorf("create segment %d: %w", number, err))
	}
	s.next++
	sealed := s.active
	s.active = &segment{number: number, file: file, end: segmentHeaderBytes}
	s.all[number] = s.active
	s.dirty[number] = s.active
	s.dirtyDir = true
	s.metrics.segments.Inc()
	if sealed != nil {
		s.idle++
		s.maybeRemoveLocked(sealed)
	}
	return s.active, nil
}

// sync makes every write that returned before the call durable. A failure is
// final: nobody knows what a failed sync left, so there is no second try.
func (s *segments) sync() error {
	s.syncMu.Lock()
	defer s.syncMu.Unlock()
	s.mu.Lock()
	if s.failed != nil {
		defer s.mu.Unlock()
		return s.failed
	}
	dirty, dir := s.dirty, s.dirtyDir
	s.dirty, s.dirtyDir = map[uint64]*segment{}, false
	for _, seg := range dirty {
		seg.pins++
	}
	s.mu.Unlock()

	var err error
	for _, number := range slices.Sorted(maps.Keys(dirty)) {
		if err == nil {
			err = dirty[number].file.Sync()
		}
	}
	if err == nil && dir {
		err = s.fs.SyncDir(s.dir)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	for _, seg := range dirty {
		s.unpinLocked(seg)
	}
	if err != nil {
		return s.failLocked(fmt.Errorf("sync segments: %w", err))
	}
	return nil
}

// release gives up live bytes, by segment. Segments without any are removed
// once nobody pins them.
func (s *segments) release(bytes map[uint64]int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for number, n := range bytes {
		seg := s.all[number]
		if seg == nil || seg.live < n {
			panic(fmt.Sprintf("bookie: release of %d bytes of segment %d, which has %+v", n, number, seg))
		}
		seg.live -= n
		s.metrics.liveBytes.Sub(float64(n))
		s.maybeRemoveLocked(seg)
	}
}

// pin keeps a segment from being removed and opens it. Each pin needs an unpin.
// The error is errSegmentGone if the segment was removed.
func (s *segments) pin(number uint64) (*segment, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seg := s.all[number]
	if seg == nil {
		return nil, fmt.Errorf("segment %d: %w", number, errSegmentGone)
	}
	if seg.file == nil {
		if err := s.openLocked(seg); err != nil {
			return nil, err
		}
	}
	seg.pins++
	return seg, nil
}

func (s *segments) openLocked(seg *segment) error {
	file, err := s.fs.Open(s.path(seg.number))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("segment %d: %w: %w", seg.number, err, ledger.ErrDamaged)
	}
	if err != nil {
		return err
	}
	header := make([]byte, segmentHeaderBytes)
	_, err = file.ReadAt(header, 0)
	if err != nil {
		err = fmt.Errorf("segment %d: read header: %w: %w", seg.number, err, ledger.ErrDamaged)
	} else {
		err = checkSegmentHeader(header, seg.number)
	}
	if err != nil {
		return errors.Join(err, file.Close())
	}
	seg.file = file
	s.idle++
	s.closeIdleLocked(seg)
	return nil
}

// closeIdleLocked closes one handle that nobody uses if there are too many.
func (s *segments) closeIdleLocked(keep *segment) {
	if s.idle <= maxIdleHandles {
		return
	}
	for _, seg := range s.all { // any one will do
		if seg != keep && seg != s.active && seg.pins == 0 && seg.file != nil && s.dirty[seg.number] == nil {
			s.closeLocked(seg)
			return
		}
	}
}

// closeLocked closes the handle of a sealed segment that was read only, or
// synced, or whose bytes nobody needs; a failure means nothing.
func (s *segments) closeLocked(seg *segment) {
	_ = seg.file.Close()
	seg.file = nil
	s.idle--
}

func (s *segments) unpin(seg *segment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unpinLocked(seg)
}

func (s *segments) unpinLocked(seg *segment) {
	seg.pins--
	s.maybeRemoveLocked(seg)
}

func (s *segments) maybeRemoveLocked(seg *segment) {
	if seg.live > 0 || seg.pins > 0 || seg == s.active || s.all[seg.number] != seg {
		return
	}
	delete(s.all, seg.number)
	delete(s.dirty, seg.number)
	if seg.file != nil {
		s.closeLocked(seg)
	}
	// A file that cannot be removed costs space until the next start, no more.
	if err := s.fs.Remove(s.path(seg.number)); err == nil {
		s.dirtyDir = true
	}
	s.metrics.segments.Dec()
}

func (s *segments) failLocked(err error) error {
	if s.failed == nil {
		s.failed = err
	}
	return s.failed
}

// nextNumber returns a number above that of every segment made so far.
func (s *segments) nextNumber() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.next
}

// list returns the numbers of the segments there are, ascending.
func (s *segments) list() []uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.all))
}

// close closes every handle. Nothing may use s afterwards.
func (s *segments) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, seg := range s.all {
		if seg.file != nil {
			errs = append(errs, seg.file.Close())
			seg.file = nil
		}
	}
	s.failed = errors.New("store closed")
	return errors.Join(errs...)
}
