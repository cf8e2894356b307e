package bookie

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/magnetar-io/magnetar/internal/vfs"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

// do applies one command of ops at the next index and returns its outcomes.
func (d *disk) do(ops ...op) []outcome {
	d.t.Helper()
	c := raftlog.Command{Index: d.m.Applied() + 1, Term: 1, Data: appendCommand(nil, ops)}
	switch r := d.m.Apply([]raftlog.Command{c})[0].(type) {
	case []outcome:
		return r
	case error:
		return []outcome{{err: r}}
	default:
		d.t.Fatalf("answer %T", r)
		return nil
	}
}

func (d *disk) create(id ledger.ID) {
	d.t.Helper()
	must(d.t, d.do(op{kind: opCreate, ledger: id, epoch: 1, owner: "a topic"})[0].err)
}

// fill appends n entries of size bytes each, one per command.
func (d *disk) fill(id ledger.ID, n, size int) {
	d.t.Helper()
	f, _, err := d.m.lookup(id)
	must(d.t, err)
	for i := range n {
		at := f.next + ledger.EntryID(i)
		must(d.t, d.do(op{kind: opAppend, ledger: id, epoch: 1, first: at, frames: frame(pattern(id, at, size))})[0].err)
	}
}

func pattern(id ledger.ID, at ledger.EntryID, size int) []byte {
	return bytes.Repeat([]byte{byte(id), byte(at)}, size/2)
}

func TestDeleteFreesSegments(t *testing.T) {
	d := newDisk(t, 4<<10)
	d.create(1)
	d.create(2)
	d.fill(1, 20, 1000)
	d.fill(2, 1, 1000)
	must(t, d.m.Checkpoint())
	before := len(d.store.segments.list())
	if before < 5 {
		t.Fatalf("%d segments, want at least 5 for 20 KiB in 4 KiB segments", before)
	}
	must(t, d.do(op{kind: opDelete, ledger: 1})[0].err)
	if n := len(d.store.segments.list()); n != before {
		t.Errorf("%d segments before the deletion is durable, want %d", n, before)
	}
	must(t, d.m.Checkpoint())
	if n := len(d.store.segments.list()); n > 2 {
		t.Errorf("%d segments after the deletion, want the active one and that of ledger 2", n)
	}
	d.m.verify(t)
	d.crash(nil)
	if got, err := readAll(d.m, 2, 0, 0, 1); err != nil || !bytes.Equal(got[0], pattern(2, 0, 1000)) {
		t.Errorf("the other ledger: %v", err)
	}
}

func TestStreamPinsSegments(t *testing.T) {
	d := newDisk(t, 4<<10)
	d.create(1)
	d.fill(1, 20, 1000)
	s, err := d.m.Stream()
	must(t, err)
	must(t, d.do(op{kind: opDelete, ledger: 1})[0].err)
	must(t, d.m.Checkpoint())
	pinned := len(d.store.segments.list())
	if pinned < 5 {
		t.Fatalf("%d segments while a stream reads 20 KiB", pinned)
	}
	b, err := io.ReadAll(s)
	must(t, err)
	if int64(len(b)) != s.Size {
		t.Errorf("stream of %d bytes, promised %d", len(b), s.Size)
	}
	must(t, s.Close())
	if n := len(d.store.segments.list()); n > 1 {
		t.Errorf("%d segments after the stream, want the active one", n)
	}
	to := newDisk(t, 4<<10)
	must(t, to.m.Install(bytes.NewReader(b), s.Applied))
	got, err := readAll(to.m, 1, 0, 19, 1<<20)
	if err != nil || len(got) != 20 || !bytes.Equal(got[19], pattern(1, 19, 1000)) {
		t.Errorf("the copy has %d entries, %v", len(got), err)
	}
}

func TestInstallIsAllOrNothing(t *testing.T) {
	from := newDisk(t, 4<<10)
	from.create(1)
	from.fill(1, 10, 1000)
	s, err := from.m.Stream()
	must(t, err)
	good, err := io.ReadAll(s)
	must(t, err)
	must(t, s.Close())

	flipped := bytes.Clone(good)
	flipped[len(flipped)-100] ^= 1
	for _, tt := range []struct {
		name string
		b    []byte
	}{
		{"cut", good[:len(good)-1]},
		{"half", good[:len(good)/2]},
		{"longer", append(bytes.Clone(good), 0)},
		{"flipped", flipped},
		{"empty", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newDisk(t, 4<<10)
			d.create(5)
			d.fill(5, 3, 100)
			if err := d.m.Install(bytes.NewReader(tt.b), s.Applied); err == nil {
				t.Fatal("a bad stream was installed")
			}
			d.m.verify(t)
			if got, err := readAll(d.m, 5, 0, 2, 1<<20); err != nil || len(got) != 3 {
				t.Errorf("the old state has %d entries, %v", len(got), err)
			}
			if n := len(d.store.segments.list()); n > 2 {
				t.Errorf("%d segments are left of it", n)
			}
			must(t, errors.Join(d.fatals()...))
		})
	}
}

func TestDamagedEntries(t *testing.T) {
	for _, tt := range []struct {
		name   string
		offset int64 // in the segment
	}{
		{"record-header", segmentHeaderBytes + 10},
		{"frame-length", segmentHeaderBytes + recordHeaderBytes},
		{"frame-checksum", segmentHeaderBytes + recordHeaderBytes + 4},
		{"data", segmentHeaderBytes + recordHeaderBytes + 50},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newDisk(t, 1<<20)
			d.create(1)
			d.fill(1, 3, 100)
			must(t, d.m.Checkpoint())
			must(t, d.fs.Damage(filepath.Join("/bookie/segments", fmt.Sprintf("%016d.segment", 1)), tt.offset))
			if _, err := readAll(d.m, 1, 0, 2, 1<<20); !errors.Is(err, ledger.ErrDamaged) || errors.Is(err, ledger.ErrNoSuchEntry) {
				t.Errorf("read = %v, want ErrDamaged", err)
			}
			if tt.name == "data" { // what follows is readable
				if got, err := readAll(d.m, 1, 1, 2, 1<<20); err != nil || len(got) != 2 {
					t.Errorf("read behind the damage: %d entries, %v", len(got), err)
				}
			}
			s, err := d.m.Stream()
			must(t, err)
			if _, err := io.ReadAll(s); !errors.Is(err, ledger.ErrDamaged) {
				t.Errorf("stream of damaged entries: %v, want ErrDamaged", err)
			}
			must(t, s.Close())
			// A repeat cannot be compared; nothing changes, so the group goes on.
			repeat := op{kind: opAppend, ledger: 1, epoch: 1, first: 0, frames: frame(pattern(1, 0, 100))}
			if out := d.do(repeat); !errors.Is(out[0].err, ledger.ErrDamaged) {
				t.Errorf("repeat of a damaged entry: %v, want ErrDamaged", out[0].err)
			}
			must(t, errors.Join(d.fatals()...))
		})
	}
}

// A record of another ledger where this one's should be must not be served, even
// with a good checksum.
func TestReadVerifiesWhoseRecordItIs(t *testing.T) {
	d := newDisk(t, 1<<20)
	d.create(1)
	d.create(2)
	d.fill(1, 1, 100)
	d.fill(2, 1, 100)
	one, two := d.m.current[1], d.m.current[2]
	one.runs, two.runs = two.runs, one.runs
	if _, err := readAll(d.m, 1, 0, 0, 1); !errors.Is(err, ledger.ErrDamaged) {
		t.Errorf("read of a foreign record: %v, want ErrDamaged", err)
	}
}

func TestUnknownCommandStopsTheGroup(t *testing.T) {
	d := newDisk(t, 1<<20)
	d.create(1)
	bad := appendCommand(nil, []op{{kind: opClose, ledger: 1, epoch: 1}})
	bad[0] = 9
	at := d.m.Applied()
	results := d.m.Apply([]raftlog.Command{{Index: at + 1, Data: bad}})
	if err, _ := results[0].(error); !errors.Is(err, ledger.ErrUnknownOutcome) {
		t.Errorf("answer %v, want ErrUnknownOutcome", results[0])
	}
	if f := d.fatals(); len(f) != 1 || !strings.Contains(f[0].Error(), "version 9") {
		t.Errorf("fatal: %v, want one about version 9", f)
	}
	if out := d.do(op{kind: opClose, ledger: 1, epoch: 1}); !errors.Is(out[0].err, ledger.ErrUnknownOutcome) {
		t.Errorf("a command behind it: %v", out[0].err)
	}
	if d.m.Applied() != at || d.m.Checkpoint() == nil {
		t.Error("a stopped machine moved on or made a checkpoint")
	}
}

func TestFailedDiskStopsTheGroup(t *testing.T) {
	for _, tt := range []struct {
		name string
		fail func(*vfs.Mem)
		use  func(*disk) error
	}{
		{"write", func(m *vfs.Mem) { m.FailWrite(1) }, func(d *disk) error {
			return d.do(op{kind: opAppend, ledger: 1, epoch: 1, first: 3, frames: frame([]byte("x"))})[0].err
		}},
		{"sync", func(m *vfs.Mem) { m.FailSync(1) }, func(d *disk) error { return d.m.Checkpoint() }},
		{"sync-of-the-folder", func(m *vfs.Mem) { m.FailSync(2) }, func(d *disk) error { return d.m.Checkpoint() }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newDisk(t, 1<<20)
			d.create(1)
			d.fill(1, 3, 100)
			tt.fail(d.fs)
			if err := tt.use(d); !errors.Is(err, vfs.ErrInjected) {
				t.Fatalf("%v, want ErrInjected", err)
			}
			if f := d.fatals(); len(f) == 0 || !errors.Is(f[0], vfs.ErrInjected) {
				t.Errorf("fatal: %v, want ErrInjected", f)
			}
			if d.m.Checkpoint() == nil {
				t.Error("a checkpoint after the failure")
			}
			syncs := d.fs.Syncs()
			d.m.Close()
			if d.fs.Syncs() != syncs {
				t.Error("a failed sync was tried again")
			}
			d.crash(nil)
			if d.m.Applied() != 0 {
				t.Errorf("after the crash applied is %d, want 0: no checkpoint succeeded", d.m.Applied())
			}
		})
	}
}

func TestDiskReserve(t *testing.T) {
	d := newDisk(t, 1<<20)
	must(t, d.store.admit())
	d.store.asked = d.store.asked.Add(-2 * diskCheckInterval)
	d.fs.SetFree(DefaultDiskReserveBytes - 1)
	if err := d.store.admit(); !errors.Is(err, ledger.ErrUnavailable) || !errors.Is(err, errDiskFull) {
		t.Errorf("admit on a full disk: %v, want ErrUnavailable", err)
	}
}

// TestReadsBesideEverything reads, streams and checkpoints beside appends and
// deletions. It is for the race detector, too.
func TestReadsBesideEverything(t *testing.T) {
	d := newDisk(t, 8<<10)
	const ledgers = 8
	stop := make(chan struct{})
	var beside sync.WaitGroup
	loop := func(fn func() error) {
		beside.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := fn(); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for id := ledger.ID(1); id <= 2; id++ {
		loop(func() error {
			for id := id; id <= 40; id += 2 {
				got, err := readAll(d.m, id, 0, 100, 3000)
				if errors.Is(err, ledger.ErrNoSuchLedger) || errors.Is(err, ledger.ErrNoSuchEntry) {
					continue
				}
				if err != nil {
					return fmt.Errorf("ledger %d: %w", id, err)
				}
				for i, e := range got {
					if !bytes.Equal(e, pattern(id, ledger.EntryID(i), 200)) {
						return fmt.Errorf("ledger %d, entry %d: %x", id, i, e)
					}
				}
			}
			return nil
		})
	}
	loop(d.m.Checkpoint)
	loop(func() error {
		s, err := d.m.Stream()
		if err != nil {
			return err
		}
		n, err := io.Copy(io.Discard, s)
		if err == nil && n != s.Size {
			err = fmt.Errorf("stream of %d bytes, promised %d", n, s.Size)
		}
		return errors.Join(err, s.Close())
	})
	for id := ledger.ID(1); id <= 40; id++ {
		d.create(id)
		d.fill(id, 30, 200)
		if id > ledgers {
			must(t, d.do(op{kind: opDelete, ledger: id - ledgers})[0].err)
		}
	}
	close(stop)
	beside.Wait()
	must(t, d.m.Checkpoint())
	d.m.verify(t)
}

// An entry that both the old state and the new one hold is there all the time.
func TestReadsBesideInstall(t *testing.T) {
	from := newDisk(t, 4<<10)
	from.create(1)
	from.fill(1, 20, 200)
	s, err := from.m.Stream()
	must(t, err)
	b, err := io.ReadAll(s)
	must(t, err)
	must(t, s.Close())

	to := newDisk(t, 4<<10)
	must(t, to.m.Install(bytes.NewReader(b), s.Applied))
	stop := make(chan struct{})
	var beside sync.WaitGroup
	for range 2 {
		beside.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				got, err := readAll(to.m, 1, 0, 19, 1<<20)
				if err != nil || len(got) != 20 {
					t.Errorf("%d entries, %v", len(got), err)
					return
				}
			}
		})
	}
	for i := range 300 {
		must(t, to.m.Install(bytes.NewReader(b), s.Applied+raftlog.Index(i)))
	}
	close(stop)
	beside.Wait()
}

func TestStoreRefusesANewerFormat(t *testing.T) {
	d := newDisk(t, 1<<20)
	d.create(1)
	must(t, d.m.Checkpoint())
	must(t, d.store.index.db.Set([]byte{keyFormat}, []byte{2, 0, 0, 0, 0, 0, 0, 0, 1}, nil))
	must(t, d.m.Close())
	must(t, d.store.Close())
	_, err := NewStore("/bookie", StoreConfig{Log: d.store.log, FS: d.fs, IndexFS: d.indexFS, Fatal: func(error) {}})
	if err == nil || !strings.Contains(err.Error(), "reads version 1") {
		t.Errorf("NewStore on a newer format: %v", err)
	}
	d.m, d.store = nil, nil
}
