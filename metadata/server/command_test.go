package server

import (
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/magnetar-io/magnetar/metadata"
)

// examples holds one command of each kind; testdata/commands has their bytes.
func examples() []*Command {
	origin := Origin{Client: clientID(7), Sequence: 42, Resend: true, Known: 5}
	return []*Command{
		{Kind: KindPut, Origin: origin, Key: "/a", Value: []byte("one"), If: metadata.AnyVersion, Lease: 3},
		{Kind: KindSequential, Origin: origin, Key: "/ledgers/", Value: []byte("owner")},
		{Kind: KindDelete, Origin: Origin{Client: clientID(7), Sequence: 43}, Key: "/a", If: 9},
		{Kind: KindGrant, Origin: origin, TTL: 6 * time.Second},
		{Kind: KindRevoke, Origin: origin, Lease: 3},
		{Kind: KindExpire, Lease: 3, Revision: 8, Leader: 2},
		{Kind: KindLead},
	}
}

// TestCommandBytes keeps what is on disk readable: the bytes of version 1 never
// change. UPDATE_GOLDEN=1 writes the file anew after a version was added.
func TestCommandBytes(t *testing.T) {
	var lines []string
	for _, c := range examples() {
		lines = append(lines, hex.EncodeToString(c.Encode()))
	}
	const file = "testdata/commands"
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Fields(string(want)), lines); diff != "" {
		t.Errorf("command bytes changed: (-want +got)\n%s", diff)
	}
}

func TestCommandRoundTrip(t *testing.T) {
	for _, c := range examples() {
		got, err := DecodeCommand(c.Encode())
		if err != nil {
			t.Errorf("%v: %v", c, err)
			continue
		}
		if diff := cmp.Diff(c, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%v came back otherwise: (-want +got)\n%s", c, diff)
		}
	}
}

func TestCommandDamageIsSeen(t *testing.T) {
	for _, c := range examples() {
		b := c.Encode()
		for i := range b {
			bad := bytes.Clone(b)
			bad[i] ^= 0x10
			if _, err := DecodeCommand(bad); !errors.Is(err, errCommand) {
				t.Errorf("%v with byte %d changed: %v, want errCommand", c, i, err)
			}
		}
		for n := range b {
			if _, err := DecodeCommand(b[:n]); !errors.Is(err, errCommand) {
				t.Errorf("%v cut to %d bytes: %v, want errCommand", c, n, err)
			}
		}
	}
}

func FuzzDecodeCommand(f *testing.F) {
	for _, c := range examples() {
		f.Add(c.Encode())
	}
	f.Add([]byte{})
	f.Add(make([]byte, 39))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := DecodeCommand(sealed(b))
		if err != nil {
			return
		}
		again := c.Encode()
		if !bytes.Equal(again, sealed(b)) {
			t.Errorf("%x decodes to %+v, which encodes to %x", b, c, again)
		}
	})
}

// sealed gives bytes the checksum that they should have, so that fuzzing gets
// behind it.
func sealed(b []byte) []byte {
	if len(b) < 4 {
		return b
	}
	b = bytes.Clone(b[:len(b)-4])
	return appendSum(b)
}
