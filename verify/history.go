package verify

import (
	"context"
	"fmt"
	"hash/crc32"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
)

// DefaultSubscription is the subscription that [History.Delivered] stands for.
const DefaultSubscription = ""

// maxExamples is how many cases of each violation a verdict spells out.
const maxExamples = 10

// maxOpenIDs bounds how many acknowledged ids of one producer are remembered
// until their message is delivered. They only make examples more telling.
const maxOpenIDs = 1 << 14

// History is a record of sends, acknowledgements and deliveries.
type History struct {
	mu            sync.Mutex // guards all below; never held together with a producer's lock
	producers     map[string]*producer
	subscriptions map[string]bool
	invented      int64
	corrupt       int64
	examples      map[Violation][]string // of violations seen when they happen
}

// New returns an empty history.
func New() *History {
	return &History{
		producers: map[string]*producer{}, subscriptions: map[string]bool{},
		examples: map[Violation][]string{},
	}
}

// producer is what happened to one producer's messages.
type producer struct {
	name string

	mu        sync.Mutex // guards all below
	pages     map[int64]*page
	openIDs   map[int64]ledger.Position // acknowledged, not delivered; at most maxOpenIDs
	published int64
	acked     int64
	failed    int64
	readings  map[string]*reading // by subscription
}

// reading is what one subscription received of one producer.
type reading struct {
	pages      map[int64]*bits
	highest    int64 // of the first deliveries; -1 before any
	highestBy  string
	first      int64 // messages delivered at least once
	again      int64 // deliveries beyond the first
	ackedFirst int64 // of first: those acknowledged by now
	disordered int64
}

// pageSize is how many sequence numbers share one allocation.
const pageSize = 1 << 12

// page holds the state of pageSize consecutive messages.
type page struct {
	sum   [pageSize]uint32 // CRC32C of the payload
	state [pageSize]uint8
}

// bits holds one bit for each of pageSize consecutive messages.
type bits [pageSize / 64]uint64

// What a page says of a message.
const (
	stateSent uint8 = 1 << iota
	stateAcked
	stateFailed
)

// Send records that a message is about to be handed to a client. Sequence
// numbers are at least 0, each used once; a dense run is cheapest.
func (h *History) Send(producer string, sequence int64, payload []byte) {
	if sequence < 0 {
		panic(fmt.Sprintf("verify: %s sends sequence %d, want at least 0", producer, sequence))
	}
	p := h.producer(producer, true)
	p.mu.Lock()
	defer p.mu.Unlock()
	pg := p.pages[sequence/pageSize]
	if pg == nil {
		pg = new(page)
		p.pages[sequence/pageSize] = pg
	}
	i := sequence % pageSize
	if pg.state[i]&stateSent != 0 {
		panic(fmt.Sprintf("verify: %s sends sequence %d a second time", producer, sequence))
	}
	pg.state[i] |= stateSent
	pg.sum[i] = crc32.Checksum(payload, castagnoli)
	p.published++
}

// Acked records that the message was acknowledged, stored at id.
func (h *History) Acked(producer string, sequence int64, id ledger.Position) {
	p := h.producer(producer, false)
	if !p.ack(sequence, id) {
		h.note(Invented, &h.invented, fmt.Sprintf("%s/%d acknowledged at %v, never sent", producer, sequence, id))
	}
}

// Failed records that the client gave up on a message. It may still have been
// stored.
func (h *History) Failed(producer string, sequence int64) {
	p := h.producer(producer, false)
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.state(sequence); s != nil && *s&(stateSent|stateFailed) == stateSent {
		*s |= stateFailed
		p.failed++
	}
}

// Delivered records that consumer received a message through the default
// subscription.
func (h *History) Delivered(consumer, producer string, sequence int64, payload []byte) {
	h.Subscription(DefaultSubscription).Delivered(consumer, producer, sequence, payload)
}

// Received is Delivered for a payload that says itself whose it is.
func (h *History) Received(consumer string, payload []byte) {
	h.Subscription(DefaultSubscription).Received(consumer, payload)
}

// Subscription is the part of a history that belongs to one subscription. Each
// subscription must see every message.
type Subscription struct {
	history *History
	name    string
}

// Subscription returns the part of the history of the subscription called name.
// From then on the subscription is judged.
func (h *History) Subscription(name string) Subscription {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.subscriptions[name] = true
	return Subscription{h, name}
}

// Received is Delivered for a payload that says itself whose it is.
func (s Subscription) Received(consumer string, payload []byte) {
	m, err := Parse(payload)
	if err != nil {
		s.history.note(Corrupt, &s.history.corrupt, fmt.Sprintf("%s: %v", s.receiver(consumer), err))
		return
	}
	s.Delivered(consumer, m.Producer, m.Sequence, payload)
}

// Delivered records that consumer received a message.
func (s Subscription) Delivered(consumer, producer string, sequence int64, payload []byte) {
	h := s.history
	p := h.producer(producer, false)
	violation, example := p.deliver(s, consumer, sequence, crc32.Checksum(payload, castagnoli))
	switch violation {
	default: // nothing is broken
	case Invented:
		h.note(Invented, &h.invented, fmt.Sprintf("%s/%d delivered to %s, never sent", producer, sequence, s.receiver(consumer)))
	case Corrupt:
		h.note(Corrupt, &h.corrupt, fmt.Sprintf("%s/%d delivered to %s with other bytes (%d of them)", producer, sequence, s.receiver(consumer), len(payload)))
	case OutOfOrder:
		h.note(OutOfOrder, nil, example)
	}
}

func (s Subscription) receiver(consumer string) string {
	if s.name == DefaultSubscription {
		return consumer
	}
	return s.name + "/" + consumer
}

// Outstanding returns how many acknowledged messages were not delivered yet,
// summed over the subscriptions.
func (h *History) Outstanding() int64 {
	subscriptions, producers := h.snapshot()
	var n int64
	for _, p := range producers {
		p.mu.Lock()
		for _, s := range subscriptions {
			n += p.acked
			if r := p.readings[s]; r != nil {
				n -= r.ackedFirst
			}
		}
		p.mu.Unlock()
	}
	return n
}

// Wait returns once nothing is outstanding, or with an error that tells how much
// was when ctx ended.
func (h *History) Wait(ctx context.Context) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		n := h.Outstanding()
		if n == 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%d acknowledged messages were not delivered: %w", n, ctx.Err())
		}
	}
}

func (h *History) producer(name string, create bool) *producer {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.producers[name]
	if p == nil && create {
		p = &producer{name: name, pages: map[int64]*page{}, openIDs: map[int64]ledger.Position{}, readings: map[string]*reading{}}
		h.producers[name] = p
	}
	return p
}

// snapshot returns the subscriptions to judge and the producers, by name.
func (h *History) snapshot() ([]string, []*producer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	subscriptions := slices.Sorted(maps.Keys(h.subscriptions))
	if len(subscriptions) == 0 {
		subscriptions = []string{DefaultSubscription} // nobody ever read: everything is lost
	}
	producers := make([]*producer, 0, len(h.producers))
	for _, name := range slices.Sorted(maps.Keys(h.producers)) {
		producers = append(producers, h.producers[name])
	}
	return subscriptions, producers
}

func (h *History) note(v Violation, count *int64, example string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if count != nil {
		*count++
	}
	if len(h.examples[v]) < maxExamples {
		h.examples[v] = append(h.examples[v], example)
	}
}

// state returns where the message's state is kept, or nil. Needs mu.
func (p *producer) state(sequence int64) *uint8 {
	if sequence < 0 {
		return nil
	}
	pg := p.pages[sequence/pageSize]
	if pg == nil {
		return nil
	}
	return &pg.state[sequence%pageSize]
}

// ack reports false if the message was never sent. A nil producer sent nothing.
func (p *producer) ack(sequence int64, id ledger.Position) bool {
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.state(sequence)
	if s == nil || *s&stateSent == 0 {
		return false
	}
	if *s&stateAcked != 0 {
		return true
	}
	*s |= stateAcked
	p.acked++
	delivered := false
	for _, r := range p.readings {
		if r.has(sequence) {
			r.ackedFirst++
			delivered = true
		}
	}
	if !delivered && len(p.openIDs) < maxOpenIDs {
		p.openIDs[sequence] = id
	}
	return true
}

// deliver records a delivery and returns the promise it breaks, or "".
func (p *producer) deliver(s Subscription, consumer string, sequence int64, sum uint32) (Violation, string) {
	if p == nil {
		return Invented, ""
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	state := p.state(sequence)
	switch {
	case state == nil || *state&stateSent == 0:
		return Invented, ""
	case p.pages[sequence/pageSize].sum[sequence%pageSize] != sum:
		return Corrupt, ""
	}
	r := p.readings[s.name]
	if r == nil {
		r = &reading{pages: map[int64]*bits{}, highest: -1}
		p.readings[s.name] = r
	}
	if r.has(sequence) {
		r.again++
		return "", ""
	}
	r.set(sequence)
	r.first++
	delete(p.openIDs, sequence)
	if *state&stateAcked != 0 {
		r.ackedFirst++
	}
	if sequence > r.highest {
		r.highest, r.highestBy = sequence, consumer
		return "", ""
	}
	r.disordered++
	return OutOfOrder, fmt.Sprintf("%s/%d first delivered to %s after %s/%d was to %s",
		p.name, sequence, s.receiver(consumer), p.name, r.highest, s.receiver(r.highestBy))
}

func (r *reading) has(sequence int64) bool {
	b := r.pages[sequence/pageSize]
	i := sequence % pageSize
	return b != nil && b[i/64]&(1<<(i%64)) != 0
}

func (r *reading) set(sequence int64) {
	b := r.pages[sequence/pageSize]
	if b == nil {
		b = new(bits)
		r.pages[sequence/pageSize] = b
	}
	i := sequence % pageSize
	b[i/64] |= 1 << (i % 64)
}
