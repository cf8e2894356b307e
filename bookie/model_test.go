package bookie

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

// modelLedger is a ledger as plainly as it can be.
type modelLedger struct {
	state   state
	epoch   uint64
	owner   string
	entries [][]byte
}

// model decides commands like a Machine, in memory and without any cleverness.
type model map[ledger.ID]*modelLedger

// apply returns what the operation answers: the last entry and the kind of error.
func (m model) apply(o op) (ledger.EntryID, error) {
	l := m[o.ledger]
	if o.kind == opDelete {
		delete(m, o.ledger)
		return 0, nil
	}
	if o.kind == opCreate {
		switch {
		case l == nil:
			m[o.ledger] = &modelLedger{stateOpen, o.epoch, o.owner, nil}
			return -1, nil
		case l.owner != o.owner:
			return 0, rpc.ErrInvalid
		case l.epoch != o.epoch:
			return 0, ledger.ErrFenced
		}
		return ledger.EntryID(len(l.entries) - 1), nil
	}
	if l == nil {
		return 0, ledger.ErrNoSuchLedger
	}
	end := ledger.EntryID(len(l.entries) - 1)
	switch o.kind {
	case opFence:
		switch {
		case o.epoch < l.epoch:
			return 0, ledger.ErrFenced
		case l.state == stateClosed:
		case o.epoch == l.epoch && l.state == stateOpen:
			return 0, rpc.ErrInvalid
		case o.epoch > l.epoch:
			l.epoch, l.state = o.epoch, stateFenced
		}
		return end, nil
	case opClose:
		if l.state == stateFenced || l.epoch != o.epoch {
			return 0, ledger.ErrFenced
		}
		l.state = stateClosed
		return end, nil
	default:
		return l.append(o)
	}
}

func (l *modelLedger) append(o op) (ledger.EntryID, error) {
	if l.state == stateFenced || l.epoch != o.epoch {
		return 0, ledger.ErrFenced
	}
	if int(o.first) > len(l.entries) {
		return 0, ledger.ErrGap
	}
	at := int(o.first)
	fresh := false
	for _, e := range unframe(o.frames) {
		switch {
		case at < len(l.entries) && !bytes.Equal(l.entries[at], e):
			return 0, rpc.ErrInvalid
		case at >= len(l.entries) && l.state == stateClosed:
			return 0, ledger.ErrClosed
		case at >= len(l.entries):
			l.entries = append(l.entries, e)
			fresh = true
		}
		at++
	}
	if fresh {
		return ledger.EntryID(len(l.entries) - 1), nil
	}
	return ledger.EntryID(at - 1), nil
}

func unframe(frames []byte) (entries [][]byte) {
	for len(frames) > 0 {
		data, _, rest, err := bookiepb.Next(frames)
		if err != nil {
			panic(err)
		}
		entries, frames = append(entries, data), rest
	}
	return entries
}

func frame(entries ...[]byte) (frames []byte) {
	for _, e := range entries {
		frames = bookiepb.AppendFrame(frames, e)
	}
	return frames
}

// history is a Raft log with what each command answered the first time.
type history struct {
	rng      *rand.Rand
	commands []raftlog.Command
	answers  [][]outcome
	model    model
}

// next makes a command and lets the model decide it.
func (h *history) next() {
	ops := make([]op, 1+h.rng.IntN(4))
	for i := range ops {
		ops[i] = h.op()
	}
	answer := make([]outcome, len(ops))
	for i, o := range ops {
		answer[i].last, answer[i].err = h.model.apply(o)
	}
	index := raftlog.Index(3 * (len(h.commands) + 1)) // Raft has entries of its own between
	h.commands = append(h.commands, raftlog.Command{Index: index, Term: 1, Data: appendCommand(nil, ops)})
	h.answers = append(h.answers, answer)
}

func (h *history) op() op {
	o := op{ledger: ledger.ID(1 + h.rng.IntN(12)), epoch: 1}
	l := h.model[o.ledger]
	switch n := h.rng.IntN(100); {
	case l == nil && n < 80 || n < 3:
		o.kind, o.owner = opCreate, []string{"a topic", "a topic", "another"}[h.rng.IntN(3)]
	case n < 5:
		o.kind, o.epoch = opFence, uint64(1+h.rng.IntN(3))
	case n < 7:
		o.kind = opClose
	case n < 13:
		o.kind = opDelete
	default:
		o.kind = opAppend
		if h.rng.IntN(30) == 0 {
			o.epoch = uint64(1 + h.rng.IntN(3))
		}
		o.first, o.frames = h.entries(l)
	}
	return o
}

// entries makes an append: mostly the next entries, else a repeat, a gap, or
// entries with other bytes than those that are there.
func (h *history) entries(l *modelLedger) (ledger.EntryID, []byte) {
	next := 0
	if l != nil {
		next = len(l.entries)
	}
	first := next
	switch h.rng.IntN(10) {
	case 0:
		first += 1 + h.rng.IntN(3)
	case 1, 2, 3:
		first -= min(first, h.rng.IntN(20))
	}
	var frames []byte
	for i := range 1 + h.rng.IntN(8) {
		if at := first + i; at < next && h.rng.IntN(100) > 0 {
			frames = bookiepb.AppendFrame(frames, l.entries[at])
			continue
		}
		data := make([]byte, h.rng.IntN(200))
		for j := range data {
			data[j] = byte(h.rng.Uint32())
		}
		frames = bookiepb.AppendFrame(frames, data)
	}
	return ledger.EntryID(first), frames
}

// feed applies everything that m has not, in batches, and checks the answers.
func (h *history) feed(t *testing.T, m *Machine) {
	t.Helper()
	at, _ := slices.BinarySearchFunc(h.commands, m.Applied()+1, func(c raftlog.Command, i raftlog.Index) int {
		return int(c.Index) - int(i)
	})
	for at < len(h.commands) {
		n := min(1+h.rng.IntN(8), len(h.commands)-at)
		for i, result := range m.Apply(h.commands[at : at+n]) {
			if diff := differ(result, h.answers[at+i]); diff != "" {
				t.Fatalf("command %d: %s", h.commands[at+i].Index, diff)
			}
		}
		at += n
	}
}

func differ(result any, want []outcome) string {
	got, ok := result.([]outcome)
	if !ok || len(got) != len(want) {
		return fmt.Sprintf("answer %v, want %d outcomes", result, len(want))
	}
	for i := range got {
		if !errors.Is(got[i].err, want[i].err) || (want[i].err == nil && got[i].last != want[i].last) {
			return fmt.Sprintf("operation %d: last %d, err %v; model says %d, %v", i, got[i].last, got[i].err, want[i].last, want[i].err)
		}
	}
	return ""
}

// compare reads everything back.
func (h *history) compare(t *testing.T, m *Machine) {
	t.Helper()
	for id := ledger.ID(1); id <= 12; id++ {
		l := h.model[id]
		f, ok, err := m.lookup(id)
		must(t, err)
		if ok != (l != nil) {
			t.Fatalf("ledger %d exists: %v, model says %v", id, ok, l != nil)
		}
		if l == nil {
			if _, err := readAll(m, id, 0, 0, 100); !errors.Is(err, ledger.ErrNoSuchLedger) {
				t.Fatalf("ledger %d: read = %v, want ErrNoSuchLedger", id, err)
			}
			continue
		}
		if f.state != l.state || f.epoch != l.epoch || f.owner != l.owner || int(f.next) != len(l.entries) {
			t.Fatalf("ledger %d: %+v, model has %v, epoch %d, %q, %d entries", id, f, l.state, l.epoch, l.owner, len(l.entries))
		}
		for first := 0; first < len(l.entries); {
			last := first + h.rng.IntN(len(l.entries)-first)
			got, err := readAll(m, id, ledger.EntryID(first), ledger.EntryID(last), int64(h.rng.IntN(2000)))
			if err != nil || len(got) == 0 || first+len(got) > last+1 {
				t.Fatalf("ledger %d: read %d to %d = %d entries, %v", id, first, last, len(got), err)
			}
			for i, e := range got {
				if !bytes.Equal(e, l.entries[first+i]) {
					t.Fatalf("ledger %d, entry %d is %x, want %x", id, first+i, e, l.entries[first+i])
				}
			}
			first += len(got)
		}
	}
}

func readAll(m *Machine, id ledger.ID, first, last ledger.EntryID, maxBytes int64) ([][]byte, error) {
	b := readBuffer{out: new([]byte), limit: maxBytes}
	n, err := m.read(id, first, last, &b)
	if err != nil {
		return nil, err
	}
	entries := unframe(*b.out)
	if len(entries) != n {
		return nil, fmt.Errorf("%d entries in %d", len(entries), n)
	}
	return entries, nil
}

// TestMachineMatchesModel runs a random history with checkpoints, restarts,
// power cuts and moves to another disk, and compares answers and contents with
// the model.
func TestMachineMatchesModel(t *testing.T) {
	rng := seeded(t)
	for start, i := time.Now(), 0; i < 12 && time.Since(start) < 10*time.Second; i++ {
		h := &history{rng: rng, model: model{}}
		d := newDisk(t, 8<<10)
		for step := range 120 {
			for range 1 + rng.IntN(8) {
				h.next()
			}
			h.feed(t, d.m)
			d.m.verify(t)
			switch rng.IntN(12) {
			case 0, 1, 2:
				must(t, d.m.Checkpoint())
			case 3:
				d.crash(nil)
			case 4:
				d.crash(rng)
			case 5:
				d.restart()
			case 6:
				d = h.move(t, d)
			}
			d.m.verify(t)
			h.feed(t, d.m)
			if step%10 == 0 {
				h.compare(t, d.m)
			}
			d.m.verify(t)
		}
		h.compare(t, d.m)
		if err := errors.Join(d.fatals()...); err != nil {
			t.Fatal(err)
		}
	}
}

// move streams the state to a disk that has another, and goes on there.
func (h *history) move(t *testing.T, d *disk) *disk {
	t.Helper()
	s, err := d.m.Stream()
	must(t, err)
	to := newDisk(t, d.segment)
	old := &history{rng: h.rng, model: model{}}
	for range 20 {
		old.next()
	}
	old.feed(t, to.m)
	if h.rng.IntN(2) == 0 {
		must(t, to.m.Checkpoint())
	}
	var b bytes.Buffer
	n, err := b.ReadFrom(s)
	must(t, err)
	must(t, s.Close())
	if n != s.Size || s.Applied != d.m.Applied() {
		t.Fatalf("stream of %d bytes at %d, promised %d at %d", n, d.m.Applied(), s.Size, s.Applied)
	}
	must(t, to.m.Install(&b, s.Applied))
	if to.m.Applied() != s.Applied {
		t.Fatalf("applied %d after the install, want %d", to.m.Applied(), s.Applied)
	}
	to.crash(nil) // an install is durable when it returns
	return to
}
