package vfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
)

// ErrInjected is what a fault that was asked for returns.
var ErrInjected = errors.New("injected disk fault")

// Mem is a file system in memory that remembers what would survive a power
// cut. Make one with [NewMem].
type Mem struct {
	mu   sync.Mutex // guards everything below and the nodes
	dirs map[string]*memDir
	free int64

	syncs     int // calls of File.Sync and SyncDir so far
	failSync  int // the sync with this number fails; 0 = none
	writes    int // calls of WriteAt so far
	failWrite int // the write with this number fails; 0 = none
}

type memDir struct {
	now    map[string]*memNode // names as a running process sees them
	synced map[string]*memNode // names as a crash leaves them
}

// memNode is a file's contents. Writes since the last sync are kept one by
// one, because a crash may keep any of them.
type memNode struct {
	data    []byte
	synced  []byte
	pending []memWrite
}

type memWrite struct {
	offset int64
	data   []byte
}

// NewMem returns an empty file system with no bound on its space.
func NewMem() *Mem {
	return &Mem{dirs: map[string]*memDir{}, free: math.MaxInt64}
}

// FailSync lets the n-th sync from now fail with [ErrInjected]; n counts from
// 1, files and folders alike. The failed sync makes nothing durable.
func (m *Mem) FailSync(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failSync = m.syncs + n
}

// FailWrite lets the n-th write from now fail with [ErrInjected], counting
// from 1. Half of its bytes are written.
func (m *Mem) FailWrite(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failWrite = m.writes + n
}

// SetFree sets what Free reports and Preallocate may take, in bytes. It does not
// limit writes.
func (m *Mem) SetFree(n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.free = n
}

// Syncs returns the number of syncs so far, the failed ones included.
func (m *Mem) Syncs() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.syncs
}

// Crash returns what a power cut at this moment leaves. Synced bytes and names
// survive. With a nil rng nothing else does; otherwise each unsynced write and
// each unsynced name survives, or not, by a throw of the dice. Handles of m
// go on working on m and cannot touch the result.
func (m *Mem) Crash(rng *rand.Rand) *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	keep := func() bool { return rng != nil && rng.IntN(2) == 0 }
	clone := NewMem()
	clone.free = m.free
	nodes := map[*memNode]*memNode{}
	survivor := func(n *memNode) *memNode {
		if nodes[n] == nil {
			nodes[n] = n.crash(keep)
		}
		return nodes[n]
	}
	for _, dir := range slices.Sorted(maps.Keys(m.dirs)) {
		d, left := m.dirs[dir], newMemDir()
		before, moved := map[*memNode]bool{}, map[*memNode]bool{}
		for _, name := range slices.Sorted(maps.Keys(d.synced)) {
			n := d.synced[name]
			before[n] = true
			if d.now[name] != n && keep() {
				moved[n] = true
				continue // the removal, or the new name, reached the disk
			}
			left.now[name] = survivor(n)
		}
		for _, name := range slices.Sorted(maps.Keys(d.now)) {
			n := d.now[name]
			switch {
			case d.synced[name] == n:
			case before[n]: // a new name of an old file: one of the two is left
				if moved[n] {
					left.now[name] = survivor(n)
				}
			case keep():
				left.now[name] = survivor(n)
			}
		}
		maps.Copy(left.synced, left.now)
		clone.dirs[dir] = left
	}
	return clone
}

// Damage flips every bit of one byte, in what is synced and in what is read.
func (m *Mem) Damage(name string, offset int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, err := m.find("damage", name)
	if err != nil {
		return err
	}
	if offset < 0 || offset >= int64(len(n.data)) {
		return fmt.Errorf("damage %s: offset %d is outside its %d bytes", name, offset, len(n.data))
	}
	n.data[offset] ^= 0xff
	if offset < int64(len(n.synced)) {
		n.synced[offset] ^= 0xff
	}
	return nil
}

// MkdirAll implements [FS]. Folders are durable at once.
func (m *Mem) MkdirAll(dir string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	dir = filepath.Clean(dir)
	if m.dirs[dir] == nil {
		m.dirs[dir] = newMemDir()
	}
	return nil
}

// Create implements [FS].
func (m *Mem) Create(name string) (File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, base, err := m.dir("create", name)
	if err != nil {
		return nil, err
	}
	if d.now[base] != nil {
		return nil, &fs.PathError{Op: "create", Path: name, Err: fs.ErrExist}
	}
	n := &memNode{}
	d.now[base] = n
	return &memFile{fs: m, node: n, name: name}, nil
}

// Open implements [FS].
func (m *Mem) Open(name string) (File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, err := m.find("open", name)
	if err != nil {
		return nil, err
	}
	return &memFile{fs: m, node: n, name: name, readOnly: true}, nil
}

// OpenWrite implements [FS].
func (m *Mem) OpenWrite(name string) (File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, err := m.find("open", name)
	if err != nil {
		return nil, err
	}
	return &memFile{fs: m, node: n, name: name}, nil
}

// Rename implements [FS].
func (m *Mem) Rename(from, to string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, err := m.find("rename", from)
	if err != nil {
		return err
	}
	d, old, _ := m.dir("rename", from)
	into, base, err := m.dir("rename", to)
	switch {
	case err != nil:
		return err
	case into != d:
		return &fs.PathError{Op: "rename", Path: to, Err: fs.ErrInvalid}
	case d.now[base] != nil:
		return &fs.PathError{Op: "rename", Path: to, Err: fs.ErrExist}
	}
	delete(d.now, old)
	d.now[base] = n
	return nil
}

// Remove implements [FS].
func (m *Mem) Remove(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := m.find("remove", name); err != nil {
		return err
	}
	d, base, _ := m.dir("remove", name)
	delete(d.now, base)
	return nil
}

// List implements [FS].
func (m *Mem) List(dir string) ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.dirs[filepath.Clean(dir)]
	if d == nil {
		return nil, &fs.PathError{Op: "list", Path: dir, Err: fs.ErrNotExist}
	}
	return slices.Sorted(maps.Keys(d.now)), nil
}

// SyncDir implements [FS].
func (m *Mem) SyncDir(dir string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.dirs[filepath.Clean(dir)]
	if d == nil {
		return &fs.PathError{Op: "sync", Path: dir, Err: fs.ErrNotExist}
	}
	if err := m.sync(dir); err != nil {
		return err
	}
	clear(d.synced)
	maps.Copy(d.synced, d.now)
	return nil
}

// Free implements [FS].
func (m *Mem) Free(string) (int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.free, nil
}

// sync counts one sync and says whether it is the one to fail. It needs mu.
func (m *Mem) sync(name string) error {
	m.syncs++
	if m.syncs == m.failSync {
		return &fs.PathError{Op: "sync", Path: name, Err: ErrInjected}
	}
	return nil
}

func (m *Mem) dir(op, name string) (*memDir, string, error) {
	dir, base := filepath.Split(filepath.Clean(name))
	d := m.dirs[filepath.Clean(dir)]
	if d == nil {
		return nil, "", &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
	}
	return d, base, nil
}

func (m *Mem) find(op, name string) (*memNode, error) {
	d, base, err := m.dir(op, name)
	if err != nil {
		return nil, err
	}
	if d.now[base] == nil {
		return nil, &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
	}
	return d.now[base], nil
}

func newMemDir() *memDir {
	return &memDir{now: map[string]*memNode{}, synced: map[string]*memNode{}}
}

func (n *memNode) crash(keep func() bool) *memNode {
	left := slices.Clone(n.synced)
	for _, w := range n.pending {
		if keep() {
			left = writeAt(left, w.data, w.offset)
		}
	}
	return &memNode{data: left, synced: slices.Clone(left)}
}

func writeAt(dst, p []byte, offset int64) []byte {
	if end := int(offset) + len(p); end > len(dst) {
		dst = append(dst, make([]byte, end-len(dst))...)
	}
	copy(dst[offset:], p)
	return dst
}

type memFile struct {
	fs       *Mem
	node     *memNode // guarded by fs.mu
	name     string
	readOnly bool
	closed   bool // guarded by fs.mu
}

func (f *memFile) ReadAt(p []byte, offset int64) (int, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if f.closed {
		return 0, &fs.PathError{Op: "read", Path: f.name, Err: fs.ErrClosed}
	}
	if offset < 0 || offset >= int64(len(f.node.data)) {
		return 0, io.EOF
	}
	n := copy(p, f.node.data[offset:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memFile) WriteAt(p []byte, offset int64) (int, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	switch {
	case f.closed:
		return 0, &fs.PathError{Op: "write", Path: f.name, Err: fs.ErrClosed}
	case f.readOnly:
		return 0, &fs.PathError{Op: "write", Path: f.name, Err: fs.ErrPermission}
	}
	f.fs.writes++
	var err error
	if f.fs.writes == f.fs.failWrite {
		p = p[:len(p)/2]
		err = &fs.PathError{Op: "write", Path: f.name, Err: ErrInjected}
	}
	f.node.data = writeAt(f.node.data, p, offset)
	f.node.pending = append(f.node.pending, memWrite{offset, slices.Clone(p)})
	return len(p), err
}

func (f *memFile) Sync() error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if f.closed {
		return &fs.PathError{Op: "sync", Path: f.name, Err: fs.ErrClosed}
	}
	if err := f.fs.sync(f.name); err != nil {
		return err
	}
	for _, w := range f.node.pending {
		f.node.synced = writeAt(f.node.synced, w.data, w.offset)
	}
	f.node.pending = nil
	return nil
}

func (f *memFile) Preallocate(size int64) error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	more := size - int64(len(f.node.data))
	switch {
	case f.closed:
		return &fs.PathError{Op: "fallocate", Path: f.name, Err: fs.ErrClosed}
	case more <= 0:
		return nil
	case more > f.fs.free:
		return &fs.PathError{Op: "fallocate", Path: f.name, Err: syscall.ENOSPC}
	}
	f.node.data = append(f.node.data, make([]byte, more)...)
	f.node.pending = append(f.node.pending, memWrite{size, nil})
	return nil
}

func (f *memFile) Size() (int64, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	return int64(len(f.node.data)), nil
}

func (f *memFile) Close() error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if f.closed {
		return &fs.PathError{Op: "close", Path: f.name, Err: fs.ErrClosed}
	}
	f.closed = true
	return nil
}
