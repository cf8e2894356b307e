package ledger

import "errors"

// What a caller of storage must tell apart. Each says what to do next; the
// error that wraps it says where and why.
var (
	// ErrFenced reports that a newer owner has taken the ledger over. Stop
	// writing: no retry on this handle can succeed.
	ErrFenced = errors.New("ledger fenced by a newer owner")

	// ErrClosed reports an append to a ledger that was closed. Its end is fixed;
	// write to another ledger.
	ErrClosed = errors.New("ledger closed")

	// ErrNoSuchLedger comes only from a group's leader after a read barrier: the
	// ledger was deleted or never created. Asking again cannot help.
	ErrNoSuchLedger = errors.New("no such ledger")

	// ErrNoSuchEntry comes only from a group's leader after a read barrier: the
	// ledger exists and does not hold the entry.
	ErrNoSuchEntry = errors.New("no such entry")

	// ErrNotYet reports a replica that has not applied what was asked for. Ask
	// the leader, or ask again.
	ErrNotYet = errors.New("replica has not caught up that far")

	// ErrDamaged reports an entry whose bytes fail their checksum on every
	// replica that was asked. It exists; it is not absent.
	ErrDamaged = errors.New("entry damaged")

	// ErrUnknownOutcome reports a write that may or may not have happened: the
	// group lost its leader before it answered. Send it again with the same
	// epoch and entry id, or fence the ledger and look.
	ErrUnknownOutcome = errors.New("outcome unknown")

	// ErrGap reports an append that would leave a hole before it. It is a bug in
	// the writer or an answer to a resend out of order.
	ErrGap = errors.New("append is not contiguous")

	// ErrUnavailable reports that nobody could be asked: no leader, no
	// connection, or a full disk. Nothing was changed; try again later.
	ErrUnavailable = errors.New("storage unavailable")
)
