package protocol

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// The numbers that open the two sections a payload may have.
const (
	magicMessage     = 0x0e01 // checksum, metadata, body
	magicBrokerEntry = 0x0e02 // what a broker put in front of a message section
)

// messageHeader is what precedes the metadata: magic, checksum, metadata size.
const messageHeader = 2 + 4 + 4

// brokerEntryHeader is what precedes the broker entry metadata: magic and size.
const brokerEntryHeader = 2 + 4

// ErrChecksum reports a payload whose bytes are not those that were sent: answer
// ChecksumError, or treat the message as damaged. Nothing in it can be trusted.
var ErrChecksum = errors.New("checksum mismatch")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// section is a payload taken apart; all slices alias it.
type section struct {
	brokerEntry []byte // encoded BrokerEntryMetadata; nil if none
	message     []byte // from the magic of the message section on
	metadata    []byte // encoded MessageMetadata
	body        []byte
}

// split takes a payload apart and checks its lengths, not its checksum.
func split(p []byte) (section, error) {
	var s section
	if len(p) >= brokerEntryHeader && binary.BigEndian.Uint16(p) == magicBrokerEntry {
		size := binary.BigEndian.Uint32(p[2:])
		rest := p[brokerEntryHeader:]
		if uint64(size) > uint64(len(rest)) {
			return s, fmt.Errorf("%w payload: broker entry metadata of %d bytes, %d are there", ErrMalformed, size, len(rest))
		}
		s.brokerEntry, p = rest[:size:size], rest[size:]
	}
	if len(p) < messageHeader {
		return s, fmt.Errorf("%w payload: %d bytes, a message section has at least %d", ErrMalformed, len(p), messageHeader)
	}
	if magic := binary.BigEndian.Uint16(p); magic != magicMessage {
		return s, fmt.Errorf("%w payload: it starts with %#04x, want %#04x; messages without a checksum are not accepted", ErrMalformed, magic, magicMessage)
	}
	size := binary.BigEndian.Uint32(p[6:])
	rest := p[messageHeader:]
	if uint64(size) > uint64(len(rest)) {
		return s, fmt.Errorf("%w payload: metadata of %d bytes, %d are there", ErrMalformed, size, len(rest))
	}
	s.message, s.metadata, s.body = p, rest[:size:size], rest[size:]
	return s, nil
}

// CheckPayload verifies a payload's lengths and its CRC32C, which covers all
// that follows it. The error wraps [ErrMalformed] or [ErrChecksum].
func CheckPayload(p []byte) error {
	s, err := split(p)
	if err != nil {
		return err
	}
	want := binary.BigEndian.Uint32(s.message[2:])
	if got := crc32.Checksum(s.message[6:], castagnoli); got != want {
		return fmt.Errorf("%w: payload of %d bytes says %08x, its bytes give %08x", ErrChecksum, len(p), want, got)
	}
	return nil
}

// ParseMetadata decodes a payload's metadata and returns it with the body, which
// aliases p. It does not verify the checksum. The error wraps [ErrMalformed].
func ParseMetadata(p []byte) (*pulsarpb.MessageMetadata, []byte, error) {
	s, err := split(p)
	if err != nil {
		return nil, nil, err
	}
	meta := new(pulsarpb.MessageMetadata)
	if err := meta.UnmarshalVT(s.metadata); err != nil {
		return nil, nil, fmt.Errorf("%w message metadata of %d bytes: %w", ErrMalformed, len(s.metadata), err)
	}
	if n := meta.GetNumMessagesInBatch(); n < 1 {
		return nil, nil, badCount(n)
	}
	return meta, s.body, nil
}

func badCount(n int32) error {
	return fmt.Errorf("%w message metadata: a batch of %d messages, want at least 1", ErrMalformed, n)
}

// ParseBrokerEntry returns what a broker put in front of the message section,
// or nil if there is nothing, and the message section, which aliases p.
func ParseBrokerEntry(p []byte) (*pulsarpb.BrokerEntryMetadata, []byte, error) {
	s, err := split(p)
	if err != nil || s.brokerEntry == nil {
		return nil, s.message, err
	}
	meta := new(pulsarpb.BrokerEntryMetadata)
	if err := meta.UnmarshalVT(s.brokerEntry); err != nil {
		return nil, nil, fmt.Errorf("%w broker entry metadata of %d bytes: %w", ErrMalformed, len(s.brokerEntry), err)
	}
	return meta, s.message, nil
}

// BuildPayload returns a new payload section of exactly its size. It panics if
// meta lacks producer_name, sequence_id or publish_time, which is a bug in the
// caller.
func BuildPayload(meta *pulsarpb.MessageMetadata, body []byte) []byte {
	size := meta.SizeVT()
	p := make([]byte, messageHeader+size+len(body))
	binary.BigEndian.PutUint16(p, magicMessage)
	binary.BigEndian.PutUint32(p[6:], uint32(size))
	if n, err := meta.MarshalToSizedBufferVT(p[messageHeader : messageHeader+size]); err != nil || n != size {
		panic(fmt.Sprintf("protocol: message metadata does not encode: %d of %d bytes, %v", n, size, err))
	}
	copy(p[messageHeader+size:], body)
	binary.BigEndian.PutUint32(p[2:], crc32.Checksum(p[6:], castagnoli))
	return p
}
