package server

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/magnetar-io/magnetar/internal/invariants"
	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/raftlog"
)

const (
	stateFile = "state"     // the last checkpoint
	tempFile  = "state.tmp" // one being written; worth nothing after a crash
)

// Machine is the metadata store as group 0 replicates it: a [State], the recent
// changes, and the file of the last checkpoint.
type Machine struct {
	dir     string // "" = checkpoints are kept nowhere
	log     *slog.Logger
	state   atomic.Pointer[State] // stored by Apply and Install only
	history history

	// observe, if set, learns of leases that came and went, on the apply
	// goroutine, after state is stored. Set before the first Apply.
	observe atomic.Pointer[func(granted, ended []metadata.LeaseID)]

	files sync.Mutex // one writer of the file at a time; guards saved
	saved uint64     // applied index of the file
}

var _ raftlog.Machine = (*Machine)(nil)

// NewMachine opens the store kept in dir, which is made if absent. It fails on a
// file that is damaged or of another version rather than starting empty.
func NewMachine(dir string, log *slog.Logger) (*Machine, error) {
	m := newMachine(dir, log, NewState())
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("metadata directory: %w", err)
	}
	name := filepath.Join(dir, stateFile)
	f, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil
	}
	if err != nil {
		return nil, fmt.Errorf("metadata checkpoint: %w", err)
	}
	defer f.Close() //nolint:errcheck // only read
	start := time.Now()
	s, err := decodeState(f)
	if err != nil {
		return nil, fmt.Errorf("metadata checkpoint %s: %w; if its disk damaged it, wipe this bookie's directory and let it join again", name, err)
	}
	m.saved = s.applied
	m.adopt(s)
	m.log.Info("metadata checkpoint loaded", "index", s.applied, "revision", int64(s.revision), "keys", s.items.count, "took", time.Since(start))
	return m, nil
}

// NewVolatileMachine returns an empty store without a file, for tests that need
// no restart.
func NewVolatileMachine(log *slog.Logger) *Machine { return newMachine("", log, NewState()) }

func newMachine(dir string, log *slog.Logger, s State) *Machine {
	m := &Machine{dir: dir, log: log.With("component", "metadata")}
	m.state.Store(&s)
	return m
}

// adopt replaces the whole state.
func (m *Machine) adopt(s State) {
	m.state.Store(&s)
	m.history.reset(s.revision)
}

// State returns the store as it is now.
func (m *Machine) State() State { return *m.state.Load() }

// Applied returns the log index of the last command applied.
func (m *Machine) Applied() raftlog.Index { return raftlog.Index(m.State().applied) }

// Apply applies commands; each result is a [Result]. It panics on a command that
// this program does not know or that is damaged: skipping it would make this
// replica differ from the others without anybody noticing.
func (m *Machine) Apply(batch []raftlog.Command) []any {
	results := make([]any, len(batch))
	s := m.State()
	var events []metadata.Event
	var granted, ended []metadata.LeaseID
	for i, command := range batch {
		c, err := DecodeCommand(command.Data)
		if err != nil {
			panic(fmt.Sprintf("metadata group stopped at log index %d, term %d: %v", command.Index, command.Term, err))
		}
		var result Result
		var effect Effect
		s, result, effect = s.Apply(uint64(command.Index), c)
		results[i] = result
		events = append(events, effect.Events...)
		if effect.Granted != 0 {
			granted = append(granted, effect.Granted)
		}
		if effect.Ended != 0 {
			ended = append(ended, effect.Ended)
		}
	}
	if invariants.Enabled && s.items.count < 1000 { // it visits everything
		if err := s.verify(); err != nil {
			panic(err.Error())
		}
	}
	m.state.Store(&s)
	m.history.add(events, s.revision)
	if observe := m.observe.Load(); observe != nil && len(granted)+len(ended) > 0 {
		(*observe)(granted, ended)
	}
	return results
}

// Checkpoint makes everything applied so far durable.
func (m *Machine) Checkpoint() error {
	m.files.Lock()
	defer m.files.Unlock()
	s := m.State()
	if s.applied == m.saved || m.dir == "" {
		return nil
	}
	start := time.Now()
	if err := m.writeLocked(s); err != nil {
		return fmt.Errorf("metadata checkpoint at index %d: %w", s.applied, err)
	}
	m.log.Debug("metadata checkpoint written", "index", s.applied, "bytes", s.encodedSize(), "took", time.Since(start))
	return nil
}

// writeLocked replaces the file: a temporary one is written and synced, renamed,
// and the directory synced. After any failure the old file stands.
func (m *Machine) writeLocked(s State) (err error) {
	temp := filepath.Join(m.dir, tempFile)
	f, err := os.OpenFile(temp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o640) //nolint:gosec // the operator's own directory
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, encodeChunkBytes)
	for chunk := range s.encode() {
		if _, err = w.Write(chunk); err != nil {
			break
		}
	}
	if err == nil {
		err = w.Flush()
	}
	if err == nil {
		err = f.Sync()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(temp, filepath.Join(m.dir, stateFile))
	}
	if err == nil {
		err = syncDir(m.dir)
	}
	if err == nil {
		m.saved = s.applied
	}
	return err
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Stream returns the whole state for another member. Close it to free it.
func (m *Machine) Stream() (raftlog.Stream, error) {
	s := m.State()
	next, stop := iter.Pull(s.encode())
	return raftlog.Stream{
		ReadCloser: &stateReader{next: next, stop: stop},
		Size:       s.encodedSize(),
		Applied:    raftlog.Index(s.applied),
	}, nil
}

// stateReader reads a state as it is encoded.
type stateReader struct {
	next func() ([]byte, bool)
	stop func()
	rest []byte
}

// Read implements io.Reader.
func (r *stateReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		chunk, ok := r.next()
		if !ok {
			return 0, io.EOF
		}
		r.rest = chunk
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// Close ends the encoding.
func (r *stateReader) Close() error {
	r.stop()
	return nil
}

// Install replaces the whole state by that of a stream, which must have been
// taken at applied, or before with no command in between. Nothing changes if it
// fails.
func (m *Machine) Install(r io.Reader, applied raftlog.Index) error {
	s, err := decodeState(r)
	if err != nil {
		return fmt.Errorf("install metadata state at index %d: %w", applied, err)
	}
	if s.applied > uint64(applied) {
		return fmt.Errorf("install metadata state at index %d: it is of index %d", applied, s.applied)
	}
	s.applied = uint64(applied)
	m.files.Lock()
	defer m.files.Unlock()
	if m.dir != "" {
		if err := m.writeLocked(s); err != nil {
			return fmt.Errorf("install metadata state at index %d: %w", applied, err)
		}
	}
	m.adopt(s)
	m.log.Info("metadata state installed", "index", s.applied, "revision", int64(s.revision), "keys", s.items.count)
	return nil
}

// Close waits for a checkpoint under way. What was applied after the last one is
// in the group's log.
func (m *Machine) Close() error {
	m.files.Lock()
	defer m.files.Unlock()
	return nil
}
