package managedledger

import (
	"errors"

	"github.com/magnetar-io/magnetar/cursor"
)

// What a caller must tell apart.
var (
	// ErrFenced reports that another owner has taken the managed ledger over.
	// Close this handle; look up who owns the topic.
	ErrFenced = errors.New("managed ledger was taken over by another owner")

	// ErrClosed reports a managed ledger, reader or factory that was closed here.
	// Open it again.
	ErrClosed = errors.New("managed ledger is closed")

	// ErrTerminated reports a managed ledger that was sealed: nothing can be
	// added, and a reader that gets it has seen everything.
	ErrTerminated = errors.New("managed ledger is terminated")

	// ErrWouldBlock reports that nothing can be returned now. The reader's Ready
	// fires when it is worth trying again.
	ErrWouldBlock = errors.New("nothing to read yet")

	// ErrReadPending reports a second ReadEntries before the first was answered.
	ErrReadPending = errors.New("a read is pending on this reader")

	// ErrNotFound reports a managed ledger or cursor that does not exist.
	ErrNotFound = errors.New("no such managed ledger")

	// ErrTooManyReads reports a read that waited too long for its share of
	// managedLedgerMaxReadsInFlightSizeInMB, or found too many waiting. Batches
	// are being held; try again later.
	ErrTooManyReads = errors.New("too many bytes of reads in flight")

	// ErrTooLarge reports an entry of more than MaxEntryBytes. It was not stored,
	// and never can be.
	ErrTooLarge = errors.New("entry is too large")

	// ErrBeyondEnd, ErrBehind and ErrResetting are package cursor's.
	ErrBeyondEnd = cursor.ErrBeyondEnd
	ErrBehind    = cursor.ErrBehind
	ErrResetting = cursor.ErrResetting
)
