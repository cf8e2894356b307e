package managedledger

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/metadata/metadatatest"
)

var rewrite = flag.Bool("rewrite", false, "write what the scripts in testdata print into them")

// TestScripts replays testdata. A script is commands, each followed by ---- and
// what it printed. After a change of behaviour, run
//
//	go test ./managedledger -run TestScripts -rewrite
//
// and read the diff: commit it only if every changed line is one you meant. Time
// is the bubble's: it stands still but for the command "advance".
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			source, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var got string
			synctest.Test(t, func(t *testing.T) { got = replayScript(t, string(source)) })
			if *rewrite {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if got != string(source) {
				t.Errorf("%s prints something else:\n%s", file, firstDifference(string(source), got))
			}
		})
	}
}

func firstDifference(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range min(len(w), len(g)) {
		if w[i] != g[i] {
			return fmt.Sprintf("line %d\n  want %s\n   got %s", i+1, w[i], g[i])
		}
	}
	return fmt.Sprintf("%d lines, want %d", len(g), len(w))
}

// replayScript returns the script with what its commands print now.
func replayScript(t *testing.T, source string) string {
	w := &scriptWorld{
		t: t, bookies: newBookies(), meta: &slowMeta{Store: metadatatest.NewMemory(t)}, cfg: testConfig(),
		factories: map[string]*Factory{}, ledgers: map[string]*ManagedLedger{},
	}
	var out strings.Builder
	skipping := false
	for line := range strings.SplitSeq(strings.TrimRight(source, "\n"), "\n") {
		switch {
		case line == "----":
			skipping = true
		case line == "":
			skipping = false
			out.WriteString("\n")
		case skipping:
		case strings.HasPrefix(line, "#"):
			out.WriteString(line + "\n")
		default:
			out.WriteString(line + "\n----\n")
			w.out.reset()
			w.run(strings.Fields(line))
			synctest.Wait()
			out.WriteString(w.out.String())
		}
	}
	for _, f := range w.factories {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		w.bookies.let(1 << 30)
		f.Close(ctx)
		cancel()
	}
	return out.String()
}

// scriptWorld is bookies, a metadata store, and brokers (factories) by name. The
// broker of a command is "a" unless it begins with "NAME:".
type scriptWorld struct {
	t         *testing.T
	bookies   *fakeBookies
	meta      *slowMeta
	cfg       Config
	factories map[string]*Factory
	ledgers   map[string]*ManagedLedger
	out       scriptOutput
}

// scriptOutput is what a command printed, its own lines and those of answers.
type scriptOutput struct {
	mu   sync.Mutex
	text strings.Builder
}

func (o *scriptOutput) reset() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text.Reset()
}

func (o *scriptOutput) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

func (w *scriptWorld) printf(format string, args ...any) {
	w.out.mu.Lock()
	defer w.out.mu.Unlock()
	fmt.Fprintf(&w.out.text, format+"\n", args...)
}

// let allows n appends to go on.
func (b *fakeBookies) let(n int) {
	b.mu.Lock()
	b.allowed += n
	waiting := append([]*fakeWriter(nil), b.writers...)
	b.mu.Unlock()
	for _, w := range waiting {
		w.poke()
	}
}

func (w *scriptWorld) run(words []string) {
	broker := "a"
	if name, rest, ok := strings.Cut(words[0], ":"); ok {
		broker, words[0] = name, rest
	}
	m := w.ledgers[broker]
	command, args := words[0], words[1:]
	switch command {
	case "config":
		w.config(args)
	case "open":
		w.open(broker)
	case "close":
		w.fail(m.Close(w.t.Context()))
	case "append":
		for _, data := range args {
			m.Append([]byte(data), func(p ledger.Position, err error) {
				if err != nil {
					w.printf("%s: %s", data, sentinel(err))
				} else {
					w.printf("%s: %v", data, p)
				}
			})
		}
	case "hold":
		w.bookies.set(func() { w.bookies.held, w.bookies.allowed = true, 0 })
	case "let":
		n, _ := strconv.Atoi(args[0])
		w.bookies.let(n)
	case "break": // break LEDGER:ENTRY lost|stored
		p := w.position(args[0])
		w.bookies.set(func() { w.bookies.breakAt[p.Ledger] = breakage{p.Entry, args[1] == "stored"} })
	case "storage":
		w.storage(args)
	case "metadata":
		w.metadata(args)
	case "advance":
		d, err := time.ParseDuration(args[0])
		w.fail(err)
		time.Sleep(d)
	case "terminate":
		p, err := m.Terminate(w.t.Context())
		w.fail(err)
		w.printf("%v", p)
	case "state":
		w.state(m)
	case "stored":
		w.stored()
	default:
		w.cursor(m, command, args)
	}
}

func (w *scriptWorld) config(args []string) {
	for _, arg := range args {
		key, value, _ := strings.Cut(arg, "=")
		n, err := strconv.Atoi(value)
		w.fail(err)
		switch key {
		case "entries":
			w.cfg.MaxEntriesPerLedger = n
		case "mb":
			w.cfg.MaxSizePerLedgerMB = int64(n)
		case "minAge":
			w.cfg.MinRolloverMinutes = n
		case "maxAge":
			w.cfg.MaxRolloverMinutes = n
		default:
			w.t.Fatalf("unknown key %q", key)
		}
	}
}

func (w *scriptWorld) open(broker string) {
	if w.factories[broker] == nil {
		w.factories[broker] = NewFactory(w.bookies, w.meta, w.cfg, quietLog(), nil)
	}
	m, err := w.factories[broker].Open(w.t.Context(), topic)
	if err != nil {
		w.printf("%s", sentinel(err))
		return
	}
	w.ledgers[broker] = m
	w.state(m)
}

// storage breaks or heals the bookies: "storage create|fence|delete fails", "storage works".
func (w *scriptWorld) storage(args []string) {
	w.bookies.set(func() {
		b := w.bookies
		switch args[0] {
		case "create":
			b.createErr = errPlanned
		case "fence":
			b.fenceErr = errPlanned
		case "delete":
			b.deleteErr = errPlanned
		case "works":
			b.createErr, b.fenceErr, b.deleteErr, b.held = nil, nil, nil, false
		}
	})
	if args[0] == "works" {
		w.bookies.let(1 << 30)
	}
}

func (w *scriptWorld) metadata(args []string) {
	switch args[0] {
	case "fails":
		w.meta.set(func(string, string) error { return ledger.ErrUnavailable }, nil)
	case "answers-get-lost":
		w.meta.set(nil, func(string, string) error { return ledger.ErrUnknownOutcome })
	case "works":
		w.meta.set(nil, nil)
	}
}

func (w *scriptWorld) cursor(m *ManagedLedger, command string, args []string) {
	at := Earliest
	if command == "latest" {
		at = Latest
	}
	if command == "reader" { // reader NAME POSITION
		m.NewReader(args[0], w.position(args[1]))
		return
	}
	if command == "earliest" || command == "latest" {
		_, err := m.OpenCursor(w.t.Context(), args[0], at)
		w.fail(err)
		return
	}
	var r *Reader
	for _, other := range m.Cursors() {
		if other.Name() == args[0] {
			r = other
		}
	}
	if r == nil {
		w.t.Fatalf("%s: no cursor %q", command, args[0])
	}
	ctx := w.t.Context()
	switch args = args[1:]; command {
	case "read":
		n, _ := strconv.Atoi(args[0])
		w.read(r, n)
	case "ack":
		var ps []ledger.Position
		for _, a := range args {
			ps = append(ps, w.position(a))
		}
		w.fail(r.Ack(ps))
	case "cumulative":
		w.fail(r.AckCumulative(w.position(args[0])))
	case "seek":
		w.fail(r.Seek(ctx, w.position(args[0])))
	case "skip":
		n, _ := strconv.Atoi(args[0])
		w.fail(r.Skip(ctx, int64(n)))
	case "clear":
		w.fail(r.ClearBacklog(ctx))
	case "rewind":
		r.Rewind()
	case "delete-cursor":
		w.fail(m.DeleteCursor(ctx, r.Name()))
	default:
		w.t.Fatalf("unknown command %q", command)
	}
}

func (w *scriptWorld) read(r *Reader, n int) {
	for n > 0 {
		b, err := r.TryRead(Limit{Entries: n})
		if errors.Is(err, ErrWouldBlock) {
			synctest.Wait()
			select {
			case <-r.Ready():
				continue
			default:
			}
			w.printf("nothing more")
			return
		}
		if err != nil {
			w.printf("%s", sentinel(err))
			return
		}
		for _, e := range b.Entries {
			w.printf("%v %s", e.Position, e.Data)
		}
		n -= len(b.Entries)
		b.Release()
	}
}

// state prints one line for the managed ledger and one for each cursor.
func (w *scriptWorld) state(m *ManagedLedger) {
	synctest.Wait()
	s := m.Stats()
	var ls []string
	for _, l := range s.Ledgers {
		star := ""
		if l.Closed.IsZero() {
			star = "*"
		}
		ls = append(ls, fmt.Sprintf("%d%s(%d)", l.ID, star, l.Entries))
	}
	w.printf("%s last=%v pending=%d ledgers=%s", s.State, s.LastConfirmed, s.PendingAdds, strings.Join(ls, ","))
	for _, c := range s.Cursors {
		kind := ""
		if !c.Durable {
			kind = " (not durable)"
		}
		w.printf("  %s: marked=%v beyond=%d read=%v backlog=%d%s", c.Name, c.MarkDeleted, c.AckedBeyond, c.ReadPosition, c.Backlog, kind)
	}
}

// stored prints what the bookies and the record have.
func (w *scriptWorld) stored() {
	synctest.Wait()
	kv, err := w.meta.Get(w.t.Context(), ledgerKey(topic))
	if errors.Is(err, metadata.ErrNotFound) {
		w.printf("no record, bookies have %v", w.bookies.ids())
		return
	}
	w.fail(err)
	r, err := parseRecord(topic, kv.Value)
	w.fail(err)
	var ls []string
	for _, l := range r.ledgers {
		if l.Closed.IsZero() {
			ls = append(ls, fmt.Sprintf("%d(open)", l.ID))
		} else {
			ls = append(ls, fmt.Sprintf("%d(%d)", l.ID, l.Entries))
		}
	}
	w.printf("record has %s, unlisted %v; bookies have %v", strings.Join(ls, ","), r.unlisted, w.bookies.ids())
}

func (w *scriptWorld) position(s string) ledger.Position {
	p, err := ledger.ParsePosition(s)
	w.fail(err)
	return p
}

func (w *scriptWorld) fail(err error) {
	if err != nil {
		w.printf("%s", sentinel(err))
	}
}

// sentinel spells the kind of an error, so that scripts do not depend on words.
func sentinel(err error) string {
	for name, kind := range map[string]error{
		"fenced": ErrFenced, "closed": ErrClosed, "terminated": ErrTerminated,
		"beyond the end": ErrBeyondEnd, "behind": ErrBehind,
	} {
		if errors.Is(err, kind) {
			return name
		}
	}
	return err.Error()
}
