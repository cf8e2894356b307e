package handshake

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestHelloGolden(t *testing.T) {
	h := hello{
		self: Self{Cluster: "c", ClusterID: "", Node: "b@1"},
		to:   Target{Node: "a@2", Service: Raft, Group: 3},
	}
	var got bytes.Buffer
	if err := writeFrame(&got, kindHello, h.encode()); err != nil {
		t.Fatal(err)
	}
	// The bytes drawn in docs/formats/hello.md.
	want := []byte("MGNT\x01\x01\x00\x14" + "\x00\x01c" + "\x00\x00" + "\x00\x03b@1" + "\x00\x03a@2" + "\x01" + "\x00\x00\x00\x03" + "\x12\xb7\x20\x28")
	if diff := cmp.Diff(want, got.Bytes()); diff != "" {
		t.Errorf("frame changed (-want +got):\n%s", diff)
	}
	kind, body, err := readFrame(&got)
	if err != nil || kind != kindHello {
		t.Fatalf("readFrame = kind %d, %v", kind, err)
	}
	again, err := parseHello(body)
	if err != nil || again != h {
		t.Errorf("parsed %v, %v, want %v", again, err, h)
	}
}

func FuzzReadFrame(f *testing.F) {
	for _, h := range []hello{
		{Self{"c", "", "b@1"}, Target{"a@2", Raft, 3}},
		{Self{"cluster", "d9a0", "broker-1"}, Target{"", Storage, 0}},
	} {
		var b bytes.Buffer
		if err := writeFrame(&b, kindHello, h.encode()); err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes())
	}
	f.Add([]byte("GET / HTTP/1.1\r\n"))
	f.Add([]byte("MGNT\x01\x01\xff\xff"))
	f.Fuzz(func(t *testing.T, in []byte) {
		r := bytes.NewReader(in)
		kind, body, err := readFrame(r)
		if err != nil {
			return // rejecting is fine
		}
		if used := len(in) - r.Len(); used != headerBytes+len(body)+crcBytes {
			t.Errorf("read %d bytes for a frame of %d", used, headerBytes+len(body)+crcBytes)
		}
		if kind != kindHello {
			return
		}
		h, err := parseHello(body)
		if err != nil {
			return
		}
		if again := h.encode(); !bytes.Equal(again, body) {
			t.Errorf("%q parsed to %v, which writes %q", body, h, again)
		}
	})
}
