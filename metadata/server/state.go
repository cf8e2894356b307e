package server

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/magnetar-io/magnetar/metadata"
)

// Bounds of the state that are part of the state machine: every replica must
// have the same, so changing one needs a new command version.
const (
	// MaxClients is how many client lanes the store remembers the last command
	// of. The lane that was silent longest is forgotten first.
	MaxClients = 4096

	// MaxLeases bounds the leases that exist at once.
	MaxLeases = 65536
)

// Code is how a command ended. The numbers are on disk.
type Code uint8

// The ways a command ends.
const (
	CodeOK           Code = 0
	CodeNotFound     Code = 1
	CodeBadVersion   Code = 2 // Result.Version is the version found
	CodeLeaseExpired Code = 3
	CodeLeaseFull    Code = 4 // the lease has metadata.MaxLeaseKeys keys
	CodeLeases       Code = 5 // there are MaxLeases leases
	CodeStale        Code = 6 // the lane sent a newer command; not applied
	CodeForgotten    Code = 7 // a resend by a lane that was forgotten; not applied now, perhaps earlier
	CodeDeposed      Code = 8 // KindExpire: another leader counts the time of leases now
)

// Result is a command's outcome. A repeat of a command gets the same Result.
type Result struct {
	Code     Code
	Version  metadata.Version // the key's new version, or the one found
	Number   int64            // KindSequential: the number
	Lease    metadata.LeaseID // KindGrant: the lease
	Revision metadata.Version // the store's revision after the command
}

// Effect is what one command changed, for watches and for the leader's clock.
type Effect struct {
	Events  []metadata.Event // all with the command's revision, in order of key
	Granted metadata.LeaseID // 0 = none
	Ended   metadata.LeaseID // 0 = none
}

type item struct {
	value   []byte
	version metadata.Version
	lease   metadata.LeaseID
}

type lease struct {
	ttl      time.Duration
	revision metadata.Version // of the last command that granted it or attached a key
	keys     int              // attached now
}

type attachment struct {
	lease metadata.LeaseID
	key   string
}

type client struct {
	sequence uint64
	used     metadata.Version // revision of its last command; unique
	result   Result
}

// State is the whole store at one revision: an immutable value. Its methods do
// not change it; Apply returns the next one.
type State struct {
	applied   uint64           // log index of the last command
	revision  metadata.Version // number of commands applied
	leader    metadata.Version // revision of the last KindLead
	forgotten metadata.Version // highest client.used of a client that was dropped
	bytes     int64            // of keys, prefixes and values

	items    tree[string, item]
	counters tree[string, int64] // last number of each sequential prefix
	leases   tree[metadata.LeaseID, lease]
	attached tree[attachment, struct{}] // item.lease the other way round
	clients  tree[ClientID, client]
	uses     tree[metadata.Version, ClientID] // client.used the other way round
}

// Orders of the trees.
var (
	byString = &order[string]{strings.Compare, hashString}
	byLease  = &order[metadata.LeaseID]{cmp.Compare[metadata.LeaseID], func(id metadata.LeaseID) uint64 { return mix(uint64(id)) }}
	byUse    = &order[metadata.Version]{cmp.Compare[metadata.Version], func(v metadata.Version) uint64 { return mix(uint64(v)) }}
	byClient = &order[ClientID]{
		func(a, b ClientID) int { return bytes.Compare(a[:], b[:]) },
		func(id ClientID) uint64 {
			return mix(binary.LittleEndian.Uint64(id[:8]) ^ mix(binary.LittleEndian.Uint64(id[8:])))
		},
	}
	byAttachment = &order[attachment]{
		func(a, b attachment) int { return cmp.Or(cmp.Compare(a.lease, b.lease), strings.Compare(a.key, b.key)) },
		func(a attachment) uint64 { return mix(uint64(a.lease) ^ hashString(a.key)) },
	}
)

// NewState returns the empty store, before its first command.
func NewState() State {
	return State{
		items: newTree[string, item](byString), counters: newTree[string, int64](byString),
		leases: newTree[metadata.LeaseID, lease](byLease), attached: newTree[attachment, struct{}](byAttachment),
		clients: newTree[ClientID, client](byClient), uses: newTree[metadata.Version, ClientID](byUse),
	}
}

// Revision returns the number of commands applied.
func (s State) Revision() metadata.Version { return s.revision }

// Applied returns the log index of the last command.
func (s State) Applied() uint64 { return s.applied }

// Bytes returns the size of all keys and values.
func (s State) Bytes() int64 { return s.bytes }

// Get returns a key.
func (s State) Get(key string) (metadata.KV, bool) {
	it, ok := s.items.get(key)
	return kv(key, it), ok
}

func kv(key string, it item) metadata.KV {
	return metadata.KV{Key: key, Value: it.value, Version: it.version, Lease: it.lease}
}

// Range returns keys that begin with prefix and come after the key after, in
// order: at most limit, and no more once they hold maxBytes. more says that
// there may be others.
func (s State) Range(prefix, after string, limit, maxBytes int) (kvs []metadata.KV, more bool) {
	size := 0
	for key, it := range s.items.from(max(prefix, after)) {
		switch {
		case !strings.HasPrefix(key, prefix):
			return kvs, false
		case key == after && after != "":
			continue
		case len(kvs) == limit || size >= maxBytes:
			return kvs, true
		}
		kvs = append(kvs, kv(key, it))
		size += len(key) + len(it.value)
	}
	return kvs, false
}

// Lease returns a lease's TTL and revision.
func (s State) Lease(id metadata.LeaseID) (ttl time.Duration, revision metadata.Version, ok bool) {
	l, ok := s.leases.get(id)
	return l.ttl, l.revision, ok
}

// Apply returns the state after c, the command at log index index, and what it
// did. It depends on nothing but s and c.
func (s State) Apply(index uint64, c *Command) (State, Result, Effect) {
	s.applied = index
	s.revision++
	remembers := c.Origin.Client != ClientID{}
	if remembers {
		if result, decided := s.recall(c.Origin); decided {
			return s, result, Effect{}
		}
	}
	var result Result
	var effect Effect
	switch c.Kind {
	case KindPut:
		result = s.put(c, &effect)
	case KindSequential:
		result = s.putSequential(c, &effect)
	case KindDelete:
		result = s.delete(c, &effect)
	case KindGrant:
		result = s.grant(c, &effect)
	case KindRevoke:
		result = s.endLease(c.Lease, &effect)
	case KindExpire:
		result = s.expire(c, &effect)
	case KindLead:
		s.leader = s.revision
	default:
		panic(fmt.Sprintf("metadata command of kind %d applied", c.Kind)) // DecodeCommand lets none pass
	}
	result.Revision = s.revision
	if remembers {
		s.remember(c.Origin, result)
	}
	return s, result, effect
}

// recall answers a command that its client sent before, or that came too late.
func (s *State) recall(o Origin) (Result, bool) {
	last, known := s.clients.get(o.Client)
	switch {
	case !known && o.Resend && o.Known < s.forgotten:
		// An earlier sending may have been applied and forgotten.
		return Result{Code: CodeForgotten, Revision: s.revision}, true
	case !known || o.Sequence > last.sequence:
		return Result{}, false
	case o.Sequence == last.sequence:
		return last.result, true
	default:
		return Result{Code: CodeStale, Revision: s.revision}, true
	}
}

// remember keeps the result for a repeat, and forgets the client that was silent
// longest if there are too many.
func (s *State) remember(o Origin, result Result) {
	if last, ok := s.clients.get(o.Client); ok {
		s.uses = s.uses.without(last.used)
	}
	s.clients = s.clients.with(o.Client, client{sequence: o.Sequence, used: s.revision, result: result})
	s.uses = s.uses.with(s.revision, o.Client)
	if s.clients.count > MaxClients {
		oldest, _ := s.uses.first()
		id, _ := s.uses.get(oldest)
		s.uses, s.clients = s.uses.without(oldest), s.clients.without(id)
		s.forgotten = max(s.forgotten, oldest)
	}
}

func (s *State) put(c *Command, effect *Effect) Result {
	old, exists := s.items.get(c.Key)
	if c.If != metadata.AnyVersion && c.If != old.version {
		return Result{Code: CodeBadVersion, Version: old.version}
	}
	if c.Lease != 0 {
		l, ok := s.leases.get(c.Lease)
		switch {
		case !ok:
			return Result{Code: CodeLeaseExpired}
		case l.keys >= metadata.MaxLeaseKeys && old.lease != c.Lease:
			return Result{Code: CodeLeaseFull}
		}
	}
	if exists {
		s.drop(c.Key, old)
	}
	s.set(c.Key, item{value: c.Value, version: s.revision, lease: c.Lease})
	effect.Events = append(effect.Events, s.putEvent(c.Key))
	return Result{Version: s.revision}
}

func (s *State) putSequential(c *Command, effect *Effect) Result {
	n, counted := s.counters.get(c.Key)
	if !counted {
		s.bytes += int64(len(c.Key))
	}
	// A key that somebody wrote under a number of its own is left alone.
	for n++; ; n++ {
		if _, exists := s.items.get(sequentialKey(c.Key, n)); !exists {
			break
		}
	}
	s.counters = s.counters.with(c.Key, n)
	key := sequentialKey(c.Key, n)
	s.set(key, item{value: c.Value, version: s.revision})
	effect.Events = append(effect.Events, s.putEvent(key))
	return Result{Version: s.revision, Number: n}
}

func (s *State) delete(c *Command, effect *Effect) Result {
	old, exists := s.items.get(c.Key)
	switch {
	case !exists:
		return Result{Code: CodeNotFound}
	case c.If != metadata.AnyVersion && c.If != old.version:
		return Result{Code: CodeBadVersion, Version: old.version}
	}
	s.drop(c.Key, old)
	effect.Events = append(effect.Events, s.deleteEvent(c.Key))
	return Result{}
}

func (s *State) grant(c *Command, effect *Effect) Result {
	if s.leases.count >= MaxLeases {
		return Result{Code: CodeLeases}
	}
	id := metadata.LeaseID(s.revision) // revisions never repeat, so neither do ids
	s.leases = s.leases.with(id, lease{ttl: c.TTL, revision: s.revision})
	effect.Granted = id
	return Result{Lease: id}
}

// expire ends a lease unless it changed since the leader decided to, or another
// leader took over since, which may have renewed it.
func (s *State) expire(c *Command, effect *Effect) Result {
	l, ok := s.leases.get(c.Lease)
	switch {
	case c.Leader != s.leader:
		return Result{Code: CodeDeposed}
	case ok && l.revision != c.Revision:
		return Result{Code: CodeBadVersion, Version: l.revision}
	}
	return s.endLease(c.Lease, effect)
}

// endLease deletes a lease with its keys.
func (s *State) endLease(id metadata.LeaseID, effect *Effect) Result {
	if _, ok := s.leases.get(id); !ok {
		return Result{Code: CodeLeaseExpired}
	}
	for a := range s.attached.from(attachment{lease: id}) { // over the tree as it was
		if a.lease != id {
			break
		}
		it, _ := s.items.get(a.key)
		s.drop(a.key, it)
		effect.Events = append(effect.Events, s.deleteEvent(a.key))
	}
	s.leases = s.leases.without(id)
	effect.Ended = id
	return Result{}
}

// set writes an absent key and attaches it to its lease.
func (s *State) set(key string, it item) {
	s.items = s.items.with(key, it)
	s.bytes += int64(len(key) + len(it.value))
	if it.lease != 0 {
		l, _ := s.leases.get(it.lease)
		l.keys++
		l.revision = max(l.revision, it.version)
		s.leases = s.leases.with(it.lease, l)
		s.attached = s.attached.with(attachment{it.lease, key}, struct{}{})
	}
}

// drop removes a present key and detaches it from its lease.
func (s *State) drop(key string, it item) {
	s.items = s.items.without(key)
	s.bytes -= int64(len(key) + len(it.value))
	if it.lease != 0 {
		l, _ := s.leases.get(it.lease)
		l.keys--
		s.leases = s.leases.with(it.lease, l)
		s.attached = s.attached.without(attachment{it.lease, key})
	}
}

func (s *State) putEvent(key string) metadata.Event {
	it, _ := s.items.get(key)
	return metadata.Event{Type: metadata.EventPut, KV: kv(key, it)}
}

func (s *State) deleteEvent(key string) metadata.Event {
	return metadata.Event{Type: metadata.EventDelete, KV: metadata.KV{Key: key, Version: s.revision}}
}

// verify returns the first broken invariant. It visits everything.
func (s State) verify() error {
	size, attached, keys := int64(0), 0, map[metadata.LeaseID]int{}
	for key, it := range s.items.all() {
		size += int64(len(key) + len(it.value))
		if it.version < 1 || it.version > s.revision {
			return fmt.Errorf("metadata state: key %q is at version %d, the store at %d", key, it.version, s.revision)
		}
		if it.lease == 0 {
			continue
		}
		attached++
		keys[it.lease]++
		if _, ok := s.attached.get(attachment{it.lease, key}); !ok {
			return fmt.Errorf("metadata state: key %q names lease %d, which does not know it", key, it.lease)
		}
	}
	for prefix := range s.counters.all() {
		size += int64(len(prefix))
	}
	if size != s.bytes || attached != s.attached.count {
		return fmt.Errorf("metadata state: %d bytes and %d attached keys counted, %d and %d kept", size, attached, s.bytes, s.attached.count)
	}
	for id, l := range s.leases.all() {
		if keys[id] != l.keys || l.revision > s.revision || l.revision < metadata.Version(id) {
			return fmt.Errorf("metadata state: lease %d has %d keys at revision %d, %d name it: %+v", id, l.keys, l.revision, keys[id], l)
		}
		delete(keys, id)
	}
	if len(keys) > 0 {
		return fmt.Errorf("metadata state: keys name leases that do not exist: %v", keys)
	}
	return s.verifyClients()
}

func (s State) verifyClients() error {
	if s.clients.count != s.uses.count || s.clients.count > MaxClients {
		return fmt.Errorf("metadata state: %d clients and %d uses, at most %d", s.clients.count, s.uses.count, MaxClients)
	}
	for id, c := range s.clients.all() {
		if user, ok := s.uses.get(c.used); !ok || user != id || c.used > s.revision || c.used <= s.forgotten {
			return fmt.Errorf("metadata state: client %x was last used at revision %d, where %x is noted; forgotten up to %d", id, c.used, user, s.forgotten)
		}
	}
	return nil
}

// leaseIDs returns the ids of all leases in order.
func (s State) leaseIDs() []metadata.LeaseID {
	ids := make([]metadata.LeaseID, 0, s.leases.count)
	for id := range s.leases.all() {
		ids = append(ids, id)
	}
	return slices.Clip(ids)
}
