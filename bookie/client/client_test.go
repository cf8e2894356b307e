package client_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/bookie/client"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

// recorder appends numbered entries to one writer and notes every answer.
type recorder struct {
	w *client.Writer

	mu      sync.Mutex
	changed sync.Cond // L is &mu
	sent    int
	stored  int // entries answered without error; they are 0 to stored-1
	err     error
	bad     []string
}

func record(w *client.Writer) *recorder {
	r := &recorder{w: w}
	r.changed.L = &r.mu
	return r
}

func entry(id ledger.ID, n int) []byte {
	b := make([]byte, 16+n*37%300)
	binary.BigEndian.PutUint64(b, uint64(id))
	binary.BigEndian.PutUint64(b[8:], uint64(n))
	for i := range b[16:] {
		b[16+i] = byte(n + i)
	}
	return b
}

// append waits while 500 are unanswered, then appends the next entry.
func (r *recorder) append() {
	r.mu.Lock()
	for r.sent-r.stored >= 500 && r.err == nil {
		r.changed.Wait()
	}
	n := r.sent
	r.sent++
	r.mu.Unlock()
	r.w.Append(entry(r.w.ID(), n), func(id ledger.EntryID, err error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		defer r.changed.Broadcast()
		switch {
		case err != nil && r.err == nil:
			r.err = err
		case err == nil && r.err != nil:
			r.bad = append(r.bad, fmt.Sprintf("entry %d stored after %v", id, r.err))
		case err == nil && (int(id) != r.stored || n != r.stored):
			r.bad = append(r.bad, fmt.Sprintf("append %d answered as entry %d after %d", n, id, r.stored))
		}
		if err == nil {
			r.stored++
		}
	})
}

// settle waits until everything is answered or something has failed.
func (r *recorder) settle() (stored int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.stored < r.sent && r.err == nil {
		r.changed.Wait()
	}
	return r.stored, r.err
}

// check reads the ledger back and compares.
func (r *recorder) check(t *testing.T, c *client.Client, atLeast int) {
	t.Helper()
	for _, b := range r.bad {
		t.Error(b)
	}
	for next := 0; next < atLeast; {
		entries, err := c.Read(t.Context(), r.w.ID(), ledger.EntryID(next), ledger.EntryID(atLeast-1), 32<<10)
		must(t, err)
		for _, e := range entries {
			if e.Position != (ledger.Position{Ledger: r.w.ID(), Entry: ledger.EntryID(next)}) || !bytes.Equal(e.Data, entry(r.w.ID(), next)) {
				t.Fatalf("read %v with %d bytes, want entry %d as appended", e.Position, len(e.Data), next)
			}
			next++
		}
	}
}

func create(t *testing.T, c *client.Client, n int) []*recorder {
	t.Helper()
	var all []*recorder
	for range n {
		w, err := c.Create(t.Context(), "a topic")
		must(t, err)
		all = append(all, record(w))
	}
	return all
}

func TestAppendsSurviveTheLeader(t *testing.T) {
	cluster := newCluster(t)
	c := cluster.client()
	all := create(t, c, 4) // two in each group
	stop := make(chan struct{})
	var appending sync.WaitGroup
	for _, r := range all {
		appending.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					r.append()
				}
			}
		})
	}
	progress := func() {
		t.Helper()
		for _, r := range all {
			r.mu.Lock()
			want := r.stored + 1000
			r.mu.Unlock()
			eventually(t, fmt.Sprintf("1000 more entries in ledger %d", r.w.ID()), func() bool {
				r.mu.Lock()
				defer r.mu.Unlock()
				if r.err != nil {
					t.Fatal(r.err)
				}
				return r.stored >= want
			})
		}
	}
	progress()
	for range 3 {
		victim := cluster.leader(1)
		cluster.kill(victim)
		progress()
		cluster.start(victim, nil)
		progress()
	}
	close(stop)
	appending.Wait()
	for _, r := range all {
		stored, err := r.settle()
		must(t, err)
		last, err := r.w.Close(t.Context())
		if err != nil || int(last) != stored-1 {
			t.Errorf("closed at %d, %v, want %d", last, err, stored-1)
		}
		r.check(t, c, stored)
		if _, err := c.Read(t.Context(), r.w.ID(), ledger.EntryID(stored), ledger.EntryID(stored), 1); !errors.Is(err, ledger.ErrNoSuchEntry) {
			t.Errorf("read behind the end: %v, want ErrNoSuchEntry", err)
		}
		t.Logf("ledger %d: %d entries", r.w.ID(), stored)
	}
}

func TestRecoverStopsTheWriter(t *testing.T) {
	cluster := newCluster(t)
	old, heir := cluster.client(), cluster.client()
	r := create(t, old, 1)[0]
	stop := make(chan struct{})
	var appending sync.WaitGroup
	appending.Go(func() {
		for {
			r.mu.Lock()
			over := r.err != nil
			r.mu.Unlock()
			if over {
				return
			}
			r.append()
		}
	})
	eventually(t, "some entries", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.stored > 100
	})
	end, err := heir.Recover(t.Context(), r.w.ID())
	must(t, err)
	appending.Wait()
	close(stop)
	stored, err := r.settle()
	if !errors.Is(err, ledger.ErrFenced) {
		t.Errorf("append after the fence: %v, want ErrFenced", err)
	}
	if stored > int(end.Last)+1 {
		t.Errorf("%d entries acknowledged, the ledger ends at %d", stored, end.Last)
	}
	total := int64(0)
	for n := range int(end.Last) + 1 {
		total += int64(len(entry(r.w.ID(), n)))
	}
	if end.Bytes != total {
		t.Errorf("recovered %d bytes, want %d", end.Bytes, total)
	}
	r.check(t, heir, int(end.Last)+1)
	if again, err := heir.Recover(t.Context(), r.w.ID()); again != end || err != nil {
		t.Errorf("second Recover = %v, %v, want %v", again, err, end)
	}
	if _, err := r.w.Close(t.Context()); !errors.Is(err, ledger.ErrFenced) {
		t.Errorf("Close of a fenced ledger: %v, want ErrFenced", err)
	}
}

func TestLargestEntriesPass(t *testing.T) {
	cluster := newCluster(t)
	c := cluster.client()
	w, err := c.Create(t.Context(), "a topic")
	must(t, err)
	data := bytes.Repeat([]byte("0123456789abcdef"), 5<<20/16)
	answered := make(chan error, 3)
	for range 3 {
		w.Append(data, func(_ ledger.EntryID, err error) { answered <- err })
	}
	for range 3 {
		must(t, <-answered)
	}
	entries, err := c.Read(t.Context(), w.ID(), 1, 2, 1)
	if err != nil || len(entries) != 1 || !bytes.Equal(entries[0].Data, data) {
		t.Errorf("read %d entries, %v, want one of %d bytes", len(entries), err, len(data))
	}
}

func TestDelete(t *testing.T) {
	cluster := newCluster(t)
	c := cluster.client()
	r := create(t, c, 1)[0]
	r.append()
	_, err := r.settle()
	must(t, err)
	must(t, c.Delete(t.Context(), r.w.ID()))
	must(t, c.Delete(t.Context(), r.w.ID()))
	if _, err := c.Read(t.Context(), r.w.ID(), 0, 0, 1); !errors.Is(err, ledger.ErrNoSuchLedger) {
		t.Errorf("read: %v, want ErrNoSuchLedger", err)
	}
	if _, err := c.Recover(t.Context(), r.w.ID()); !errors.Is(err, ledger.ErrNoSuchLedger) {
		t.Errorf("recover: %v, want ErrNoSuchLedger", err)
	}
	if kvs, err := cluster.meta.Range(t.Context(), "/ledgers/", "", 10); err != nil || len(kvs) != 0 {
		t.Errorf("records left: %v, %v", kvs, err)
	}
	r.append()
	if _, err := r.settle(); !errors.Is(err, ledger.ErrNoSuchLedger) {
		t.Errorf("append: %v, want ErrNoSuchLedger", err)
	}
}

func TestReadsWithoutALeader(t *testing.T) {
	cluster := newCluster(t)
	c := cluster.client()
	r := create(t, c, 1)[0]
	for range 200 {
		r.append()
	}
	_, err := r.settle()
	must(t, err)
	leader := cluster.leader(1)
	eventually(t, "every replica has it", func() bool {
		commit := cluster.running[leader].node.Group(1).Status().Commit
		for _, b := range cluster.all() {
			if b.node.Group(1).Status().Applied < commit {
				return false
			}
		}
		return true
	})
	cluster.kill(leader)
	cluster.kill((leader + 1) % 3)
	r.check(t, c, 200)

	// What nobody can promise to be absent is not said to be.
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := c.Read(ctx, r.w.ID(), 200, 200, 1); !errors.Is(err, ledger.ErrUnavailable) || errors.Is(err, ledger.ErrNoSuchEntry) {
		t.Errorf("read behind the end without a leader: %v, want ErrUnavailable", err)
	}
	r.append() // waits for a leader, which never comes
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.settle(); !errors.Is(err, ledger.ErrUnknownOutcome) {
		t.Errorf("append after Close: %v, want ErrUnknownOutcome", err)
	}
}

// TestWipedBookieCatchesUp empties a disk. The bookie comes back under another
// identity, gets the ledgers as a stream, and then serves them alone.
func TestWipedBookieCatchesUp(t *testing.T) {
	cluster := newCluster(t)
	c := cluster.client()
	all := create(t, c, 4)
	for _, r := range all {
		for range 2000 {
			r.append()
		}
		_, err := r.settle()
		must(t, err)
	}
	must(t, c.Delete(t.Context(), all[3].w.ID()))
	for range 10 { // more commands than the log keeps, and time for a snapshot pointer
		for _, r := range all[:3] {
			for range 20 {
				r.append()
				_, err := r.settle()
				must(t, err)
			}
		}
	}
	const victim = 2
	before := cluster.running[victim].node.Identity().Node()
	cluster.kill(victim)
	must(t, os.RemoveAll(cluster.dirOf(victim)))
	cluster.start(victim, nil)
	wiped := cluster.running[victim].node
	if wiped.Identity().Node() == before {
		t.Fatalf("the wiped bookie is still %s", before)
	}
	eventually(t, "three voters again, the wiped one among them", func() bool {
		for _, g := range wiped.Groups() {
			s := g.Status()
			voter := slices.ContainsFunc(s.Members, func(m raftlog.Member) bool { return m.Node == wiped.Identity().Node() && m.Voter })
			if len(s.Members) != 3 || !voter {
				return false
			}
		}
		return true
	})
	for i := range 3 {
		if i != victim {
			cluster.kill(i)
		}
	}
	for _, r := range all[:3] {
		r.check(t, c, 2200)
	}
}

func TestDamageIsReadAround(t *testing.T) {
	cluster := newCluster(t)
	c := cluster.client()
	r := create(t, c, 1)[0]
	r.append()
	_, err := r.settle()
	must(t, err)
	leader := cluster.leader(1)
	flip(t, cluster.dirOf(leader))
	r.check(t, c, 1)
	for i := range 3 {
		if i != leader {
			eventually(t, "the entry on "+name(i), func() bool { return damage(t, cluster.dirOf(i)) })
		}
	}
	if _, err := c.Read(t.Context(), r.w.ID(), 0, 0, 1); !errors.Is(err, ledger.ErrDamaged) {
		t.Errorf("read of an entry damaged everywhere: %v, want ErrDamaged", err)
	}
}

func flip(t *testing.T, dir string) {
	t.Helper()
	eventually(t, "an entry to damage", func() bool { return damage(t, dir) })
}

// damage flips a bit in the last byte of the newest segment, if it has entries.
func damage(t *testing.T, dir string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "ledgers", "segments", "*.segment"))
	must(t, err)
	for _, name := range files {
		b, err := os.ReadFile(name)
		must(t, err)
		if len(b) > 100 {
			b[len(b)-1] ^= 1
			f, err := os.OpenFile(name, os.O_WRONLY, 0)
			must(t, err)
			_, err = f.WriteAt(b[len(b)-1:], int64(len(b)-1))
			must(t, err)
			must(t, f.Close())
			return true
		}
	}
	return false
}

func TestWriterEnds(t *testing.T) {
	cluster := newCluster(t)
	c := cluster.client()
	all := create(t, c, 3)
	if last, err := all[0].w.Close(t.Context()); last != ledger.BeforeFirst || err != nil {
		t.Errorf("Close of an empty ledger = %d, %v, want -1", last, err)
	}
	all[0].append()
	if _, err := all[0].settle(); !errors.Is(err, ledger.ErrClosed) {
		t.Errorf("append after Close: %v, want ErrClosed", err)
	}
	all[1].w.Abandon()
	all[1].append()
	if _, err := all[1].settle(); !errors.Is(err, ledger.ErrUnknownOutcome) {
		t.Errorf("append after Abandon: %v, want ErrUnknownOutcome", err)
	}
	if _, err := c.Read(t.Context(), 0, 0, 0, 1); !errors.Is(err, ledger.ErrNoSuchLedger) {
		t.Errorf("read of ledger 0: %v", err)
	}
	if _, err := c.Read(t.Context(), 1, 3, 2, 1); !errors.Is(err, rpc.ErrInvalid) {
		t.Errorf("read of entries 3 to 2: %v", err)
	}
}
