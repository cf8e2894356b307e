package managedledger

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/magnetar-io/magnetar/cursor"
	"github.com/magnetar-io/magnetar/executor"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata"
)

// newOwner names one opening of a managed ledger; no two are alike.
func newOwner() string {
	var id [16]byte
	rand.Read(id[:]) // never fails
	return hex.EncodeToString(id[:])
}

// takeOverAttempts is how often an opening starts over because the record changed
// under it: the former owner may be at work until it is fenced.
const takeOverAttempts = 5

func (f *Factory) takeOver(ctx context.Context, name string) (*ManagedLedger, error) {
	retry := f.backoff()
	for attempt := 1; ; attempt++ {
		m, err := f.tryTakeOver(ctx, name)
		if !errors.Is(err, errConflict) || attempt == takeOverAttempts {
			return m, err
		}
		if waitErr := retry.wait(ctx); waitErr != nil {
			return nil, err
		}
	}
}

// tryTakeOver opens a managed ledger: it fixes the end of the last ledger, makes
// a new one, writes the list (which fences the former owner), and takes the
// cursors over.
func (f *Factory) tryTakeOver(ctx context.Context, name string) (*ManagedLedger, error) {
	rec, version, err := f.loadRecord(ctx, name)
	if err != nil {
		return nil, err
	}
	m := f.newLedger(name)
	next := rec.clone()
	if err := f.closeLast(ctx, m, next); err != nil {
		return nil, err
	}
	var writer Writer
	if next.terminated == nil {
		if writer, err = f.storage.Create(ctx, name); err != nil {
			return nil, fmt.Errorf("create a ledger: %w", err)
		}
		if err := checkID(next, writer.ID()); err != nil {
			writer.Abandon()
			return nil, err
		}
		next.add(writer.ID())
	}
	m.record, m.version = rec, version
	if err := m.save(ctx, next); err != nil {
		if writer != nil {
			writer.Abandon()
		}
		if errors.Is(err, errConflict) {
			if writer != nil {
				m.discard(ctx, writer.ID())
			}
			return nil, fmt.Errorf("%w: another broker is using it: %w", ErrFenced, err)
		}
		return nil, err
	}
	m.begin(writer)
	if err := m.takeCursors(ctx); err != nil {
		m.giveUp(ctx)
		return nil, err
	}
	if len(m.record.unlisted) > 0 {
		m.trimSoon(false)
	}
	return m, nil
}

// loadRecord returns a managed ledger's record, an empty one at version 0 if
// there is none. It finishes a deletion that was begun.
func (f *Factory) loadRecord(ctx context.Context, name string) (*record, metadata.Version, error) {
	for {
		kv, err := f.meta.Get(ctx, ledgerKey(name))
		if errors.Is(err, metadata.ErrNotFound) {
			return &record{}, 0, nil
		}
		if err != nil {
			return nil, 0, err
		}
		rec, err := parseRecord(name, kv.Value)
		if err != nil {
			return nil, 0, err
		}
		if !rec.deleting {
			return rec, kv.Version, nil
		}
		if err := f.remove(ctx, name); err != nil && !errors.Is(err, ErrNotFound) {
			return nil, 0, fmt.Errorf("finish the deletion that was begun: %w", err)
		}
	}
}

// closeLast fixes the end of next's last ledger if it was open, which fences its
// writer.
func (f *Factory) closeLast(ctx context.Context, m *ManagedLedger, next *record) error {
	n := len(next.ledgers) - 1
	if n < 0 || !next.ledgers[n].Closed.IsZero() {
		return nil
	}
	id := next.ledgers[n].ID
	end, err := f.storage.Recover(ctx, id)
	if errors.Is(err, ledger.ErrNoSuchLedger) {
		m.log.Error("the last ledger does not exist; dropping it from the list", "ledger", id)
		end, err = Closed{Last: ledger.BeforeFirst}, nil
	}
	if err != nil {
		return fmt.Errorf("recover ledger %d: %w", id, err)
	}
	next.close(end.Last, end.Bytes, time.Now())
	return nil
}

func (f *Factory) newLedger(name string) *ManagedLedger {
	m := &ManagedLedger{
		f: f, name: name, cfg: f.cfg, owner: newOwner(),
		log:      f.log.With("managedLedger", name),
		fencedCh: make(chan struct{}), metaTurn: make(chan struct{}, 1), cursorTurn: make(chan struct{}, 1), changed: make(chan struct{}),
		ring: f.cache.NewRing(), strand: executor.NewStrand(f.guard),
	}
	m.failing = f.backoff()
	m.ctx, m.cancel = context.WithCancel(context.Background())
	return m
}

// begin makes the record that was just saved the picture of what exists.
func (m *ManagedLedger) begin(writer Writer) {
	closed := m.record.ledgers
	var (
		cur *current
		end ledger.Position
	)
	if writer != nil {
		closed = closed[:len(closed)-1]
		cur = newCurrent(writer.ID(), sumEntries(closed))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if writer != nil {
		m.startLocked(writer)
	} else {
		m.state = stateTerminated
		m.refuse = fmt.Errorf("managed ledger %q: %w", m.name, ErrTerminated)
		end = *m.record.terminated
	}
	m.view.Store(newView(closed, 0, cur, end))
}

// takeCursors opens every durable cursor that has a record.
func (m *ManagedLedger) takeCursors(ctx context.Context) error {
	all, err := metadata.List(ctx, m.f.meta, cursorPrefix(m.name))
	if err != nil {
		return fmt.Errorf("list cursors: %w", err)
	}
	for _, kv := range all {
		name, err := cursorName(m.name, kv.Key)
		if err != nil {
			return fmt.Errorf("cursor key %q: %w", kv.Key, err)
		}
		c, err := cursor.Load(ctx, name, m.layout, m.cursorOptions(name))
		if err != nil {
			return err
		}
		m.registry.add(newReader(m, c))
	}
	return nil
}

func (m *ManagedLedger) cursorOptions(name string) cursor.Options {
	return cursor.Options{
		Store:     &cursorStore{meta: m.f.meta, key: cursorKey(m.name, name), owner: m.owner, retry: m.f.backoff()},
		Interval:  m.cfg.saveInterval(),
		Timeout:   m.cfg.cursorTimeout,
		MaxRanges: m.cfg.MaxRangesToPersist,
		Log:       m.log,
		Lost:      m.lost,
	}
}

// giveUp ends a handle whose opening failed after it had a ledger.
func (m *ManagedLedger) giveUp(ctx context.Context) {
	m.fence(fmt.Errorf("managed ledger %q was not opened: %w", m.name, ErrClosed))
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.cfg.cursorTimeout)
	defer cancel()
	_ = m.Close(ctx) // nothing to save: it was never used
}
