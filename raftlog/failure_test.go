package raftlog

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog/journal"
)

// faultyStore fails or delays appends on demand.
type faultyStore struct {
	backend
	fail  atomic.Bool
	block atomic.Pointer[chan struct{}]
}

var errInjected = errors.New("injected disk error")

func (f *faultyStore) StoreLogs(logs []*raft.Log) error {
	if c := f.block.Load(); c != nil {
		<-*c
	}
	if f.fail.Load() {
		return errInjected
	}
	return f.backend.StoreLogs(logs)
}

// faults wraps group 1's store of every bookie, and records what was fatal.
type faults struct {
	mu     sync.Mutex
	stores map[string]*faultyStore
	fatal  map[string][]error
}

func (f *faults) tune(name string, cfg *Config) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stores == nil {
		f.stores, f.fatal = map[string]*faultyStore{}, map[string][]error{}
	}
	cfg.wrapStore = func(g GroupID, b backend) backend {
		if g != 1 {
			return b
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		f.stores[name] = &faultyStore{backend: b}
		return f.stores[name]
	}
	cfg.Fatal = func(err error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.fatal[name] = append(f.fatal[name], err)
	}
}

func (f *faults) store(name string) *faultyStore {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stores[name]
}

func (f *faults) fatals(name string) []error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.fatal[name])
}

func TestFollowerDiskErrorIsFatalAndWedgesNobody(t *testing.T) {
	var f faults
	c := newCluster(t)
	c.tune = f.tune
	c.startAll("a", "b", "c")
	c.put(1, "x0")
	want := []string{"x0"}
	leader := c.leader(1)
	victim := c.live()[0]
	if victim == leader {
		victim = c.live()[1]
	}
	f.store(victim.name).fail.Store(true)
	for i := range 20 {
		d := fmt.Sprintf("y%d", i)
		c.put(1, d)
		want = append(want, d)
	}
	eventually(t, "the failure is fatal", func() bool { return len(f.fatals(victim.name)) > 0 })
	if errs := f.fatals(victim.name); len(errs) != 1 || !errors.Is(errs[0], errInjected) || !strings.Contains(errs[0].Error(), "append to the log") {
		t.Errorf("fatal was called with %v, want the injected error once", errs)
	}
	c.stop(victim, false) // the process ended; its disk works again
	c.start(victim.name)
	c.awaitList(1, want)
}

func TestLeaderDiskErrorIsUnknownAndMovesOn(t *testing.T) {
	var f faults
	c := newCluster(t)
	c.tune = f.tune
	c.startAll("a", "b", "c")
	c.put(1, "x")
	leader := c.leader(1)
	f.store(leader.name).fail.Store(true)
	answer := make(chan outcome, 1)
	leader.Group(1).Propose([]byte("lost"), func(r any, err error) { answer <- outcome{r, err} })
	eventually(t, "the failure is fatal", func() bool { return len(f.fatals(leader.name)) == 1 })
	// Heartbeats do not touch the disk: only the end of the process, which Fatal
	// stands for, lets the others elect.
	c.stop(leader, false)
	if o := <-answer; !errors.Is(o.err, ledger.ErrUnknownOutcome) {
		t.Errorf("command that met the disk error: %v, want an unknown outcome", o.err)
	}
	c.put(1, "y")
	c.start(leader.name)
	c.awaitList(1, []string{"x", "y"})
}

func TestHangingDiskIsFatal(t *testing.T) {
	var f faults
	c := newCluster(t)
	c.tune = f.tune
	c.timing.StoreHang = 300 * time.Millisecond
	c.startAll("a")
	c.put(1, "x")
	b := c.leader(1)
	hang := make(chan struct{})
	f.store("a").block.Store(&hang)
	b.Group(1).Propose([]byte("stuck"), func(any, error) {})
	eventually(t, "the hang is fatal", func() bool { return len(f.fatals("a")) == 1 })
	if err := f.fatals("a")[0]; !strings.Contains(err.Error(), "hangs") {
		t.Errorf("fatal: %v, want a hang", err)
	}
	close(hang)
}

// slowCuts is a disk that takes its time for each cut of the log, but answers.
type slowCuts struct{ backend }

func (s slowCuts) DeleteRange(low, high uint64) error {
	time.Sleep(60 * time.Millisecond)
	return s.backend.DeleteRange(low, high)
}

func TestCuttingALongLogIsNotAHang(t *testing.T) {
	b, err := openBolt(filepath.Join(t.TempDir(), logFile))
	if err != nil {
		t.Fatal(err)
	}
	const entries = 20 * deleteChunk
	fatal := make(chan error, 1)
	s := newGuardedStore(slowCuts{b}, 500*time.Millisecond, newMetrics(nil).group(1), func(err error) { fatal <- err })
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	var logs []*raft.Log
	for i := range uint64(entries) {
		logs = append(logs, &raft.Log{Index: i + 1, Term: 1})
	}
	if err := s.StoreLogs(logs); err != nil {
		t.Fatal(err)
	}
	cut := make(chan error, 1)
	go func() { cut <- s.DeleteRange(1, entries-1) }()
	select {
	case err := <-fatal:
		s.release()
		<-cut
		t.Errorf("fatal: %v; every single write took 60 ms", err)
	case err := <-cut:
		if first, errFirst := s.FirstIndex(); err != nil || errFirst != nil || first != entries {
			t.Errorf("after the cut the log begins at %d, want %d: %v, %v", first, entries, err, errFirst)
		}
	}
}

func TestCrashBetweenStagingAndInstalling(t *testing.T) {
	var crash atomic.Bool
	reached := make(chan struct{}, 100)
	c := newCluster(t)
	c.tune = func(name string, cfg *Config) {
		cfg.staged = func(g GroupID) error {
			if name == "c" && g == 1 && crash.Load() {
				reached <- struct{}{}
				return errors.New("stopped before installing")
			}
			return nil
		}
	}
	c.startAll("a", "b")
	want := numbered("x", 30)
	c.putAll(1, want)
	for _, b := range c.live() {
		c.snapshot(b, 1)
	}
	crash.Store(true)
	victim := c.start("c")
	<-reached
	c.stop(victim, false)
	if _, err := os.Stat(filepath.Join(groupDir(c.dirOf("c"), 1), stagedFile)); err != nil {
		t.Fatalf("no staged stream was left: %v", err)
	}
	crash.Store(false)
	again := c.start("c")
	if got := again.machines[1].list(); !slices.Equal(got, want) {
		t.Errorf("right after open the machine holds %q, want %q: the staged stream was not installed before Raft began", got, want)
	}
	if _, err := os.Stat(filepath.Join(groupDir(c.dirOf("c"), 1), stagedFile)); err == nil {
		t.Error("the staged stream is still there")
	}
	c.awaitVoters(3)
	c.put(1, "y")
	c.awaitList(1, append(want, "y"))
}

func TestDamagedStagedStreamIsDropped(t *testing.T) {
	c := newCluster(t)
	c.startAll("a", "b", "c")
	want := numbered("x", 30)
	c.putAll(1, want)
	c.awaitList(1, want)
	b := c.live()[2]
	p := pointer{index: b.Group(1).applied.get() + 100, term: 9, config: raft.Configuration{Servers: b.Group(1).instance().servers()}, configIndex: 1}
	c.stop(b, true)
	body := append(p.encode(), encodeStreamHead(p.index)...)
	body = append(body, "[]XXXX"...) // a wrong checksum
	if err := os.WriteFile(filepath.Join(groupDir(c.dirOf(b.name), 1), stagedFile), body, 0o644); err != nil {
		t.Fatal(err)
	}
	b = c.start(b.name)
	c.put(1, "y")
	c.awaitList(1, append(want, "y"))
	if n := b.machines[1].installs; n != 0 {
		t.Errorf("a damaged stream was installed %d times", n)
	}
}

// A follower's log has a tail that conflicts with the snapshot it is sent.
// hashicorp/raft keeps the end of the old tail in memory and livelocks (#697);
// raftlog replaces the instance.
func TestSnapshotOverAConflictingTail(t *testing.T) {
	c := newCluster(t)
	c.startAll("a", "b", "c")
	c.putAll(1, numbered("x", 5))
	c.awaitList(1, numbered("x", 5))
	want := numbered("x", 5)
	leader := c.leader(1)
	victim := c.live()[0]
	if victim == leader {
		victim = c.live()[1]
	}
	c.stop(victim, true)
	more := numbered("y", 30)
	c.putAll(1, more)
	want = append(want, more...)
	for _, b := range c.live() {
		c.snapshot(b, 1)
	}
	// Give the victim a long tail of an old term that was never committed.
	s, closeLog := c.openLog(victim.name, 1)
	last, err := s.LastIndex()
	if err != nil {
		t.Fatal(err)
	}
	for i := last + 1; i < last+200; i++ {
		if err := s.StoreLog(&raft.Log{Index: i, Term: 1, Type: raft.LogCommand, Data: []byte("never committed")}); err != nil {
			t.Fatal(err)
		}
	}
	if err := closeLog(); err != nil {
		t.Fatal(err)
	}
	b := c.start(victim.name)
	c.put(1, "z")
	want = append(want, "z")
	c.awaitList(1, want)
	if b.machines[1].installs == 0 {
		t.Error("the state came without a stream; the test shows nothing")
	}
}

// openLog opens a group's log while its node does not run.
func (c *cluster) openLog(name string, g GroupID) (raft.LogStore, func() error) {
	c.t.Helper()
	if logStore() == Journal {
		j, err := journal.Open(filepath.Join(c.dirOf(name), journalDir), journal.Options{SegmentBytes: 16 << 20})
		if err != nil {
			c.t.Fatal(err)
		}
		return j.Group(journal.Group(g)), j.Close
	}
	b, err := openBolt(filepath.Join(groupDir(c.dirOf(name), g), logFile))
	if err != nil {
		c.t.Fatal(err)
	}
	return b, b.Close
}

// A directory keeps the kind of log that it was made with.
func TestOtherKindOfLogIsRefused(t *testing.T) {
	for _, kinds := range [][2]LogStore{{BoltDB, Journal}, {Journal, BoltDB}} {
		t.Run(string(kinds[0]), func(t *testing.T) {
			c := newCluster(t)
			c.tune = func(_ string, cfg *Config) { cfg.LogStore = kinds[0] }
			c.startAll("a")
			c.put(1, "x")
			c.stop(c.leader(1), false)
			c.tune = func(_ string, cfg *Config) { cfg.LogStore = kinds[1] }
			if _, err := c.open("a"); err == nil || !strings.Contains(err.Error(), "raftLogStore="+string(kinds[0])) || !strings.Contains(err.Error(), "set ") {
				t.Fatalf("Open = %v, want a refusal that says what to do", err)
			}
			c.tune = func(_ string, cfg *Config) { cfg.LogStore = kinds[0] }
			c.start("a")
			c.awaitList(1, []string{"x"})
		})
	}
}

// Both kinds keep the contract of raft.LogStore that this package relies on.
func TestLogStoreContract(t *testing.T) {
	for _, kind := range []LogStore{BoltDB, Journal} {
		t.Run(string(kind), func(t *testing.T) {
			dir := t.TempDir()
			open := func() (raft.LogStore, func()) {
				var s raft.LogStore
				var end func() error
				if kind == Journal {
					j, err := journal.Open(dir, journal.Options{SegmentBytes: 64 << 10})
					if err != nil {
						t.Fatal(err)
					}
					s, end = j.Group(1), j.Close
				} else {
					b, err := openBolt(filepath.Join(dir, logFile))
					if err != nil {
						t.Fatal(err)
					}
					s, end = b, b.Close
				}
				return s, func() {
					if err := end(); err != nil {
						t.Error(err)
					}
				}
			}
			s, end := open()
			check := func(step string, first, last uint64, terms ...uint64) {
				t.Helper()
				for range 2 { // the same after another opening
					f, err1 := s.FirstIndex()
					l, err2 := s.LastIndex()
					if f != first || l != last || err1 != nil || err2 != nil {
						t.Fatalf("%s: log is %d to %d (%v, %v), want %d to %d", step, f, l, err1, err2, first, last)
					}
					for i, term := range terms {
						var e raft.Log
						want := raft.Log{Index: first + uint64(i), Term: term, Type: raft.LogCommand, Data: fmt.Appendf(nil, "%d/%d", first+uint64(i), term), Extensions: []byte("ext"), AppendedAt: time.Unix(1700000000, 7)}
						err := s.GetLog(want.Index, &e)
						if err != nil || e.Index != want.Index || e.Term != term || e.Type != want.Type || string(e.Data) != string(want.Data) || string(e.Extensions) != "ext" || !e.AppendedAt.Equal(want.AppendedAt) {
							t.Fatalf("%s: entry is %+v, %v, want %+v", step, e, err, want)
						}
					}
					for _, i := range []uint64{first - 1, last + 1} {
						if err := s.GetLog(i, new(raft.Log)); !errors.Is(err, raft.ErrLogNotFound) {
							t.Fatalf("%s: entry %d: %v, want ErrLogNotFound", step, i, err)
						}
					}
					end()
					s, end = open()
				}
			}
			store := func(from, to, term uint64) {
				t.Helper()
				var logs []*raft.Log
				for i := from; i <= to; i++ {
					logs = append(logs, &raft.Log{Index: i, Term: term, Type: raft.LogCommand, Data: fmt.Appendf(nil, "%d/%d", i, term), Extensions: []byte("ext"), AppendedAt: time.Unix(1700000000, 7)})
				}
				if err := s.StoreLogs(logs); err != nil {
					t.Fatal(err)
				}
			}
			cut := func(low, high uint64) {
				t.Helper()
				if err := s.DeleteRange(low, high); err != nil {
					t.Fatal(err)
				}
			}
			check("empty", 0, 0)
			store(1, 6, 1)
			check("stored", 1, 6, 1, 1, 1, 1, 1, 1)
			cut(5, 6)
			check("suffix cut", 1, 4, 1, 1, 1, 1)
			store(5, 7, 2)
			check("appended", 1, 7, 1, 1, 1, 1, 2, 2, 2)
			store(7, 8, 3) // over its last entry, as after an append that failed
			check("appended again", 1, 8, 1, 1, 1, 1, 2, 2, 3, 3)
			cut(1, 3)
			check("prefix cut", 4, 8, 1, 2, 2, 3, 3)
			cut(4, 8)
			check("emptied", 0, 0)
			store(100, 101, 4) // after an installed state
			check("begun elsewhere", 100, 101, 4, 4)
			end()
		})
	}
}

func benchmarkStore(b *testing.B, kind LogStore, groups, batch int) {
	dir := b.TempDir()
	var stores []raft.LogStore
	if kind == Journal {
		j, err := journal.Open(dir, journal.Options{})
		if err != nil {
			b.Fatal(err)
		}
		defer j.Close()
		for g := range groups {
			stores = append(stores, j.Group(journal.Group(g)))
		}
	} else {
		for g := range groups {
			s, err := openBolt(filepath.Join(dir, strconv.Itoa(g)))
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			stores = append(stores, s)
		}
	}
	data := make([]byte, 1024)
	b.SetBytes(int64(groups * batch * len(data)))
	b.ReportAllocs()
	b.ResetTimer()
	var all sync.WaitGroup
	for _, s := range stores {
		all.Go(func() {
			logs := make([]*raft.Log, batch)
			for n := range b.N {
				for i := range logs {
					logs[i] = &raft.Log{Index: uint64(n*batch + i + 1), Term: 1, Data: data}
				}
				if err := s.StoreLogs(logs); err != nil {
					b.Error(err)
					return
				}
				if n%100 == 99 {
					if err := s.DeleteRange(1, uint64((n-50)*batch)); err != nil {
						b.Error(err)
						return
					}
				}
			}
		})
	}
	all.Wait()
}

// BenchmarkStoreLogs: one operation is one batch in each group.
func BenchmarkStoreLogs(b *testing.B) {
	for _, groups := range []int{1, 4} {
		for _, batch := range []int{1, 64} {
			for _, kind := range []LogStore{BoltDB, Journal} {
				b.Run(fmt.Sprintf("groups=%d/batch=%d/%s", groups, batch, kind), func(b *testing.B) { benchmarkStore(b, kind, groups, batch) })
			}
		}
	}
}

func TestOpenRefusesWhatForgot(t *testing.T) {
	for _, tt := range []struct {
		name  string
		spoil func(dir string) error
		want  string
	}{
		{"log-gone", func(dir string) error { return os.Remove(filepath.Join(groupDir(dir, 1), logFile)) }, "the log is gone"},
		{"state-gone", func(dir string) error { return os.RemoveAll(filepath.Join(dir, "list", "1")) }, "lost what was durable"},
		{"identity-gone", func(dir string) error { return os.Remove(filepath.Join(dir, identityFile)) }, "identity.json is missing"},
		{"pointer-damaged", func(dir string) error {
			return os.WriteFile(filepath.Join(groupDir(dir, 1), pointerFile), []byte("MGSP\x01\x00\x00\x00garbage"), 0o644)
		}, "snapshot pointer"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCluster(t)
			c.startAll("a")
			c.put(1, "x")
			c.snapshot(c.leader(1), 1)
			c.stop(c.leader(1), false)
			if err := tt.spoil(c.dirOf("a")); err != nil {
				t.Fatal(err)
			}
			_, err := c.open("a")
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Open = %v, want a refusal with %q", err, tt.want)
			}
		})
	}
}

// A one-member group whose log lost its committed end must not take commands at
// indexes that its state already holds: they would be dropped in silence.
func TestLogThatLostItsEndIsFatal(t *testing.T) {
	var f faults
	c := newCluster(t)
	c.tune = f.tune
	c.startAll("a")
	c.putAll(1, numbered("x", 10))
	b := c.leader(1)
	if err := b.machines[1].Checkpoint(); err != nil {
		t.Fatal(err)
	}
	c.stop(b, false)
	s, closeLog := c.openLog("a", 1)
	last, err := s.LastIndex()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.DeleteRange(last-8, last); err != nil {
		t.Fatal(err)
	}
	if err := closeLog(); err != nil {
		t.Fatal(err)
	}
	b = c.start("a")
	eventually(t, "the loss is fatal", func() bool { return len(f.fatals("a")) > 0 })
	if err := f.fatals("a")[0]; !strings.Contains(err.Error(), "lost committed entries") {
		t.Errorf("fatal: %v", err)
	}
	if b.Group(1).IsLeader() {
		t.Error("the node leads all the same")
	}
}

// jam sets raft's flag that a transfer is under way, and nobody clears it.
func jam(r *raft.Raft) {
	f := reflect.ValueOf(r).Elem().FieldByName("leaderState").FieldByName("leadershipTransferInProgress")
	atomic.StoreInt32((*int32)(f.Addr().UnsafePointer()), 1)
}

// hashicorp/raft #696: a leader whose transfer never ends refuses all commands.
func TestTransferThatNeverEndsIsHealed(t *testing.T) {
	t.Run("in-a-new-term", func(t *testing.T) {
		c := newCluster(t)
		c.startAll("a", "b", "c")
		c.put(1, "x")
		l := c.leader(1)
		b := c.live()[0]
		if b == l {
			b = c.live()[1]
		}
		jammed := b.Group(1).instance()
		jam(jammed.raft)
		to := raft.ServerAddress(raftAddress(b.Identity().Node(), b.cfg.Advertised))
		if err := l.Group(1).instance().raft.LeadershipTransferToServer(raft.ServerID(b.Identity().Node()), to).Error(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the jammed instance is replaced", func() bool { return b.Group(1).instance() != jammed })
		c.put(1, "y")
		c.awaitList(1, []string{"x", "y"})
	})
	t.Run("after-a-failed-transfer", func(t *testing.T) {
		c := newCluster(t)
		c.startAll("a")
		c.put(1, "x")
		g := c.leader(1).Group(1)
		jammed := g.instance()
		jam(jammed.raft)
		g.checkUnstuck(t.Context(), jammed)
		eventually(t, "the jammed instance is replaced", func() bool { in := g.instance(); return in != nil && in != jammed })
		c.put(1, "y")
		c.awaitList(1, []string{"x", "y"})
	})
}

func TestPausesAreNoticed(t *testing.T) {
	p := newPauses()
	p.start = p.start.Add(-time.Minute)
	p.last.Store(int64(time.Minute - pauseLimit - time.Millisecond))
	if !p.recent() {
		t.Error("a process that has not ticked for longer than the limit was not suspected")
	}
	now := int64(time.Since(p.start))
	p.last.Store(now)
	if p.recent() {
		t.Error("a process that ticks is suspected")
	}
	p.end.Store(now)
	if !p.recent() {
		t.Error("a pause that just ended was forgotten")
	}
}

// The restart that heals a stuck instance must leave a working group.
func TestRestartKeepsTheGroupWorking(t *testing.T) {
	c := newCluster(t)
	c.startAll("a", "b", "c")
	want := numbered("x", 5)
	c.putAll(1, want)
	for i := range 3 {
		l := c.leader(1)
		l.Group(1).requestRestart("test")
		d := fmt.Sprintf("y%d", i)
		c.put(1, d)
		want = append(want, d)
	}
	c.awaitList(1, want)
}

func TestProposalsKeepTheirOrderAndAnswerOnce(t *testing.T) {
	c := newCluster(t)
	c.timing.Heartbeat, c.timing.Election, c.timing.Lease = 3*time.Second, 3*time.Second, 3*time.Second // no change of leader on a busy machine
	c.startAll("a", "b", "c")
	g := c.leader(1).Group(1)
	const n = 2000
	var mu sync.Mutex
	var order []int
	calls := make([]int, n)
	done := make(chan struct{})
	var want []string
	for i := range n {
		d := strconv.Itoa(i)
		want = append(want, d)
		g.Propose([]byte(d), func(r any, err error) {
			mu.Lock()
			defer mu.Unlock()
			if err != nil || r != i+1 {
				t.Errorf("command %d answered %v, %v, want %d", i, r, err, i+1)
			}
			order = append(order, i)
			calls[i]++
			if len(order) == n {
				close(done)
			}
		})
	}
	<-done
	mu.Lock()
	defer mu.Unlock()
	if !slices.IsSorted(order) {
		t.Error("answers came out of order")
	}
	for i, k := range calls {
		if k != 1 {
			t.Errorf("command %d was answered %d times", i, k)
		}
	}
	c.awaitList(1, want)
}

// Whatever happens to leader and node, every proposal is answered exactly once,
// and "not proposed" is never said of a command that is applied.
func TestEveryProposalIsAnsweredThroughAllEnds(t *testing.T) {
	c := newCluster(t)
	c.startAll("a", "b", "c")
	var mu sync.Mutex
	answers := map[string][]error{}
	proposed := map[string]bool{}
	stop := make(chan struct{})
	var senders sync.WaitGroup
	for _, b := range c.live() {
		senders.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				d := fmt.Sprintf("%s-%d", b.name, i)
				mu.Lock()
				proposed[d] = true
				mu.Unlock()
				b.Group(1).Propose([]byte(d), func(_ any, err error) {
					mu.Lock()
					defer mu.Unlock()
					answers[d] = append(answers[d], err)
				})
				time.Sleep(200 * time.Microsecond)
			}
		})
	}
	for i := range 4 {
		l := c.leader(1)
		switch i {
		case 0:
			l.Group(1).requestRestart("test")
		case 1:
			_ = l.Group(1).instance().raft.LeadershipTransfer().Error()
		case 2:
			c.stop(l, false)
		case 3:
			eventually(t, "some more go through", func() bool { return propose(l.Group(1), fmt.Sprintf("extra-%d", time.Now().UnixNano())).err == nil })
		}
	}
	close(stop)
	senders.Wait()
	eventually(t, "all are answered", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(answers) == len(proposed)
	})
	time.Sleep(50 * time.Millisecond) // a second answer would come now
	applied := map[string]bool{}
	final := c.leader(1)
	if err := final.Group(1).ReadBarrier(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, d := range final.machines[1].list() {
		if applied[d] {
			t.Errorf("%s applied twice", d)
		}
		applied[d] = true
	}
	mu.Lock()
	defer mu.Unlock()
	kinds := map[string]int{}
	for d, errs := range answers {
		var elsewhere *NotLeaderError
		switch err := errs[0]; {
		case len(errs) != 1:
			t.Errorf("%s answered %d times", d, len(errs))
		case err == nil:
			kinds["applied"]++
			if !applied[d] {
				t.Errorf("%s was acknowledged and is lost", d)
			}
		case errors.Is(err, ledger.ErrUnknownOutcome):
			kinds["unknown"]++
		case errors.As(err, &elsewhere), errors.Is(err, ledger.ErrUnavailable):
			kinds["refused"]++
			if applied[d] {
				t.Errorf("%s was refused (%v) and is applied", d, err)
			}
		default:
			t.Errorf("%s: unexpected %v", d, err)
		}
	}
	t.Logf("answers: %v", kinds)
	if kinds["applied"] == 0 || kinds["refused"] == 0 {
		t.Errorf("the test shows nothing: %v", kinds)
	}
}

func TestCommandSizeAndBytesInFlight(t *testing.T) {
	var f faults
	c := newCluster(t)
	c.tune = f.tune
	c.startAll("a")
	g := c.leader(1).Group(1)
	for _, size := range []int{0, MaxCommandBytes + 1} {
		answer := make(chan error, 1)
		g.Propose(make([]byte, size), func(_ any, err error) { answer <- err })
		if err := <-answer; err == nil || errors.Is(err, ledger.ErrUnavailable) || errors.Is(err, ledger.ErrUnknownOutcome) {
			t.Errorf("command of %d bytes: %v, want a refusal that no retry helps", size, err)
		}
	}
	hold := make(chan struct{})
	f.store("a").block.Store(&hold)
	answers := make(chan error, 100)
	n := MaxInFlightBytes/MaxCommandBytes + 2
	big := make([]byte, MaxCommandBytes)
	for range n {
		g.Propose(big, func(_ any, err error) { answers <- err })
	}
	f.store("a").block.Store(nil)
	close(hold)
	refused := 0
	for range n {
		switch err := <-answers; {
		case err == nil:
		case errors.Is(err, ledger.ErrUnavailable):
			refused++
		default:
			t.Errorf("large command: %v", err)
		}
	}
	if refused != 2 {
		t.Errorf("%d of %d commands of %d bytes were refused, want the 2 beyond %d in flight", refused, n, MaxCommandBytes, MaxInFlightBytes)
	}
	if o := propose(g, "small"); o.err != nil {
		t.Errorf("after the flood: %v", o.err)
	}
}
