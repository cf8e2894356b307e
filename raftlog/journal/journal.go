package journal

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/magnetar-io/magnetar/internal/vfs"
)

const (
	// DefaultSegmentBytes is how large a segment file is.
	DefaultSegmentBytes = 128 << 20

	minSegmentBytes = 4 << 10
	maxSegmentBytes = 1 << 30

	// maxFrameBytes bounds one write, and so what a crash may tear.
	maxFrameBytes = 16 << 20

	// DefaultMaxSegments is how many segments there may be before what pins the
	// oldest is copied forward.
	DefaultMaxSegments = 8

	// maxSpares bounds the files that are kept to be written over.
	maxSpares = 2

	// relocateChunk bounds what one step of relocation copies while others wait.
	relocateChunk = 4 << 20

	// fillAhead is how much of a new file is overwritten with zeros before small
	// frames go there: to sync written blocks takes half as long.
	fillAhead = 1 << 20

	// smallFrame is the size from which on filling ahead gains nothing.
	smallFrame = 256 << 10

	// idleAfter is how long nothing is written before the empty frame that tells
	// recovery that everything before it is on the disk.
	idleAfter = 100 * time.Millisecond
)

var (
	// ErrFailed reports that the disk failed. What it holds of the change is
	// unknown; the process must end.
	ErrFailed = errors.New("the journal's disk failed, and what it holds is unknown")

	// ErrClosed reports use after Close. Nothing was written.
	ErrClosed = errors.New("journal closed")
)

// Options tune a journal. The zero value is right outside tests, but for Log.
type Options struct {
	FS           vfs.FS // nil: the operating system's
	SegmentBytes int64  // of new segments; 0: DefaultSegmentBytes
	MaxSegments  int    // 0: DefaultMaxSegments

	Log        *slog.Logger
	Registerer prometheus.Registerer // nil: nobody scrapes

	// Failed is told, once, that the journal takes nothing more. It may be nil:
	// whoever writes next hears of it as well.
	Failed func(error)
}

func (o *Options) validate() error {
	if o.FS == nil {
		o.FS = vfs.OS
	}
	if o.SegmentBytes == 0 {
		o.SegmentBytes = DefaultSegmentBytes
	}
	if o.MaxSegments == 0 {
		o.MaxSegments = DefaultMaxSegments
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.SegmentBytes < minSegmentBytes || o.SegmentBytes > maxSegmentBytes || o.SegmentBytes%alignment != 0 {
		return fmt.Errorf("journal: segments of %d bytes: want %d to %d, a multiple of %d", o.SegmentBytes, minSegmentBytes, maxSegmentBytes, alignment)
	}
	if o.MaxSegments < 2 {
		return fmt.Errorf("journal: at most %d segments: want 2 or more", o.MaxSegments)
	}
	return nil
}

// Journal is the segment log of one bookie. The committer owns what is not
// marked otherwise.
type Journal struct {
	fs        vfs.FS
	dir       string
	opts      Options
	m         *metrics
	maxRecord int

	mu     sync.Mutex // guards logs, queue and closed
	logs   map[Group]*Log
	queue  []*request
	closed bool
	wake   chan struct{} // do and Close to the committer; capacity 1; never closed
	done   chan struct{} // closed once the committer has ended
	failed atomic.Pointer[error]

	segMu    sync.RWMutex // guards the map
	segments map[uint32]*segment
	first    uint32       // oldest segment
	live     atomic.Int64 // bytes of records of live entries

	recovering bool // entries may be missing until later ones are read

	active  *segment // the last one
	offset  int64    // where the next frame goes; everything before is synced
	filled  int64    // bytes of active whose blocks were written before
	marked  bool     // the newest frame is an empty one
	ops     []op     // what the frames of active did, for its footer
	places  int      // locations in ops
	frame   frame
	spares  []string
	answers []*request // wholly in frame
}

// frame is the one that is being filled.
type frame struct {
	buf     []byte // frameHeaderBytes of room, then records
	records uint32
	ops     []op
	logs    []*Log // ops[i] is for logs[i]
	places  int
}

// request is one change that a caller waits for.
type request struct {
	log  *Log
	done chan error // capacity 1

	logs []*raft.Log // to store; nil: delete low to high
	buf  []byte      // their records
	ends []int       // where each ends in buf

	low, high uint64
}

// Group returns a group's log, which is empty if the journal knows nothing of it.
func (j *Journal) Group(id Group) *Log {
	j.mu.Lock()
	defer j.mu.Unlock()
	l := j.logs[id]
	if l == nil {
		l = &Log{j: j, id: id}
		j.logs[id] = l
	}
	return l
}

// Groups returns the number of groups whose logs are not empty.
func (j *Journal) Groups() int {
	n := 0
	for _, l := range j.allLogs() {
		if l.bounds() != (span{}) {
			n++
		}
	}
	return n
}

func (j *Journal) allLogs() []*Log {
	j.mu.Lock()
	defer j.mu.Unlock()
	all := make([]*Log, 0, len(j.logs))
	for _, l := range j.logs {
		all = append(all, l)
	}
	return all
}

// do hands a request to the committer and waits until it is on the disk.
func (j *Journal) do(r *request) error {
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return ErrClosed
	}
	j.queue = append(j.queue, r)
	j.mu.Unlock()
	j.signal()
	return <-r.done
}

func (j *Journal) signal() {
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

// Close makes what waits durable, then ends the committer. It may be called
// twice. Nothing may be read afterwards.
func (j *Journal) Close() error {
	j.mu.Lock()
	j.closed = true
	j.mu.Unlock()
	j.signal()
	<-j.done
	if err := j.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// take returns everything that waits.
func (j *Journal) take() (batch []*request, closed bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	batch, j.queue = j.queue, nil
	return batch, j.closed
}

// commit is the committer.
func (j *Journal) commit() {
	defer close(j.done)
	defer j.closeFiles()
	idle := time.NewTimer(idleAfter)
	defer idle.Stop()
	for {
		batch, closed := j.take()
		switch {
		case len(batch) > 0:
			j.round(batch)
			idle.Reset(idleAfter)
			continue
		case closed:
			j.run(j.mark)
			return
		case j.relocating():
			j.run(j.relocateStep)
			idle.Reset(idleAfter)
			continue
		}
		select {
		case <-j.wake:
		case <-idle.C:
			j.run(j.mark)
		}
	}
}

// run runs one step of the committer's own, unless the journal failed.
func (j *Journal) run(step func() error) {
	if j.failed.Load() != nil {
		return
	}
	if err := step(); err != nil {
		j.fail(err)
	}
}

// fail ends the journal.
func (j *Journal) fail(err error) {
	err = fmt.Errorf("%w: %w", ErrFailed, err)
	j.failed.Store(&err)
	j.opts.Log.Error("journal stops", "err", err)
	if j.opts.Failed != nil {
		j.opts.Failed(err)
	}
}

// round makes a batch durable and answers it, in its order.
func (j *Journal) round(batch []*request) {
	j.m.requests.Add(float64(len(batch)))
	for i, r := range batch {
		err := j.failure()
		if err == nil {
			var refused error
			if refused, err = j.add(r); refused != nil {
				r.done <- refused
				continue
			}
		}
		if err == nil {
			j.answers = append(j.answers, r)
			continue
		}
		j.refuse(append(j.answers, batch[i:]...), err)
		return
	}
	if err := j.flush(); err != nil {
		j.refuse(j.answers, err)
		return
	}
	j.run(j.reclaim)
	// What pins old segments must go also while there is always somebody waiting.
	if j.failed.Load() == nil && j.relocating() {
		j.run(j.relocateStep)
	}
}

func (j *Journal) failure() error {
	if err := j.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// refuse ends the journal, if it has not ended yet, and the requests.
func (j *Journal) refuse(requests []*request, err error) {
	if j.failed.Load() == nil {
		j.fail(err)
	}
	err = j.failure()
	for _, r := range requests {
		r.done <- err
	}
	j.answers = nil
}

// add puts a request's records into the frame, and writes frames that are full.
// refused: nothing of it was written.
func (j *Journal) add(r *request) (refused, failed error) {
	if r.logs == nil {
		return j.addDelete(r)
	}
	l, p := r.log, &r.log.planned
	first := r.logs[0].Index
	if p.first != 0 && first > p.last+1 {
		return fmt.Errorf("group %d: store entry %d behind entry %d: want no gap", l.id, first, p.last), nil
	}
	if p.first != 0 && first <= p.last {
		if err := j.control(l, kindTruncate, first); err != nil {
			return nil, err
		}
		p.cutSuffix(first)
	}
	if c := l.takeStaged(); c != 0 {
		if err := j.control(l, kindCommit, c); err != nil {
			return nil, err
		}
	}
	at := 0
	for i, e := range r.logs {
		if err := j.put(l, kindEntry, e.Index, e.Term, r.buf[at:r.ends[i]]); err != nil {
			return nil, err
		}
		at = r.ends[i]
	}
	if p.first == 0 {
		p.first = first
	}
	p.last = r.logs[len(r.logs)-1].Index
	return nil, nil
}

func (j *Journal) addDelete(r *request) (refused, failed error) {
	p := &r.log.planned
	switch {
	case p.first == 0 || r.high < p.first || r.low > p.last:
		return nil, nil
	case r.low <= p.first && r.high >= p.last:
		*p = span{}
		return nil, j.control(r.log, kindReset, 0)
	case r.low <= p.first:
		p.cutPrefix(r.high + 1)
		return nil, j.control(r.log, kindFirst, r.high+1)
	case r.high >= p.last:
		p.cutSuffix(r.low)
		return nil, j.control(r.log, kindTruncate, r.low)
	}
	return fmt.Errorf("group %d: delete %d to %d of %d to %d: want a range that reaches one end", r.log.id, r.low, r.high, p.first, p.last), nil
}

func (j *Journal) control(l *Log, kind recordKind, index uint64) error {
	rec := record{kind: kind, group: l.id, index: index}
	return j.put(l, kind, index, 0, rec.append(nil))
}

// appendOp adds what one record did to ops, joined to the step before if that
// did the same to the entry before.
func appendOp(ops []op, o op) []op {
	if n := len(ops); n > 0 && len(o.at) > 0 {
		last := &ops[n-1]
		if last.kind == o.kind && last.group == o.group && last.term == o.term && last.index+uint64(len(last.at)) == o.index {
			last.at = append(last.at, o.at...)
			return ops
		}
	}
	return append(ops, o)
}

// put adds one encoded record to the frame; if there is no room it writes the
// frame first, and begins another segment if that has none either.
func (j *Journal) put(l *Log, kind recordKind, index, term uint64, encoded []byte) error {
	f := &j.frame
	if f.records > 0 && (len(f.buf)+len(encoded) > maxFrameBytes || !j.fits(len(encoded))) {
		if err := j.flush(); err != nil {
			return err
		}
	}
	if f.records == 0 {
		if !j.fits(len(encoded)) {
			if err := j.roll(); err != nil {
				return err
			}
		}
		f.buf = append(f.buf[:0], make([]byte, frameHeaderBytes)...)
	}
	o := op{kind: kind, group: l.id, index: index, term: term}
	at := len(f.buf)
	f.buf = append(f.buf, encoded...)
	stamp(f.buf[at:], j.active.generation)
	f.records++
	if kind.holdsEntry() {
		o.at = []location{{uint32(j.offset) + uint32(at), uint32(len(encoded))}}
		f.places++
	}
	if f.ops = appendOp(f.ops, o); len(f.ops) > len(f.logs) {
		f.logs = append(f.logs, l)
	}
	return nil
}

// fits reports whether the active segment has room for one more record in the
// frame, an empty frame behind it and the footer.
func (j *Journal) fits(record int) bool {
	f := &j.frame
	end := align(j.offset + int64(max(len(f.buf), frameHeaderBytes)+record))
	footer := footerSize(len(j.ops)+len(f.ops)+1, j.places+f.places+1)
	return end+frameHeaderBytes+footer+trailerBytes <= int64(j.active.size)
}

// maxRecordIn returns the largest record that a segment of that size can hold.
func maxRecordIn(segment int64) int {
	room := segment - headerBytes - 2*frameHeaderBytes - footerSize(1, 1) - trailerBytes - 2*alignment
	return int(min(room, maxFrameBytes-frameHeaderBytes))
}

// flush writes and syncs the frame, makes its records the logs' state, and
// answers the requests that are wholly on the disk.
func (j *Journal) flush() error {
	f := &j.frame
	if f.records > 0 {
		if err := j.write(f.buf, f.records); err != nil {
			return err
		}
		for i, o := range f.ops {
			if err := f.logs[i].apply(o, j.active); err != nil {
				panic(fmt.Sprintf("journal: own record of kind %d: %v", o.kind, err))
			}
			j.ops = appendOp(j.ops, o)
		}
		j.places += f.places
		clear(f.logs)
		f.ops, f.logs, f.records, f.places = f.ops[:0], f.logs[:0], 0, 0
		if cap(f.buf) > maxKeptFrame {
			f.buf = nil
		}
		f.buf = f.buf[:0]
	}
	for i, r := range j.answers {
		r.done <- nil
		j.answers[i] = nil
	}
	j.answers = j.answers[:0]
	return nil
}

// maxKeptFrame bounds the buffer that is kept between frames.
const maxKeptFrame = 4 << 20

// write writes one frame, whose header is not filled in yet, and syncs it.
func (j *Journal) write(frame []byte, records uint32) error {
	start := time.Now()
	h := frameHeader{j.active.generation, j.active.number, uint32(len(frame) - frameHeaderBytes), records, uint64(j.offset)}
	h.put(frame)
	for len(frame)%alignment != 0 {
		frame = append(frame, 0)
	}
	end := j.offset + int64(len(frame))
	if err := j.fill(end, len(frame)); err != nil {
		return err
	}
	if err := writeFull(j.active.file, frame, j.offset); err != nil {
		return err
	}
	if err := j.active.file.Sync(); err != nil {
		return err
	}
	j.offset, j.active.end, j.marked = end, end, records == 0
	j.m.syncs.Inc()
	j.m.bytes.Add(float64(len(frame)))
	j.m.seconds.Observe(time.Since(start).Seconds())
	return nil
}

// fill writes zeros ahead of a small frame that ends at end, in a new file.
func (j *Journal) fill(end int64, size int) error {
	if end <= j.filled {
		return nil
	}
	if size >= smallFrame {
		j.filled = end
		return nil
	}
	to := min(end+fillAhead, int64(j.active.size))
	from := max(j.filled, j.offset)
	j.filled = to
	return writeFull(j.active.file, make([]byte, to-from), from)
}

// mark writes an empty frame, if the newest one is not empty: recovery knows then
// that everything before was synced.
func (j *Journal) mark() error {
	if j.marked {
		return nil
	}
	if j.offset+frameHeaderBytes+footerSize(len(j.ops), j.places)+trailerBytes > int64(j.active.size) {
		return j.roll() // a footer says the same
	}
	return j.write(make([]byte, frameHeaderBytes), 0)
}

// seal writes the active segment's footer.
func (j *Journal) seal() error {
	s, footer := j.active, encodeFooter(j.ops)
	t := trailer{s.generation, s.number, uint64(j.offset), uint64(len(footer)), uint32(len(j.ops)), sum(footer)}
	if err := writeFull(s.file, footer, j.offset); err != nil {
		return err
	}
	if err := writeFull(s.file, t.encode(), int64(s.size)-trailerBytes); err != nil {
		return err
	}
	if err := s.file.Sync(); err != nil {
		return err
	}
	s.sealed, j.ops, j.places = true, nil, 0
	return nil
}

// roll seals the active segment and begins the next one.
func (j *Journal) roll() error {
	if !j.active.sealed {
		if err := j.seal(); err != nil {
			return err
		}
	}
	return j.begin(j.active.number+1, j.active.end)
}

// begin makes segment number, in a spare file if there is one, and lets the
// journal go on there. Its header is on the disk before it gets its name.
func (j *Journal) begin(number uint32, prevEnd int64) error {
	name, reused, create := j.path(number, spareSuffix), false, j.fs.Create
	if n := len(j.spares); n > 0 {
		name, reused, create = j.spares[n-1], true, j.fs.OpenWrite
		j.spares = j.spares[:n-1]
	}
	f, err := create(name)
	if err != nil {
		return fmt.Errorf("begin journal segment %d: %w", number, err)
	}
	h := header{number: number, generation: newGeneration(), size: uint64(j.opts.SegmentBytes), prevEnd: uint64(prevEnd)}
	if err = f.Preallocate(j.opts.SegmentBytes); err == nil {
		err = writeFull(f, h.encode(), 0)
	}
	if err == nil {
		err = f.Sync()
	}
	path := j.path(number, segmentSuffix)
	if err == nil {
		err = j.fs.Rename(name, path)
	}
	if err == nil {
		err = j.fs.SyncDir(j.dir)
	}
	if err != nil {
		_ = f.Close()
		return fmt.Errorf("begin journal segment %d of %d bytes: %w", number, j.opts.SegmentBytes, err)
	}
	s := &segment{header: h, path: path, file: f, end: headerBytes, total: &j.live}
	j.segMu.Lock()
	j.segments[number] = s
	j.segMu.Unlock()
	if j.first == 0 {
		j.first = number
	}
	j.active, j.offset, j.marked = s, headerBytes, true
	if j.filled = headerBytes; reused {
		j.filled = j.opts.SegmentBytes
	}
	j.m.segments.Set(float64(number - j.first + 1))
	return nil
}

// newGeneration returns the number of one use of a file. It is random, so that
// nobody can publish an entry that looks like a frame.
func newGeneration() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the program first
	return binary.LittleEndian.Uint64(b[:])
}

func (j *Journal) closeFiles() {
	j.segMu.Lock()
	defer j.segMu.Unlock()
	for _, s := range j.segments {
		s.retire()
	}
}
