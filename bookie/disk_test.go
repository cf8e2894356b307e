package bookie

import (
	"errors"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	pebblevfs "github.com/cockroachdb/pebble/v2/vfs"

	"github.com/magnetar-io/magnetar/internal/vfs"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

const testGroup raftlog.GroupID = 1

// disk is a bookie's disk in memory with a store on it.
type disk struct {
	t       *testing.T
	fs      *vfs.Mem
	indexFS *pebblevfs.MemFS
	segment int64
	store   *Store
	m       *Machine

	mu    sync.Mutex
	fatal []error
}

func newDisk(t *testing.T, segmentBytes int64) *disk {
	d := &disk{t: t, fs: vfs.NewMem(), indexFS: pebblevfs.NewCrashableMem(), segment: segmentBytes}
	d.open()
	t.Cleanup(func() {
		if d.m != nil && d.store != nil {
			d.m.Close()
			d.store.Close()
		}
	})
	return d
}

func (d *disk) open() {
	d.t.Helper()
	var err error
	d.store, err = NewStore("/bookie", StoreConfig{
		SegmentBytes: d.segment, Log: slog.New(slog.DiscardHandler), FS: d.fs, IndexFS: d.indexFS,
		Fatal: func(err error) {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.fatal = append(d.fatal, err)
		},
	})
	if err != nil {
		d.t.Fatal(err)
	}
	if d.m, err = d.store.Machine(testGroup); err != nil {
		d.t.Fatal(err)
	}
}

// crash cuts the power and starts again. With a nil rng nothing unsynced
// survives.
func (d *disk) crash(rng *rand.Rand) {
	d.t.Helper()
	fs, percent := d.fs.Crash(rng), 0
	if rng != nil {
		percent = 50
	}
	indexFS := d.indexFS.CrashClone(pebblevfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rng})
	d.m.stopped = errors.New("power cut") // nothing of the old process reaches the new disk
	d.store.forget(testGroup)
	if err := d.store.Close(); err != nil {
		d.t.Fatal(err)
	}
	d.fs, d.indexFS = fs, indexFS
	d.open()
}

// restart closes and opens.
func (d *disk) restart() {
	d.t.Helper()
	must(d.t, d.m.Close())
	must(d.t, d.store.Close())
	d.open()
}

func (d *disk) fatals() []error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.fatal
}

// verify checks what must hold between commands: runs cover each ledger without
// hole, and every live byte is counted, by machine and by segment.
func (m *Machine) verify(t *testing.T) {
	t.Helper()
	ids := map[ledger.ID]bool{}
	must(t, eachLedger(m.store.index.db, m.group, func(id ledger.ID, _ facts) error {
		ids[id] = true
		return nil
	}))
	live := map[uint64]int64{}
	for id, c := range m.current {
		ids[id] = true
		for _, r := range c.dead {
			live[r.segment] += int64(r.length)
		}
		if !c.fresh {
			continue
		}
		must(t, eachRun(m.store.index.db, m.group, id, 0, func(r run) bool {
			live[r.segment] += int64(r.length) // goes with the next checkpoint
			return true
		}))
	}
	for id := range ids {
		f, ok, err := m.lookup(id)
		must(t, err)
		if !ok {
			continue
		}
		must(t, f.check())
		runs, err := m.runs(id, 0, f.last(), 1<<60)
		must(t, err)
		next := ledger.EntryID(0)
		for _, r := range runs {
			if r.first != next {
				t.Fatalf("ledger %d: run begins at %d, want %d: %v", id, r.first, next, runs)
			}
			next = r.end()
			live[r.segment] += int64(r.length)
		}
		if next != f.next {
			t.Fatalf("ledger %d: runs end at %d, facts at %d", id, next, f.next)
		}
	}
	for number, n := range m.live {
		if live[number] != n {
			t.Fatalf("segment %d: %d live bytes counted, %d found", number, n, live[number])
		}
		delete(live, number)
	}
	if len(live) > 0 {
		t.Fatalf("live bytes that nobody counts: %v", live)
	}
	for number, seg := range m.store.segments.all {
		if seg.live != m.live[number] || seg.pins != 0 {
			t.Fatalf("segment %d has %d live bytes and %d pins, its only group has %d", number, seg.live, seg.pins, m.live[number])
		}
		if seg.live == 0 && seg != m.store.segments.active {
			t.Fatalf("segment %d is dead and still there", number)
		}
	}
	names, err := m.store.fs.List("/bookie/segments")
	must(t, err)
	if len(names) != len(m.store.segments.all) {
		t.Fatalf("%d segments, files %v", len(m.store.segments.all), names)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// seeded returns a random source that a rerun can repeat.
func seeded(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	if s := os.Getenv("TEST_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("TEST_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// dirSyncs notes which folders were synced.
type dirSyncs struct {
	vfs.FS
	mu     sync.Mutex
	synced map[string]bool
}

func (f *dirSyncs) SyncDir(dir string) error {
	f.mu.Lock()
	f.synced[filepath.Clean(dir)] = true
	f.mu.Unlock()
	return f.FS.SyncDir(dir)
}

// A synced segment is worth nothing in a folder that a power cut takes away.
func TestSegmentsFolderSurvivesAPowerCut(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ledgers")
	fs := &dirSyncs{FS: vfs.OS, synced: map[string]bool{}}
	d := newDisk(t, 0)
	store, err := NewStore(dir, StoreConfig{Log: d.store.log, Fatal: func(error) {}, FS: fs})
	must(t, err)
	defer store.Close()
	if !fs.synced[dir] {
		t.Errorf("%s was not synced after the folder of segments was made in it", dir)
	}
}
