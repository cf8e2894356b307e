package bookie

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

var rewrite = flag.Bool("rewrite", false, "write testdata/*.golden anew; read the diff: an old file must stay readable")

func goldenOps() []op {
	return []op{
		{kind: opCreate, ledger: 7, epoch: 1, owner: "public/default/persistent/t"},
		{kind: opAppend, ledger: 7, epoch: 1, first: 0, frames: frame([]byte("one"), nil, []byte("three"))},
		{kind: opFence, ledger: 7, epoch: 1<<64 - 1},
		{kind: opClose, ledger: 1 << 40, epoch: 2},
		{kind: opDelete, ledger: 7},
	}
}

// TestFormatsAreStable compares encodings with those of the release that wrote
// the golden files.
func TestFormatsAreStable(t *testing.T) {
	r := record{segment: 3, group: 2, count: 2, index: 99, ledger: 7, first: 5, body: 22}
	head := make([]byte, recordHeaderBytes)
	r.put(head)
	f := facts{state: stateFenced, epoch: 3, next: 12, bytes: 3456, owner: "public/default/persistent/t"}
	for _, tt := range []struct {
		name  string
		bytes []byte
	}{
		{"command", appendCommand(nil, goldenOps())},
		{"record", append(head, frame([]byte("abc"), []byte("def"))...)},
		{"segment-header", segmentHeader(3)},
		{"facts", appendFacts(nil, f)},
		{"run", encodeRun(run{first: 5, count: 2, length: 78, segment: 3, offset: 4096})},
		{"stream-header", streamHeader{group: 2, applied: 99, ledgers: 1}.encode()},
		{"stream-section", appendSection(nil, 7, f)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			file := filepath.Join("testdata", tt.name+".golden")
			got := hex.Dump(tt.bytes)
			if *rewrite {
				must(t, os.MkdirAll("testdata", 0o755))
				must(t, os.WriteFile(file, []byte(got), 0o644))
			}
			want, err := os.ReadFile(file)
			must(t, err)
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tt.name, diff)
			}
		})
	}
}

func TestDecodeCommandRefuses(t *testing.T) {
	good := appendCommand(nil, goldenOps())
	newer := bytes.Clone(good)
	newer[0] = 2
	flipped := bytes.Clone(good)
	flipped[40] ^= 1
	for _, tt := range []struct {
		name, want string
		b          []byte
	}{
		{"empty", "too short", nil},
		{"newer", "command version 2", newer},
		{"flipped", "CRC32C", flipped},
		{"cut", "CRC32C", good[:len(good)-1]},
		{"no-operations", "0 operations", appendCommand(nil, nil)},
		{"unknown-kind", "kind 6", appendCommand(nil, []op{{kind: 6, ledger: 1, epoch: 1}})},
		{"append-of-nothing", "at least one", appendCommand(nil, []op{{kind: opAppend, ledger: 1, epoch: 1}})},
		{"no-epoch", "epoch 0", appendCommand(nil, []op{{kind: opFence, ledger: 1}})},
		{"no-ledger", "ledger id 0", appendCommand(nil, []op{{kind: opDelete}})},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := decodeCommand(tt.b, nil)
			if !errors.Is(err, errForeignCommand) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("decodeCommand = %v, want errForeignCommand with %q", err, tt.want)
			}
		})
	}
}

func FuzzDecodeCommand(f *testing.F) {
	f.Add(appendCommand(nil, goldenOps()))
	f.Add([]byte{})
	f.Add([]byte{1, 0, 0xff, 0xff, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		ops, err := decodeCommand(b, nil)
		if err != nil {
			// The checksum keeps most inputs out; look behind it, too.
			if len(b) >= commandHeaderBytes {
				decodeOp(b[commandHeaderBytes:])
			}
			return
		}
		if again := appendCommand(nil, ops); !bytes.Equal(again, b) {
			t.Errorf("%x reads back as %x", b, again)
		}
	})
}

func FuzzDecodeOp(f *testing.F) {
	for _, o := range goldenOps() {
		f.Add(appendCommand(nil, []op{o})[commandHeaderBytes:])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		o, rest, err := decodeOp(b)
		if err != nil {
			return
		}
		again := appendCommand(nil, []op{o})
		again = again[commandHeaderBytes : len(again)-commandSumBytes]
		if !bytes.Equal(again, b[:len(b)-len(rest)]) {
			t.Errorf("%x reads back as %x", b, again)
		}
	})
}

func FuzzParseRecord(f *testing.F) {
	frames := frame([]byte("abc"))
	b := make([]byte, recordHeaderBytes)
	record{segment: 1, group: 1, count: 1, index: 1, ledger: 1, body: uint32(len(frames))}.put(b)
	f.Add(append(b, frames...))
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		r, frames, rest, err := parseRecord(b)
		if err != nil {
			if !errors.Is(err, ledger.ErrDamaged) {
				t.Errorf("%v, want ErrDamaged", err)
			}
			return
		}
		if len(frames) != int(r.body) || recordHeaderBytes+len(frames)+len(rest) != len(b) {
			t.Errorf("%d bytes cut into %d and %d", len(b), len(frames), len(rest))
		}
	})
}

func FuzzParseFactsAndRun(f *testing.F) {
	f.Add(appendFacts(nil, facts{state: stateOpen, epoch: 1, owner: "x"}))
	f.Add(encodeRun(run{count: 1, length: 64, segment: 1, offset: 32}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if got, err := parseFacts(b); err == nil && !bytes.Equal(appendFacts(nil, got), b) {
			t.Errorf("facts %x read back as %x", b, appendFacts(nil, got))
		}
		if got, err := parseRun(0, b); err == nil && string(encodeRun(got)[4:]) != string(b[4:]) {
			t.Errorf("run %x reads back as %x", b, encodeRun(got))
		}
	})
}

// FuzzInstall feeds streams to a machine: whatever they say, it must not panic,
// must not allocate much, and must keep its state if it refuses one.
func FuzzInstall(f *testing.F) {
	seed := streamHeader{group: testGroup, applied: 9, ledgers: 1}.encode()
	seed = appendSection(seed, 7, facts{state: stateOpen, epoch: 1, next: 1, bytes: 3, owner: "x"})
	seed = append(seed, frame([]byte("abc"))...)
	f.Add(append(seed, streamEnd...))
	f.Add(streamHeader{group: testGroup, applied: 9, ledgers: 1 << 60}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		d := newDisk(t, 1<<20)
		err := d.m.Install(bytes.NewReader(b), 9)
		if err != nil && d.m.Applied() != 0 {
			t.Errorf("a refused stream left the machine at %d", d.m.Applied())
		}
		d.m.verify(t)
	})
}

func TestLimitsFitTogether(t *testing.T) {
	largest := []op{{kind: opAppend, ledger: 1, epoch: 1, frames: make([]byte, maxFramesBytes)}}
	if n := commandBytes(largest); n > raftlog.MaxCommandBytes {
		t.Errorf("a command with the largest entry has %d bytes, Raft takes %d", n, raftlog.MaxCommandBytes)
	}
	full := make([]op, maxOps)
	for i := range full {
		full[i] = op{kind: opCreate, ledger: 1, epoch: 1, owner: strings.Repeat("x", maxOwnerBytes)}
	}
	if n := commandBytes(full); n > raftlog.MaxCommandBytes {
		t.Errorf("a command full of creates has %d bytes, Raft takes %d", n, raftlog.MaxCommandBytes)
	}
	if bookiepb.BatchBytes > maxFramesBytes {
		t.Errorf("a batch of %d bytes is more than an append's %d", bookiepb.BatchBytes, maxFramesBytes)
	}
}
