package managedledger

import (
	"log/slog"
	"time"

	"github.com/magnetar-io/magnetar/internal/config"
)

// Config is the managedLedger* keys. Each managed ledger keeps what it was
// opened with.
type Config struct {
	CacheSizeMB int // 0 turns the cache off

	MaxEntriesPerLedger int   // roll over at so many entries
	MaxSizePerLedgerMB  int64 // or so many MiB
	MinRolloverMinutes  int   // but never before this age; 0 = no minimum
	MaxRolloverMinutes  int   // and at this age anyway, if there is an entry

	MarkDeleteRateLimit  float64 // saves of one cursor a second, at most
	CursorFlushSeconds   int     // a cursor's changes are saved after this at the latest
	MaxRangesToPersist   int     // in one cursor's record
	RetentionCheckPeriod int     // seconds between two looks for ledgers to trim

	MaxReadsInFlightMB       int // bytes being read or held by readers
	ReadPermitTimeoutMillis  int // how long a read may wait for its share of them
	ReadPermitQueueSize      int // how many reads may wait
	ReadTimeoutSeconds       int // of one read from the bookies
	MetadataTimeoutSeconds   int // of opening, and of one attempt to change anything
	ReadCallbackInline       bool
	MaxReadCompletionDepth   int // below 1 counts as 1
	cursorTimeout            time.Duration
	housekeeping             time.Duration
	retryBackoff, maxBackoff time.Duration
}

// DefaultConfig is what a library user gets. A broker's keys default to the
// same, but for managedLedgerReadEntriesCallbackInline=true.
func DefaultConfig() Config {
	return Config{
		CacheSizeMB:         64,
		MaxEntriesPerLedger: 50_000, MaxSizePerLedgerMB: 2048,
		MinRolloverMinutes: 10, MaxRolloverMinutes: 240,
		MarkDeleteRateLimit: 1, CursorFlushSeconds: 1, MaxRangesToPersist: 10_000,
		RetentionCheckPeriod: 120,
		MaxReadsInFlightMB:   64, ReadPermitTimeoutMillis: 60_000, ReadPermitQueueSize: 50_000,
		ReadTimeoutSeconds: 60, MetadataTimeoutSeconds: 60,
		MaxReadCompletionDepth: 10,
	}
}

// Register adds the keys to s.
func (c *Config) Register(s *config.Set) {
	d := DefaultConfig()
	s.Int(&c.CacheSizeMB, "managedLedgerCacheSizeMB", d.CacheSizeMB, 0, 1<<20,
		"Memory for recent entries of all topics, in MiB. 0 turns the cache off: every read goes to a bookie.")
	s.Int(&c.MaxEntriesPerLedger, "managedLedgerMaxEntriesPerLedger", d.MaxEntriesPerLedger, 1, 1<<30,
		"Entries after which a topic goes on in a new ledger.")
	s.Int64(&c.MaxSizePerLedgerMB, "managedLedgerMaxSizePerLedgerMbytes", d.MaxSizePerLedgerMB, 1, 1<<20,
		"MiB after which a topic goes on in a new ledger.")
	s.Int(&c.MinRolloverMinutes, "managedLedgerMinLedgerRolloverTimeMinutes", d.MinRolloverMinutes, 0, 1<<20,
		"Age in minutes before which a ledger is kept even if it is full. 0 = none.")
	s.Int(&c.MaxRolloverMinutes, "managedLedgerMaxLedgerRolloverTimeMinutes", d.MaxRolloverMinutes, 1, 1<<20,
		"Age in minutes at which a topic goes on in a new ledger, if the old one has an entry.")
	s.Float(&c.MarkDeleteRateLimit, "managedLedgerDefaultMarkDeleteRateLimit", d.MarkDeleteRateLimit, 0.01, 1000,
		"How often a second one cursor's acknowledgements are saved at most.")
	s.Int(&c.CursorFlushSeconds, "managedLedgerCursorPositionFlushSeconds", d.CursorFlushSeconds, 1, 3600,
		"Seconds after which acknowledgements are saved at the latest. A crash may deliver again what was acknowledged within them.")
	s.Int(&c.MaxRangesToPersist, "managedLedgerMaxUnackedRangesToPersist", d.MaxRangesToPersist, 0, 30_000,
		"Ranges of single acknowledgements that one cursor saves. Further ones are kept in memory and redelivered after a crash.")
	s.Int(&c.RetentionCheckPeriod, "retentionCheckIntervalInSeconds", d.RetentionCheckPeriod, 1, 86_400,
		"Seconds between two looks for consumed ledgers to delete.")
	s.Int(&c.MaxReadsInFlightMB, "managedLedgerMaxReadsInFlightSizeInMB", d.MaxReadsInFlightMB, 1, 1<<20,
		"MiB that reads from bookies and the batches held by consumers may take together. Reads from bookies wait beyond it; reads from the cache do not.")
	s.Int(&c.ReadPermitTimeoutMillis, "managedLedgerMaxReadsInFlightPermitsAcquireTimeoutMillis", d.ReadPermitTimeoutMillis, 1, 1<<30,
		"How long a read may wait for that limit before it fails, in milliseconds.")
	s.Int(&c.ReadPermitQueueSize, "managedLedgerMaxReadsInFlightPermitsAcquireQueueSize", d.ReadPermitQueueSize, 1, 1<<30,
		"How many reads may wait for that limit; further ones fail at once.")
	s.Int(&c.ReadTimeoutSeconds, "managedLedgerReadEntryTimeoutSeconds", d.ReadTimeoutSeconds, 1, 3600,
		"Seconds after which a read from the bookies fails. It is tried again by whoever asked.")
	s.Int(&c.MetadataTimeoutSeconds, "managedLedgerMetadataOperationsTimeoutSeconds", d.MetadataTimeoutSeconds, 1, 3600,
		"Seconds that opening a topic, or one attempt to change its ledgers, may take.")
	s.Bool(&c.ReadCallbackInline, "managedLedgerReadEntriesCallbackInline", true,
		"Complete reads of cached entries on the goroutine that asks. false = on the topic's ordered worker.")
	s.Int(&c.MaxReadCompletionDepth, "managedLedgerMaxReadCompletionDepth", d.MaxReadCompletionDepth, -1<<31, 1<<20,
		"How deep completions of cached reads may nest on one goroutine before one goes to the shared pool. Below 1 counts as 1.")
}

// normalized fills in what must not be zero and clamps what must not be small.
func (c Config) normalized(log *slog.Logger) Config {
	d := DefaultConfig()
	fill := func(v *int, def int) {
		if *v <= 0 {
			*v = def
		}
	}
	fill(&c.MaxEntriesPerLedger, d.MaxEntriesPerLedger)
	fill(&c.MaxRolloverMinutes, d.MaxRolloverMinutes)
	fill(&c.CursorFlushSeconds, d.CursorFlushSeconds)
	fill(&c.RetentionCheckPeriod, d.RetentionCheckPeriod)
	fill(&c.MaxReadsInFlightMB, d.MaxReadsInFlightMB)
	fill(&c.ReadPermitTimeoutMillis, d.ReadPermitTimeoutMillis)
	fill(&c.ReadPermitQueueSize, d.ReadPermitQueueSize)
	fill(&c.ReadTimeoutSeconds, d.ReadTimeoutSeconds)
	fill(&c.MetadataTimeoutSeconds, d.MetadataTimeoutSeconds)
	if c.MaxSizePerLedgerMB <= 0 {
		c.MaxSizePerLedgerMB = d.MaxSizePerLedgerMB
	}
	if c.MarkDeleteRateLimit <= 0 {
		c.MarkDeleteRateLimit = d.MarkDeleteRateLimit
	}
	if c.MaxReadCompletionDepth < 1 {
		log.Warn("managedLedgerMaxReadCompletionDepth is below 1; using 1", "value", c.MaxReadCompletionDepth)
		c.MaxReadCompletionDepth = 1
	}
	c.cursorTimeout = 10 * time.Second
	c.housekeeping = 5 * time.Second
	c.retryBackoff, c.maxBackoff = 20*time.Millisecond, 2*time.Second
	return c
}

// saveInterval is the time between two saves of one cursor.
func (c *Config) saveInterval() time.Duration {
	byRate := time.Duration(float64(time.Second) / c.MarkDeleteRateLimit)
	return min(byRate, time.Duration(c.CursorFlushSeconds)*time.Second)
}

func (c *Config) metadataTimeout() time.Duration {
	return time.Duration(c.MetadataTimeoutSeconds) * time.Second
}

func (c *Config) readTimeout() time.Duration {
	return time.Duration(c.ReadTimeoutSeconds) * time.Second
}
