package vfs_test

import (
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"github.com/magnetar-io/magnetar/internal/vfs"
)

// TestConformance holds for every file system, so that a test on Mem means
// something for OS.
func TestConformance(t *testing.T) {
	for _, tt := range []struct {
		name string
		fs   vfs.FS
		dir  string
	}{
		{"os", vfs.OS, t.TempDir()},
		{"mem", vfs.NewMem(), "/data"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(tt.dir, "a", "b")
			must(t, tt.fs.MkdirAll(dir))
			name := filepath.Join(dir, "1")
			if _, err := tt.fs.Open(name); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("Open of nothing: %v, want ErrNotExist", err)
			}
			f, err := tt.fs.Create(name)
			must(t, err)
			if _, err := tt.fs.Create(name); !errors.Is(err, fs.ErrExist) {
				t.Errorf("second Create: %v, want ErrExist", err)
			}
			write(t, f, 3, "hello")
			must(t, f.Sync())
			must(t, tt.fs.SyncDir(dir))
			if size, err := f.Size(); size != 8 || err != nil {
				t.Errorf("Size = %d, %v, want 8", size, err)
			}
			r, err := tt.fs.Open(name)
			must(t, err)
			if got := read(t, r, 10); got != "\x00\x00\x00hello" {
				t.Errorf("read %q", got)
			}
			if _, err := r.WriteAt([]byte("x"), 0); err == nil {
				t.Error("a file opened for reading took a write")
			}
			must(t, tt.fs.Remove(name))
			if got := read(t, r, 10); got != "\x00\x00\x00hello" {
				t.Errorf("after Remove an open handle reads %q", got)
			}
			names, err := tt.fs.List(dir)
			if err != nil || len(names) != 0 {
				t.Errorf("List = %v, %v, want nothing", names, err)
			}
			if free, err := tt.fs.Free(dir); err != nil || free <= 0 {
				t.Errorf("Free = %d, %v", free, err)
			}
			must(t, r.Close())
			must(t, f.Close())
		})
	}
}

func TestCrashKeepsWhatWasSynced(t *testing.T) {
	m := vfs.NewMem()
	must(t, m.MkdirAll("/d"))
	kept, err := m.Create("/d/kept")
	must(t, err)
	write(t, kept, 0, "synced")
	must(t, kept.Sync())
	must(t, m.SyncDir("/d"))
	write(t, kept, 6, " and not")
	unnamed, err := m.Create("/d/unnamed")
	must(t, err)
	write(t, unnamed, 0, "bytes without a name")
	must(t, unnamed.Sync())

	after := m.Crash(nil)
	if names, _ := after.List("/d"); !slices.Equal(names, []string{"kept"}) {
		t.Errorf("names after the crash: %v, want [kept]", names)
	}
	r, err := after.Open("/d/kept")
	must(t, err)
	if got := read(t, r, 100); got != "synced" {
		t.Errorf("after the crash %q, want %q", got, "synced")
	}
	write(t, kept, 0, "SYNCED")
	must(t, kept.Sync())
	if got := read(t, r, 100); got != "synced" {
		t.Errorf("a write after the crash shows up before it: %q", got)
	}
}

func TestCrashBringsBackAnUnsyncedRemoval(t *testing.T) {
	m := vfs.NewMem()
	must(t, m.MkdirAll("/d"))
	f, err := m.Create("/d/f")
	must(t, err)
	must(t, f.Sync())
	must(t, m.SyncDir("/d"))
	must(t, m.Remove("/d/f"))
	if names, _ := m.Crash(nil).List("/d"); len(names) != 1 {
		t.Errorf("after the crash: %v, want the file back", names)
	}
	must(t, m.SyncDir("/d"))
	if names, _ := m.Crash(nil).List("/d"); len(names) != 0 {
		t.Errorf("after SyncDir and the crash: %v, want nothing", names)
	}
}

func TestCrashMayKeepUnsyncedWrites(t *testing.T) {
	m := vfs.NewMem()
	must(t, m.MkdirAll("/d"))
	f, err := m.Create("/d/f")
	must(t, err)
	must(t, m.SyncDir("/d"))
	write(t, f, 0, "a")
	write(t, f, 1, "b")
	seen := map[string]bool{}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		r, err := m.Crash(rng).Open("/d/f")
		must(t, err)
		seen[read(t, r, 10)] = true
	}
	for _, want := range []string{"", "a", "\x00b", "ab"} {
		if !seen[want] {
			t.Errorf("no crash left %q; seen %v", want, seen)
		}
	}
}

func TestFaults(t *testing.T) {
	m := vfs.NewMem()
	must(t, m.MkdirAll("/d"))
	f, err := m.Create("/d/f")
	must(t, err)
	write(t, f, 0, "abcd")
	m.FailSync(2)
	must(t, m.SyncDir("/d"))
	if err := f.Sync(); !errors.Is(err, vfs.ErrInjected) {
		t.Errorf("second sync: %v, want ErrInjected", err)
	}
	r, err := m.Crash(nil).Open("/d/f")
	must(t, err)
	if got := read(t, r, 10); got != "" {
		t.Errorf("a failed sync kept %q", got)
	}
	m.FailWrite(1)
	if n, err := f.WriteAt([]byte("wxyz"), 0); n != 2 || !errors.Is(err, vfs.ErrInjected) {
		t.Errorf("WriteAt = %d, %v, want 2, ErrInjected", n, err)
	}
	m.SetFree(7)
	if free, _ := m.Free("/d"); free != 7 {
		t.Errorf("Free = %d, want 7", free)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, f vfs.File, offset int64, s string) {
	t.Helper()
	if _, err := f.WriteAt([]byte(s), offset); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, f vfs.File, limit int64) string {
	t.Helper()
	b, err := io.ReadAll(io.NewSectionReader(f, 0, limit))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
