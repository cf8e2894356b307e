package managedledger

import (
	"slices"
	"sync"
	"sync/atomic"
)

// registry is a managed ledger's readers.
type registry struct {
	mu      sync.Mutex // serializes changes
	readers atomic.Pointer[[]*Reader]
}

// all returns the readers of this moment. The slice must not be changed.
func (g *registry) all() []*Reader {
	if p := g.readers.Load(); p != nil {
		return *p
	}
	return nil
}

func (g *registry) count() int { return len(g.all()) }

func (g *registry) add(r *Reader) {
	g.mu.Lock()
	defer g.mu.Unlock()
	next := append(slices.Clone(g.all()), r)
	g.readers.Store(&next)
}

func (g *registry) remove(r *Reader) {
	g.mu.Lock()
	defer g.mu.Unlock()
	next := slices.DeleteFunc(slices.Clone(g.all()), func(other *Reader) bool { return other == r })
	g.readers.Store(&next)
}

// durable returns the durable reader of that name, or nil.
func (g *registry) durable(name string) *Reader {
	for _, r := range g.all() {
		if r.Durable() && r.Name() == name {
			return r
		}
	}
	return nil
}

// waiters is the readers that found nothing to read. An add that is confirmed
// wakes them all.
//
// No wake-up is lost: a reader first joins and then looks at the confirmed
// position again; an add first moves that position and then looks for waiters.
type waiters struct {
	any  atomic.Bool // list may have somebody
	mu   sync.Mutex
	list []*Reader // guarded by mu
	free []*Reader // guarded by mu: the array of the list before, for the next one
}

// join puts r in the list, if it is not there.
func (w *waiters) join(r *Reader) {
	if r.waiting.Swap(true) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.list = append(w.list, r)
	w.any.Store(true)
}

// wake empties the list and signals everybody in it.
func (w *waiters) wake() {
	if !w.any.Load() {
		return
	}
	w.mu.Lock()
	list := w.list
	w.list, w.free = w.free[:0], nil
	w.any.Store(false)
	w.mu.Unlock()
	for i, r := range list {
		list[i] = nil
		r.waiting.Store(false)
		r.signal()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.free == nil {
		w.free = list[:0]
	}
}

// count returns how many readers wait.
func (w *waiters) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.list)
}
