package managedledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/magnetar-io/magnetar/cursor"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/managedledger/managedledgerpb"
	"github.com/magnetar-io/magnetar/metadata"
)

// Where the records lie in the metadata store.
const (
	ledgersPrefix = "/managed-ledgers/"
	cursorsPrefix = "/cursors/"
)

// recordFormat is the version of both records' format.
const recordFormat = 1

func ledgerKey(name string) string      { return ledgersPrefix + name }
func cursorPrefix(name string) string   { return cursorsPrefix + name + "/" }
func cursorKey(name, sub string) string { return cursorPrefix(name) + url.PathEscape(sub) }
func cursorName(name, key string) (string, error) {
	return url.PathUnescape(strings.TrimPrefix(key, cursorPrefix(name)))
}

// LedgerInfo is one closed ledger of the list.
type LedgerInfo struct {
	ID      ledger.ID
	Entries int64
	Bytes   int64
	Closed  time.Time // when it was closed; zero in a record means that it is open
}

// record is a managed ledger's list of ledgers, as it is stored.
type record struct {
	owner      string
	ledgers    []LedgerInfo // the open one, if any, is last
	last       ledger.ID    // the highest id ever listed
	unlisted   []ledger.ID  // to be deleted
	terminated *ledger.Position
	deleting   bool
}

// clone returns a copy that can be changed.
func (r *record) clone() *record {
	c := *r
	c.ledgers = append([]LedgerInfo(nil), r.ledgers...)
	c.unlisted = append([]ledger.ID(nil), r.unlisted...)
	return &c
}

// add lists a new open ledger.
func (r *record) add(id ledger.ID) {
	r.ledgers = append(r.ledgers, LedgerInfo{ID: id})
	r.last = id
}

// close fixes the end of the last ledger, or unlists it if it is empty.
func (r *record) close(last ledger.EntryID, size int64, at time.Time) {
	n := len(r.ledgers) - 1
	if last == ledger.BeforeFirst {
		r.unlisted = append(r.unlisted, r.ledgers[n].ID)
		r.ledgers = r.ledgers[:n]
		return
	}
	r.ledgers[n].Entries, r.ledgers[n].Bytes, r.ledgers[n].Closed = int64(last)+1, size, at
}

func (r *record) marshal() []byte {
	p := &managedledgerpb.ManagedLedger{
		Format: recordFormat, Owner: r.owner, LastLedger: int64(r.last), Deleting: r.deleting,
	}
	for _, l := range r.ledgers {
		stored := &managedledgerpb.Ledger{Id: int64(l.ID), Entries: l.Entries, Bytes: l.Bytes}
		if !l.Closed.IsZero() {
			stored.ClosedMillis = l.Closed.UnixMilli()
		}
		p.Ledgers = append(p.Ledgers, stored)
	}
	for _, id := range r.unlisted {
		p.Unlisted = append(p.Unlisted, int64(id))
	}
	if r.terminated != nil {
		p.Terminated = &managedledgerpb.Position{Ledger: int64(r.terminated.Ledger), Entry: int64(r.terminated.Entry)}
	}
	data, err := p.MarshalVT()
	if err != nil {
		panic(err) // only a string that is not UTF-8 fails, and owner is hex
	}
	return data
}

func parseRecord(name string, data []byte) (*record, error) {
	var p managedledgerpb.ManagedLedger
	if err := p.UnmarshalVT(data); err != nil {
		return nil, fmt.Errorf("record of managed ledger %q is damaged: %w", name, err)
	}
	if p.Format != recordFormat {
		return nil, fmt.Errorf("record of managed ledger %q has format %d, this version reads %d: use a newer version", name, p.Format, recordFormat)
	}
	r := &record{owner: p.Owner, last: ledger.ID(p.LastLedger), deleting: p.Deleting}
	for i, l := range p.Ledgers {
		info := LedgerInfo{ID: ledger.ID(l.Id), Entries: l.Entries, Bytes: l.Bytes}
		if l.ClosedMillis != 0 {
			info.Closed = time.UnixMilli(l.ClosedMillis)
		}
		open := info.Closed.IsZero()
		if i > 0 && r.ledgers[i-1].ID >= info.ID || info.ID > r.last || open && i < len(p.Ledgers)-1 || !open && info.Entries < 1 {
			return nil, fmt.Errorf("record of managed ledger %q is damaged: ledger %d (entry %d of %d) out of order, or its end missing", name, info.ID, i, len(p.Ledgers))
		}
		r.ledgers = append(r.ledgers, info)
	}
	for _, id := range p.Unlisted {
		r.unlisted = append(r.unlisted, ledger.ID(id))
	}
	if t := p.Terminated; t != nil {
		r.terminated = &ledger.Position{Ledger: ledger.ID(t.Ledger), Entry: ledger.EntryID(t.Entry)}
	}
	return r, nil
}

// errConflict reports a key that somebody else has written.
var errConflict = errors.New("record was changed by another owner")

// putIf writes a key under compare-and-set until it knows whether that happened
// or ctx ends. ownerOf reads the owner from a record, and owner is ours: a
// record of our own at another version is an earlier write of ours that was not
// answered, and not a conflict. Nobody but the caller may be writing for owner.
func putIf(ctx context.Context, meta metadata.Store, key string, value []byte, version metadata.Version,
	owner string, ownerOf func([]byte) string, retry backoff,
) (metadata.Version, error) {
	for {
		next, err := meta.Put(ctx, key, value, version, 0)
		switch {
		case err == nil:
			return next, nil
		case errors.Is(err, metadata.ErrInvalid):
			return 0, err
		case errors.Is(err, metadata.ErrBadVersion):
			kv, getErr := meta.Get(ctx, key)
			switch {
			case getErr == nil && bytes.Equal(kv.Value, value):
				return kv.Version, nil
			case getErr == nil && ownerOf(kv.Value) == owner && kv.Version != version:
				version = kv.Version
				continue
			case getErr == nil || errors.Is(getErr, metadata.ErrNotFound):
				return 0, fmt.Errorf("write %q: %w", key, errConflict)
			}
			err = getErr
		}
		if retry.wait(ctx) != nil {
			return 0, fmt.Errorf("write %q: %w", key, err)
		}
	}
}

// backoff doubles from first to most.
type backoff struct {
	first, most time.Duration
	next        time.Duration
}

// wait sleeps, longer each time. It returns ctx's error if that ends first.
func (b *backoff) wait(ctx context.Context) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	b.next = min(max(2*b.next, b.first), b.most)
	t := time.NewTimer(b.next)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// cursorStore keeps one cursor's record. It implements [cursor.Store].
type cursorStore struct {
	meta  metadata.Store
	key   string
	owner string
	retry backoff
}

// Load implements [cursor.Store].
func (s *cursorStore) Load(ctx context.Context) (cursor.State, int64, error) {
	kv, err := s.meta.Get(ctx, s.key)
	if errors.Is(err, metadata.ErrNotFound) {
		return cursor.State{}, 0, cursor.ErrNotFound
	}
	if err != nil {
		return cursor.State{}, 0, err
	}
	state, err := parseCursor(s.key, kv.Value)
	return state, int64(kv.Version), err
}

// Save implements [cursor.Store].
func (s *cursorStore) Save(ctx context.Context, state cursor.State, version int64) (int64, error) {
	value := marshalCursor(state, s.owner)
	next, err := putIf(ctx, s.meta, s.key, value, metadata.Version(version), s.owner, cursorOwner, s.retry)
	if errors.Is(err, errConflict) {
		err = fmt.Errorf("%w (%q)", cursor.ErrConflict, s.key)
	}
	return int64(next), err
}

// Remove implements [cursor.Store].
func (s *cursorStore) Remove(ctx context.Context, version int64) error {
	retry := s.retry
	for {
		err := s.meta.Delete(ctx, s.key, metadata.Version(version))
		switch {
		case err == nil, errors.Is(err, metadata.ErrNotFound):
			return nil
		case errors.Is(err, metadata.ErrBadVersion):
			kv, getErr := s.meta.Get(ctx, s.key)
			switch {
			case errors.Is(getErr, metadata.ErrNotFound):
				return nil
			case getErr == nil && cursorOwner(kv.Value) == s.owner && int64(kv.Version) != version:
				version = int64(kv.Version) // a save of ours that was not answered
				continue
			case getErr == nil:
				return fmt.Errorf("%w (%q)", cursor.ErrConflict, s.key)
			}
			err = getErr
		}
		if retry.wait(ctx) != nil {
			return err
		}
	}
}

// cursorOwner returns who wrote a cursor's record, "" if it cannot be read.
func cursorOwner(data []byte) string {
	var p managedledgerpb.Cursor
	if p.UnmarshalVT(data) != nil {
		return ""
	}
	return p.Owner
}

// recordOwner returns who wrote a managed ledger's record, "" if it cannot be
// read.
func recordOwner(data []byte) string {
	var p managedledgerpb.ManagedLedger
	if p.UnmarshalVT(data) != nil {
		return ""
	}
	return p.Owner
}

func marshalCursor(state cursor.State, owner string) []byte {
	p := &managedledgerpb.Cursor{
		Format: recordFormat, Owner: owner, UnsavedRanges: int64(state.Unsaved),
		MarkDeleted: &managedledgerpb.Position{Ledger: int64(state.MarkDeleted.Ledger), Entry: int64(state.MarkDeleted.Entry)},
		Acked:       make([]*managedledgerpb.Range, len(state.Acked)),
	}
	for i, r := range state.Acked {
		p.Acked[i] = &managedledgerpb.Range{Ledger: int64(r.Ledger), First: int64(r.First), Last: int64(r.Last)}
	}
	data, err := p.MarshalVT()
	if err != nil {
		panic(err) // only a string that is not UTF-8 fails, and owner is hex
	}
	return data
}

func parseCursor(key string, data []byte) (cursor.State, error) {
	var p managedledgerpb.Cursor
	if err := p.UnmarshalVT(data); err != nil {
		return cursor.State{}, fmt.Errorf("cursor record %q is damaged: %w", key, err)
	}
	if p.Format != recordFormat {
		return cursor.State{}, fmt.Errorf("cursor record %q has format %d, this version reads %d: use a newer version", key, p.Format, recordFormat)
	}
	if p.MarkDeleted == nil {
		return cursor.State{}, fmt.Errorf("cursor record %q is damaged: no mark-delete position", key)
	}
	state := cursor.State{
		MarkDeleted: ledger.Position{Ledger: ledger.ID(p.MarkDeleted.Ledger), Entry: ledger.EntryID(p.MarkDeleted.Entry)},
		Unsaved:     int(p.UnsavedRanges),
	}
	for _, r := range p.Acked {
		if r.First < 0 || r.Last < r.First {
			return cursor.State{}, fmt.Errorf("cursor record %q is damaged: range %d:%d..%d", key, r.Ledger, r.First, r.Last)
		}
		state.Acked = append(state.Acked, cursor.Range{Ledger: ledger.ID(r.Ledger), First: ledger.EntryID(r.First), Last: ledger.EntryID(r.Last)})
	}
	return state, nil
}
