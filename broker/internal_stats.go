package broker

import (
	"context"
	"time"

	"github.com/magnetar-io/magnetar/protocol"
)

// InternalStats is how a topic is kept. The JSON names are Pulsar's.
type InternalStats struct {
	EntriesAdded         int64                  `json:"entriesAddedCounter"` // since the topic was opened here
	NumberOfEntries      int64                  `json:"numberOfEntries"`
	TotalSize            int64                  `json:"totalSize"`
	CurrentLedgerEntries int64                  `json:"currentLedgerEntries"`
	CurrentLedgerSize    int64                  `json:"currentLedgerSize"`
	LedgerCreated        string                 `json:"lastLedgerCreatedTimestamp"`
	WaitingCursors       int                    `json:"waitingCursorsCount"`
	PendingAdds          int                    `json:"pendingAddEntriesCount"`
	LastConfirmed        string                 `json:"lastConfirmedEntry"` // "ledger:entry"
	State                string                 `json:"state"`
	Ledgers              []LedgerInfo           `json:"ledgers"`
	Cursors              map[string]CursorStats `json:"cursors"`
}

// LedgerInfo is one ledger of a topic. Of the one being written Pulsar gives
// entries and size as 0 here; they are above.
type LedgerInfo struct {
	LedgerID  int64 `json:"ledgerId"`
	Entries   int64 `json:"entries"`
	Size      int64 `json:"size"`
	Offloaded bool  `json:"offloaded"`
}

// CursorStats is where one subscription stands.
type CursorStats struct {
	MarkDelete        string  `json:"markDeletePosition"`
	ReadPosition      string  `json:"readPosition"`
	WaitingReadOp     bool    `json:"waitingReadOp"`
	PendingReadOps    int     `json:"pendingReadOps"`
	Backlog           int64   `json:"numberOfEntriesSinceFirstNotAckedMessage"`
	CursorLedger      int64   `json:"cursorLedger"` // -1: cursors are kept in metadata
	CursorLedgerEntry int64   `json:"cursorLedgerLastEntry"`
	State             string  `json:"state"`
	IsDurable         bool    `json:"isDurable"`  // ours
	MsgBacklog        int64   `json:"msgBacklog"` // ours
	WhyIdle           WhyIdle `json:"whyIdle"`    // ours: what its subscription waits for
}

// InternalStats returns how a topic is kept; see [Broker.Stats] for its errors.
func (b *Broker) InternalStats(ctx context.Context, name protocol.TopicName) (*InternalStats, error) {
	t, err := b.topic(ctx, name, createNever)
	if err != nil {
		return nil, err
	}
	ml := t.ml.Stats()
	s := &InternalStats{
		EntriesAdded: ml.Added, NumberOfEntries: ml.Entries, TotalSize: ml.Bytes,
		CurrentLedgerEntries: ml.CurrentEntries, CurrentLedgerSize: ml.CurrentBytes,
		LedgerCreated: ml.CurrentCreated.Format(time.RFC3339Nano), WaitingCursors: ml.WaitingReaders,
		PendingAdds: ml.PendingAdds, LastConfirmed: ml.LastConfirmed.String(), State: ml.State,
		Ledgers: []LedgerInfo{}, Cursors: map[string]CursorStats{},
	}
	for _, l := range ml.Ledgers {
		info := LedgerInfo{LedgerID: int64(l.ID)}
		if !l.Closed.IsZero() {
			info.Entries, info.Size = l.Entries, l.Bytes
		}
		s.Ledgers = append(s.Ledgers, info)
	}
	for _, sub := range t.subs() {
		backlog, why := sub.reader.Backlog(), *sub.why.Load()
		c := CursorStats{
			MarkDelete: sub.reader.MarkDeleted().String(), ReadPosition: sub.reader.ReadPosition().String(),
			WaitingReadOp: why == CaughtUp, Backlog: backlog, CursorLedger: -1, CursorLedgerEntry: -1,
			State: "NoLedger", IsDurable: sub.reader.Durable(), MsgBacklog: backlog, WhyIdle: why,
		}
		if why == Fetching {
			c.PendingReadOps = 1
		}
		s.Cursors[sub.name] = c
	}
	return s, nil
}
