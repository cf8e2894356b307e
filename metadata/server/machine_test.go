package server

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/raftlog"
)

func openMachine(t *testing.T, dir string) *Machine {
	t.Helper()
	m, err := NewMachine(dir, discard)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// put applies one put at the machine's next index.
func put(t *testing.T, m *Machine, key, value string) Result {
	t.Helper()
	c := Command{Kind: KindPut, Key: key, Value: []byte(value), If: metadata.AnyVersion}
	r, ok := m.Apply([]raftlog.Command{{Index: m.Applied() + 1, Term: 1, Data: c.Encode()}})[0].(Result)
	if !ok || r.Code != CodeOK {
		t.Fatalf("put %q: %+v", key, r)
	}
	return r
}

func wantKey(t *testing.T, m *Machine, key, want string) {
	t.Helper()
	if kv, ok := m.State().Get(key); string(kv.Value) != want || ok != (want != "") {
		t.Errorf("%q is %q (present: %v), want %q", key, kv.Value, ok, want)
	}
}

func TestCheckpointSurvivesRestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "metadata")
	m := openMachine(t, dir)
	if m.Applied() != 0 {
		t.Errorf("new machine applied %d", m.Applied())
	}
	put(t, m, "/a", "one")
	if err := m.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	put(t, m, "/a", "two") // in the log only
	again := openMachine(t, dir)
	wantKey(t, again, "/a", "one")
	if again.Applied() != 1 {
		t.Errorf("restarted machine applied %d, want 1", again.Applied())
	}
	put(t, again, "/a", "two")
	if !bytes.Equal(encoded(again.State()), encoded(m.State())) {
		t.Error("a restarted machine that applied the rest differs from one that was not restarted")
	}
	if err := errors.Join(again.Checkpoint(), again.Close()); err != nil {
		t.Fatal(err)
	}
	wantKey(t, openMachine(t, dir), "/a", "two")
}

// TestCrashWhileWriting leaves what a crash during a checkpoint may leave.
func TestCrashWhileWriting(t *testing.T) {
	dir := t.TempDir()
	m := openMachine(t, dir)
	put(t, m, "/a", "one")
	if err := m.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, tempFile), []byte("half a sta"), 0o600); err != nil {
		t.Fatal(err)
	}
	m = openMachine(t, dir)
	wantKey(t, m, "/a", "one")
	put(t, m, "/b", "two")
	if err := m.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	wantKey(t, openMachine(t, dir), "/b", "two")
}

// TestFailedCheckpointLeavesTheOldOne: the new state goes to a file of its own
// first, which cannot be made here.
func TestFailedCheckpointLeavesTheOldOne(t *testing.T) {
	dir := t.TempDir()
	m := openMachine(t, dir)
	put(t, m, "/a", "one")
	if err := m.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	put(t, m, "/a", "two")
	temp := filepath.Join(dir, tempFile)
	if err := os.Mkdir(temp, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := m.Checkpoint(); err == nil {
		t.Error("checkpoint without a place for its temporary file is no error")
	}
	wantKey(t, openMachine(t, dir), "/a", "one")
	if err := os.Remove(temp); err != nil {
		t.Fatal(err)
	}
	if err := m.Checkpoint(); err != nil { // not taken for done
		t.Fatal(err)
	}
	wantKey(t, openMachine(t, dir), "/a", "two")
}

func TestDamagedCheckpointIsRefused(t *testing.T) {
	dir := t.TempDir()
	m := openMachine(t, dir)
	for _, key := range []string{"/a", "/b", "/c"} {
		put(t, m, key, "value")
	}
	if err := m.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, stateFile)
	good, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 1
		if err := os.WriteFile(name, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := NewMachine(dir, discard); !errors.Is(err, errState) || !strings.Contains(err.Error(), name) {
			t.Errorf("byte %d changed: %v, want errState naming the file", i, err)
		}
	}
	for _, bad := range [][]byte{nil, good[:len(good)-1], append(bytes.Clone(good), 0)} {
		if err := os.WriteFile(name, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := NewMachine(dir, discard); !errors.Is(err, errState) {
			t.Errorf("%d bytes in place of %d: %v, want errState", len(bad), len(good), err)
		}
	}
}

// TestStateBytes reads a state of version 1 from a file that never changes.
func TestStateBytes(t *testing.T) {
	const file = "testdata/state-v1"
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(file, encoded(exampleState()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	s, err := decodeState(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(encoded(s), encoded(exampleState())) {
		t.Error("the state in the file is not the one it was written from")
	}
}

func TestStreamAndInstall(t *testing.T) {
	from, dir := openMachine(t, t.TempDir()), t.TempDir()
	for i := range 300 { // several chunks
		put(t, from, strings.Repeat("k", 1+i), strings.Repeat("v", 1000))
	}
	stream, err := from.Stream()
	if err != nil {
		t.Fatal(err)
	}
	put(t, from, "/later", "not in the stream")
	b, err := io.ReadAll(iotest.OneByteReader(stream))
	if err != nil || int64(len(b)) != stream.Size || stream.Applied != 300 {
		t.Fatalf("stream of %d bytes at index %d, %v; announced %d bytes", len(b), stream.Applied, err, stream.Size)
	}
	if err := stream.Close(); err != nil {
		t.Fatal(err)
	}

	to := openMachine(t, dir)
	put(t, to, "/old", "to be replaced")
	for _, r := range []io.Reader{
		bytes.NewReader(b[:len(b)-1]),
		io.MultiReader(bytes.NewReader(b), iotest.ErrReader(io.ErrUnexpectedEOF)),
		strings.NewReader("something else"),
	} {
		if err := to.Install(r, stream.Applied); err == nil {
			t.Error("a broken stream was installed")
		}
		wantKey(t, to, "/old", "to be replaced")
	}
	if err := to.Install(bytes.NewReader(b), stream.Applied); err != nil {
		t.Fatal(err)
	}
	for _, m := range []*Machine{to, openMachine(t, dir)} { // at once, and after a crash
		wantKey(t, m, "/old", "")
		wantKey(t, m, "/later", "")
		if !bytes.Equal(encoded(m.State()), b) || m.Applied() != stream.Applied {
			t.Error("the installed state differs from the stream")
		}
	}
}

func TestStreamClosedEarlyLeavesNothing(t *testing.T) {
	m := NewVolatileMachine(discard)
	put(t, m, "/a", "one")
	for _, read := range []int{0, 5} {
		stream, err := m.Stream()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(stream, make([]byte, read)); err != nil {
			t.Fatal(err)
		}
		if err := stream.Close(); err != nil { // goleak watches
			t.Fatal(err)
		}
	}
}

func TestUnknownCommandStopsTheGroup(t *testing.T) {
	newer := (&Command{Kind: KindGrant, TTL: metadata.MinTTL}).Encode()
	newer[0] = commandVersion + 1
	unknown := (&Command{Kind: KindGrant, TTL: metadata.MinTTL}).Encode()
	unknown[1] = 99
	unknown = sealed(unknown)
	for _, data := range [][]byte{newer, unknown, nil} {
		m := NewVolatileMachine(discard)
		func() {
			defer func() {
				if r := recover(); r == nil || !strings.Contains(r.(string), "log index 7") {
					t.Errorf("applying %x: recovered %v, want a panic naming index 7", data, r)
				}
			}()
			m.Apply([]raftlog.Command{{Index: 7, Data: data}})
		}()
		if m.Applied() != 0 {
			t.Errorf("after an unknown command applied is %d", m.Applied())
		}
	}
}
