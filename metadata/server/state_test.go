package server

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/magnetar-io/magnetar/metadata"
)

// model is the store as a child would write it: maps and loops.
type model struct {
	revision metadata.Version
	leader   metadata.Version
	keys     map[string]metadata.KV
	counters map[string]int64
	leases   map[metadata.LeaseID]metadata.Version
	last     map[ClientID]uint64
	results  map[ClientID]Result
}

func newModel() *model {
	return &model{
		keys: map[string]metadata.KV{}, counters: map[string]int64{}, leases: map[metadata.LeaseID]metadata.Version{},
		last: map[ClientID]uint64{}, results: map[ClientID]Result{},
	}
}

func (m *model) apply(c *Command) Result {
	m.revision++
	if c.Origin.Sequence == 0 {
		return m.decide(c)
	}
	switch last := m.last[c.Origin.Client]; {
	case c.Origin.Sequence == last:
		return m.results[c.Origin.Client]
	case c.Origin.Sequence < last:
		return Result{Code: CodeStale, Revision: m.revision}
	}
	r := m.decide(c)
	m.last[c.Origin.Client], m.results[c.Origin.Client] = c.Origin.Sequence, r
	return r
}

func (m *model) decide(c *Command) (r Result) {
	r.Revision = m.revision
	old, exists := m.keys[c.Key]
	leaseRevision, leased := m.leases[c.Lease]
	switch c.Kind {
	case KindPut:
		switch {
		case c.If != metadata.AnyVersion && c.If != old.Version:
			r.Code, r.Version = CodeBadVersion, old.Version
		case c.Lease != 0 && !leased:
			r.Code = CodeLeaseExpired
		default:
			m.keys[c.Key] = metadata.KV{Key: c.Key, Value: c.Value, Version: m.revision, Lease: c.Lease}
			if c.Lease != 0 {
				m.leases[c.Lease] = m.revision
			}
			r.Version = m.revision
		}
	case KindSequential:
		m.counters[c.Key]++
		r.Number, r.Version = m.counters[c.Key], m.revision
		key := fmt.Sprintf("%s%019d", c.Key, r.Number)
		m.keys[key] = metadata.KV{Key: key, Value: c.Value, Version: m.revision}
	case KindDelete:
		switch {
		case !exists:
			r.Code = CodeNotFound
		case c.If != metadata.AnyVersion && c.If != old.Version:
			r.Code, r.Version = CodeBadVersion, old.Version
		default:
			delete(m.keys, c.Key)
		}
	case KindGrant:
		r.Lease = metadata.LeaseID(m.revision)
		m.leases[r.Lease] = m.revision
	case KindLead:
		m.leader = m.revision
	case KindRevoke, KindExpire:
		switch {
		case c.Kind == KindExpire && c.Leader != m.leader:
			r.Code = CodeDeposed
		case !leased:
			r.Code = CodeLeaseExpired
		case c.Kind == KindExpire && c.Revision != leaseRevision:
			r.Code, r.Version = CodeBadVersion, leaseRevision
		default:
			delete(m.leases, c.Lease)
			maps.DeleteFunc(m.keys, func(_ string, kv metadata.KV) bool { return kv.Lease == c.Lease })
		}
	}
	return r
}

func (m *model) under(prefix string) (kvs []metadata.KV) {
	for _, key := range slices.Sorted(maps.Keys(m.keys)) {
		if strings.HasPrefix(key, prefix) {
			kvs = append(kvs, m.keys[key])
		}
	}
	return kvs
}

// TestStateMatchesModel also follows the events, from which alone the keys must
// come out right, and sends the state through its file format now and then.
func TestStateMatchesModel(t *testing.T) {
	rng := seeded(t)
	s, m, told := NewState(), newModel(), map[string]metadata.KV{}
	for step := range 5000 {
		c := randomCommand(rng, s.revision)
		if rng.IntN(2) == 0 && s.leases.count > 0 { // a lease that exists, more often than by chance
			ids := s.leaseIDs()
			c.Lease = ids[rng.IntN(len(ids))]
			if c.Kind == KindExpire && rng.IntN(2) == 0 {
				_, c.Revision, _ = s.Lease(c.Lease)
				c.Leader = s.leader
			}
		}
		c, err := DecodeCommand(c.Encode())
		if err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
		next, result, effect := s.Apply(uint64(step+1), c)
		if want := m.apply(c); result != want {
			t.Fatalf("step %d: %+v gives %+v, model says %+v", step, c, result, want)
		}
		for i, e := range effect.Events {
			if e.KV.Version != next.revision || i > 0 && e.KV.Key <= effect.Events[i-1].KV.Key {
				t.Fatalf("step %d: %+v tells %+v at revision %d", step, c, effect.Events, next.revision)
			}
			told[e.KV.Key] = e.KV
			if e.Type == metadata.EventDelete {
				delete(told, e.KV.Key)
			}
		}
		s = next
		if err := s.verify(); err != nil {
			t.Fatalf("step %d, %+v: %v", step, c, err)
		}
		prefix := []string{"", "/a", "/x/", "/b/c"}[rng.IntN(4)]
		kvs, more := s.Range(prefix, "", 1<<30, 1<<30)
		if want := m.under(prefix); more || !slices.EqualFunc(want, kvs, sameKV) {
			t.Fatalf("step %d, %+v: Range(%q), more %v: (-model +state)\n%s", step, c, prefix, more, cmp.Diff(want, kvs))
		}
		if !maps.EqualFunc(m.keys, told, sameKV) {
			t.Fatalf("step %d, %+v: keys by events: (-model +told)\n%s", step, c, cmp.Diff(m.keys, told))
		}
		if step%200 == 0 {
			s = throughFile(t, s)
		}
	}
}

func sameKV(a, b metadata.KV) bool {
	return a.Key == b.Key && bytes.Equal(a.Value, b.Value) && a.Version == b.Version && a.Lease == b.Lease
}

// throughFile encodes a state, decodes it, and compares.
func throughFile(t *testing.T, s State) State {
	t.Helper()
	b := encoded(s)
	if int64(len(b)) != s.encodedSize() {
		t.Fatalf("state of %d bytes, announced as %d", len(b), s.encodedSize())
	}
	again, err := decodeState(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, encoded(again)) || again.revision != s.revision || again.applied != s.applied {
		t.Fatalf("state at revision %d changed on its way through a file", s.revision)
	}
	return again
}

func encoded(s State) []byte {
	var b bytes.Buffer
	for chunk := range s.encode() {
		b.Write(chunk)
	}
	return b.Bytes()
}

// TestRepeatIsAnsweredOnce is the promise that lets clients resend.
func TestRepeatIsAnsweredOnce(t *testing.T) {
	s := NewState()
	next := func(c Command) Result {
		t.Helper()
		var r Result
		s, r, _ = s.Apply(s.applied+1, &c)
		return r
	}
	from := func(n int, sequence uint64) Origin { return Origin{Client: clientID(n), Sequence: sequence} }
	resent := func(o Origin) Origin { o.Resend = true; return o }

	take := Command{Kind: KindSequential, Origin: from(1, 1), Key: "/l/"}
	first := next(take)
	other := next(Command{Kind: KindSequential, Origin: from(2, 1), Key: "/l/"})
	take.Origin = resent(take.Origin)
	if again := next(take); again != first || first.Number != 1 || other.Number != 2 {
		t.Errorf("first %+v, other client's %+v, first again %+v", first, other, again)
	}
	s = throughFile(t, s) // the memory survives a checkpoint
	if again := next(take); again != first {
		t.Errorf("first %+v, again after a restart %+v", first, again)
	}
	if n, _ := s.counters.get("/l/"); n != 2 {
		t.Errorf("counter is %d after two commands and two repeats", n)
	}

	// A refusal is remembered as well: what made it wrong may be gone by now.
	refused := Command{Kind: KindDelete, Origin: from(1, 2), Key: "/k", If: metadata.AnyVersion}
	if r := next(refused); r.Code != CodeNotFound {
		t.Errorf("delete of an absent key: %+v", r)
	}
	next(Command{Kind: KindPut, Key: "/k", If: metadata.AnyVersion})
	if r := next(refused); r.Code != CodeNotFound {
		t.Errorf("repeat of a refused delete: %+v, want the refusal", r)
	}
	if _, ok := s.Get("/k"); !ok {
		t.Error("the repeat of a refused delete deleted the key")
	}

	// Late comers are never applied.
	if r := next(take); r.Code != CodeStale {
		t.Errorf("sequence 1 after 2: %+v, want CodeStale", r)
	}
}

func TestForgottenClients(t *testing.T) {
	s := NewState()
	apply := func(o Origin) Result {
		var r Result
		s, r, _ = s.Apply(s.applied+1, &Command{Kind: KindSequential, Origin: o, Key: "/l/"})
		return r
	}
	for n := range MaxClients {
		apply(Origin{Client: clientID(n), Sequence: 1})
	}
	apply(Origin{Client: clientID(0), Sequence: 2}) // now client 1 was silent longest
	known := s.revision
	apply(Origin{Client: clientID(MaxClients), Sequence: 1})
	if _, ok := s.clients.get(clientID(1)); ok || s.clients.count != MaxClients {
		t.Errorf("client 1 remembered: %v; %d clients, want %d", ok, s.clients.count, MaxClients)
	}
	if _, ok := s.clients.get(clientID(0)); !ok {
		t.Error("client 0 forgotten, though client 1 was silent longer")
	}
	before, _ := s.counters.get("/l/")
	if r := apply(Origin{Client: clientID(1), Sequence: 1, Resend: true}); r.Code != CodeForgotten {
		t.Errorf("resend by a forgotten client: %+v, want CodeForgotten", r)
	}
	if after, _ := s.counters.get("/l/"); after != before {
		t.Error("the resend of a forgotten client was applied")
	}
	// Who was first sent after all that was forgotten cannot be among it.
	if r := apply(Origin{Client: clientID(1), Sequence: 2, Resend: true, Known: known}); r.Code != CodeOK {
		t.Errorf("resend of a command younger than anything forgotten: %+v", r)
	}
	if r := apply(Origin{Client: clientID(-1), Sequence: 5}); r.Code != CodeOK {
		t.Errorf("first sending by an unknown client: %+v", r)
	}
	if err := s.verify(); err != nil {
		t.Error(err)
	}
}

func TestBoundsOfLeases(t *testing.T) {
	s := NewState()
	apply := func(c Command) Result {
		t.Helper()
		var r Result
		s, r, _ = s.Apply(s.applied+1, &c)
		return r
	}
	lease := apply(Command{Kind: KindGrant, TTL: metadata.MinTTL}).Lease
	for i := range metadata.MaxLeaseKeys {
		apply(Command{Kind: KindPut, Key: strconv.Itoa(i), Lease: lease})
	}
	if r := apply(Command{Kind: KindPut, Key: "more", Lease: lease}); r.Code != CodeLeaseFull {
		t.Errorf("one key more: %+v, want CodeLeaseFull", r)
	}
	if r := apply(Command{Kind: KindPut, Key: "0", If: metadata.AnyVersion, Lease: lease}); r.Code != CodeOK {
		t.Errorf("a key that is attached already: %+v", r)
	}
	if r := apply(Command{Kind: KindRevoke, Lease: lease}); r.Code != CodeOK || s.items.count != 0 || s.attached.count != 0 {
		t.Errorf("revoke: %+v, leaves %d keys", r, s.items.count)
	}
	for range MaxLeases {
		apply(Command{Kind: KindGrant, TTL: metadata.MinTTL})
	}
	if r := apply(Command{Kind: KindGrant, TTL: metadata.MinTTL}); r.Code != CodeLeases {
		t.Errorf("one lease more: %+v, want CodeLeases", r)
	}
	if err := s.verify(); err != nil {
		t.Error(err)
	}
}

// exampleState is what testdata/state-v1 holds.
func exampleState() State {
	s := NewState()
	for i, c := range []Command{
		{Kind: KindGrant, Origin: Origin{Client: clientID(1), Sequence: 1}, TTL: metadata.MinTTL},
		{Kind: KindLead},
		{Kind: KindPut, Key: "/a", Value: []byte("one"), Lease: 1},
		{Kind: KindSequential, Origin: Origin{Client: clientID(2), Sequence: 9}, Key: "/l/", Value: []byte("two")},
		{Kind: KindDelete, Origin: Origin{Client: clientID(1), Sequence: 2}, Key: "/none", If: metadata.AnyVersion},
	} {
		s, _, _ = s.Apply(uint64(10+i), &c)
	}
	return s
}

func FuzzDecodeState(f *testing.F) {
	f.Add(encoded(NewState()))
	f.Add(encoded(exampleState()))
	f.Add([]byte(stateMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		b = sealed(b)
		s, err := decodeState(bytes.NewReader(b))
		if err != nil {
			return
		}
		again, err := decodeState(bytes.NewReader(encoded(s)))
		if err != nil || !bytes.Equal(encoded(again), encoded(s)) {
			t.Errorf("a state that was accepted does not survive: %v", err)
		}
	})
}

func BenchmarkApplyPut(b *testing.B) {
	s := NewState()
	commands := make([]*Command, 4096)
	for i := range commands {
		commands[i] = &Command{
			Kind: KindPut, Key: fmt.Sprintf("/managed-ledgers/public/default/persistent/topic-%d", i), Value: make([]byte, 200),
			If: metadata.AnyVersion, Origin: Origin{Client: clientID(i % 64), Sequence: 1},
		}
		s, _, _ = s.Apply(1, commands[i])
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		c := commands[i%len(commands)]
		c.Origin.Sequence = uint64(i + 2)
		s, _, _ = s.Apply(1, c)
		i++
	}
}
