package ledger

import (
	"cmp"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
)

// ID names one ledger. IDs are handed out one by one in increasing order, by
// the metadata group, and never reused.
type ID int64

// EntryID is an entry's index within its ledger, counting from 0.
type EntryID int64

// BeforeFirst is the EntryID just before a ledger's first entry.
const BeforeFirst EntryID = -1

// Position is a place in a topic: an entry of one of its ledgers. Positions of
// the same topic are totally ordered, by ledger and then by entry.
type Position struct {
	Ledger ID
	Entry  EntryID
}

// Compare returns -1, 0 or +1 as p is before, at or after q.
func (p Position) Compare(q Position) int {
	return cmp.Or(cmp.Compare(p.Ledger, q.Ledger), cmp.Compare(p.Entry, q.Entry))
}

// Before reports whether p is strictly before q.
func (p Position) Before(q Position) bool { return p.Compare(q) < 0 }

// After reports whether p is strictly after q.
func (p Position) After(q Position) bool { return p.Compare(q) > 0 }

// Next returns the position one entry further in the same ledger, whether or
// not that entry exists.
func (p Position) Next() Position { return Position{p.Ledger, p.Entry + 1} }

// String returns the form operators see and type: "ledger:entry".
func (p Position) String() string {
	return strconv.FormatInt(int64(p.Ledger), 10) + ":" + strconv.FormatInt(int64(p.Entry), 10)
}

// LogValue makes every log line spell a Position alike.
func (p Position) LogValue() slog.Value { return slog.StringValue(p.String()) }

// ParsePosition is the inverse of [Position.String].
func ParsePosition(s string) (Position, error) {
	l, e, _ := strings.Cut(s, ":")
	id, errL := strconv.ParseInt(l, 10, 64)
	entry, errE := strconv.ParseInt(e, 10, 64)
	if errL != nil || errE != nil || id < 0 || entry < int64(BeforeFirst) {
		return Position{}, fmt.Errorf(`position %q: want "ledger:entry", such as "7:42"`, s)
	}
	return Position{ID(id), EntryID(entry)}, nil
}

// Entry is one stored entry. Data is immutable.
type Entry struct {
	Position Position
	Data     []byte
}
