package verify

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/fnv"
)

// A payload, all numbers big endian:
//
//	 0  'M' 'V'              magic
//	 2  version              1
//	 3  P                    length of the producer's name
//	 4  sequence             8 bytes
//	12  size                 4 bytes, of the whole payload
//	16  CRC32C               4 bytes, of all other bytes
//	20  producer             P bytes
//	..  filler               deterministic
const (
	payloadMagic   = 0x4d56
	payloadVersion = 1
	payloadHeader  = 20

	// MaxProducerName is the longest name of a producer in bytes.
	MaxProducerName = 255
)

// ErrCorrupt reports a payload that is not what [Payload] made.
var ErrCorrupt = errors.New("payload corrupt")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Message is what a payload says of itself.
type Message struct {
	Producer string
	Sequence int64
}

// Payload makes the payload of one message: size bytes, or as many as the header
// and the producer's name take, if that is more. The same arguments give the
// same bytes. It panics if producer is longer than [MaxProducerName].
func Payload(producer string, sequence int64, size int) []byte {
	if len(producer) > MaxProducerName {
		panic(fmt.Sprintf("verify: producer name of %d bytes, at most %d fit", len(producer), MaxProducerName))
	}
	p := make([]byte, max(size, payloadHeader+len(producer)))
	binary.BigEndian.PutUint16(p, payloadMagic)
	p[2], p[3] = payloadVersion, byte(len(producer))
	binary.BigEndian.PutUint64(p[4:], uint64(sequence))
	binary.BigEndian.PutUint32(p[12:], uint32(len(p)))
	copy(p[payloadHeader:], producer)
	fill(p[payloadHeader+len(producer):], producer, sequence)
	binary.BigEndian.PutUint32(p[16:], payloadSum(p))
	return p
}

// Parse checks a payload and says whose it is. The error wraps [ErrCorrupt].
func Parse(p []byte) (Message, error) {
	if len(p) < payloadHeader {
		return Message{}, fmt.Errorf("%w: %d bytes, the header alone has %d", ErrCorrupt, len(p), payloadHeader)
	}
	if magic := binary.BigEndian.Uint16(p); magic != payloadMagic || p[2] != payloadVersion {
		return Message{}, fmt.Errorf("%w: it starts with %04x version %d, want %04x version %d", ErrCorrupt, magic, p[2], payloadMagic, payloadVersion)
	}
	if size := binary.BigEndian.Uint32(p[12:]); uint64(size) != uint64(len(p)) {
		return Message{}, fmt.Errorf("%w: %d bytes, the header says %d", ErrCorrupt, len(p), size)
	}
	if want, got := binary.BigEndian.Uint32(p[16:]), payloadSum(p); want != got {
		return Message{}, fmt.Errorf("%w: checksum is %08x, its bytes give %08x", ErrCorrupt, want, got)
	}
	name := int(p[3])
	if payloadHeader+name > len(p) {
		return Message{}, fmt.Errorf("%w: a name of %d bytes in a payload of %d", ErrCorrupt, name, len(p))
	}
	return Message{
		Producer: string(p[payloadHeader : payloadHeader+name]),
		Sequence: int64(binary.BigEndian.Uint64(p[4:])),
	}, nil
}

func payloadSum(p []byte) uint32 {
	return crc32.Update(crc32.Checksum(p[:16], castagnoli), castagnoli, p[payloadHeader:])
}

// fill writes a xorshift stream that starts from the message's name, so that a
// payload neither compresses away nor equals another one.
func fill(b []byte, producer string, sequence int64) {
	h := fnv.New64a()
	h.Write([]byte(producer))
	x := (h.Sum64() ^ uint64(sequence)*0x9e3779b97f4a7c15) | 1
	for len(b) >= 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.BigEndian.PutUint64(b, x)
		b = b[8:]
	}
	for i := range b {
		b[i] = byte(x >> (8 * i))
	}
}
