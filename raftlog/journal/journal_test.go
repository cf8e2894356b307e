package journal

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"go.uber.org/goleak"

	"github.com/magnetar-io/magnetar/internal/vfs"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T, fsys vfs.FS, segment int64) *Journal {
	t.Helper()
	j, err := Open("j", Options{FS: fsys, SegmentBytes: segment, MaxSegments: 3})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	return j
}

func logs(from, to, term uint64) []*raft.Log {
	var all []*raft.Log
	for i := from; i <= to; i++ {
		all = append(all, &raft.Log{Index: i, Term: term, Data: fmt.Appendf(nil, "entry %d of term %d", i, term)})
	}
	return all
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func segmentPath(n uint32) string { return filepath.Join("j", fmt.Sprintf("%016d.segment", n)) }

// TestTornOrDamaged flips bytes and says how opening judges them.
func TestTornOrDamaged(t *testing.T) {
	// The last frame of three, and where each begins, without an empty one behind.
	build := func(t *testing.T, idle bool) (*vfs.Mem, []int64) {
		mem := vfs.NewMem()
		j, err := Open("j", Options{FS: mem, SegmentBytes: 8 << 10, MaxSegments: 3})
		must(t, err)
		var at []int64
		for i := uint64(1); i <= 3; i++ {
			must(t, j.Group(1).StoreLogs(logs(i, i, 1)))
			at = append(at, j.segment(1).end)
		}
		left := mem.Crash(nil)
		if idle {
			must(t, j.Close())
			left = mem.Crash(nil)
		} else {
			_ = j.Close()
		}
		return left, append([]int64{headerBytes}, at...)
	}
	for _, tt := range []struct {
		name   string
		idle   bool
		frame  int   // which frame
		offset int64 // in it
		last   uint64
		damage bool
	}{
		{"header-of-the-last-frame-unmarked", false, 2, 3, 2, false},
		{"body-of-the-last-frame-unmarked", false, 2, frameHeaderBytes + recordBytes + 1, 2, false},
		{"header-of-the-last-frame-marked", true, 2, 3, 0, true},
		{"body-of-the-last-frame-marked", true, 2, frameHeaderBytes + recordBytes + 1, 0, true},
		{"record-generation-marked", true, 2, frameHeaderBytes + 4, 0, true},
		{"header-of-an-inner-frame", false, 1, 0, 0, true},
		{"length-of-an-inner-frame", false, 1, 24, 0, true},
		{"body-of-an-inner-frame", false, 1, frameHeaderBytes + 20, 0, true},
		{"empty-frame-itself", true, 3, 8, 3, false},
		{"segment-header", true, 0, -headerBytes + 20, 0, true},
		{"behind-everything", true, 3, 500, 3, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mem, at := build(t, tt.idle)
			offset := at[tt.frame] + tt.offset
			must(t, mem.Damage(segmentPath(1), offset))
			j, err := Open("j", Options{FS: mem, SegmentBytes: 8 << 10, MaxSegments: 3})
			var damage *DamageError
			if tt.damage {
				want := at[tt.frame]
				if tt.offset < 0 {
					want = 0
				}
				if !errors.As(err, &damage) || damage.Offset != want || damage.Path != segmentPath(1) {
					t.Fatalf("Open = %v, want damage at %d", err, want)
				}
				return
			}
			must(t, err)
			defer j.Close()
			if got := j.Group(1).bounds(); got != (span{1, tt.last}) {
				t.Errorf("log holds %v, want 1 to %d", got, tt.last)
			}
			must(t, j.Group(1).StoreLogs(logs(tt.last+1, tt.last+2, 2)))
		})
	}
}

func TestFailedWriteOrSyncEndsTheJournal(t *testing.T) {
	for _, tt := range []struct {
		name string
		arm  func(*vfs.Mem)
	}{
		{"write", func(m *vfs.Mem) { m.FailWrite(1) }},
		{"sync", func(m *vfs.Mem) { m.FailSync(1) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mem, told := vfs.NewMem(), 0
			j, err := Open("j", Options{FS: mem, SegmentBytes: 8 << 10, Failed: func(error) { told++ }})
			must(t, err)
			must(t, j.Group(1).StoreLogs(logs(1, 1, 1)))
			tt.arm(mem)
			before := mem.Syncs()
			for range 2 {
				if err := j.Group(1).StoreLogs(logs(2, 2, 1)); !errors.Is(err, ErrFailed) || !errors.Is(err, vfs.ErrInjected) {
					t.Fatalf("StoreLogs = %v, want ErrFailed", err)
				}
			}
			if got := j.Group(1).bounds(); got != (span{1, 1}) {
				t.Errorf("log holds %v after the failure, want 1 to 1", got)
			}
			if err := j.Close(); !errors.Is(err, ErrFailed) {
				t.Errorf("Close = %v, want ErrFailed", err)
			}
			if n := mem.Syncs() - before; n > 1 {
				t.Errorf("%d syncs after the failure, want no other try", n)
			}
			if told != 1 {
				t.Errorf("Failed was called %d times, want once", told)
			}
			j = open(t, mem.Crash(nil), 8<<10)
			if got := j.Group(1).bounds(); got != (span{1, 1}) {
				t.Errorf("log holds %v after a crash, want 1 to 1", got)
			}
		})
	}
}

func TestFullDisk(t *testing.T) {
	mem := vfs.NewMem()
	j, err := Open("j", Options{FS: mem, SegmentBytes: 8 << 10})
	must(t, err)
	mem.SetFree(1000)
	n := uint64(0)
	for err == nil {
		n++
		err = j.Group(1).StoreLogs(logs(n, n, 1))
	}
	if !errors.Is(err, ErrFailed) || !strings.Contains(err.Error(), "no space left") {
		t.Fatalf("StoreLogs = %v, want a full disk", err)
	}
	if err := j.Group(1).GetLog(1, new(raft.Log)); err != nil {
		t.Errorf("reading on a full disk: %v", err)
	}
	_ = j.Close()
	left := mem.Crash(nil)
	left.SetFree(1 << 20)
	j = open(t, left, 8<<10)
	if got := j.Group(1).bounds(); got != (span{1, n - 1}) {
		t.Errorf("log holds %v, want 1 to %d", got, n-1)
	}
	must(t, j.Group(1).StoreLogs(logs(n, n, 1)))
}

// A quiet group does not keep old segments for ever.
func TestQuietGroupIsRelocated(t *testing.T) {
	mem := vfs.NewMem()
	j := open(t, mem, 8<<10)
	must(t, j.Group(1).StoreLogs(logs(1, 5, 1)))
	busy := j.Group(2)
	for i := uint64(1); i <= 1000; i++ {
		must(t, busy.StoreLogs(logs(i, i, 1)))
		if i%10 == 0 {
			must(t, busy.DeleteRange(1, i-5))
		}
	}
	must(t, j.Close())
	names, err := mem.List("j")
	must(t, err)
	if len(names) > 4+maxSpares {
		t.Errorf("%d files are left: %v", len(names), names)
	}
	if j.first == 1 {
		t.Error("the first segment is still there; nothing was relocated")
	}
	j = open(t, mem.Crash(nil), 8<<10)
	if got := j.Group(1).bounds(); got != (span{1, 5}) {
		t.Errorf("the quiet log holds %v, want 1 to 5", got)
	}
	for _, want := range logs(1, 5, 1) {
		var got raft.Log
		must(t, j.Group(1).GetLog(want.Index, &got))
		must(t, same(&got, want))
	}
}

// slowFS takes a moment for each sync, as a disk does.
type slowFS struct{ *vfs.Mem }

type slowFile struct{ vfs.File }

func (f slowFile) Sync() error {
	time.Sleep(time.Millisecond)
	return f.File.Sync()
}

func (f slowFS) Create(name string) (vfs.File, error) {
	file, err := f.Mem.Create(name)
	return slowFile{file}, err
}

func TestOneSyncServesAllGroupsThatWait(t *testing.T) {
	mem := vfs.NewMem()
	j := open(t, slowFS{mem}, 1<<20)
	before := mem.Syncs()
	var all sync.WaitGroup
	for g := range Group(8) {
		all.Go(func() {
			for i := uint64(1); i <= 50; i++ {
				if err := j.Group(g).StoreLogs(logs(i, i, 1)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if n := mem.Syncs() - before; n > 150 {
		t.Errorf("%d syncs for 400 appends of 8 groups", n)
	}
}

func TestSealedSegmentIsNotScanned(t *testing.T) {
	mem := vfs.NewMem()
	open := func(t *testing.T, fsys vfs.FS, segment int64) *Journal {
		t.Helper()
		j, err := Open("j", Options{FS: fsys, SegmentBytes: segment, MaxSegments: 100})
		must(t, err)
		t.Cleanup(func() { _ = j.Close() })
		return j
	}
	j := open(t, mem, 8<<10)
	for i := uint64(1); i <= 200; i++ {
		must(t, j.Group(1).StoreLogs(logs(i, i, 1)))
	}
	must(t, j.Close())
	must(t, mem.Damage(segmentPath(1), headerBytes+frameHeaderBytes+recordBytes+2)) // in entry 1
	j = open(t, mem, 8<<10)
	var damage *DamageError
	if err := j.Group(1).GetLog(1, new(raft.Log)); !errors.As(err, &damage) {
		t.Errorf("GetLog of a damaged entry = %v, want damage", err)
	}
	must(t, j.Group(1).GetLog(2, new(raft.Log)))
	must(t, j.Close())

	must(t, mem.Damage(segmentPath(2), 8<<10-10)) // a footer can be made again from frames that are whole
	j = open(t, mem, 8<<10)
	if got := j.Group(1).bounds(); got != (span{1, 200}) {
		t.Errorf("log holds %v, want 1 to 200", got)
	}
	must(t, j.Close())

	must(t, mem.Damage(segmentPath(1), 8<<10-10)) // but not from these
	if _, err := Open("j", Options{FS: mem, SegmentBytes: 8 << 10}); !errors.As(err, &damage) {
		t.Errorf("Open = %v, want damage", err)
	}
}

func TestCommitIndex(t *testing.T) {
	mem := vfs.NewMem()
	j := open(t, mem, 8<<10)
	l := j.Group(1)
	must(t, l.StoreLogs(logs(1, 5, 1)))
	must(t, l.StageCommitIndex(4))
	must(t, j.Close())
	j = open(t, mem, 8<<10)
	l = j.Group(1)
	if c, err := l.GetCommitIndex(); c != 0 || err != nil {
		t.Errorf("commit index is %d, %v before anything stored it, want 0", c, err)
	}
	must(t, l.StageCommitIndex(99))
	must(t, l.StoreLogs(logs(6, 6, 1)))
	must(t, j.Close())
	j = open(t, mem, 8<<10)
	if c, err := j.Group(1).GetCommitIndex(); c != 6 || err != nil {
		t.Errorf("commit index is %d, %v, want the last index, 6", c, err)
	}
}

// TestGolden holds the format still. After a change that is meant, run with
// -args -rewrite.
func TestGolden(t *testing.T) {
	h := header{number: 7, generation: 0x1122334455667788, size: 4096, prevEnd: 640}
	rec := entryRecord(3, &raft.Log{Index: 9, Term: 2, Type: raft.LogCommand, Data: []byte("data"), Extensions: []byte("ext"), AppendedAt: time.Unix(1700000000, 5)})
	frame := make([]byte, frameHeaderBytes)
	for _, r := range []record{rec, {kind: kindTruncate, group: 3, index: 12}, {kind: kindCommit, group: 4, index: 8}} {
		at := len(frame)
		frame = r.append(frame)
		stamp(frame[at:], h.generation)
	}
	fh := frameHeader{h.generation, 7, uint32(len(frame) - frameHeaderBytes), 3, 128}
	fh.put(frame)
	ops := []op{{kind: kindEntry, group: 3, index: 9, term: 2, at: []location{{112, 55}}}, {kind: kindTruncate, group: 3, index: 12}}
	footer := encodeFooter(ops)
	tr := trailer{h.generation, 7, 300, uint64(len(footer)), 2, sum(footer)}
	for name, b := range map[string][]byte{"header": h.encode(), "frame": frame, "footer": footer, "trailer": tr.encode()} {
		path := filepath.Join("testdata", name+".golden")
		if *rewrite {
			must(t, os.MkdirAll("testdata", 0o750))
			must(t, os.WriteFile(path, b, 0o600))
		}
		want, err := os.ReadFile(path)
		must(t, err)
		if !bytes.Equal(b, want) {
			t.Errorf("%s is %x, want %x", name, b, want)
		}
	}
	if got, err := parseHeader(h.encode()); got != h || err != nil {
		t.Errorf("parseHeader = %+v, %v, want %+v", got, err, h)
	}
	if got, err := parseFrameHeader(frame, h.generation, 7); got != fh || err != nil {
		t.Errorf("parseFrameHeader = %+v, %v, want %+v", got, err, fh)
	}
	if records, err := parseFrame(fh, frame[frameHeaderBytes:]); err != nil || len(records) != 3 {
		t.Errorf("parseFrame = %d records, %v, want 3", len(records), err)
	}
	if got, err := parseFooter(footer, 2, 300); err != nil || fmt.Sprint(got) != fmt.Sprint(ops) {
		t.Errorf("parseFooter = %v, %v, want %v", got, err, ops)
	}
}

// FuzzOpen gives recovery a segment with arbitrary frames behind a sound header:
// it must neither panic nor hang.
func FuzzOpen(f *testing.F) {
	r := record{kind: kindEntry, group: 1, index: 1, term: 1, data: []byte("x")}
	body := r.append(nil)
	stamp(body, 5)
	frame := make([]byte, frameHeaderBytes)
	frameHeader{5, 1, uint32(len(body)), 1, headerBytes}.put(frame)
	f.Add(append(frame, body...), false)
	f.Add(encodeFooter([]op{{kind: kindReset}}), true)
	f.Fuzz(func(t *testing.T, b []byte, sealed bool) {
		if len(b) > 2<<10 {
			return
		}
		mem := vfs.NewMem()
		must(t, mem.MkdirAll("j"))
		file, err := mem.Create(segmentPath(1))
		must(t, err)
		must(t, file.Preallocate(4<<10))
		must(t, writeFull(file, header{number: 1, generation: 5, size: 4 << 10}.encode(), 0))
		must(t, writeFull(file, b, headerBytes))
		if sealed {
			tr := trailer{5, 1, headerBytes, uint64(len(b)), uint32(len(b) / footerOpBytes), sum(b)}
			must(t, writeFull(file, tr.encode(), 4<<10-trailerBytes))
		}
		j, err := Open("j", Options{FS: mem, SegmentBytes: 4 << 10})
		if err != nil {
			return
		}
		must(t, j.Close())
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(frameMagic))
	rec := record{kind: kindEntry, data: []byte("x")}
	f.Add(rec.append(nil))
	f.Fuzz(func(_ *testing.T, b []byte) {
		_, _ = parseRecord(b)
		_, _ = parseFooter(b, 1, 1<<20)
		_, _ = parseFrame(frameHeader{records: 1}, b)
		_, _ = parseHeader(b)
	})
}

// Readers, appends and cuts of many groups beside each other, for -race.
func TestConcurrentUse(t *testing.T) {
	j := open(t, vfs.NewMem(), 16<<10)
	var all sync.WaitGroup
	for g := range Group(4) {
		l := j.Group(g)
		stop := make(chan struct{})
		all.Go(func() {
			defer close(stop)
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			for next := uint64(1); next < 400; next++ {
				if err := l.StoreLogs(randomLogs(rng, next, 1, 1)); err != nil {
					t.Error(err)
				}
				if next%20 == 0 && g > 0 {
					if err := l.DeleteRange(1, next-10); err != nil {
						t.Error(err)
					}
				}
			}
		})
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				b := l.bounds()
				if b.first == 0 {
					continue
				}
				var got raft.Log
				if err := l.GetLog(b.first, &got); err != nil && !errors.Is(err, raft.ErrLogNotFound) {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
}

// What a killed process left in the page cache is read by the next one, which
// must not show it to anybody before it is on the disk.
func TestRecoveredTailIsSynced(t *testing.T) {
	mem := vfs.NewMem()
	j, err := Open("j", Options{FS: mem, SegmentBytes: 8 << 10})
	must(t, err)
	must(t, j.Group(1).StoreLogs(logs(1, 1, 1)))
	mem.FailSync(1)
	if err := j.Group(1).StoreLogs(logs(2, 2, 1)); !errors.Is(err, ErrFailed) {
		t.Fatalf("StoreLogs = %v, want ErrFailed", err)
	}
	_ = j.Close()
	j = open(t, mem, 8<<10) // the process was killed, the power stayed
	if got := j.Group(1).bounds(); got != (span{1, 2}) {
		t.Fatalf("log holds %v, want 1 to 2", got)
	}
	j = open(t, mem.Crash(nil), 8<<10)
	if got := j.Group(1).bounds(); got != (span{1, 2}) {
		t.Errorf("log holds %v after the power went, want 1 to 2", got)
	}
}
