package managedledger

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata/metadatatest"
)

const topic = "public/default/persistent/orders"

func TestAppendReadAckReopen(t *testing.T) {
	b, meta := newBookies(), metadatatest.NewMemory(t)
	f := testFactory(t, b, meta, testConfig())
	m := mustOpen(t, f, topic)
	r, err := m.OpenCursor(t.Context(), "sub", Earliest)
	if err != nil {
		t.Fatal(err)
	}
	ps := appendAll(t, m, "a", "b", "c", "d")
	got := readAll(t, r, 4, Limit{Entries: 10})
	for i, e := range got {
		if e.Position != ps[i] || string(e.Data) != string("abcd"[i]) {
			t.Errorf("entry %d is %v %q", i, e.Position, e.Data)
		}
	}
	if err := r.Ack([]ledger.Position{ps[0], ps[2]}); err != nil {
		t.Fatal(err)
	}
	if again, err := m.OpenCursor(t.Context(), "sub", Latest); err != nil || again != r {
		t.Errorf("opening the cursor again gave %p, %v, want the same reader %p", again, err, r)
	}
	if again := mustOpen(t, f, topic); again != m {
		t.Error("opening the name again gave another handle")
	}
	if err := f.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Open(t.Context(), topic); !errors.Is(err, ErrClosed) {
		t.Errorf("Open after Close = %v, want ErrClosed", err)
	}

	f = testFactory(t, b, meta, testConfig())
	m = mustOpen(t, f, topic)
	if m.LastConfirmed() != ps[3] {
		t.Errorf("last confirmed %v, want %v", m.LastConfirmed(), ps[3])
	}
	r, err = m.OpenCursor(t.Context(), "sub", Latest)
	if err != nil {
		t.Fatal(err)
	}
	if r.MarkDeleted() != ps[0] || r.Backlog() != 2 {
		t.Errorf("cursor is %+v, want mark-delete %v and backlog 2", r.Stats(), ps[0])
	}
	got = readAll(t, r, 2, Limit{Entries: 10})
	if string(got[0].Data) != "b" || string(got[1].Data) != "d" {
		t.Errorf("read %q and %q, want b and d", got[0].Data, got[1].Data)
	}
	noReadsInFlight(t, f)
}

// TestFailedAddIsResentOnceInOrder breaks a ledger in the middle of many adds,
// with the breaking entry stored or not.
func TestFailedAddIsResentOnceInOrder(t *testing.T) {
	for _, stored := range []bool{false, true} {
		t.Run(fmt.Sprintf("stored=%v", stored), func(t *testing.T) {
			b := newBookies()
			m := mustOpen(t, testFactory(t, b, metadatatest.NewMemory(t), testConfig()), topic)
			r := m.NewReader("r", at(0, 0))
			b.set(func() {
				b.breakAt[1] = breakage{entry: 70, stored: stored}
				b.breakAt[2] = breakage{entry: 5, stored: !stored}
			})
			const n = 200
			var mu sync.Mutex
			var order []int
			var positions []ledger.Position
			var wg sync.WaitGroup
			for i := range n {
				wg.Add(1)
				m.Append([]byte(strconv.Itoa(i)), func(p ledger.Position, err error) {
					defer wg.Done()
					mu.Lock()
					defer mu.Unlock()
					if err != nil {
						t.Errorf("add %d: %v", i, err)
					}
					order = append(order, i)
					positions = append(positions, p)
				})
			}
			wg.Wait()
			for i := range order {
				if order[i] != i {
					t.Fatalf("answer %d was for add %d", i, order[i])
				}
				if i > 0 && !positions[i].After(positions[i-1]) {
					t.Fatalf("add %d is at %v, after %v", i, positions[i], positions[i-1])
				}
			}
			for i, e := range readAll(t, r, n, Limit{Entries: 7}) {
				if string(e.Data) != strconv.Itoa(i) || e.Position != positions[i] {
					t.Fatalf("entry %d is %v %q, want %v", i, e.Position, e.Data, positions[i])
				}
			}
			if s := m.Stats(); s.Entries != n || len(s.Ledgers) != 3 || s.PendingBytes != 0 {
				t.Errorf("stats %+v, want %d entries in 3 ledgers", s, n)
			}
		})
	}
}

// TestOlderFactoryIsFenced opens a name twice on one metadata store. The older
// owner must not acknowledge anything afterwards, neither adds nor acks.
func TestOlderFactoryIsFenced(t *testing.T) {
	b, meta := newBookies(), metadatatest.NewMemory(t)
	older := mustOpen(t, testFactory(t, b, meta, testConfig()), topic)
	olderSub, err := older.OpenCursor(t.Context(), "sub", Earliest)
	if err != nil {
		t.Fatal(err)
	}
	appendAll(t, older, "a", "b")

	newer := mustOpen(t, testFactory(t, b, meta, testConfig()), topic)
	failed := make(chan error, 1)
	older.Append([]byte("late"), func(_ ledger.Position, err error) { failed <- err })
	if err := <-failed; !errors.Is(err, ErrFenced) {
		t.Errorf("an add to the older handle = %v, want ErrFenced", err)
	}
	select {
	case <-older.Fenced():
	case <-time.After(10 * time.Second):
		t.Fatal("Fenced does not fire")
	}
	if _, err := olderSub.TryRead(Limit{}); !errors.Is(err, ErrFenced) {
		t.Errorf("TryRead of the older handle = %v, want ErrFenced", err)
	}
	if err := olderSub.AckCumulative(at(1, 1)); !errors.Is(err, ErrFenced) {
		t.Errorf("an acknowledgement of the older handle = %v, want ErrFenced", err)
	}
	if _, err := older.OpenCursor(t.Context(), "other", Earliest); !errors.Is(err, ErrFenced) {
		t.Errorf("OpenCursor of the older handle = %v, want ErrFenced", err)
	}
	appendAll(t, newer, "c")
	sub, err := newer.OpenCursor(t.Context(), "sub", Latest)
	if err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, sub, 3, Limit{Entries: 9}); string(got[0].Data)+string(got[1].Data)+string(got[2].Data) != "abc" {
		t.Errorf("the newer owner reads %q, want a, b, c", got)
	}
	// The older factory can open the name again, and takes it back.
	again := mustOpen(t, older.f, topic)
	appendAll(t, again, "d")
	newer.Append([]byte("late"), func(_ ledger.Position, err error) { failed <- err })
	if err := <-failed; !errors.Is(err, ErrFenced) {
		t.Errorf("an add to the former owner = %v, want ErrFenced", err)
	}
}

// TestOlderOwnerIsFencedByItsCursor: an owner that only acknowledges learns from
// the cursor's record.
func TestOlderOwnerIsFencedByItsCursor(t *testing.T) {
	b, meta := newBookies(), metadatatest.NewMemory(t)
	older := mustOpen(t, testFactory(t, b, meta, testConfig()), topic)
	sub, err := older.OpenCursor(t.Context(), "sub", Earliest)
	if err != nil {
		t.Fatal(err)
	}
	appendAll(t, older, "a", "b")
	newer := mustOpen(t, testFactory(t, b, meta, testConfig()), topic)
	if err := sub.AckCumulative(at(1, 1)); err != nil {
		t.Fatal(err)
	}
	if err := sub.Flush(t.Context()); err == nil {
		t.Error("the older owner's cursor was saved")
	}
	select {
	case <-older.Fenced():
	case <-time.After(10 * time.Second):
		t.Fatal("Fenced does not fire")
	}
	again, err := newer.OpenCursor(t.Context(), "sub", Latest)
	if err != nil {
		t.Fatal(err)
	}
	if again.Backlog() != 2 {
		t.Errorf("backlog %d, want 2: the older owner's acknowledgement counts", again.Backlog())
	}
}

// TestLostAnswersFenceNobody: a write of the record that lands without an answer
// is found to be ours.
func TestLostAnswersFenceNobody(t *testing.T) {
	b, meta := newBookies(), &slowMeta{Store: metadatatest.NewMemory(t)}
	cfg := testConfig()
	cfg.MaxEntriesPerLedger = 2
	m := mustOpen(t, testFactory(t, b, meta, cfg), topic)
	sub, err := m.OpenCursor(t.Context(), "sub", Earliest)
	if err != nil {
		t.Fatal(err)
	}
	var n atomic.Int64
	meta.set(nil, func(string, string) error {
		if n.Add(1)%2 == 1 {
			return ledger.ErrUnknownOutcome
		}
		return nil
	})
	appendAll(t, m, "a", "b", "c", "d", "e")
	for _, p := range []ledger.Position{at(1, 1), at(2, 1)} {
		if err := errors.Join(sub.AckCumulative(p), sub.Flush(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
	// And one whose answer is lost for so long that the caller gave up.
	gaveUp, cancel := context.WithCancel(t.Context())
	meta.set(nil, func(string, string) error { cancel(); return ledger.ErrUnknownOutcome })
	if err := sub.AckCumulative(at(3, 0)); err != nil {
		t.Fatal(err)
	}
	if err := sub.Flush(gaveUp); err == nil {
		t.Error("a save that was not answered succeeded")
	}
	meta.set(nil, nil)
	appendAll(t, m, "f")
	if err := errors.Join(sub.AckCumulative(at(3, 1)), sub.Flush(t.Context())); err != nil {
		t.Error(err)
	}
	select {
	case <-m.Fenced():
		t.Error("an owner fenced itself over its own writes")
	default:
	}
}

func TestTerminate(t *testing.T) {
	b, meta := newBookies(), metadatatest.NewMemory(t)
	f := testFactory(t, b, meta, testConfig())
	m := mustOpen(t, f, topic)
	sub, err := m.OpenCursor(t.Context(), "sub", Earliest)
	if err != nil {
		t.Fatal(err)
	}
	ps := appendAll(t, m, "a", "b")
	for range 2 {
		last, err := m.Terminate(t.Context())
		if err != nil || last != ps[1] {
			t.Fatalf("Terminate = %v, %v, want %v", last, err, ps[1])
		}
	}
	failed := make(chan error, 1)
	m.Append([]byte("c"), func(_ ledger.Position, err error) { failed <- err })
	if err := <-failed; !errors.Is(err, ErrTerminated) {
		t.Errorf("Append = %v, want ErrTerminated", err)
	}
	readAll(t, sub, 2, Limit{Entries: 1})
	if _, err := sub.TryRead(Limit{}); !errors.Is(err, ErrTerminated) {
		t.Errorf("TryRead at the end = %v, want ErrTerminated", err)
	}
	if err := m.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	m = mustOpen(t, f, topic)
	if m.LastConfirmed() != ps[1] || m.Stats().State != "Terminated" {
		t.Errorf("after reopening %+v", m.Stats())
	}
	sub, err = m.OpenCursor(t.Context(), "sub", Earliest)
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, sub, 2, Limit{Entries: 5})
	if _, err := sub.TryRead(Limit{}); !errors.Is(err, ErrTerminated) {
		t.Errorf("TryRead at the end after reopening = %v, want ErrTerminated", err)
	}
	if err := sub.ClearBacklog(t.Context()); err != nil {
		t.Fatal(err)
	}
	if sub.Backlog() != 0 {
		t.Errorf("backlog %d after ClearBacklog", sub.Backlog())
	}
}

// TestTerminateWakesAWaitingReader: a reader at the end is told.
func TestTerminateWakesAWaitingReader(t *testing.T) {
	m := mustOpen(t, testFactory(t, newBookies(), metadatatest.NewMemory(t), testConfig()), topic)
	r := m.NewReader("r", at(0, 0))
	answers := make(chan error, 1)
	r.ReadEntries(0, Limit{Entries: 1}, func(_ int, _ *Batch, err error) { answers <- err })
	if _, err := m.Terminate(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-answers:
		if !errors.Is(err, ErrTerminated) {
			t.Errorf("the waiting read = %v, want ErrTerminated", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the waiting read was not answered")
	}
}

func TestDelete(t *testing.T) {
	b, meta := newBookies(), metadatatest.NewMemory(t)
	f := testFactory(t, b, meta, testConfig())
	m := mustOpen(t, f, topic)
	sub, err := m.OpenCursor(t.Context(), "sub", Earliest)
	if err != nil {
		t.Fatal(err)
	}
	appendAll(t, m, "a")
	mustOpen(t, f, topic+"-other")
	if names, err := f.List(t.Context(), "public/default/persistent/"); err != nil || len(names) != 2 {
		t.Errorf("List = %v, %v, want two names", names, err)
	}
	if err := f.Delete(t.Context(), topic); err != nil {
		t.Fatal(err)
	}
	if _, err := sub.TryRead(Limit{}); !errors.Is(err, ErrClosed) {
		t.Errorf("TryRead after Delete = %v, want ErrClosed", err)
	}
	if ok, err := f.Exists(t.Context(), topic); ok || err != nil {
		t.Errorf("Exists = %v, %v", ok, err)
	}
	if names, _ := f.List(t.Context(), "public/default/persistent/"); len(names) != 1 {
		t.Errorf("List = %v, want the other name", names)
	}
	if ids := b.ids(); len(ids) != 1 {
		t.Errorf("ledgers %v are left, want the other name's", ids)
	}
	if err := f.Delete(t.Context(), topic); !errors.Is(err, ErrNotFound) {
		t.Errorf("deleting again = %v, want ErrNotFound", err)
	}
	m = mustOpen(t, f, topic)
	if cursors := m.Cursors(); len(cursors) != 0 || m.Stats().Entries != 0 {
		t.Errorf("the name came back with %d cursors and %d entries", len(cursors), m.Stats().Entries)
	}
}

// TestDeletionIsFinishedByTheNextOpening breaks a deletion half way.
func TestDeletionIsFinishedByTheNextOpening(t *testing.T) {
	b, meta := newBookies(), metadatatest.NewMemory(t)
	f := testFactory(t, b, meta, testConfig())
	appendAll(t, mustOpen(t, f, topic), "a")
	b.set(func() { b.deleteErr = errPlanned })
	if err := f.Delete(t.Context(), topic); !errors.Is(err, errPlanned) {
		t.Fatalf("Delete = %v, want the planned failure", err)
	}
	if ok, _ := f.Exists(t.Context(), topic); ok {
		t.Error("a managed ledger that is being deleted exists")
	}
	if names, _ := f.List(t.Context(), "public/"); len(names) != 0 {
		t.Errorf("List = %v", names)
	}
	b.set(func() { b.deleteErr = nil })
	m := mustOpen(t, f, topic)
	if s := m.Stats(); s.Entries != 0 {
		t.Errorf("the old entries came back: %+v", s)
	}
	if ids := b.ids(); len(ids) != 1 {
		t.Errorf("ledgers %v are left, want the new one only", ids)
	}
}

func TestRefusesALedgerIDThatIsNotAbove(t *testing.T) {
	b, meta := newBookies(), metadatatest.NewMemory(t)
	f := testFactory(t, b, meta, testConfig())
	m := mustOpen(t, f, topic)
	appendAll(t, m, "a")
	if err := m.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.set(func() { b.last = 0 }) // the metadata group was reset
	if _, err := f.Open(t.Context(), topic); !errors.Is(err, errIDNotAbove) {
		t.Errorf("Open = %v, want a refusal of the id", err)
	}
}

func TestCloseAnswersEverything(t *testing.T) {
	b := newBookies()
	f := testFactory(t, b, metadatatest.NewMemory(t), testConfig())
	m := mustOpen(t, f, topic)
	b.set(func() { b.held = true })
	answers := make(chan error, 3)
	for range 3 {
		m.Append([]byte("x"), func(_ ledger.Position, err error) { answers <- err })
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := m.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Close = %v, want the deadline", err)
	}
	for range 3 {
		if err := <-answers; !errors.Is(err, ErrClosed) {
			t.Errorf("a pending add = %v, want ErrClosed", err)
		}
	}
	if m.PendingBytes() != 0 {
		t.Errorf("%d bytes pending after Close", m.PendingBytes())
	}
	m.Append([]byte("x"), func(_ ledger.Position, err error) { answers <- err })
	if err := <-answers; !errors.Is(err, ErrClosed) {
		t.Errorf("Append after Close = %v, want ErrClosed", err)
	}
}

func TestTooLargeAnEntryIsRefused(t *testing.T) {
	m := mustOpen(t, testFactory(t, newBookies(), metadatatest.NewMemory(t), testConfig()), topic)
	answers := make(chan error, 1)
	m.Append(make([]byte, MaxEntryBytes+1), func(_ ledger.Position, err error) { answers <- err })
	if err := <-answers; !errors.Is(err, ErrTooLarge) {
		t.Errorf("Append = %v, want ErrTooLarge", err)
	}
	appendAll(t, m, "small")
}
