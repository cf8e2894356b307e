package server

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"iter"
	"time"

	"github.com/magnetar-io/magnetar/metadata"
)

// stateMagic and stateVersion open every encoded state.
const (
	stateMagic   = "MGNRMETA"
	stateVersion = 1

	encodeChunkBytes = 64 << 10 // the encoder hands out chunks of about this size
)

// errState reports bytes that are no whole state of a known version.
var errState = errors.New("not a metadata state")

// encode yields the state's bytes in chunks, as docs/formats/metadata-state.md
// draws them. Equal states have equal bytes. A chunk is valid until the next.
func (s State) encode() iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		e := &encoder{yield: yield}
		e.b = append(e.b, stateMagic...)
		e.b = append(e.b, stateVersion)
		for _, n := range []uint64{
			s.applied, uint64(s.revision), uint64(s.leader), uint64(s.forgotten), uint64(s.items.count),
			uint64(s.counters.count), uint64(s.leases.count), uint64(s.clients.count),
		} {
			e.b = appendUint64(e.b, n)
		}
		// Leases come first, so that a reader knows them when an item names one.
		for id, l := range s.leases.all() {
			e.b = appendUint64(e.b, uint64(id))
			e.b = appendUint64(e.b, uint64(l.ttl.Milliseconds()))
			e.b = appendUint64(e.b, uint64(l.revision))
			if !e.flush(encodeChunkBytes) {
				return
			}
		}
		for key, it := range s.items.all() {
			e.b = appendString(e.b, key)
			e.b = appendValue(e.b, it.value)
			e.b = appendUint64(e.b, uint64(it.version))
			e.b = appendUint64(e.b, uint64(it.lease))
			if !e.flush(encodeChunkBytes) {
				return
			}
		}
		for prefix, n := range s.counters.all() {
			e.b = appendString(e.b, prefix)
			e.b = appendUint64(e.b, uint64(n))
			if !e.flush(encodeChunkBytes) {
				return
			}
		}
		for id, c := range s.clients.all() {
			e.b = append(e.b, id[:]...)
			e.b = append(e.b, byte(c.result.Code))
			for _, n := range []uint64{
				c.sequence, uint64(c.used), uint64(c.result.Version), uint64(c.result.Number),
				uint64(c.result.Lease), uint64(c.result.Revision),
			} {
				e.b = appendUint64(e.b, n)
			}
			if !e.flush(encodeChunkBytes) {
				return
			}
		}
		if e.flush(1) {
			yield(binary.LittleEndian.AppendUint32(nil, e.sum))
		}
	}
}

type encoder struct {
	b     []byte
	sum   uint32 // of everything yielded
	yield func([]byte) bool
}

// flush yields what is buffered once it is at least atLeast bytes.
func (e *encoder) flush(atLeast int) bool {
	if len(e.b) < atLeast {
		return true
	}
	e.sum = crc32.Update(e.sum, castagnoli, e.b)
	ok := e.yield(e.b)
	e.b = e.b[:0]
	return ok
}

// encodedSize returns how many bytes encode yields.
func (s State) encodedSize() int64 {
	const (
		header  = len(stateMagic) + 1 + 8*8 + 4
		perItem = 2 + 4 + 8 + 8
	)
	keysAndValues := s.bytes // holds the counters' prefixes too
	return int64(header) + keysAndValues + int64(s.items.count)*perItem +
		int64(s.counters.count)*(2+8) + int64(s.leases.count)*(3*8) + int64(s.clients.count)*(16+1+6*8)
}

// decodeState reads one state from r, up to the end of r. It trusts no count: it
// takes memory only as the bytes arrive.
func decodeState(r io.Reader) (State, error) {
	d := &decoder{r: bufio.NewReaderSize(r, encodeChunkBytes)}
	s := d.state()
	if d.err == nil {
		want := d.sum
		if got := d.uint64n(4); d.err == nil && got != uint64(want) {
			d.fail("checksum is %08x, its bytes have %08x", got, want)
		}
	}
	if d.err == nil {
		if _, err := d.r.ReadByte(); !errors.Is(err, io.EOF) {
			d.fail("bytes follow its end (%v)", err)
		}
	}
	if d.err == nil {
		if err := s.verify(); err != nil {
			d.err = fmt.Errorf("%w: %w", errState, err)
		}
	}
	return s, d.err
}

type decoder struct {
	r   *bufio.Reader
	sum uint32 // of everything read
	err error  // the first failure; every field is zero from then on
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf("%w: %s", errState, fmt.Sprintf(format, args...))
	}
}

// take reads n bytes, which the caller may keep.
func (d *decoder) take(n int) []byte {
	b := make([]byte, n) // n is at most MaxValueBytes
	if d.err != nil {
		return b
	}
	if _, err := io.ReadFull(d.r, b); err != nil {
		d.err = fmt.Errorf("%w: cut short: %w", errState, err)
	}
	d.sum = crc32.Update(d.sum, castagnoli, b)
	return b
}

func (d *decoder) uint64n(size int) (n uint64) {
	for i, c := range d.take(size) {
		n |= uint64(c) << (8 * i)
	}
	return n
}

// int63 reads a number that must not be negative.
func (d *decoder) int63() int64 {
	n := int64(d.uint64n(8))
	if n < 0 {
		d.fail("a number is negative: %d", n)
	}
	return n
}

func (d *decoder) version() metadata.Version { return metadata.Version(d.int63()) }

func (d *decoder) string() string {
	n := d.uint64n(2)
	if n > metadata.MaxKeyBytes {
		d.fail("a key has %d bytes", n)
		return ""
	}
	key := string(d.take(int(n)))
	if err := metadata.CheckPrefix(key); err != nil {
		d.fail("%v", err)
	}
	return key
}

func (d *decoder) value() []byte {
	n := d.uint64n(4)
	if n > metadata.MaxValueBytes {
		d.fail("a value has %d bytes", n)
		return nil
	}
	return d.take(int(n))
}

func (d *decoder) state() State {
	s := NewState()
	if magic := string(d.take(len(stateMagic))); magic != stateMagic {
		d.fail("it begins with %q, want %q", magic, stateMagic)
	}
	if v := d.uint64n(1); v != stateVersion {
		d.fail("version %d, this program knows version %d: run the program that wrote it, or a newer one", v, stateVersion)
	}
	s.applied, s.revision, s.leader, s.forgotten = d.uint64n(8), d.version(), d.version(), d.version()
	items, counters, leases, clients := d.int63(), d.int63(), d.int63(), d.int63()
	for range leases {
		if d.err != nil {
			return s
		}
		d.lease(&s)
	}
	for range items {
		if d.err != nil {
			return s
		}
		d.item(&s)
	}
	for range counters {
		if d.err != nil {
			return s
		}
		prefix, n := d.string(), d.int63()
		s.bytes += int64(len(prefix))
		insert(d, &s.counters, prefix, n)
	}
	for range clients {
		if d.err != nil {
			return s
		}
		d.client(&s)
	}
	return s
}

// insert adds a key, which must be new: a file holds each once.
func insert[K, V any](d *decoder, t *tree[K, V], key K, value V) {
	if _, twice := t.get(key); twice {
		d.fail("it holds %v twice", key)
	}
	*t = t.with(key, value)
}

func (d *decoder) lease(s *State) {
	id, ttl := metadata.LeaseID(d.int63()), time.Duration(0)
	if ms := d.int63(); ms <= int64(metadata.MaxTTL/time.Millisecond) {
		ttl = time.Duration(ms) * time.Millisecond
	}
	if err := metadata.CheckTTL(ttl); err != nil {
		d.fail("lease %d: %v", id, err)
	}
	insert(d, &s.leases, id, lease{ttl: ttl, revision: d.version()})
}

func (d *decoder) item(s *State) {
	key := d.string()
	it := item{value: d.value(), version: d.version(), lease: metadata.LeaseID(d.int63())}
	if key == "" {
		d.fail("it holds the empty key")
	}
	if it.lease != 0 {
		l, ok := s.leases.get(it.lease)
		if !ok {
			d.fail("key %q names lease %d, which is not there", key, it.lease)
		}
		l.keys++
		s.leases = s.leases.with(it.lease, l)
		s.attached = s.attached.with(attachment{it.lease, key}, struct{}{})
	}
	s.bytes += int64(len(key) + len(it.value))
	insert(d, &s.items, key, it)
}

func (d *decoder) client(s *State) {
	id := ClientID(d.take(len(ClientID{})))
	c := client{result: Result{Code: Code(d.uint64n(1))}}
	c.sequence, c.used = d.uint64n(8), d.version()
	c.result.Version, c.result.Number = d.version(), d.int63()
	c.result.Lease, c.result.Revision = metadata.LeaseID(d.int63()), d.version()
	insert(d, &s.clients, id, c)
	insert(d, &s.uses, c.used, id)
}
