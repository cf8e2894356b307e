package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/metadata"
)

// Bounds on what the leader takes on. Beyond them it refuses before proposing.
const (
	// MaxStateBytes bounds all keys and values together.
	MaxStateBytes = 512 << 20

	// MaxProposedBytes bounds the commands that wait for their result.
	MaxProposedBytes = 64 << 20

	// MaxWatches bounds the watches at once.
	MaxWatches = 4096

	// rangeBytes is where the answer to one range is cut.
	rangeBytes = 4 << 20
)

// Group is what an Engine needs of group 0; *raftlog.Group is one.
type Group interface {
	// Propose hands a command to the group; done runs exactly once.
	Propose(data []byte, done func(result any, err error))
	// ReadBarrier returns nil if this node leads, was confirmed as the leader
	// after the call began, and has applied everything committed before.
	ReadBarrier(ctx context.Context) error
	// Watch makes the group call back after every change of leadership of this
	// node; with true only once it has applied everything of earlier leaders.
	Watch(changed func(leading bool))
}

// Engine is the leader's side of the store.
type Engine struct {
	group   Group
	machine *Machine
	log     *slog.Logger
	lessor  *lessor

	proposed atomic.Int64 // bytes of commands that wait for their result
	watches  atomic.Int64

	mu     sync.Mutex    // guards lead and closed
	lead   chan struct{} // closed when this node stops leading; nil while it does not lead
	closed bool

	cancel context.CancelFunc // ends the lessor's loop
	done   sync.WaitGroup     // the lessor's loop
}

// NewEngine starts the leader's side of machine, which group drives. Close it
// before the group.
func NewEngine(group Group, machine *Machine, log *slog.Logger) *Engine {
	log = log.With("component", "metadata")
	ctx, cancel := context.WithCancel(context.Background())
	e := &Engine{group: group, machine: machine, log: log, lessor: newLessor(machine, group, log), cancel: cancel}
	e.done.Go(func() { e.lessor.run(ctx) })
	group.Watch(e.leading)
	return e
}

// Close ends the watches, refuses new ones, and ends the lease clock, for which
// it waits. Reads and changes go on as long as the group does.
func (e *Engine) Close() {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	e.leading(false)
	e.cancel()
	e.done.Wait()
}

func (e *Engine) leading(leading bool) {
	e.lessor.lead(leading)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lead != nil {
		close(e.lead)
		e.lead = nil
	}
	if leading && !e.closed {
		e.lead = make(chan struct{})
	}
}

// Get returns a key, or an error that wraps [metadata.ErrNotFound].
func (e *Engine) Get(ctx context.Context, key string) (metadata.KV, error) {
	if err := metadata.CheckKey(key); err != nil {
		return metadata.KV{}, err
	}
	if err := e.group.ReadBarrier(ctx); err != nil {
		return metadata.KV{}, err
	}
	found, ok := e.machine.State().Get(key)
	if !ok {
		return metadata.KV{}, fmt.Errorf("get %q: %w", key, metadata.ErrNotFound)
	}
	return found, nil
}

// Range is [metadata.Store]'s, except that it may stop early at a size; then
// more is true.
func (e *Engine) Range(ctx context.Context, prefix, after string, limit int) (kvs []metadata.KV, more bool, err error) {
	if err := errors.Join(metadata.CheckPrefix(prefix), metadata.CheckPrefix(after), metadata.CheckLimit(limit)); err != nil {
		return nil, false, err
	}
	if err := e.group.ReadBarrier(ctx); err != nil {
		return nil, false, err
	}
	kvs, more = e.machine.State().Range(prefix, after, limit, rangeBytes)
	return kvs, more && len(kvs) < limit, nil
}

// Revision returns the store's revision.
func (e *Engine) Revision(ctx context.Context) (metadata.Version, error) {
	if err := e.group.ReadBarrier(ctx); err != nil {
		return 0, err
	}
	return e.machine.State().Revision(), nil
}

// Change proposes a command and waits for its result. Results other than
// CodeOK come as errors, except CodeForgotten, of which only the caller knows
// what to make.
func (e *Engine) Change(ctx context.Context, c *Command) (Result, error) {
	if err := e.admit(ctx, c); err != nil {
		return Result{}, err
	}
	data := c.Encode()
	size := int64(len(data))
	if e.proposed.Add(size) > MaxProposedBytes {
		e.proposed.Add(-size)
		return Result{}, fmt.Errorf("%v: more than %d bytes of changes wait already: %w", c, MaxProposedBytes, ledger.ErrUnavailable)
	}
	type outcome struct {
		result any
		err    error
	}
	answered := make(chan outcome, 1)
	e.group.Propose(data, func(result any, err error) {
		e.proposed.Add(-size)
		answered <- outcome{result, err}
	})
	select {
	case o := <-answered:
		if o.err != nil {
			return Result{}, fmt.Errorf("%v: %w", c, o.err)
		}
		result, ok := o.result.(Result)
		if !ok {
			panic(fmt.Sprintf("metadata group answered %v with %T, want Result", c, o.result))
		}
		if err := result.err(c); err != nil {
			return Result{}, err
		}
		return result, nil
	case <-ctx.Done():
		return Result{}, fmt.Errorf("%v: %w: %w", c, ctx.Err(), ledger.ErrUnknownOutcome)
	}
}

// admit refuses what must not be proposed.
func (e *Engine) admit(ctx context.Context, c *Command) error {
	if err := ctx.Err(); err != nil { // such as after this process was stopped for a while
		return fmt.Errorf("%v: %w: %w", c, err, ledger.ErrUnavailable)
	}
	if err := c.check(); err != nil {
		return err
	}
	grows := c.Kind == KindPut || c.Kind == KindSequential
	if size := e.machine.State().Bytes(); grows && size+int64(len(c.Key)+len(c.Value)) > MaxStateBytes {
		return fmt.Errorf("%v: the metadata store holds %d bytes, at most %d are allowed: delete something: %w", c, size, MaxStateBytes, ledger.ErrUnavailable)
	}
	if c.Kind == KindPut && c.Lease != 0 && e.lessor.ending(c.Lease) {
		// Attaching a key changes the lease's revision, so a holder that only
		// writes and never renews would put its expiry off for ever.
		return fmt.Errorf("%v: lease %d: %w", c, c.Lease, metadata.ErrLeaseExpired)
	}
	return nil
}

// String names a command in errors.
func (c *Command) String() string {
	switch c.Kind {
	case KindPut:
		return fmt.Sprintf("put %q", c.Key)
	case KindSequential:
		return fmt.Sprintf("put next of %q", c.Key)
	case KindDelete:
		return fmt.Sprintf("delete %q", c.Key)
	case KindGrant:
		return fmt.Sprintf("grant lease of %v", c.TTL)
	case KindRevoke:
		return fmt.Sprintf("revoke lease %d", c.Lease)
	case KindExpire:
		return fmt.Sprintf("expire lease %d", c.Lease)
	case KindLead:
		return "begin to count leases"
	default:
		return fmt.Sprintf("command of kind %d", c.Kind)
	}
}

// err is what c's caller gets to know of the result.
func (r Result) err(c *Command) error {
	switch r.Code {
	case CodeOK, CodeForgotten:
		return nil
	case CodeNotFound:
		return fmt.Errorf("%v: %w", c, metadata.ErrNotFound)
	case CodeBadVersion:
		return fmt.Errorf("%v: want version %d, found %d: %w", c, c.If, r.Version, metadata.ErrBadVersion)
	case CodeLeaseExpired:
		if c.Kind == KindRevoke {
			return nil // it is over, as wanted
		}
		return fmt.Errorf("%v: lease %d: %w", c, c.Lease, metadata.ErrLeaseExpired)
	case CodeLeaseFull:
		return fmt.Errorf("%v: lease %d holds %d keys, the most allowed: %w", c, c.Lease, metadata.MaxLeaseKeys, metadata.ErrInvalid)
	case CodeLeases:
		return fmt.Errorf("%v: there are %d leases, the most allowed: wait until some expire: %w", c, MaxLeases, ledger.ErrUnavailable)
	case CodeStale:
		return fmt.Errorf("%v: sequence number %d comes after a higher one of its client: %w", c, c.Origin.Sequence, metadata.ErrInvalid)
	default: // CodeDeposed is only for the lease clock
		return fmt.Errorf("%v: ended with code %d, which this program does not know", c, r.Code)
	}
}

// KeepAlive restarts a lease's TTL.
func (e *Engine) KeepAlive(ctx context.Context, id metadata.LeaseID) error {
	if err := e.group.ReadBarrier(ctx); err != nil {
		return err
	}
	switch e.lessor.renew(id) {
	case renewed:
		return nil
	case expired:
		return fmt.Errorf("keep lease %d alive: %w", id, metadata.ErrLeaseExpired)
	case notLeading:
	}
	return errNotReady
}

// errNotReady reports a leader that has not taken up its duties yet, or just
// laid them down.
var errNotReady = fmt.Errorf("metadata leader is changing: %w", ledger.ErrUnavailable)

// Told is one message of a watch.
type Told struct {
	Reset   bool             // forget what was told before
	Events  []metadata.Event // puts and deletes
	Synced  bool             // the puts since Reset are all there is
	Through metadata.Version // every change up to here has been told; 0 between Reset and Synced
}

const (
	watchBytes = 256 << 10 // about what one message of a watch holds

	// WatchBeat is how often a watch says something at least.
	WatchBeat = time.Second
)

// Watch tells send what changes under prefix, until ctx ends, send fails or this
// node stops leading; it always returns an error. It starts with the current
// keys, or, with resume, with what changed after revision from if that is known.
// send may block for as long as it likes: changes that do not fit in the
// history meanwhile are replaced by a new start.
func (e *Engine) Watch(ctx context.Context, prefix string, resume bool, from metadata.Version, send func(Told) error) error {
	if err := metadata.CheckPrefix(prefix); err != nil {
		return err
	}
	if e.watches.Add(1) > MaxWatches {
		e.watches.Add(-1)
		return fmt.Errorf("watch %q: there are %d watches, the most allowed: %w", prefix, MaxWatches, ledger.ErrUnavailable)
	}
	defer e.watches.Add(-1)
	if err := e.group.ReadBarrier(ctx); err != nil {
		return err
	}
	e.mu.Lock()
	lead := e.lead
	e.mu.Unlock()
	if lead == nil {
		return errNotReady
	}
	beat := time.NewTicker(WatchBeat)
	defer beat.Stop()
	// The barrier applied all that any leader told, so a watch from beyond this
	// revision is from another store.
	known := resume && from <= e.machine.State().Revision()
	for {
		events, through, wait, ok := e.machine.history.after(from, prefix, watchBytes)
		if !ok || !known {
			var err error
			if from, err = e.tellAll(prefix, send); err != nil {
				return err
			}
			known = true
			continue
		}
		from = through
		if len(events) > 0 {
			if err := send(Told{Events: events, Through: through}); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("watch %q: %w", prefix, ctx.Err())
		case <-lead:
			return errNotReady
		default:
		}
		if wait == nil {
			continue
		}
		select {
		case <-wait:
		case <-beat.C:
			if err := send(Told{Through: through}); err != nil {
				return err
			}
		case <-ctx.Done():
		case <-lead:
		}
	}
}

// tellAll starts a watch over, with the state of one revision, which it returns.
func (e *Engine) tellAll(prefix string, send func(Told) error) (metadata.Version, error) {
	s := e.machine.State()
	told := Told{Reset: true}
	for after, more := "", true; more; {
		var kvs []metadata.KV
		kvs, more = s.Range(prefix, after, metadata.MaxRange, watchBytes)
		for i := range kvs {
			told.Events = append(told.Events, metadata.Event{Type: metadata.EventPut, KV: kvs[i]})
			after = kvs[i].Key
		}
		if !more {
			told.Synced, told.Through = true, s.Revision()
		}
		if err := send(told); err != nil {
			return 0, err
		}
		told = Told{}
	}
	return s.Revision(), nil
}
