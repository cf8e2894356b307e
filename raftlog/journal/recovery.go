package journal

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/magnetar-io/magnetar/internal/vfs"
)

// searchBytes is how much of a file is read at once to look for a later frame.
const searchBytes = 1 << 20

// Exists reports whether dir holds a journal.
func Exists(fsys vfs.FS, dir string) (bool, error) {
	names, err := fsys.List(dir)
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(names, func(n string) bool { _, ok := parseName(n, segmentSuffix); return ok }), nil
}

// Open recovers the journal in dir, and makes an empty one if there is none. What
// it found is synced before it returns. dir must not be open elsewhere.
func Open(dir string, opts Options) (*Journal, error) {
	if err := opts.validate(); err != nil {
		return nil, err
	}
	j := &Journal{
		fs: opts.FS, dir: dir, opts: opts, m: newMetrics(opts.Registerer), maxRecord: maxRecordIn(opts.SegmentBytes),
		logs: map[Group]*Log{}, segments: map[uint32]*segment{}, wake: make(chan struct{}, 1), done: make(chan struct{}),
	}
	if err := j.recover(); err != nil {
		j.closeFiles()
		return nil, fmt.Errorf("open journal %s: %w", dir, err)
	}
	go j.commit()
	return j, nil
}

func (j *Journal) recover() error {
	if err := j.fs.MkdirAll(j.dir); err != nil {
		return err
	}
	numbers, err := j.inventory()
	if err != nil {
		return err
	}
	// A name that the last run left undecided must be decided before a spare file
	// is written over.
	if err := j.fs.SyncDir(j.dir); err != nil {
		return err
	}
	j.recovering = true
	for i, n := range numbers {
		if err := j.load(n, i == len(numbers)-1); err != nil {
			return err
		}
	}
	j.recovering = false
	if len(numbers) == 0 {
		err = j.begin(1, 0)
	} else if j.active.sealed {
		err = j.begin(j.active.number+1, j.active.end)
	}
	if err != nil {
		return err
	}
	for id, l := range j.logs {
		if index, ok := l.hole(); ok {
			return fmt.Errorf("%w: group %d lacks entry %d: a segment is missing", errOrder, id, index)
		}
		l.planned = l.bounds()
	}
	if err := j.mark(); err != nil {
		return err
	}
	return j.reclaim()
}

// inventory lists the segments and takes over spare files.
func (j *Journal) inventory() ([]uint32, error) {
	names, err := j.fs.List(j.dir)
	if err != nil {
		return nil, err
	}
	var numbers []uint32
	for _, name := range names {
		if n, ok := parseName(name, segmentSuffix); ok {
			numbers = append(numbers, n)
		}
		if n, ok := parseName(name, spareSuffix); ok {
			if err := j.takeSpare(j.path(n, spareSuffix)); err != nil {
				return nil, err
			}
		}
	}
	slices.Sort(numbers)
	for i := 1; i < len(numbers); i++ {
		if numbers[i] != numbers[i-1]+1 {
			return nil, fmt.Errorf("segment %d is missing: there are %d and %d", numbers[i-1]+1, numbers[i-1], numbers[i])
		}
	}
	if len(numbers) > 0 {
		j.first = numbers[0]
	}
	return numbers, nil
}

// takeSpare keeps a file of the right size to be written over. One that was not
// filled to its end, because a crash interrupted its making, is as good.
func (j *Journal) takeSpare(path string) error {
	f, err := j.fs.Open(path)
	if err != nil {
		return err
	}
	size, err := f.Size()
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	if size != j.opts.SegmentBytes || len(j.spares) >= maxSpares {
		return j.fs.Remove(path)
	}
	j.spares = append(j.spares, path)
	return nil
}

// load reads one segment into the logs. After the last one the journal knows
// where to go on.
func (j *Journal) load(number uint32, last bool) error {
	s := &segment{path: j.path(number, segmentSuffix), total: &j.live}
	var err error
	if s.file, err = j.fs.OpenWrite(s.path); err != nil {
		return err
	}
	j.segMu.Lock()
	j.segments[number] = s
	j.segMu.Unlock()
	b := make([]byte, headerBytes)
	if err := readFull(s.file, b, 0); err != nil {
		return s.damage(0, err)
	}
	if s.header, err = parseHeader(b); errors.Is(err, errFormat) {
		return s.damage(0, err)
	} else if err != nil {
		return fmt.Errorf("%s: %w", s.path, err)
	}
	if s.number != number {
		return s.damage(0, badFormat("segment %d under the name of %d", s.number, number))
	}
	if before := j.active; before != nil && s.prevEnd != uint64(before.end) {
		return before.damage(before.end, badFormat("its frames end at %d, the next segment says at %d", before.end, s.prevEnd))
	}
	j.active = s
	ops, end, err := s.footer()
	if err == nil {
		s.end, s.sealed = end, true
		return j.replay(s, ops)
	}
	if !errors.Is(err, errFormat) {
		return err
	}
	if !last {
		j.opts.Log.Warn("a sealed journal segment has no sound footer; it is read as a whole", "segment", s.path, "err", err)
	}
	return j.scan(s, last)
}

// footer returns the steps of a sealed segment and where its frames end. The
// error wraps errFormat if there is no sound footer.
func (s *segment) footer() ([]op, int64, error) {
	b := make([]byte, trailerBytes)
	if s.size < headerBytes+trailerBytes {
		return nil, 0, badFormat("segment of %d bytes", s.size)
	}
	if err := s.readOrBad(b, int64(s.size)-trailerBytes); err != nil {
		return nil, 0, err
	}
	t, err := parseTrailer(b, s.header)
	if err != nil {
		return nil, 0, err
	}
	b = make([]byte, t.length)
	if err := s.readOrBad(b, int64(t.offset)); err != nil {
		return nil, 0, err
	}
	if sum(b) != t.crc {
		return nil, 0, badFormat("checksum of the footer")
	}
	ops, err := parseFooter(b, t.ops, t.offset)
	return ops, int64(t.offset), err
}

// readOrBad reads b. A file that ends early is bad format, no failure.
func (s *segment) readOrBad(b []byte, offset int64) error {
	err := readFull(s.file, b, offset)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return badFormat("the file ends early")
	}
	return err
}

// replay applies the steps of a segment.
func (j *Journal) replay(s *segment, ops []op) error {
	for _, o := range ops {
		if err := j.Group(o.group).apply(o, s); err != nil {
			return fmt.Errorf("%s: %w", s.path, err)
		}
	}
	return nil
}

// scan reads a segment frame by frame. In the last one a torn end is cut, and
// the journal goes on there.
func (j *Journal) scan(s *segment, last bool) error {
	var ops []op
	at, places, synced, marked := int64(headerBytes), 0, int64(headerBytes), true
	for {
		h, records, err := s.frameAt(at)
		if errors.Is(err, errFormat) {
			if err := s.judge(at, synced, err); err != nil {
				return err
			}
			break
		}
		if err != nil {
			return err
		}
		offset := at + frameHeaderBytes
		for _, r := range records {
			o := op{kind: r.kind, group: r.group, index: r.index, term: r.term}
			if r.kind.holdsEntry() {
				o.at = []location{{uint32(offset), uint32(r.size())}}
				places++
			}
			if err := j.replay(s, []op{o}); err != nil {
				return err
			}
			ops = appendOp(ops, o)
			offset += int64(r.size())
		}
		at = align(at + frameHeaderBytes + int64(h.body))
		synced, marked = max(synced, int64(h.synced)), h.records == 0
	}
	s.end = at
	if !last {
		s.sealed = true
		return nil
	}
	j.ops, j.places, j.offset, j.marked = ops, places, at, marked
	return j.cut(s)
}

// frameAt reads one frame.
func (s *segment) frameAt(at int64) (h frameHeader, records []record, err error) {
	b := make([]byte, frameHeaderBytes)
	if err = s.readOrBad(b, at); err != nil {
		return h, nil, err
	}
	if h, err = parseFrameHeader(b, s.generation, s.number); err != nil {
		return h, nil, err
	}
	if h.synced > uint64(at) || int64(h.body) > int64(s.size)-at-frameHeaderBytes {
		return h, nil, badFormat("frame of %d bytes, synced to %d", h.body, h.synced)
	}
	body := make([]byte, h.body)
	if err = s.readOrBad(body, at+frameHeaderBytes); err != nil {
		return h, nil, err
	}
	records, err = parseFrame(h, body)
	return h, records, err
}

// judge says whether bytes at offset at, which are no whole frame, are the torn
// end of the segment, which is nil, or damage.
func (s *segment) judge(at, synced int64, bad error) error {
	if at < synced {
		return s.damage(at, fmt.Errorf("%w, below offset %d that was synced", bad, synced))
	}
	later, err := s.laterFrame(at + alignment)
	if err != nil {
		return err
	}
	if later > 0 {
		return s.damage(at, fmt.Errorf("%w, but there is a whole frame behind it at %d", bad, later))
	}
	return nil // a segment behind this one says where this one ends; load compares
}

// laterFrame looks for a frame header of this use of the file from offset from
// on and returns where it is, or 0.
func (s *segment) laterFrame(from int64) (int64, error) {
	buf := make([]byte, searchBytes+frameHeaderBytes)
	for base := from; base < int64(s.size); base += searchBytes {
		n, err := s.file.ReadAt(buf, base)
		if err != nil && !errors.Is(err, io.EOF) {
			return 0, fmt.Errorf("read %s: %w", s.path, err)
		}
		for b, at := buf[:n], 0; ; at++ {
			i := bytes.Index(b[at:], []byte(frameMagic))
			if i < 0 || at+i >= searchBytes {
				break
			}
			at += i
			if (base+int64(at))%alignment != 0 {
				continue
			}
			if _, err := parseFrameHeader(b[at:], s.generation, s.number); err == nil {
				return base + int64(at), nil
			}
		}
		if n < len(buf) {
			break
		}
	}
	return 0, nil
}

// cut overwrites what a torn write may have left behind the last frame, and
// syncs the segment: from here on everything before j.offset is on the disk.
func (j *Journal) cut(s *segment) error {
	j.filled = min(j.offset+maxFrameBytes, int64(s.size))
	zeros := make([]byte, min(searchBytes, j.filled-j.offset))
	for at := j.offset; at < j.filled; at += int64(len(zeros)) {
		if err := writeFull(s.file, zeros[:min(int64(len(zeros)), j.filled-at)], at); err != nil {
			return fmt.Errorf("cut the end of %s: %w", s.path, err)
		}
	}
	// A footer that a crash tore must not fit a later one by chance.
	if err := writeFull(s.file, make([]byte, trailerBytes), int64(s.size)-trailerBytes); err != nil {
		return fmt.Errorf("cut the end of %s: %w", s.path, err)
	}
	if err := s.file.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", s.path, err)
	}
	return nil
}
