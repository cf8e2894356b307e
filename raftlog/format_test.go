package raftlog

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/raft"
)

func testPointer() pointer {
	return pointer{index: 300, term: 7, applied: 298, configIndex: 5, config: raft.Configuration{Servers: []raft.Server{
		{Suffrage: raft.Voter, ID: "a@1", Address: "a@1/h:1"},
	}}}
}

func TestPointerGolden(t *testing.T) {
	p := testPointer()
	got := p.encode()
	const want = "4d47535001000000" + "000000000000012c" + "0000000000000007" + "000000000000012a" + "0000000000000005" +
		"0000002c" + "81a75365727665727391" + "83a741646472657373a76140312f683a31a24944a3614031a8537566667261676500"
	if h := hex.EncodeToString(got[:len(got)-4]); h != want {
		t.Errorf("pointer is\n%s, want\n%s", h, want)
	}
	again, err := readPointer(bytes.NewReader(got))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(p, again, cmp.AllowUnexported(pointer{})); diff != "" {
		t.Errorf("read back differently (-want +got):\n%s", diff)
	}
	for i := range got {
		bad := bytes.Clone(got)
		bad[i] ^= 0x40
		if _, err := readPointer(bytes.NewReader(bad)); err == nil && i != 5 && i != 6 && i != 7 {
			t.Errorf("a flipped bit in byte %d was not noticed", i)
		}
	}
}

func FuzzReadPointer(f *testing.F) {
	f.Add(testPointer().encode())
	f.Add([]byte("MGSP\x01\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, in []byte) {
		p, err := readPointer(bytes.NewReader(in))
		if err != nil {
			return
		}
		again, err := readPointer(bytes.NewReader(p.encode()))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(p, again, cmp.AllowUnexported(pointer{})); diff != "" {
			t.Errorf("read back differently:\n%s", diff)
		}
	})
}

func TestStreamFrame(t *testing.T) {
	for _, body := range []string{"", "x", strings.Repeat("state", 10_000)} {
		t.Run(strconv.Itoa(len(body)), func(t *testing.T) {
			r := newStreamReader(Stream{ReadCloser: io.NopCloser(strings.NewReader(body)), Size: int64(len(body)), Applied: 42})
			all, err := io.ReadAll(r)
			if err != nil || int64(len(all)) != r.size() {
				t.Fatalf("frame has %d bytes, %v, announced %d", len(all), err, r.size())
			}
			applied, err := parseStreamHead(all[:streamHead])
			if err != nil || applied != 42 {
				t.Fatalf("header says %d, %v", applied, err)
			}
			read := func(frame []byte) (string, error) {
				got, err := io.ReadAll(&bodyReader{r: bytes.NewReader(frame[streamHead:]), left: int64(len(body))})
				return string(got), err
			}
			if got, err := read(all); err != nil || got != body {
				t.Errorf("read %d bytes, %v", len(got), err)
			}
			bad := bytes.Clone(all)
			bad[len(bad)-1] ^= 1
			if _, err := read(bad); err == nil {
				t.Error("a wrong checksum was not noticed")
			}
			if _, err := read(all[:len(all)-streamTail-min(1, len(body))]); err == nil {
				t.Error("a short stream was not noticed")
			}
		})
	}
	short := newStreamReader(Stream{ReadCloser: io.NopCloser(strings.NewReader("abc")), Size: 5})
	if _, err := io.ReadAll(short); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a machine that yields less than its size: %v, want an error", err)
	}
}

func FuzzParseStreamHead(f *testing.F) {
	f.Add(encodeStreamHead(0))
	f.Add(encodeStreamHead(1 << 40))
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < streamHead {
			return
		}
		applied, err := parseStreamHead(in[:streamHead])
		if err == nil && in[5]|in[6]|in[7] == 0 && !bytes.Equal(encodeStreamHead(applied), in[:streamHead]) {
			t.Errorf("%x says %d, which is written differently", in[:streamHead], applied)
		}
	})
}

func TestIdentityGolden(t *testing.T) {
	r := identityRecord{Cluster: "prod", ClusterID: "c-1", Name: "bookie-1", Disk: "d-1", Groups: 3, Founder: true, Ready: true}
	dir := t.TempDir()
	if err := saveIdentity(dir, r); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(dir, identityFile))
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/identity.json")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("identity file changed (-want +got):\n%s", diff)
	}
	id, ok, err := OpenIdentity(dir)
	if err != nil || !ok || id != r.identity() {
		t.Errorf("OpenIdentity = %+v, %v, %v, want %+v", id, ok, err, r.identity())
	}
	for from, to := range map[string]string{`"version": 1`: `"version": 2`, "bookie-1": "bookie-2", "{": "", `"founder"`: `"founded"`} {
		if _, err := parseIdentity([]byte(strings.Replace(string(got), from, to, 1))); err == nil {
			t.Errorf("identity with %s in place of %s was accepted", to, from)
		}
	}
}

func FuzzParseIdentity(f *testing.F) {
	b, err := os.ReadFile("testdata/identity.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		r, err := parseIdentity(in)
		if err == nil && r.checksum() != r.Sum {
			t.Errorf("%q was accepted with a wrong checksum", in)
		}
	})
}

func TestFormat(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	id, err := Format(dir, "prod", "bookie-1", 3)
	if err != nil {
		t.Fatal(err)
	}
	if got, ok, err := OpenIdentity(dir); err != nil || !ok || got != id {
		t.Errorf("OpenIdentity = %+v, %v, %v, want %+v", got, ok, err, id)
	}
	tests := []struct {
		name          string
		dir           func(t *testing.T) string
		cluster, node string
		groups        int
		want          string
	}{
		{"twice", func(*testing.T) string { return dir }, "prod", "bookie-1", 3, "not empty"},
		{"files-in-it", func(t *testing.T) string {
			d := t.TempDir()
			os.WriteFile(filepath.Join(d, "photo.jpg"), nil, 0o644)
			return d
		}, "prod", "bookie-1", 3, "photo.jpg"},
		{"no-groups", (*testing.T).TempDir, "prod", "bookie-1", 0, "want 1 to"},
		{"bad-name", (*testing.T).TempDir, "prod", "bookie@1", 3, "bookie name"},
		{"no-cluster", (*testing.T).TempDir, "", "bookie-1", 3, "cluster name"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Format(tt.dir(t), tt.cluster, tt.node, tt.groups)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Format = %v, want a refusal with %q", err, tt.want)
			}
		})
	}
	lock, err := lockDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if _, err := lockDir(dir); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("a second lock = %v, want a refusal", err)
	}
}

func TestFormatAfterACrashInFormat(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, identityFile+".tmp"), []byte("{"), fileMode); err != nil {
		t.Fatal(err)
	}
	if _, err := Format(dir, "prod", "bookie-1", 3); err != nil {
		t.Error(err)
	}
}

func TestLogCacheMatchesModel(t *testing.T) {
	entry := func(i, term uint64) *raft.Log {
		return &raft.Log{Index: i, Term: term, Data: bytes.Repeat([]byte{byte(i)}, 100)}
	}
	size := logBytes(entry(1, 1))
	c := &logCache{limit: 10 * size}
	has := func(i uint64) (l raft.Log, ok bool) { ok = c.get(i, &l); return }
	var logs []*raft.Log
	for i := uint64(1); i <= 30; i++ {
		logs = append(logs, entry(i, 1))
	}
	c.add(logs)
	if c.bytes > c.limit {
		t.Errorf("cache holds %d bytes, the limit is %d", c.bytes, c.limit)
	}
	for i := uint64(1); i <= 30; i++ {
		if l, ok := has(i); ok != (i > 20) || ok && l.Index != i {
			t.Errorf("entry %d: cached %v, index %d", i, ok, l.Index)
		}
	}
	c.add([]*raft.Log{entry(28, 2)}) // a conflicting tail is replaced
	if l, ok := has(28); !ok || l.Term != 2 {
		t.Errorf("entry 28 is of term %d, cached %v, want the new one", l.Term, ok)
	}
	if _, ok := has(29); ok {
		t.Error("entry 29 of the old tail is still cached")
	}
	c.remove(1, 25)
	if _, ok := has(25); ok {
		t.Error("entry 25 was removed and is still cached")
	}
	if _, ok := has(26); !ok {
		t.Error("entry 26 was not removed and is gone")
	}
	c.remove(27, 28)
	if _, ok := has(27); ok {
		t.Error("entry 27 was removed and is still cached")
	}
	c.add([]*raft.Log{entry(100, 3)}) // a gap
	if _, ok := has(26); ok {
		t.Error("entry 26 is cached beside a gap")
	}
	if _, ok := has(100); !ok {
		t.Error("entry 100 is not cached")
	}
	if c.bytes != size {
		t.Errorf("cache counts %d bytes, holds %d", c.bytes, size)
	}
}
