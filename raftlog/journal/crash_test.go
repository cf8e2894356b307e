package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/magnetar-io/magnetar/internal/vfs"
)

var (
	seed = flag.Uint64("seed", 0, "run this one seed of the crash test")
	long = flag.Bool("long", false, "run all seeds of the crash test")
)

// model is what one group's log must hold. Entries of an answered change must
// be there after a crash; one change may be in doubt.
type model struct {
	first uint64
	logs  []raft.Log // logs[i].Index == first+i
}

func (m *model) last() uint64 { return m.first + uint64(len(m.logs)) - 1 }

func (m model) clone() model {
	m.logs = cloneLogs(m.logs)
	return m
}

func cloneLogs(l []raft.Log) []raft.Log { return append([]raft.Log(nil), l...) }

func (m *model) store(logs []*raft.Log) {
	if len(m.logs) > 0 && logs[0].Index <= m.last() {
		m.cut(logs[0].Index, m.last())
	}
	if len(m.logs) == 0 {
		m.first = logs[0].Index
	}
	for _, l := range logs {
		m.logs = append(m.logs, *l)
	}
}

func (m *model) cut(low, high uint64) {
	switch {
	case len(m.logs) == 0 || high < m.first || low > m.last():
	case low <= m.first && high >= m.last():
		m.logs = nil
	case low <= m.first:
		m.logs = cloneLogs(m.logs[high+1-m.first:])
		m.first = high + 1
	default:
		m.logs = m.logs[:low-m.first]
	}
}

func (m *model) check(l *Log) error {
	want := span{}
	if len(m.logs) > 0 {
		want = span{m.first, m.last()}
	}
	if got := l.bounds(); got != want {
		return fmt.Errorf("group %d holds %v, want %v", l.id, got, want)
	}
	for i := range m.logs {
		var got raft.Log
		if err := l.GetLog(m.logs[i].Index, &got); err != nil {
			return fmt.Errorf("group %d entry %d: %w", l.id, m.logs[i].Index, err)
		}
		if err := same(&got, &m.logs[i]); err != nil {
			return fmt.Errorf("group %d entry %d: %w", l.id, m.logs[i].Index, err)
		}
	}
	for _, index := range []uint64{want.first - 1, want.last + 1} {
		if err := l.GetLog(index, new(raft.Log)); !errors.Is(err, raft.ErrLogNotFound) {
			return fmt.Errorf("group %d entry %d beyond the log: %w", l.id, index, err)
		}
	}
	return nil
}

func same(got, want *raft.Log) error {
	if got.Index != want.Index || got.Term != want.Term || got.Type != want.Type ||
		!bytes.Equal(got.Data, want.Data) || !bytes.Equal(got.Extensions, want.Extensions) || !got.AppendedAt.Equal(want.AppendedAt) {
		return fmt.Errorf("got %+v, want %+v", got, want)
	}
	return nil
}

func randomLogs(rng *rand.Rand, from, term uint64, n int) []*raft.Log {
	logs := make([]*raft.Log, n)
	for i := range logs {
		data := make([]byte, rng.IntN(200))
		for k := range data {
			data[k] = byte(rng.Uint32())
		}
		if rng.IntN(8) == 0 {
			data = append(data, frameMagic...) // what looks like a frame is none
			data = append(data, version)
		}
		logs[i] = &raft.Log{Index: from + uint64(i), Term: term, Type: raft.LogType(rng.IntN(3)), Data: data}
		if rng.IntN(4) == 0 {
			logs[i].Extensions = binary.LittleEndian.AppendUint32(nil, rng.Uint32())
			logs[i].AppendedAt = time.Unix(0, rng.Int64N(1<<60)+1)
		}
	}
	return logs
}

// TestCrash appends to several groups, cuts and compacts their logs and cuts the
// power, over and over. Run one seed with -args -seed=N.
func TestCrash(t *testing.T) {
	if *seed != 0 {
		crashRun(t, *seed)
		return
	}
	deadline, n := time.Now().Add(15*time.Second), uint64(2000)
	if *long {
		deadline = time.Now().Add(time.Hour)
	}
	runs := uint64(0)
	for s := uint64(1); s <= n && time.Now().Before(deadline); s++ {
		crashRun(t, s)
		if t.Failed() {
			t.Fatalf("seed %d", s)
		}
		runs++
	}
	t.Logf("%d runs", runs)
}

func crashRun(t *testing.T, seed uint64) {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 7))
	mem := vfs.NewMem()
	const groups = 3
	models := make([]model, groups)
	for life := range 4 {
		j, err := Open("j", Options{FS: mem, SegmentBytes: int64(4+rng.IntN(3)*4) << 10, MaxSegments: 3})
		if err != nil {
			t.Fatalf("seed %d, life %d: open: %v", seed, life, err)
		}
		for g := range models {
			if err := models[g].check(j.Group(Group(g))); err != nil {
				t.Fatalf("seed %d, life %d: %v", seed, life, err)
			}
		}
		mem = crashLife(t, rng, seed, mem, j, models)
	}
}

// change is a step of one group: its effect on the model and on the journal.
type change struct {
	g     int
	after model
	do    func() error
	done  chan error
}

func randomChange(rng *rand.Rand, j *Journal, g int, m *model) change {
	c, l := change{g: g, after: m.clone()}, j.Group(Group(g))
	lo, hi := m.first, uint64(0)
	if len(m.logs) > 0 {
		hi = m.last()
	}
	switch k := rng.IntN(20); {
	case hi > 0 && k == 0: // suffix
		low := lo + rng.Uint64N(hi-lo+1)
		c.after.cut(low, hi)
		c.do = func() error { return l.DeleteRange(low, hi) }
	case hi > 0 && (k <= 4 && g != 0 || k == 1): // prefix; group 0 is nearly never compacted
		high := lo + rng.Uint64N(hi-lo+1)
		c.after.cut(lo, high)
		c.do = func() error { return l.DeleteRange(lo, high) }
	default:
		from, term := hi+1, rng.Uint64N(3)+1
		if hi == 0 {
			from = rng.Uint64N(100) + 1
		} else if k == 5 {
			from = lo + rng.Uint64N(hi-lo+1) // again, over what is there
		}
		logs := randomLogs(rng, from, term, 1+rng.IntN(4))
		if g == 0 {
			logs = logs[:1]
		}
		c.after.store(logs)
		c.do = func() error { return l.StoreLogs(logs) }
	}
	return c
}

// crashLife runs one process until its power is cut and returns what is left,
// with the changes that turned out to have happened in models.
func crashLife(t *testing.T, rng *rand.Rand, seed uint64, mem *vfs.Mem, j *Journal, models []model) *vfs.Mem {
	t.Helper()
	steps := rng.IntN(60)
	for range steps {
		var running []change
		for g := range models {
			if g == 0 && rng.IntN(4) > 0 {
				continue // quiet: it pins old segments
			}
			running = append(running, randomChange(rng, j, g, &models[g]))
		}
		launch(running)
		for _, c := range running {
			if err := <-c.done; err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			models[c.g] = c.after
		}
	}
	if rng.IntN(4) == 0 { // a clean end
		if err := j.Close(); err != nil {
			t.Fatalf("seed %d: close: %v", seed, err)
		}
		return mem.Crash(rng)
	}
	// The power goes during one more step: each sync fails from some point on, so
	// what is in doubt was neither answered nor lost for certain.
	var running []change
	for g := range models {
		running = append(running, randomChange(rng, j, g, &models[g]))
	}
	if rng.IntN(2) == 0 {
		mem.FailWrite(1 + rng.IntN(3))
	} else {
		mem.FailSync(1 + rng.IntN(3))
	}
	launch(running)
	answered := map[int]bool{}
	for _, c := range running {
		err := <-c.done
		if err == nil {
			answered[c.g] = true
			models[c.g] = c.after
		} else if !errors.Is(err, ErrFailed) {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	left := mem.Crash(rng)
	_ = j.Close()
	settle(t, seed, left, running, answered, models)
	return left
}

func launch(running []change) {
	for i := range running {
		c := &running[i]
		c.done = make(chan error, 1)
		go func(do func() error, done chan error) { done <- do() }(c.do, c.done)
	}
}

// settle finds out which unanswered changes happened: each wholly, not at all, or
// for a store as a prefix (a batch may take several frames).
func settle(t *testing.T, seed uint64, left *vfs.Mem, running []change, answered map[int]bool, models []model) {
	t.Helper()
	look := left.Crash(nil) // a copy: what is synced is all there is
	j, err := Open("j", Options{FS: look, SegmentBytes: 4 << 10, MaxSegments: 3})
	if err != nil {
		t.Fatalf("seed %d: open after the crash: %v", seed, err)
	}
	defer j.Close()
	for _, c := range running {
		if answered[c.g] {
			continue
		}
		l := j.Group(Group(c.g))
		if models[c.g].check(l) == nil {
			continue
		}
		m, found := c.after.clone(), false
		for !found {
			if found = m.check(l) == nil; found || len(m.logs) == 0 {
				break
			}
			m.logs = m.logs[:len(m.logs)-1]
		}
		if !found {
			t.Fatalf("seed %d: group %d holds %v: neither what was before (%v) nor what was asked for (%v)", seed, c.g, l.bounds(), models[c.g].check(l), c.after.check(l))
		}
		models[c.g] = m
	}
}
