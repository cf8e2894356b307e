package protocol

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

const testMaxFrame = 1 << 20

func sendCommand() *pulsarpb.BaseCommand {
	return &pulsarpb.BaseCommand{
		Type: pulsarpb.BaseCommand_SEND.Enum(),
		Send: &pulsarpb.CommandSend{ProducerId: proto.Uint64(7), SequenceId: proto.Uint64(42)},
	}
}

func pingCommand() *pulsarpb.BaseCommand {
	return &pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_PING.Enum(), Ping: &pulsarpb.CommandPing{}}
}

func reader(b []byte) *bufio.Reader { return bufio.NewReaderSize(bytes.NewReader(b), 16<<10) }

func TestFrameRoundTrip(t *testing.T) {
	payload := BuildPayload(testMetadata(), []byte("hello"))
	stream := AppendFrame(nil, pingCommand())
	stream = AppendPayloadHeader(stream, sendCommand(), len(payload))
	stream = append(stream, payload...)
	stream = AppendFrame(stream, pingCommand())

	r := bufio.NewReaderSize(iotest.OneByteReader(bytes.NewReader(stream)), 16) // every length and command is split
	for i, want := range []Frame{{pingCommand(), nil}, {sendCommand(), payload}, {pingCommand(), nil}} {
		f, err := ReadFrame(r, testMaxFrame)
		if err != nil {
			t.Fatalf("frame %d: %v", i, err)
		}
		if diff := cmp.Diff(want, f, protocmp.Transform()); diff != "" {
			t.Errorf("frame %d (-want +got):\n%s", i, diff)
		}
		if (f.Payload == nil) != (want.Payload == nil) || cap(f.Payload) != len(f.Payload) {
			t.Errorf("frame %d: payload len %d cap %d, want exactly %d", i, len(f.Payload), cap(f.Payload), len(want.Payload))
		}
	}
	if _, err := ReadFrame(r, testMaxFrame); !errors.Is(err, io.EOF) {
		t.Errorf("after the last frame: %v, want io.EOF", err)
	}
}

// TestCommandDoesNotAliasTheReader guards the promise that lets ReadFrame decode
// from the reader's own buffer.
func TestCommandDoesNotAliasTheReader(t *testing.T) {
	connect := &pulsarpb.BaseCommand{
		Type: pulsarpb.BaseCommand_CONNECT.Enum(),
		Connect: &pulsarpb.CommandConnect{
			ClientVersion: new("client"), AuthMethodName: new("token"), AuthData: []byte("secret"),
		},
	}
	stream := AppendFrame(nil, connect)
	r := bufio.NewReaderSize(bytes.NewReader(append(stream, bytes.Repeat([]byte{0xff}, 1000)...)), 64)
	raw, err := r.Peek(len(stream))
	if err != nil {
		t.Fatal(err)
	}
	f, err := ReadFrame(r, testMaxFrame)
	if err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		if _, err := r.ReadByte(); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(raw, bytes.Repeat([]byte{0xff}, len(raw))) {
		t.Fatalf("the reader's buffer was not used again, so this test shows nothing: %x", raw)
	}
	if diff := cmp.Diff(connect, f.Command, protocmp.Transform()); diff != "" {
		t.Errorf("command changed with the buffer (-want +got):\n%s", diff)
	}
}

func TestReadFrameRefuses(t *testing.T) {
	whole := AppendFrame(nil, pingCommand())
	with := func(at int, v uint32) []byte {
		b := bytes.Clone(whole)
		binary.BigEndian.PutUint32(b[at:], v)
		return b
	}
	noBody := AppendFrame(nil, &pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_SEND.Enum()})
	tests := []struct {
		name  string
		input []byte
		want  error
		text  string
	}{
		{"empty", nil, io.EOF, "EOF"},
		{"cut-in-length", whole[:3], io.ErrUnexpectedEOF, "length fields"},
		{"cut-in-command", whole[:len(whole)-1], io.ErrUnexpectedEOF, "in its command"},
		{"cut-in-payload", append(with(0, 4+4+10), 1, 2), io.ErrUnexpectedEOF, "in its payload"},
		{"no-room-for-command-length", with(0, 3), ErrMalformed, "frame of 3"},
		{"command-longer-than-frame", with(4, 100), ErrMalformed, "command of 100 bytes"},
		{"command-length-overflows", with(4, 0xffffffff), ErrMalformed, "4294967295"},
		{"command-empty", with(4, 0)[:8], ErrMalformed, "required field type"},
		{"not-protobuf", append(with(0, 5)[:4], 0, 0, 0, 1, 0xff), ErrMalformed, "command of 1 bytes"},
		{"no-body", noBody, ErrMalformed, "SEND, but its body is missing"},
		{"http", []byte("GET / HTTP/1.1\r\n\r\n"), nil, "at most 1048576 are allowed"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := ReadFrame(reader(tt.input), testMaxFrame)
			if err == nil || !strings.Contains(err.Error(), tt.text) || tt.want != nil && !errors.Is(err, tt.want) {
				t.Errorf("ReadFrame = %v, want %v with %q", err, tt.want, tt.text)
			}
		})
	}
}

func TestReadFrameLimit(t *testing.T) {
	payload := make([]byte, 100)
	stream := append(AppendPayloadHeader(nil, sendCommand(), len(payload)), payload...)
	size := len(stream) - 4
	if _, err := ReadFrame(reader(stream), size); err != nil {
		t.Errorf("frame of exactly the limit: %v", err)
	}
	_, err := ReadFrame(reader(stream), size-1)
	var large *FrameTooLargeError
	if !errors.As(err, &large) || large.Size != int64(size) || large.Max != size-1 {
		t.Errorf("frame one byte over the limit: %v, want FrameTooLargeError{%d, %d}", err, size, size-1)
	}
}

// TestEveryCommandHasItsBody builds each command of the protocol through its
// descriptor: with its body it must be accepted, without it refused.
func TestEveryCommandHasItsBody(t *testing.T) {
	base := (&pulsarpb.BaseCommand{}).ProtoReflect().Descriptor()
	types := base.Enums().ByName("Type").Values()
	if types.Len() < 60 {
		t.Fatalf("only %d command types", types.Len())
	}
	for i := range types.Len() {
		value := types.Get(i)
		field := base.Fields().ByNumber(protoreflect.FieldNumber(value.Number()))
		if field == nil || field.Message() == nil {
			t.Errorf("%s = %d has no field of that number", value.Name(), value.Number())
			continue
		}
		c := &pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_Type(value.Number()).Enum()}
		quiet := value.Name() == "PING" || value.Name() == "PONG"
		if got := hasBody(c); got != quiet {
			t.Errorf("%s without body: hasBody = %v, want %v", value.Name(), got, quiet)
		}
		c.ProtoReflect().Set(field, c.ProtoReflect().NewField(field))
		if !hasBody(c) {
			t.Errorf("%s with body: hasBody = false", value.Name())
		}
	}
	if !hasBody(&pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_Type(9999).Enum()}) {
		t.Error("a command of a later protocol was refused")
	}
}

func FuzzReadFrame(f *testing.F) {
	payload := BuildPayload(testMetadata(), []byte("hello"))
	f.Add(AppendFrame(nil, pingCommand()))
	f.Add(append(AppendPayloadHeader(nil, sendCommand(), len(payload)), payload...))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte{0, 0, 0, 4, 0, 0, 0, 0})
	f.Add(bytes.Repeat([]byte{0x3a, 0x05}, 100))
	f.Fuzz(func(t *testing.T, b []byte) {
		const limit = 4 << 10
		frame, err := ReadFrame(reader(b), limit)
		if err != nil {
			return
		}
		if len(frame.Payload) > limit {
			t.Fatalf("payload of %d bytes through a limit of %d", len(frame.Payload), limit)
		}
		again := append(AppendPayloadHeader(nil, frame.Command, len(frame.Payload)), frame.Payload...)
		second, err := ReadFrame(reader(again), 2*limit) // unknown order of fields may change the length a little
		if err != nil {
			t.Fatalf("what was read does not read back: %v", err)
		}
		if !bytes.Equal(second.Payload, frame.Payload) || !second.Command.ProtoReflect().IsValid() {
			t.Fatalf("read back differently")
		}
		if !bytes.Equal(AppendFrame(nil, second.Command), AppendFrame(nil, frame.Command)) {
			t.Fatalf("command reads back differently:\n%v\n%v", frame.Command, second.Command)
		}
	})
}

func BenchmarkReadFrame(b *testing.B) {
	for _, size := range []int{100, 1 << 10, 64 << 10} {
		payload := BuildPayload(testMetadata(), make([]byte, size))
		stream := append(AppendPayloadHeader(nil, sendCommand(), len(payload)), payload...)
		b.Run("frame=SEND/size="+itoa(size), func(b *testing.B) {
			src := bytes.NewReader(nil)
			r := bufio.NewReaderSize(nil, 64<<10)
			b.ReportAllocs()
			b.SetBytes(int64(len(stream)))
			for b.Loop() {
				src.Reset(stream)
				r.Reset(src)
				if _, err := ReadFrame(r, testMaxFrame); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkAppendFrame(b *testing.B) {
	c := sendCommand()
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		buf = AppendPayloadHeader(buf[:0], c, 100)
	}
}
