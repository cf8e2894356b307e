package bookie

// recordWriter gathers records and writes them to the active segment in one
// piece. The zero value is ready.
type recordWriter struct {
	buf     *[]byte // from the store's pool; nil while empty
	pending []pendingRecord
	live    map[uint64]int64 // bytes written since reset, by segment
}

// pendingRecord is a record in buf whose segment is not known yet.
type pendingRecord struct {
	record record
	offset int // in buf
	owner  runOwner
}

// runOwner learns where its records went, in order.
type runOwner interface{ addRun(run) }

func (w *work) addRun(r run) { w.runs = appendRun(w.runs, r) }

// add gathers one record. It copies frames.
func (b *recordWriter) add(s *Store, r record, frames []byte, owner runOwner) {
	b.pending = append(b.pending, pendingRecord{r, b.size(), owner})
	if b.buf == nil {
		b.buf = s.buffer()
	}
	*b.buf = append(*b.buf, make([]byte, recordHeaderBytes)...)
	*b.buf = append(*b.buf, frames...)
}

// size is the number of bytes gathered and not written.
func (b *recordWriter) size() int {
	if b.buf == nil {
		return 0
	}
	return len(*b.buf)
}

// flush writes what has gathered and tells the owners.
func (b *recordWriter) flush(s *Store) error {
	if len(b.pending) == 0 {
		return nil
	}
	buf := *b.buf
	number, base, err := s.segments.write(buf, func(number uint64) {
		for _, p := range b.pending {
			p.record.segment = number
			p.record.put(buf[p.offset:])
		}
	})
	if err != nil {
		return err
	}
	for _, p := range b.pending {
		p.owner.addRun(run{
			first: p.record.first, count: p.record.count, length: recordHeaderBytes + p.record.body,
			segment: number, offset: base + int64(p.offset),
		})
	}
	if b.live == nil {
		b.live = map[uint64]int64{}
	}
	b.live[number] += int64(len(buf))
	s.recycle(b.buf)
	b.buf = nil
	clear(b.pending)
	b.pending = b.pending[:0]
	return nil
}

// reset forgets everything, what was not written included.
func (b *recordWriter) reset() {
	b.buf = nil
	clear(b.pending)
	b.pending = b.pending[:0]
	clear(b.live)
}
