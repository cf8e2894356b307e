package raftlog

import (
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/hashicorp/raft"
)

// barrierMark in a log entry's Extensions makes it raftlog's own: it carries no
// command and is not shown to the machine. A new leader proposes one and knows,
// once it is applied, that everything committed in earlier terms was applied too.
var barrierMark = []byte{1}

// barrierApplied is the result of a barrier.
type barrierApplied struct {
	index Index
	term  Term
}

// fsm stands between raft and the machine. Its methods run on raft's apply
// goroutine.
type fsm struct {
	machine Machine
	snaps   *snapshots
	log     raft.LogStore
	applied *tracker
	floor   Index // the machine holds every command up to here, from before raft told us

	restart func(reason string) // asks for another raft instance
	fatal   func(error)
	staged  func() error // test hook: between staging and installing

	batch []Command // reused
}

var _ raft.BatchingFSM = (*fsm)(nil)

// Apply implements [raft.FSM]. raft calls ApplyBatch instead.
func (f *fsm) Apply(l *raft.Log) any { return f.ApplyBatch([]*raft.Log{l})[0] }

// ApplyBatch implements [raft.BatchingFSM].
func (f *fsm) ApplyBatch(logs []*raft.Log) []any {
	results := make([]any, len(logs))
	at := make([]int, 0, len(logs)) // at[i] is where batch[i]'s result goes
	batch := f.batch[:0]
	for i, l := range logs {
		switch {
		case l.Type != raft.LogCommand:
			// a configuration: raft's own affair, but it counts as applied
		case len(l.Extensions) > 0:
			results[i] = barrierApplied{Index(l.Index), Term(l.Term)}
		case Index(l.Index) > f.floor:
			batch, at = append(batch, Command{Index(l.Index), Term(l.Term), l.Data}), append(at, i)
		}
	}
	if len(batch) > 0 {
		answers := f.machine.Apply(batch)
		if len(answers) != len(batch) {
			panic(fmt.Sprintf("raftlog: the machine answered %d of %d commands", len(answers), len(batch)))
		}
		for i, a := range answers {
			results[at[i]] = a
		}
	}
	clear(batch) // the commands' bytes must not live as long as the slice
	f.batch = batch
	f.applied.advance(Index(logs[len(logs)-1].Index))
	return results
}

// Snapshot implements [raft.FSM].
func (f *fsm) Snapshot() (raft.FSMSnapshot, error) {
	return &checkpoint{machine: f.machine, applied: f.machine.Applied()}, nil
}

// checkpoint is the moment at which raft wants a snapshot.
type checkpoint struct {
	machine Machine
	applied Index
}

// Persist implements [raft.FSMSnapshot]. It runs beside Apply.
func (c *checkpoint) Persist(s raft.SnapshotSink) error {
	k, ok := s.(*sink)
	if !ok {
		panic(fmt.Sprintf("raftlog: snapshot sink is a %T", s))
	}
	if err := c.machine.Checkpoint(); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	k.checkpoint, k.p.applied = true, c.applied
	return nil // raft closes the sink, which writes the pointer
}

// Release implements [raft.FSMSnapshot].
func (c *checkpoint) Release() {}

// Restore implements [raft.FSM]: it installs the stream that was just staged.
func (f *fsm) Restore(r io.ReadCloser) error {
	if f.staged != nil {
		if err := f.staged(); err != nil {
			return err
		}
	}
	st, err := f.snaps.openStaged() // for the pointer in front; the bytes come from r, which raft watches
	if err != nil {
		return err
	}
	defer func() { _ = st.Close() }()
	restart, err := f.snaps.install(st.pointer, r, st.size, f.log)
	if err != nil {
		return err
	}
	f.floor = f.machine.Applied()
	f.applied.advance(max(f.floor, st.pointer.index))
	if restart {
		f.restart("an installed state replaced a log that conflicts with it")
	}
	return nil
}

// tracker is the index up to which the log was applied here. It never goes back.
type tracker struct {
	mu      sync.Mutex
	index   Index         // guarded by mu
	changed chan struct{} // guarded by mu; nil unless somebody waits; closed by advance
}

func (t *tracker) get() Index {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.index
}

func (t *tracker) advance(i Index) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if i <= t.index {
		return
	}
	t.index = i
	if t.changed != nil {
		close(t.changed)
		t.changed = nil
	}
}

// wait returns once everything up to i is applied.
func (t *tracker) wait(ctx context.Context, stop <-chan struct{}, i Index) error {
	for {
		t.mu.Lock()
		if t.index >= i {
			t.mu.Unlock()
			return nil
		}
		if t.changed == nil {
			t.changed = make(chan struct{})
		}
		changed := t.changed
		t.mu.Unlock()
		select {
		case <-changed:
		case <-stop:
			return errStopped
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
