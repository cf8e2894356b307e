package metadata

import (
	"context"
	"time"
)

// Limits of every Store. Beyond them a call fails with [ErrInvalid].
const (
	MaxKeyBytes   = 1 << 10 // keys are UTF-8 and not empty; so are no prefixes longer than this
	MaxValueBytes = 1 << 20
	MaxRange      = 1000 // KVs that one Range returns
	MinTTL        = 200 * time.Millisecond
	MaxTTL        = time.Hour

	// MaxLeaseKeys bounds the keys attached to one lease, because all of them
	// are deleted by one command.
	MaxLeaseKeys = 8192
)

// Version is the store revision at which a key was last written. 0 means that
// the key is absent.
type Version int64

// AnyVersion as a condition accepts whatever version the key has.
const AnyVersion Version = -1

// LeaseID names a lease. Ids are never reused; 0 means no lease.
type LeaseID int64

// KV is one key as it was at one revision. Value is immutable.
type KV struct {
	Key     string
	Value   []byte
	Version Version
	Lease   LeaseID // the lease that deletes the key when it ends; 0 = none
}

// EventType says what an [Event] tells.
type EventType uint8

// The kinds of events.
const (
	// EventReset: forget everything that this watch told before. The current
	// KVs follow as puts, then EventSynced. A key that is not among them is
	// absent, and no delete is sent for it.
	EventReset EventType = iota + 1
	// EventPut: the key was written; Event.KV is the whole of it.
	EventPut
	// EventDelete: the key was deleted; only KV.Key is set, and KV.Version is
	// the revision of the deletion.
	EventDelete
	// EventSynced: the puts since EventReset were all there is. Changes follow.
	EventSynced
)

// String names the type as logs and tests spell it.
func (t EventType) String() string {
	switch t {
	case EventReset:
		return "reset"
	case EventPut:
		return "put"
	case EventDelete:
		return "delete"
	case EventSynced:
		return "synced"
	default:
		return "unknown"
	}
}

// Event is one step of a watch.
type Event struct {
	Type EventType
	KV   KV
}

// Store is a replicated key-value store. All operations are linearizable.
//
// Besides the errors named below every method may return [ErrInvalid] for
// arguments beyond the limits, and, once ctx has ended, an error that wraps
// ctx's error and either [ErrUnavailable] (nothing was changed) or
// [ErrUnknownOutcome] (it may have been).
type Store interface {
	// Get returns a key. It returns ErrNotFound if the key is absent.
	Get(ctx context.Context, key string) (KV, error)

	// Put writes a key if its version is if_: AnyVersion writes always, 0 only
	// if the key is absent, n only if it is at version n; else ErrBadVersion.
	// With a lease the key is deleted when the lease ends (ErrLeaseExpired if it
	// has); without one the key is detached from the lease it had. It returns
	// the key's new version.
	Put(ctx context.Context, key string, value []byte, if_ Version, lease LeaseID) (Version, error)

	// PutSequential writes the key made of prefix and the prefix's next number,
	// counting from 1 and written with 19 digits. Numbers are handed out one by
	// one in the order of the writes and never again, even if keys are deleted.
	PutSequential(ctx context.Context, prefix string, value []byte) (n int64, err error)

	// Delete removes a key if its version is if_ (AnyVersion: whatever it is).
	// It returns ErrNotFound if the key is absent, else ErrBadVersion if the
	// version differs.
	Delete(ctx context.Context, key string, if_ Version) error

	// Range returns up to limit (1 to MaxRange) keys that begin with prefix and
	// come after the key after ("" = from the first), in order. Fewer than limit
	// means that there are no more. An answer of more than about 4 MiB is put
	// together from several reads, each consistent in itself.
	Range(ctx context.Context, prefix, after string, limit int) ([]KV, error)

	// Watch tells the current keys under prefix and then every change, in
	// order: EventReset, a put for each current key, EventSynced, and from then
	// on puts and deletes. If it had to miss changes (the reader was slow, or
	// the leader went) it starts over with EventReset. The channel is closed
	// when ctx ends; until then the watch reconnects by itself. A slow reader
	// holds up nobody.
	Watch(ctx context.Context, prefix string) (<-chan Event, error)

	// GrantLease makes a lease that ends ttl (MinTTL to MaxTTL) after its last
	// renewal.
	GrantLease(ctx context.Context, ttl time.Duration) (LeaseID, error)

	// KeepAlive renews a lease: it lasts for its TTL at least, counted from when
	// this call began. It returns ErrLeaseExpired if the lease has ended.
	KeepAlive(ctx context.Context, id LeaseID) error

	// RevokeLease ends a lease and deletes the keys attached to it. Revoking a
	// lease that has ended is no error.
	RevokeLease(ctx context.Context, id LeaseID) error
}

// List returns all keys under prefix, in order, from as many ranges as it takes.
// Each range is consistent in itself; changes in between may show or not.
func List(ctx context.Context, s Store, prefix string) ([]KV, error) {
	var all []KV
	for after := ""; ; {
		page, err := s.Range(ctx, prefix, after, MaxRange)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if len(page) < MaxRange {
			return all, nil
		}
		after = page[len(page)-1].Key
	}
}
