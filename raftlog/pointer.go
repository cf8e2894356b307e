package raftlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/hashicorp/raft"
)

// pointer is a snapshot as raftlog writes it: where the log may be cut. The
// state itself is with the machine. See docs/formats/snapshot.md.
type pointer struct {
	index       Index
	term        Term
	applied     Index // newest command that the machine held, durably, when the pointer was written
	config      raft.Configuration
	configIndex Index
}

const (
	formatVersion = 1

	pointerHead      = 4 + 1 + 3 + 4*8 + 4 // bytes before the configuration
	maxConfiguration = 1 << 20             // bytes of an encoded configuration; above every real one

	// streamHead is in front of a machine's stream, streamTail behind it. Both
	// are counted in the size that raft announces.
	streamHead = 4 + 1 + 3 + 8 + 4
	streamTail = 4
)

var (
	pointerMagic = [4]byte{'M', 'G', 'S', 'P'}
	streamMagic  = [4]byte{'M', 'G', 'S', 'S'}
)

func (p pointer) encode() []byte {
	config := raft.EncodeConfiguration(p.config)
	b := make([]byte, 0, pointerHead+len(config)+4)
	b = append(b, pointerMagic[:]...)
	b = append(b, formatVersion, 0, 0, 0)
	b = binary.BigEndian.AppendUint64(b, uint64(p.index))
	b = binary.BigEndian.AppendUint64(b, uint64(p.term))
	b = binary.BigEndian.AppendUint64(b, uint64(p.applied))
	b = binary.BigEndian.AppendUint64(b, uint64(p.configIndex))
	b = binary.BigEndian.AppendUint32(b, uint32(len(config)))
	b = append(b, config...)
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// readPointer reads exactly one encoded pointer from r.
func readPointer(r io.Reader) (p pointer, err error) {
	head := make([]byte, pointerHead)
	if _, err := io.ReadFull(r, head); err != nil {
		return p, fmt.Errorf("snapshot pointer: %w", err)
	}
	if err := checkMagic("snapshot pointer", head, pointerMagic); err != nil {
		return p, err
	}
	n := binary.BigEndian.Uint32(head[pointerHead-4:])
	if n > maxConfiguration {
		return p, fmt.Errorf("snapshot pointer: configuration of %d bytes: want at most %d", n, maxConfiguration)
	}
	rest := make([]byte, n+4)
	if _, err := io.ReadFull(r, rest); err != nil {
		return p, fmt.Errorf("snapshot pointer: %w", err)
	}
	sum := crc32.Update(crc32.Checksum(head, castagnoli), castagnoli, rest[:n])
	if got := binary.BigEndian.Uint32(rest[n:]); got != sum {
		return p, fmt.Errorf("snapshot pointer: checksum is %08x, the content's is %08x", got, sum)
	}
	defer func() { // raft panics on a configuration that does not decode
		if r := recover(); r != nil {
			err = fmt.Errorf("snapshot pointer: %v", r)
		}
	}()
	p.index = Index(binary.BigEndian.Uint64(head[8:]))
	p.term = Term(binary.BigEndian.Uint64(head[16:]))
	p.applied = Index(binary.BigEndian.Uint64(head[24:]))
	p.configIndex = Index(binary.BigEndian.Uint64(head[32:]))
	p.config = raft.DecodeConfiguration(rest[:n])
	return p, nil
}

func checkMagic(what string, b []byte, magic [4]byte) error {
	if [4]byte(b[:4]) != magic {
		return fmt.Errorf("%s: does not begin with %q", what, magic[:])
	}
	if b[4] != formatVersion {
		return fmt.Errorf("%s: format version %d: this program reads version %d only", what, b[4], formatVersion)
	}
	return nil
}

func encodeStreamHead(applied Index) []byte {
	b := make([]byte, 0, streamHead)
	b = append(b, streamMagic[:]...)
	b = append(b, formatVersion, 0, 0, 0)
	b = binary.BigEndian.AppendUint64(b, uint64(applied))
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func parseStreamHead(b []byte) (Index, error) {
	if err := checkMagic("state stream", b, streamMagic); err != nil {
		return 0, err
	}
	if got, want := binary.BigEndian.Uint32(b[streamHead-4:]), crc32.Checksum(b[:streamHead-4], castagnoli); got != want {
		return 0, fmt.Errorf("state stream: header checksum is %08x, the content's is %08x", got, want)
	}
	return Index(binary.BigEndian.Uint64(b[8:])), nil
}

// streamReader yields head, the machine's bytes and their checksum: exactly the
// announced size, or an error. A stream that ends early must not look whole.
type streamReader struct {
	src  Stream
	head []byte
	left int64 // of the machine's bytes
	sum  uint32
	tail []byte // nil until the machine's bytes are through
}

func newStreamReader(src Stream) *streamReader {
	return &streamReader{src: src, head: encodeStreamHead(src.Applied), left: src.Size}
}

func (s *streamReader) size() int64 { return streamHead + s.src.Size + streamTail }

// Read implements [io.Reader].
func (s *streamReader) Read(p []byte) (int, error) {
	switch {
	case len(s.head) > 0:
		n := copy(p, s.head)
		s.head = s.head[n:]
		return n, nil
	case s.left > 0:
		if int64(len(p)) > s.left {
			p = p[:s.left]
		}
		n, err := s.src.Read(p)
		s.sum = crc32.Update(s.sum, castagnoli, p[:n])
		s.left -= int64(n)
		if errors.Is(err, io.EOF) {
			err = nil
			if s.left > 0 {
				err = fmt.Errorf("state stream ended %d bytes before its size of %d: %w", s.left, s.src.Size, io.ErrUnexpectedEOF)
			}
		}
		return n, err
	case s.tail == nil:
		s.tail = binary.BigEndian.AppendUint32(nil, s.sum)
		fallthrough
	default:
		if len(s.tail) == 0 {
			return 0, io.EOF
		}
		n := copy(p, s.tail)
		s.tail = s.tail[n:]
		return n, nil
	}
}

// Close implements [io.Closer].
func (s *streamReader) Close() error { return s.src.Close() }

// bodyReader yields the machine's bytes of a staged stream, size of them, and
// io.EOF only after their checksum was found right.
type bodyReader struct {
	r    io.Reader
	left int64
	sum  uint32
	err  error // sticky
}

// Read implements [io.Reader].
func (b *bodyReader) Read(p []byte) (int, error) {
	if b.err != nil {
		return 0, b.err
	}
	if b.left == 0 {
		var tail [streamTail]byte
		b.err = io.EOF
		if _, err := io.ReadFull(b.r, tail[:]); err != nil {
			b.err = fmt.Errorf("state stream checksum: %w", err)
		} else if got := binary.BigEndian.Uint32(tail[:]); got != b.sum {
			b.err = fmt.Errorf("state stream checksum is %08x, the content's is %08x", got, b.sum)
		}
		return 0, b.err
	}
	if int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.r.Read(p)
	b.sum = crc32.Update(b.sum, castagnoli, p[:n])
	b.left -= int64(n)
	if err != nil && b.left > 0 {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		b.err = fmt.Errorf("state stream: %w", err)
		return n, b.err
	}
	return n, nil
}
