package bookie

import (
	"encoding/binary"
	"fmt"
	"maps"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

// Checkpoint makes everything applied before the call durable. It may run
// beside Apply. A failure stops the machine: what a failed sync left on disk is
// not known, so there is no second try.
func (m *Machine) Checkpoint() error {
	m.checkpointMu.Lock()
	defer m.checkpointMu.Unlock()
	return m.checkpoint()
}

// frozenState is what one checkpoint writes.
type frozenState struct {
	layer   layer
	applied raftlog.Index
	live    map[uint64]int64 // by segment, before what the layer's deletions free
	freed   map[uint64]int64 // by segment, what they free
}

// checkpoint needs checkpointMu.
func (m *Machine) checkpoint() error {
	start := time.Now()
	m.mu.Lock()
	if err := m.usableLocked(); err != nil {
		m.mu.Unlock()
		return err
	}
	if m.applied == m.durable && len(m.current) == 0 {
		m.mu.Unlock()
		return nil
	}
	m.frozen, m.current = m.current, layer{}
	f := frozenState{layer: m.frozen, applied: m.applied, live: maps.Clone(m.live), freed: map[uint64]int64{}}
	m.mu.Unlock()

	if err := m.writeCheckpoint(&f); err != nil {
		return m.stop(fmt.Errorf("checkpoint at index %d: %w", f.applied, err))
	}

	m.mu.Lock()
	m.frozen, m.durable = nil, f.applied
	m.persisted = f.live
	subtract(m.live, f.freed)
	m.mu.Unlock()
	m.store.segments.release(f.freed)
	m.store.metrics.checkpoint.Observe(time.Since(start).Seconds())
	return nil
}

// writeCheckpoint syncs the segments and then commits one batch. On success
// f.live has become what the index says.
func (m *Machine) writeCheckpoint(f *frozenState) error {
	if err := m.store.segments.sync(); err != nil {
		return err
	}
	b := m.store.index.db.NewBatch()
	defer func() { _ = b.Close() }() // frees memory; cannot fail before a second call
	for id, c := range f.layer {
		if err := m.writeChange(b, id, c, f.freed); err != nil {
			return err
		}
	}
	subtract(f.live, f.freed)
	if err := m.writeLive(b, f.live); err != nil {
		return err
	}
	if err := m.writeApplied(b, f.applied); err != nil {
		return err
	}
	return b.Commit(pebble.Sync)
}

// writeChange adds one ledger's change to the batch and the bytes that it frees
// to freed.
func (m *Machine) writeChange(b *pebble.Batch, id ledger.ID, c *change, freed map[uint64]int64) error {
	for _, r := range c.dead {
		freed[r.segment] += int64(r.length)
	}
	if c.fresh {
		if err := m.dropLedger(b, id, freed); err != nil {
			return err
		}
	}
	if c.deleted {
		return nil
	}
	if err := b.Set(ledgerKey(m.group, id), appendFacts(nil, c.facts), nil); err != nil {
		return err
	}
	for _, r := range c.runs {
		if err := b.Set(runKey(m.group, id, r.first), encodeRun(r), nil); err != nil {
			return err
		}
	}
	return nil
}

// dropLedger removes what the index has of a ledger.
func (m *Machine) dropLedger(b *pebble.Batch, id ledger.ID, freed map[uint64]int64) error {
	found := false
	err := eachRun(m.store.index.db, m.group, id, 0, func(r run) bool {
		freed[r.segment] += int64(r.length)
		found = true
		return true
	})
	if err != nil {
		return err
	}
	if found {
		if err := b.DeleteRange(runKey(m.group, id, 0), runKey(m.group, id+1, 0), nil); err != nil {
			return err
		}
	}
	return b.Delete(ledgerKey(m.group, id), nil)
}

// writeLive adds the live bytes that differ from the index's.
func (m *Machine) writeLive(b *pebble.Batch, live map[uint64]int64) error {
	for number, n := range live {
		if m.persisted[number] == n {
			continue
		}
		if err := b.Set(segmentKey(m.group, number), binary.BigEndian.AppendUint64(nil, uint64(n)), nil); err != nil {
			return err
		}
	}
	for number := range m.persisted {
		if live[number] == 0 {
			if err := b.Delete(segmentKey(m.group, number), nil); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *Machine) writeApplied(b *pebble.Batch, applied raftlog.Index) error {
	if err := putFormat(b, m.store.segments.nextNumber()); err != nil {
		return err
	}
	return b.Set(groupKey(keyApplied, m.group), binary.BigEndian.AppendUint64(nil, uint64(applied)), nil)
}

// subtract lowers counts by n and drops those that reach zero.
func subtract(counts, n map[uint64]int64) {
	for number, bytes := range n {
		counts[number] -= bytes
		if counts[number] == 0 {
			delete(counts, number)
		}
	}
}
