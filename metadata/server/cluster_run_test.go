package server_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/metadata/metadatatest"
	"github.com/magnetar-io/magnetar/metadata/server"
)

func TestConformanceOverGRPC(t *testing.T) {
	c := newCluster(t, nil, "a", "b", "c")
	store := c.client()
	metadatatest.Run(t, func() metadata.Store { return store })
}

// TestLostAnswers loses a quarter of the answers and a quarter of the proposals:
// every change must take effect exactly once, and its answer be the first one.
func TestLostAnswers(t *testing.T) {
	var mu sync.Mutex
	rng := rand.New(rand.NewPCG(rand.Uint64(), 0))
	c := newCluster(t, func(g server.Group) server.Group { return lossy{g, &mu, rng} }, "a")
	store := c.client()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	const writers, each = 8, 25
	var running sync.WaitGroup
	var numbersMu sync.Mutex
	numbers := map[int64]int{}
	for w := range writers {
		running.Go(func() {
			key := fmt.Sprintf("/lost/%d", w)
			version := metadata.Version(0)
			for i := range each {
				n, err := store.PutSequential(ctx, "/numbers/", nil)
				if err != nil {
					t.Error(err)
					return
				}
				numbersMu.Lock()
				numbers[n]++
				numbersMu.Unlock()
				// Applied twice, the second time would find another version.
				if version, err = store.Put(ctx, key, []byte(strconv.Itoa(i)), version, 0); err != nil {
					t.Error(err)
					return
				}
			}
			if err := store.Delete(ctx, key, version); err != nil { // applied twice: not found
				t.Error(err)
			}
		})
	}
	running.Wait()
	for n := int64(1); n <= writers*each; n++ {
		if numbers[n] != 1 {
			t.Errorf("number %d was given %d times", n, numbers[n])
		}
	}
	if len(numbers) != writers*each {
		t.Errorf("%d numbers were given to %d writes", len(numbers), writers*each)
	}
}

// crowding loses the answer to one change, and lets so many other clients by
// before it says so that the change's client is forgotten.
type crowding struct {
	server.Group
	once sync.Once
}

func (c *crowding) Propose(data []byte, done func(any, error)) {
	command, err := server.DecodeCommand(data)
	crowd := false
	if err == nil && command.Key == "/crowded/" {
		c.once.Do(func() { crowd = true })
	}
	if !crowd {
		c.Group.Propose(data, done)
		return
	}
	c.Group.Propose(data, func(any, error) {})
	for n := range server.MaxClients {
		other := server.Command{Kind: server.KindSequential, Key: "/others/", Origin: server.Origin{Sequence: 1}}
		other.Origin.Client[0], other.Origin.Client[1], other.Origin.Client[2] = 1, byte(n), byte(n>>8)
		last := n == server.MaxClients-1
		c.Group.Propose(other.Encode(), func(any, error) {
			if last {
				done(nil, errLost)
			}
		})
	}
}

// TestForgottenClientIsTold: what nobody can know is said, not guessed.
func TestForgottenClientIsTold(t *testing.T) {
	c := newCluster(t, func(g server.Group) server.Group { return &crowding{Group: g} }, "a")
	store := c.client()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := store.PutSequential(ctx, "/crowded/", nil); !errors.Is(err, metadata.ErrUnknownOutcome) || ctx.Err() != nil {
		t.Errorf("change by a client that was forgotten = %v, want ErrUnknownOutcome at once", err)
	}
	if n, err := store.PutSequential(ctx, "/crowded/", nil); n != 2 || err != nil {
		t.Errorf("the next change = %d, %v, want 2: the first took effect once", n, err)
	}
}

func TestUnknownOutcomeIsSaid(t *testing.T) {
	c := newCluster(t, nil, "a", "b", "c")
	store := c.client()
	if _, err := store.Put(t.Context(), "/a", nil, 0, 0); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b"} { // no quorum
		c.stop(name)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := store.Put(ctx, "/a", nil, metadata.AnyVersion, 0)
	if !ended(err) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Put without a quorum = %v", err)
	}
}

// TestLeaderChange stops leaders while clients write, and holds what they saw
// against linearizability; a watch must arrive at the same keys, and a session
// must not be lost.
func TestLeaderChange(t *testing.T) {
	names := []string{"a", "b", "c"}
	c := newCluster(t, nil, names...)
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	watchCtx, endWatch := context.WithCancel(t.Context())
	defer endWatch()
	watching := watch(watchCtx, t, c.client(), "/r/")
	session, err := metadata.NewSession(ctx, c.client(), 5*time.Second, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}

	h := &history{start: time.Now()}
	stop := make(chan struct{})
	var clients sync.WaitGroup
	for id := range 5 {
		store := c.client()
		clients.Go(func() { h.run(ctx, id, store, stop) })
	}
	for round := range 3 {
		before := h.len()
		c.eventually("clients get on", func() bool { return h.len() > before+100 })
		leader := c.leader()
		c.stop(leader)
		before = h.len()
		c.eventually("clients get on without the old leader", func() bool { return h.len() > before+50 })
		c.start(leader)
		t.Logf("round %d: leader %s stopped and started; %d operations", round, leader, h.len())
	}
	close(stop)
	clients.Wait()

	if !session.Valid() {
		t.Error("session lost by changes of leader")
	}
	if err := session.Close(ctx); err != nil {
		t.Error(err)
	}
	kvs, err := metadata.List(ctx, c.client(), "/r/")
	if err != nil {
		t.Fatal(err)
	}
	c.eventually("the watch knows what is there", func() bool { return watching.equals(kvs) })
	t.Logf("watch was reset %d times", watching.resets)
	endWatch()

	result, info := porcupine.CheckOperationsVerbose(registers, h.operations, patience)
	if result != porcupine.Ok {
		name := filepath.Join(t.ArtifactDir(), "history.html") // kept with go test -artifacts
		_ = porcupine.VisualizePath(registers, info, name)
		t.Errorf("history of %d operations is %v; drawn in %s", len(h.operations), result, name)
	}
}

// history records what clients did.
type history struct {
	start time.Time

	mu         sync.Mutex
	operations []porcupine.Operation
}

func (h *history) len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.operations)
}

type input struct {
	key   string
	op    string // get, put or delete
	value string
	if_   metadata.Version
}

type output struct {
	value   string
	version metadata.Version // 0 = absent
	err     error            // nil, ErrBadVersion or ErrNotFound
	unknown bool             // the call ended without an answer
}

func (h *history) run(ctx context.Context, id int, store metadata.Store, stop <-chan struct{}) {
	rng := rand.New(rand.NewPCG(uint64(id), 0))
	seen := map[string]metadata.Version{}
	for n := 0; ; n++ {
		select {
		case <-stop:
			return
		default:
		}
		in := input{key: fmt.Sprintf("/r/%d", rng.IntN(3)), op: "get", if_: metadata.AnyVersion}
		if rng.IntN(3) == 0 {
			in.if_ = seen[in.key]
		}
		switch rng.IntN(6) {
		case 0, 1, 2:
			in.op, in.value = "put", fmt.Sprintf("%d.%d", id, n)
		case 3:
			in.op = "delete"
		}
		// Some calls get too little time, so that outcomes are unknown.
		enough := patience
		if rng.IntN(20) == 0 {
			enough = time.Duration(rng.IntN(int(10 * time.Millisecond)))
		}
		callCtx, cancel := context.WithTimeout(ctx, enough)
		call := time.Since(h.start)
		out := perform(callCtx, store, in)
		cancel()
		if !out.unknown && out.err == nil {
			seen[in.key] = out.version
		}
		returned := time.Since(h.start)
		if out.unknown {
			if in.op == "get" {
				continue
			}
			returned = time.Hour // it may take effect at any time
		}
		h.mu.Lock()
		h.operations = append(h.operations, porcupine.Operation{ClientId: id, Input: in, Call: int64(call), Output: out, Return: int64(returned)})
		h.mu.Unlock()
	}
}

func perform(ctx context.Context, store metadata.Store, in input) (out output) {
	var err error
	switch in.op {
	case "get":
		var kv metadata.KV
		kv, err = store.Get(ctx, in.key)
		out.value, out.version = string(kv.Value), kv.Version
	case "put":
		out.version, err = store.Put(ctx, in.key, []byte(in.value), in.if_, 0)
	case "delete":
		err = store.Delete(ctx, in.key, in.if_)
	}
	for _, known := range []error{metadata.ErrBadVersion, metadata.ErrNotFound} {
		if errors.Is(err, known) {
			return output{err: known}
		}
	}
	out.unknown = err != nil
	return out
}

// register is a key in the model. The version is -1 after a write of which only
// the value is known.
type register struct {
	value   string
	version metadata.Version
}

var registers = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		byKey := map[string][]porcupine.Operation{}
		for _, o := range history {
			key := o.Input.(input).key
			byKey[key] = append(byKey[key], o)
		}
		var parts [][]porcupine.Operation
		for _, part := range byKey {
			parts = append(parts, part)
		}
		return parts
	},
	Init: func() any { return register{} },
	Step: func(state, in, out any) (bool, any) {
		return step(state.(register), in.(input), out.(output))
	},
	DescribeOperation: func(in, out any) string { return fmt.Sprintf("%+v → %+v", in, out) },
}

func step(s register, in input, out output) (bool, any) {
	// Where the version is not known, it may be the one wanted or another.
	mayMatch := in.if_ == metadata.AnyVersion || in.if_ == s.version || s.version == -1 && in.if_ > 0
	mayDiffer := in.if_ != metadata.AnyVersion && in.if_ != s.version
	switch {
	case in.op == "get" && errors.Is(out.err, metadata.ErrNotFound):
		return s.version == 0, s
	case in.op == "get":
		ok := s.version != 0 && s.value == out.value && (s.version == -1 || s.version == out.version)
		return ok, register{out.value, out.version}
	case errors.Is(out.err, metadata.ErrBadVersion):
		return mayDiffer, s
	case errors.Is(out.err, metadata.ErrNotFound):
		return s.version == 0, s
	case out.unknown && !mayMatch:
		return true, s // it was refused, as nobody was told
	case in.op == "put" && out.unknown:
		return true, register{in.value, -1}
	case in.op == "put":
		return mayMatch && (s.version == -1 || out.version > s.version), register{in.value, out.version}
	default: // delete
		return mayMatch && (s.version != 0 || out.unknown), register{}
	}
}
