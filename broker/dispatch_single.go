package broker

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/managedledger"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// single serves Exclusive and Failover subscriptions: one consumer, the active
// one, gets everything in order. On Exclusive nobody else may join; on Failover
// the others wait for their turn.
type single struct {
	s      *subscription
	active *consumer // nil = none
	rest   []ledger.Entry

	// holdUntil keeps messages from a new active consumer of a Failover
	// subscription for a moment: its predecessor's last acknowledgements and a
	// better consumer may be on their way.
	holdUntil time.Time
	// announceAt is when consumers hear who is active; zero = they know. Clients
	// that hear it right after SUCCESS may not be listening yet.
	announceAt time.Time
}

func newSingle(s *subscription) *single { return &single{s: s} }

// busyError reports who is in the way.
type busyError struct {
	holder holder
	text   string
	kind   error
}

// Error names the holder.
func (e *busyError) Error() string { return e.text + ": " + e.kind.Error() }

// Unwrap returns the sentinel.
func (e *busyError) Unwrap() error { return e.kind }

func (d *single) admit(*consumer) error {
	if d.s.kind != pulsarpb.CommandSubscribe_Exclusive || len(d.s.consumers) == 0 {
		return nil
	}
	held := d.s.consumers[0]
	return &busyError{
		holder: held.holder, kind: ErrConsumerBusy,
		text: fmt.Sprintf("Exclusive subscription %q of %s: consumer %q at %s is connected", d.s.name, d.s.topic, held.name, held.address),
	}
}

func (d *single) added(*consumer)   { d.pick() }
func (d *single) removed(*consumer) { d.pick() }

// pick makes the right consumer the active one.
func (d *single) pick() {
	failover := d.s.kind == pulsarpb.CommandSubscribe_Failover
	now := time.Now()
	if failover && len(d.s.consumers) > 0 {
		d.announceAt = now.Add(millis(d.s.cfg.FailoverDelayMillis))
	}
	next := d.choose()
	if next == d.active {
		return
	}
	d.active, d.rest = next, nil
	if next == nil {
		return
	}
	d.s.reader.Rewind()
	if failover {
		d.holdUntil = d.announceAt
		d.s.log.Info("active consumer changed", "consumer", next.name, "address", next.address)
	}
}

// choose returns the consumer that should be active: of those with the best
// priority, in order of their names, the one whose turn a partition's number
// says. A topic that is no partition spreads by its name, in a way that keeps
// most topics where they are when consumers come and go.
func (d *single) choose() *consumer {
	if len(d.s.consumers) == 0 {
		return nil
	}
	best := slices.Clone(d.s.consumers)
	slices.SortStableFunc(best, func(a, b *consumer) int {
		return cmp.Or(cmp.Compare(a.priority, b.priority), cmp.Compare(a.name, b.name))
	})
	n := 1
	for n < len(best) && best[n].priority == best[0].priority {
		n++
	}
	best = best[:n]
	if d.s.partition >= 0 {
		return best[d.s.partition%len(best)]
	}
	return slices.MaxFunc(best, func(a, b *consumer) int {
		return cmp.Compare(weight(d.s.topic, a.name), weight(d.s.topic, b.name))
	})
}

// weight is a consumer's claim to a topic in rendezvous hashing.
func weight(topic, consumer string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(topic))
	h.Write([]byte{0})
	h.Write([]byte(consumer))
	x := h.Sum64() // spread: names that differ in the last byte differ in few bits
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

func (d *single) cleared() { d.rest = nil }

// redeliver goes back to the first entry that is not acknowledged. Only the
// active consumer may ask; which messages it names does not matter.
func (d *single) redeliver(c *consumer, _ []ledger.Position, _ bool) {
	if c != d.active {
		return
	}
	d.rest = nil
	d.s.reader.Rewind()
}

func (d *single) acked(*consumer, []ledger.Position) {}

func (d *single) step() (WhyIdle, time.Time) {
	if !d.announceAt.IsZero() && !time.Now().Before(d.announceAt) {
		d.announce()
	}
	why, until := d.dispatch()
	if why != Dispatching && !d.announceAt.IsZero() && (until.IsZero() || d.announceAt.Before(until)) {
		until = d.announceAt
	}
	return why, until
}

func (d *single) announce() {
	d.announceAt = time.Time{}
	for _, c := range d.s.consumers {
		news := int8(-1)
		if c == d.active {
			news = 1
		}
		if c.told != news {
			c.told = news
			c.sink.tellActive(c, c == d.active)
		}
	}
}

func (d *single) dispatch() (WhyIdle, time.Time) {
	c := d.active
	switch {
	case time.Now().Before(d.holdUntil):
		return FailoverDelay, d.holdUntil
	case c.permits <= 0:
		return NoPermits, time.Time{}
	}
	room := c.sink.room(d.s.box)
	if room <= 0 {
		return SlowConnection, time.Time{}
	}
	if len(d.rest) == 0 {
		b, why, until := d.s.read(d.s.reader.TryRead(managedledger.Limit{
			Entries: min(c.entries(c.permits), d.s.pace.entries()),
			Bytes:   int64(min(room, d.s.cfg.DispatcherMaxReadSizeBytes)),
		}))
		if b == nil {
			return why, until
		}
		d.rest = slices.Clone(b.Entries)
		b.Release()
	}
	if !d.s.owned() {
		return NotOwner, time.Now().Add(recheckInterval)
	}
	for len(d.rest) > 0 && c.permits > 0 && room > 0 {
		e := d.rest[0]
		d.rest = d.rest[1:]
		messages := messagesIn(e.Data)
		c.send(e, messages, 0)
		d.s.out.add(messages, len(e.Data))
		room -= len(e.Data)
	}
	return Dispatching, time.Time{}
}
