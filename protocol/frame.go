package protocol

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// DefaultMaxMessageSize is the largest payload section, in bytes, unless a
// broker is configured otherwise (maxMessageSize).
const DefaultMaxMessageSize = 5 << 20

// FramePadding is what a frame may hold beyond the largest payload section, in
// bytes: the command in front of it.
const FramePadding = 10 << 10

// lengths is the size of a frame's two length fields.
const lengths = 8

// ErrMalformed reports bytes that are not the protocol. Whoever sent them is
// broken or speaks something else: close the connection.
var ErrMalformed = errors.New("malformed")

// FrameTooLargeError reports a frame that was refused before anything was
// allocated for it. Close the connection: the frame's bytes are still in it.
type FrameTooLargeError struct {
	Size int64 // bytes the sender announced, without the length field itself
	Max  int   // bytes allowed
}

// Error is written for the operator.
func (e *FrameTooLargeError) Error() string {
	return fmt.Sprintf("frame of %d bytes: at most %d are allowed (maxMessageSize plus %d)", e.Size, e.Max, FramePadding)
}

// Frame is one command as it travels.
type Frame struct {
	// Command holds the body that its type names, unless the type is unknown to
	// this version of the protocol.
	Command *pulsarpb.BaseCommand

	// Payload is the section after the command, from its magic number on; nil if
	// there is none. It is a buffer of its own, of exactly its size.
	Payload []byte
}

// ReadFrame reads one frame of at most maxFrame bytes, the length field not
// counted. It returns io.EOF if the stream ends between two frames, and an error
// that wraps io.ErrUnexpectedEOF if it ends within one. A frame that is too long
// is a *[FrameTooLargeError]; other bad bytes wrap [ErrMalformed].
//
// Reading into a buffer of 16 KiB or more keeps commands from being copied.
func ReadFrame(r *bufio.Reader, maxFrame int) (Frame, error) {
	head, err := r.Peek(lengths)
	if err != nil {
		if len(head) == 0 {
			return Frame{}, err
		}
		return Frame{}, fmt.Errorf("frame cut off in its length fields: %w", unexpected(err))
	}
	total, size := binary.BigEndian.Uint32(head), binary.BigEndian.Uint32(head[4:])
	switch {
	case int64(total) > int64(maxFrame):
		return Frame{}, &FrameTooLargeError{Size: int64(total), Max: maxFrame}
	case total < 4 || size > total-4:
		return Frame{}, fmt.Errorf("%w frame: command of %d bytes in a frame of %d", ErrMalformed, size, total)
	}
	if _, err := r.Discard(lengths); err != nil {
		return Frame{}, err
	}

	command, err := readCommand(r, int(size))
	if err != nil {
		return Frame{}, err
	}
	f := Frame{Command: command}
	if rest := int(total - 4 - size); rest > 0 {
		f.Payload = make([]byte, rest)
		if _, err := io.ReadFull(r, f.Payload); err != nil {
			return Frame{}, fmt.Errorf("%v frame cut off in its payload of %d bytes: %w", command.GetType(), rest, unexpected(err))
		}
	}
	return f, nil
}

// readCommand decodes the command in the next size bytes. It may decode straight
// from r's buffer, because UnmarshalVT copies all that it keeps.
func readCommand(r *bufio.Reader, size int) (*pulsarpb.BaseCommand, error) {
	var raw []byte
	var err error
	if size <= r.Size() {
		raw, err = r.Peek(size)
	} else {
		raw = make([]byte, size)
		_, err = io.ReadFull(r, raw)
	}
	if err != nil {
		return nil, fmt.Errorf("frame cut off in its command of %d bytes: %w", size, unexpected(err))
	}
	command := new(pulsarpb.BaseCommand)
	if err := command.UnmarshalVT(raw); err != nil {
		return nil, fmt.Errorf("%w command of %d bytes: %w", ErrMalformed, size, err)
	}
	if !hasBody(command) {
		return nil, fmt.Errorf("%w command: type is %v, but its body is missing", ErrMalformed, command.GetType())
	}
	if size <= r.Size() {
		if _, err := r.Discard(size); err != nil {
			return nil, err
		}
	}
	return command, nil
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// AppendFrame appends a frame without payload. It panics if a required field of
// c is missing, which is a bug in the caller.
func AppendFrame(dst []byte, c *pulsarpb.BaseCommand) []byte {
	return AppendPayloadHeader(dst, c, 0)
}

// AppendPayloadHeader appends all of a frame but its payload section, which the
// caller writes next: payloadLen bytes, from the magic number on. It panics if a
// required field of c is missing, which is a bug in the caller.
func AppendPayloadHeader(dst []byte, c *pulsarpb.BaseCommand, payloadLen int) []byte {
	size := c.SizeVT()
	dst = appendLengths(dst, size, payloadLen)
	start := len(dst)
	dst = append(dst, make([]byte, size)...)
	if n, err := c.MarshalToSizedBufferVT(dst[start:]); err != nil || n != size {
		panic(fmt.Sprintf("protocol: %v command does not encode: %d of %d bytes, %v", c.GetType(), n, size, err))
	}
	return dst
}

func appendLengths(dst []byte, command, payload int) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(4+command+payload))
	return binary.BigEndian.AppendUint32(dst, uint32(command))
}
