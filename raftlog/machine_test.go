package raftlog

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
)

// listMachine is the list of all commands it applied. Its state is durable only
// at a checkpoint, like a real machine's index.
type listMachine struct {
	path string

	mu       sync.Mutex
	applied  Index
	items    []string
	seen     Index // highest index ever given to Apply: it must rise
	bad      error // first broken promise of raftlog
	streams  int
	installs int
}

type listState struct {
	Applied Index
	Items   []string
}

func openListMachine(dir string) (*listMachine, error) {
	m := &listMachine{path: filepath.Join(dir, "list.json")}
	b, err := os.ReadFile(m.path)
	if errors.Is(err, fs.ErrNotExist) {
		return m, os.MkdirAll(dir, 0o755)
	}
	if err != nil {
		return nil, err
	}
	var s listState
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, err
	}
	m.applied, m.items, m.seen = s.Applied, s.Items, s.Applied
	return m, nil
}

func (m *listMachine) Apply(batch []Command) []any {
	m.mu.Lock()
	defer m.mu.Unlock()
	results := make([]any, len(batch))
	for i, c := range batch {
		if c.Index <= m.seen && m.bad == nil {
			m.bad = fmt.Errorf("command %d applied after %d", c.Index, m.seen)
		}
		m.seen, m.applied = c.Index, c.Index
		m.items = append(m.items, string(c.Data))
		results[i] = len(m.items)
	}
	return results
}

func (m *listMachine) Applied() Index {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.applied
}

func (m *listMachine) Checkpoint() error {
	m.mu.Lock()
	b, err := json.Marshal(listState{m.applied, m.items})
	m.mu.Unlock()
	if err != nil {
		return err
	}
	return replaceFile(m.path, b)
}

func (m *listMachine) Stream() (Stream, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.streams++
	b, err := json.Marshal(m.items)
	return Stream{ReadCloser: io.NopCloser(bytes.NewReader(b)), Size: int64(len(b)), Applied: m.applied}, err
}

func (m *listMachine) Install(r io.Reader, applied Index) error {
	b, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	var items []string
	if err := json.Unmarshal(b, &items); err != nil {
		return err
	}
	state, err := json.Marshal(listState{applied, items})
	if err != nil {
		return err
	}
	if err := replaceFile(m.path, state); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.applied, m.items, m.seen = applied, items, applied
	m.installs++
	return nil
}

func (m *listMachine) Close() error { return nil }

func (m *listMachine) list() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.items)
}

func (m *listMachine) check(t *testing.T) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bad != nil {
		t.Error(m.bad)
	}
}
