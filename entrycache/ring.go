package entrycache

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/magnetar-io/magnetar/ledger"
)

// blockEntries is how many neighbouring entries come and go together. A small
// number wastes less on a managed ledger with few entries and evicts more
// evenly; a large one takes the cache's lock less often.
const blockEntries = 32

// Ring is the tail of one managed ledger: its newest entries, over as many
// ledgers as they span.
type Ring struct {
	cache *Cache

	// tails are the ledgers with entries in the ring, oldest first. Readers load
	// the slice, which never changes; writers make a new one under mu.
	tails atomic.Pointer[[]*tail]

	mu     sync.Mutex // guards changes of tails; lock it before the cache's
	closed bool       // guarded by mu
}

// tail is the cached part of one ledger. Blocks are found by number: entry id
// divided by blockEntries.
type tail struct {
	id  ledger.ID
	end atomic.Int64 // entries below it are visible; the last step of a Put
	dir atomic.Pointer[directory]

	// Touched by the writer only.
	current *block
}

// directory is the array of a tail's blocks. A slot is nil when its block has
// left. A full directory is replaced by a larger copy; whoever still reads the
// old one finds old blocks in it, which is harmless.
type directory struct {
	first int64 // number of slots[0]
	slots []atomic.Pointer[block]
}

// block is up to blockEntries entries. A slot is written once, before the tail's
// end passes it, or never: then it is nil.
type block struct {
	tail   *tail
	number int64
	data   [blockEntries][]byte

	// Guarded by Cache.mu.
	prev, next     *block
	listed         bool
	bytes, entries int64
}

// NewRing makes an empty ring. Close it when the managed ledger closes.
func (c *Cache) NewRing() *Ring {
	r := &Ring{cache: c}
	r.tails.Store(&[]*tail{})
	return r
}

// Put adds the entry at p. Entries come in order, from one goroutine at a time;
// an entry that is not behind all others is not kept. data must not change any
// more. When Put returns, every reader can see the entry.
func (r *Ring) Put(p ledger.Position, data []byte) {
	cost := int64(len(data))
	if cost+blockOverhead > r.cache.budget || p.Entry < 0 {
		return
	}
	if data == nil {
		data = []byte{} // nil marks a slot without an entry
	}
	t := r.tailFor(p)
	if t == nil {
		return
	}
	number, slot := int64(p.Entry)/blockEntries, int(int64(p.Entry)%blockEntries)
	c := r.cache
	c.mu.Lock()
	b := t.current
	if b == nil || b.number != number || !b.listed {
		b = &block{tail: t, number: number}
		cost += blockOverhead
		t.current = b
		c.addLocked(b)
		t.place(b)
	}
	b.data[slot] = data
	t.end.Store(int64(p.Entry) + 1)
	c.chargeLocked(b, cost)
	c.mu.Unlock()
	c.metrics.inserted.Inc()
}

// tailFor returns the tail that p belongs to, or nil if p is out of order or the
// ring is closed.
func (r *Ring) tailFor(p ledger.Position) *tail {
	tails := *r.tails.Load()
	if n := len(tails); n > 0 {
		switch last := tails[n-1]; {
		case last.id == p.Ledger:
			if int64(p.Entry) < last.end.Load() {
				return nil
			}
			return last
		case last.id > p.Ledger:
			return nil
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	t := &tail{id: p.Ledger}
	kept := slices.DeleteFunc(slices.Clone(*r.tails.Load()), (*tail).gone)
	kept = append(kept, t)
	r.tails.Store(&kept)
	return t
}

// gone reports whether all blocks of t have left.
func (t *tail) gone() bool {
	d := t.dir.Load()
	if d == nil {
		return true
	}
	for i := range d.slots {
		if d.slots[i].Load() != nil {
			return false
		}
	}
	return true
}

// place makes b findable, in a larger directory if need be. The caller holds the
// cache's lock.
func (t *tail) place(b *block) {
	d := t.dir.Load()
	if d == nil {
		d = &directory{first: b.number, slots: make([]atomic.Pointer[block], 4)}
		t.dir.Store(d)
	}
	if at := b.number - d.first; at < int64(len(d.slots)) {
		d.slots[at].Store(b)
		return
	}
	// Leave out the slots at the front that are empty, so that a directory grows
	// with what is cached and not with what was ever written.
	live := 0
	for live < len(d.slots) && d.slots[live].Load() == nil {
		live++
	}
	first := d.first + int64(live)
	if live == len(d.slots) {
		first = b.number
	}
	size := max(4, 2*(b.number-first+1))
	next := &directory{first: first, slots: make([]atomic.Pointer[block], size)}
	for i := live; i < len(d.slots); i++ {
		next.slots[i-live].Store(d.slots[i].Load())
	}
	next.slots[b.number-first].Store(b)
	t.dir.Store(next)
}

// hide takes b out of the directory. The caller holds the cache's lock.
func (t *tail) hide(b *block) {
	d := t.dir.Load()
	if at := b.number - d.first; at >= 0 && at < int64(len(d.slots)) {
		d.slots[at].CompareAndSwap(b, nil)
	}
}

// Get appends to dst the entries from first on that are in the ring, up to n of
// them and up to maxBytes, but one at least if the first is there. They are of
// one ledger and have no gaps. It returns dst unchanged if the first is not in
// the ring. It takes no lock, and counts nothing: see [Cache.Hit].
func (r *Ring) Get(dst []ledger.Entry, first ledger.Position, n int, maxBytes int64) []ledger.Entry {
	t := r.find(first.Ledger)
	if t == nil || first.Entry < 0 {
		return dst
	}
	end := min(ledger.EntryID(t.end.Load()), first.Entry+ledger.EntryID(n))
	d := t.dir.Load()
	if d == nil {
		return dst
	}
	var bytes int64
	for at := first; at.Entry < end; {
		i := int64(at.Entry)/blockEntries - d.first
		if i < 0 || i >= int64(len(d.slots)) {
			return dst
		}
		b := d.slots[i].Load()
		slot := int(int64(at.Entry) % blockEntries)
		if b == nil {
			return dst
		}
		for ; slot < blockEntries && at.Entry < end; slot++ {
			data := b.data[slot]
			if data == nil {
				return dst
			}
			if bytes += int64(len(data)); bytes > maxBytes && at != first {
				return dst
			}
			dst = append(dst, ledger.Entry{Position: at, Data: data})
			at.Entry++
		}
	}
	return dst
}

// Has reports whether the entry at p is in the ring.
func (r *Ring) Has(p ledger.Position) bool {
	var one [1]ledger.Entry
	return len(r.Get(one[:0], p, 1, 0)) == 1
}

// Oldest returns a position at or before the oldest entry in the ring, and false
// if the ring is empty.
func (r *Ring) Oldest() (ledger.Position, bool) {
	for _, t := range *r.tails.Load() {
		d := t.dir.Load()
		if d == nil {
			continue
		}
		for i := range d.slots {
			if b := d.slots[i].Load(); b != nil {
				return ledger.Position{Ledger: t.id, Entry: ledger.EntryID(b.number * blockEntries)}, true
			}
		}
	}
	return ledger.Position{}, false
}

func (r *Ring) find(id ledger.ID) *tail {
	for _, t := range slices.Backward(*r.tails.Load()) {
		if t.id == id {
			return t
		}
	}
	return nil
}

// DropBefore lets go of the blocks whose entries all lie before p: no cursor
// will ask for them. The part of a block that lies before p stays until the
// whole block can go.
func (r *Ring) DropBefore(p ledger.Position) {
	r.drop(func(id ledger.ID, number int64) bool {
		return id < p.Ledger || id == p.Ledger && (number+1)*blockEntries <= int64(p.Entry)
	})
}

// Forget lets go of the entries of one ledger, which is to be deleted.
func (r *Ring) Forget(id ledger.ID) {
	r.drop(func(tail ledger.ID, _ int64) bool { return tail == id })
}

// Close lets go of everything and keeps nothing from then on.
func (r *Ring) Close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.drop(func(ledger.ID, int64) bool { return true })
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tails.Store(&[]*tail{})
}

func (r *Ring) drop(leaves func(ledger.ID, int64) bool) {
	c := r.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range *r.tails.Load() {
		d := t.dir.Load()
		if d == nil {
			continue
		}
		for i := range d.slots {
			b := d.slots[i].Load()
			if b == nil {
				continue
			}
			if !leaves(t.id, b.number) {
				break // blocks are in order
			}
			if b.listed {
				c.removeLocked(b)
			}
		}
	}
}
