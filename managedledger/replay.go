package managedledger

import (
	"slices"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
)

// maxReplayed is how many fetched entries a reader holds for TryReplay. A caller
// that asks for ever other positions makes it start over.
const maxReplayed = 4096

// TryReplay returns entries at positions that were delivered before, in the order
// given, leaving out those that are acknowledged or gone. Like TryRead it returns
// the part that is in memory, or starts fetching and returns [ErrWouldBlock]; it
// is then called again with the same positions. A batch without entries means
// that none of the positions is left. The read position stays, unless it is at a
// position that is returned.
func (r *Reader) TryReplay(positions []ledger.Position, limit Limit) (*Batch, error) {
	limit = limit.normalized()
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.failureLocked(); err != nil {
		return nil, err
	}
	b := &Batch{reads: r.m.f.reads}
	todo := r.c.Unacked(make([]ledger.Position, 0, len(positions)), positions)
	if len(todo) == 0 {
		return b, nil
	}
	todo = todo[:min(len(todo), limit.Entries)]
	var size int64
	for _, p := range todo {
		e, kept, ok := r.recallLocked(p)
		n := int64(len(e.Data))
		if !ok || size+n > limit.Bytes && len(b.Entries) > 0 {
			break
		}
		if kept {
			delete(r.replayed, p)
		} else {
			b.reads.add(n)
			r.m.f.cache.Hit(1, n)
		}
		b.held.Add(n)
		size += n
		b.Entries = append(b.Entries, e)
		r.c.Pass(p)
	}
	if len(b.Entries) > 0 {
		r.touched = time.Now()
		return b, nil
	}
	if err := r.replayErr; err != nil {
		r.replayErr = nil
		return nil, err
	}
	r.fetchReplayLocked(todo, limit)
	return nil, ErrWouldBlock
}

// recallLocked finds the entry at p in memory; kept says that it was fetched for
// a replay and is counted in the permits.
func (r *Reader) recallLocked(p ledger.Position) (e ledger.Entry, kept, ok bool) {
	if e, ok = r.replayed[p]; ok {
		return e, true, true
	}
	var one [1]ledger.Entry
	if got := r.m.ring.Get(one[:0], p, 1, 0); len(got) == 1 {
		return got[0], false, true
	}
	return ledger.Entry{}, false, false
}

// fetchReplayLocked fetches those of positions that are neither in memory nor
// being fetched, neighbours together.
func (r *Reader) fetchReplayLocked(positions []ledger.Position, limit Limit) {
	var missing []ledger.Position
	for _, p := range positions {
		if _, _, ok := r.recallLocked(p); ok {
			continue
		}
		if !slices.ContainsFunc(r.replays, func(w *want) bool { return w.covers(p) }) {
			missing = append(missing, p)
		}
	}
	if len(r.replayed)+len(missing) > maxReplayed {
		r.dropReplayedLocked()
	}
	slices.SortFunc(missing, ledger.Position.Compare)
	missing = slices.Compact(missing)
	for len(missing) > 0 {
		first, n := missing[0], 1
		for n < len(missing) && missing[n] == (ledger.Position{Ledger: first.Ledger, Entry: first.Entry + ledger.EntryID(n)}) {
			n++
		}
		w := &want{
			reader: r, replay: true, ledger: first.Ledger, first: first.Entry, last: first.Entry + ledger.EntryID(n) - 1,
			maxBytes: min(max(limit.Bytes, fetchBytes), maxFetchBytes, r.m.f.reads.limit),
		}
		missing = missing[n:]
		if !r.m.sources.submit(r.m, w) {
			r.signal() // the ledger was trimmed, or the managed ledger closed: look again
			continue
		}
		r.replays = append(r.replays, w)
	}
}

// settleReplayLocked keeps what a fetch for TryReplay brought.
func (r *Reader) settleReplayLocked(w *want, entries []ledger.Entry, err error) {
	i := slices.Index(r.replays, w)
	if i < 0 {
		return // closed or moved meanwhile
	}
	r.replays = slices.Delete(r.replays, i, i+1)
	if err != nil {
		r.replayErr = err
		return
	}
	if r.replayed == nil {
		r.replayed = map[ledger.Position]ledger.Entry{}
	}
	for _, e := range entries {
		if _, there := r.replayed[e.Position]; there {
			continue
		}
		n := int64(len(e.Data))
		r.replayed[e.Position] = e
		r.m.f.reads.add(n)
	}
	r.touched = time.Now()
}

func (r *Reader) dropReplayedLocked() {
	var gone int64
	for _, e := range r.replayed {
		gone += int64(len(e.Data))
	}
	r.replayed = nil
	r.m.f.reads.release(gone)
}
