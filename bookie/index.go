package bookie

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"

	"github.com/cockroachdb/pebble/v2"
	pebblevfs "github.com/cockroachdb/pebble/v2/vfs"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/raftlog"
)

const (
	indexFormat = 1

	// A bookie's index holds some 40 bytes per 64 KiB of entries. These sizes
	// keep an idle one small; reads come from the page cache.
	indexMemTableBytes = 1 << 20
	indexCacheBytes    = 4 << 20
	indexOpenFiles     = 64
)

// The first byte of a key says what it is; see docs/formats/entry-index.md.
const (
	keyFormat  = 'F' // format version and next segment number
	keyApplied = 'A' // group → applied index
	keyLedger  = 'L' // group, ledger → facts
	keyRun     = 'R' // group, ledger, first entry → run
	keySegment = 'S' // group, segment → live bytes
)

// index is the database of facts and runs. It changes by checkpoints only.
type index struct {
	db *pebble.DB
}

// openIndex opens or makes the index in dir. fatal is called if the database
// finds that it cannot go on.
func openIndex(fsys pebblevfs.FS, dir string, log *slog.Logger, fatal func(error)) (*index, error) {
	cache := pebble.NewCache(indexCacheBytes)
	defer cache.Unref()
	options := &pebble.Options{
		FS:                          fsys,
		FormatMajorVersion:          pebble.FormatTableFormatV6,
		Cache:                       cache,
		MemTableSize:                indexMemTableBytes,
		MemTableStopWritesThreshold: 4,
		MaxOpenFiles:                indexOpenFiles,
		L0CompactionThreshold:       4,
		CompactionConcurrencyRange:  func() (int, int) { return 1, 1 },
		DisableTableStats:           true,
		Logger:                      indexLogger{log, fatal},
	}
	db, err := pebble.Open(dir, options)
	if err != nil {
		return nil, fmt.Errorf("open entry index %s: %w", dir, err)
	}
	return &index{db}, nil
}

// nextSegment returns the number that the next segment must at least have. It
// refuses an index of another format.
func (x *index) nextSegment() (uint64, error) {
	value, closer, err := x.db.Get([]byte{keyFormat})
	if errors.Is(err, pebble.ErrNotFound) {
		return 1, nil
	}
	if err != nil {
		return 0, fmt.Errorf("entry index format: %w", err)
	}
	defer func() { _ = closer.Close() }()
	if len(value) != 9 || value[0] != indexFormat {
		return 0, fmt.Errorf("entry index has format %x, this bookie reads version %d: start a matching version of bookie",
			value, indexFormat)
	}
	return binary.BigEndian.Uint64(value[1:]), nil
}

func putFormat(b *pebble.Batch, nextSegment uint64) error {
	value := binary.BigEndian.AppendUint64([]byte{indexFormat}, nextSegment)
	return b.Set([]byte{keyFormat}, value, nil)
}

func groupKey(kind byte, group raftlog.GroupID) []byte {
	return binary.BigEndian.AppendUint32(append(make([]byte, 0, 24), kind), uint32(group))
}

func ledgerKey(group raftlog.GroupID, id ledger.ID) []byte {
	return binary.BigEndian.AppendUint64(groupKey(keyLedger, group), uint64(id))
}

func runKey(group raftlog.GroupID, id ledger.ID, first ledger.EntryID) []byte {
	key := binary.BigEndian.AppendUint64(groupKey(keyRun, group), uint64(id))
	return binary.BigEndian.AppendUint64(key, uint64(first))
}

func segmentKey(group raftlog.GroupID, segment uint64) []byte {
	return binary.BigEndian.AppendUint64(groupKey(keySegment, group), segment)
}

// applied returns the index of the group's last checkpoint; 0 for a new group.
func (x *index) applied(r pebble.Reader, group raftlog.GroupID) (raftlog.Index, error) {
	n, err := getUint64(r, groupKey(keyApplied, group))
	if err != nil {
		return 0, fmt.Errorf("applied index of group %d: %w", group, err)
	}
	return raftlog.Index(n), nil
}

func getUint64(r pebble.Reader, key []byte) (uint64, error) {
	value, closer, err := r.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer func() { _ = closer.Close() }()
	if len(value) != 8 {
		return 0, fmt.Errorf("value of %d bytes, want 8", len(value))
	}
	return binary.BigEndian.Uint64(value), nil
}

// facts returns what the last checkpoint says of a ledger.
func (x *index) facts(group raftlog.GroupID, id ledger.ID) (f facts, ok bool, err error) {
	value, closer, err := x.db.Get(ledgerKey(group, id))
	if errors.Is(err, pebble.ErrNotFound) {
		return facts{}, false, nil
	}
	if err == nil {
		defer func() { _ = closer.Close() }()
		f, err = parseFacts(value)
	}
	if err != nil {
		return facts{}, false, fmt.Errorf("group %d, ledger %d: %w", group, id, err)
	}
	return f, true, nil
}

// eachLedger calls fn for every ledger of the group, in order of id, until fn
// fails.
func eachLedger(r pebble.Reader, group raftlog.GroupID, fn func(ledger.ID, facts) error) error {
	prefix := groupKey(keyLedger, group)
	return scan(r, prefix, prefixEnd(prefix), func(key, value []byte) (bool, error) {
		f, err := parseFacts(value)
		if err != nil {
			return false, err
		}
		return true, fn(ledger.ID(binary.BigEndian.Uint64(key[5:])), f)
	})
}

// eachRun calls fn for the ledger's runs in order, beginning with the one that
// holds entry from, until fn returns false.
func eachRun(r pebble.Reader, group raftlog.GroupID, id ledger.ID, from ledger.EntryID, fn func(run) bool) (err error) {
	low, high := runKey(group, id, 0), runKey(group, id+1, 0)
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: low, UpperBound: high})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	valid := it.SeekLT(runKey(group, id, from+1))
	if !valid {
		valid = it.First()
	}
	for ; valid; valid = it.Next() {
		found, err := parseRun(ledger.EntryID(binary.BigEndian.Uint64(it.Key()[13:])), it.Value())
		if err != nil {
			return fmt.Errorf("group %d, ledger %d: %w", group, id, err)
		}
		if !fn(found) {
			return nil
		}
	}
	return it.Error()
}

// liveBytes returns the bytes of each segment that the group refers to.
func liveBytes(r pebble.Reader, group raftlog.GroupID) (map[uint64]int64, error) {
	live := map[uint64]int64{}
	prefix := groupKey(keySegment, group)
	return live, scan(r, prefix, prefixEnd(prefix), func(key, value []byte) (bool, error) {
		if len(value) != 8 {
			return false, fmt.Errorf("live bytes of %d bytes, want 8", len(value))
		}
		live[binary.BigEndian.Uint64(key[5:])] = int64(binary.BigEndian.Uint64(value))
		return true, nil
	})
}

// allLiveBytes is liveBytes summed over all groups.
func allLiveBytes(r pebble.Reader) (map[uint64]int64, error) {
	live := map[uint64]int64{}
	return live, scan(r, []byte{keySegment}, []byte{keySegment + 1}, func(key, value []byte) (bool, error) {
		if len(key) != 13 || len(value) != 8 {
			return false, fmt.Errorf("live bytes of %d bytes under a key of %d, want 8 and 13", len(value), len(key))
		}
		live[binary.BigEndian.Uint64(key[5:])] += int64(binary.BigEndian.Uint64(value))
		return true, nil
	})
}

func scan(r pebble.Reader, low, high []byte, fn func(key, value []byte) (bool, error)) (err error) {
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: low, UpperBound: high})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	for valid := it.First(); valid; valid = it.Next() {
		more, err := fn(it.Key(), it.Value())
		if err != nil || !more {
			return err
		}
	}
	return it.Error()
}

// prefixEnd returns the first key behind those that begin with prefix, whose
// last byte must not be 255 throughout; a group key's first byte is a letter.
func prefixEnd(prefix []byte) []byte {
	end := append([]byte(nil), prefix...)
	for i := len(end) - 1; i >= 0; i-- {
		end[i]++
		if end[i] != 0 {
			return end[:i+1]
		}
	}
	return nil
}

// indexLogger passes on what the database has to say.
type indexLogger struct {
	log   *slog.Logger
	fatal func(error)
}

func (l indexLogger) Infof(format string, args ...any) {
	l.log.Debug("entry index", "message", fmt.Sprintf(format, args...))
}

func (l indexLogger) Errorf(format string, args ...any) {
	l.log.Error("entry index", "message", fmt.Sprintf(format, args...))
}

// Fatalf is called when the database cannot go on, such as after a failed write
// of its log. It must not return; the goroutine ends here if fatal returns.
func (l indexLogger) Fatalf(format string, args ...any) {
	err := fmt.Errorf("entry index: "+format, args...)
	l.fatal(err)
	panic(err)
}
