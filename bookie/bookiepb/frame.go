package bookiepb

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/magnetar-io/magnetar/ledger"
)

const (
	// FrameHeaderBytes is what a frame adds to an entry's data.
	FrameHeaderBytes = 8

	// MaxEntryBytes is the largest entry that is stored: well above Pulsar's
	// message limit of 5 MiB, and still inside one Raft command of 8 MiB.
	MaxEntryBytes = 8<<20 - 4<<10

	// BatchBytes is how much of what waits goes into one request and into one
	// Raft command. One larger entry goes alone. Beyond 64 KiB only latency grows.
	BatchBytes = 64 << 10

	// BatchEntries bounds the same in entries.
	BatchEntries = 64
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// CRC returns the CRC32C of data.
func CRC(data []byte) uint32 { return crc32.Checksum(data, castagnoli) }

// AppendFrame appends the frame of one entry to dst.
func AppendFrame(dst, data []byte) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(data)))
	dst = binary.LittleEndian.AppendUint32(dst, CRC(data))
	return append(dst, data...)
}

// Next splits the first frame off b without checking its checksum. It fails on
// an empty b, a length beyond b or [MaxEntryBytes]; it allocates nothing.
func Next(b []byte) (data []byte, crc uint32, rest []byte, err error) {
	if len(b) < FrameHeaderBytes {
		return nil, 0, nil, fmt.Errorf("entry frame: %d bytes left, want %d for its header", len(b), FrameHeaderBytes)
	}
	n := binary.LittleEndian.Uint32(b)
	crc = binary.LittleEndian.Uint32(b[4:])
	b = b[FrameHeaderBytes:]
	if n > MaxEntryBytes || int(n) > len(b) {
		return nil, 0, nil, fmt.Errorf("entry frame: length %d, want at most %d and the %d bytes left", n, MaxEntryBytes, len(b))
	}
	return b[:n:n], crc, b[n:], nil
}

// Check walks a list of frames and returns their number and the sum of their
// data's lengths. An entry whose bytes fail their checksum is an error that
// wraps [ledger.ErrDamaged].
func Check(b []byte) (count int, bytes int64, err error) {
	for len(b) > 0 {
		data, crc, rest, err := Next(b)
		if err != nil {
			return 0, 0, err
		}
		if got := CRC(data); got != crc {
			return 0, 0, fmt.Errorf("frame %d: its %d bytes have CRC32C %08x, want %08x: %w", count, len(data), got, crc, ledger.ErrDamaged)
		}
		count, bytes, b = count+1, bytes+int64(len(data)), rest
	}
	return count, bytes, nil
}
