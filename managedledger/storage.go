package managedledger

import (
	"context"

	"github.com/magnetar-io/magnetar/bookie/client"
	"github.com/magnetar-io/magnetar/ledger"
)

// Closed is a ledger whose end is fixed.
type Closed = client.Closed

// Writer appends to a ledger that it created.
type Writer interface {
	ID() ledger.ID
	// Append stores data as the next entry; ids count from 0. It never blocks.
	// done is called exactly once, in the order of the appends, never from inside
	// Append. After one failure every later append fails too.
	Append(data []byte, done func(ledger.EntryID, error))
	// Close closes the ledger and returns its last entry.
	Close(ctx context.Context) (ledger.EntryID, error)
	// Abandon lets go of the ledger without closing it.
	Abandon()
}

// Storage is what a managed ledger needs of the bookies.
type Storage interface {
	// Create makes a ledger with a higher id than any before.
	Create(ctx context.Context, owner string) (Writer, error)
	// Recover fences a ledger against its writer and returns its exact end, or
	// [ledger.ErrNoSuchLedger].
	Recover(ctx context.Context, id ledger.ID) (Closed, error)
	// Read returns the entries first to last, or a shorter prefix of them that
	// has about maxBytes, but one entry at least.
	Read(ctx context.Context, id ledger.ID, first, last ledger.EntryID, maxBytes int) ([]ledger.Entry, error)
	// Delete removes a ledger; it is no error if there is none.
	Delete(ctx context.Context, id ledger.ID) error
}

// NewStorage is the bookies behind c.
func NewStorage(c *client.Client) Storage { return bookies{c} }

type bookies struct{ *client.Client }

// Create implements [Storage]: the client's writer is a Writer.
func (b bookies) Create(ctx context.Context, owner string) (Writer, error) {
	w, err := b.Client.Create(ctx, owner)
	if err != nil {
		return nil, err // not w: a nil *client.Writer would be a Writer that is not nil
	}
	return w, nil
}
