package broker

import (
	"maps"
	"slices"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/managedledger"
)

// shared serves Shared subscriptions: entries go to the consumers in turn, as
// their permits allow, and each is the business of one consumer until that
// acknowledges it, gives it back, or leaves.
type shared struct {
	s      *subscription
	next   int // index in s.consumers of whose turn it is
	replay positionSet
	// deliveries counts how often an unacknowledged entry was delivered again.
	deliveries map[ledger.Position]int
	unacked    int // messages in all consumers' pending
}

func newShared(s *subscription) *shared {
	return &shared{s: s, deliveries: map[ledger.Position]int{}}
}

func (d *shared) admit(*consumer) error { return nil }

func (d *shared) added(c *consumer) {
	c.pending = map[ledger.Position]int{}
	if len(d.s.consumers) == 1 {
		d.replay.clear()
		clear(d.deliveries)
		d.s.reader.Rewind()
	}
}

// removed gives everything that c held to the others, at once and in order.
func (d *shared) removed(c *consumer) {
	if len(d.s.consumers) == 0 {
		// The next consumer starts with a rewind.
		d.replay.clear()
		clear(d.deliveries)
	} else {
		d.again(slices.Collect(maps.Keys(c.pending)))
	}
	for p := range c.pending {
		d.settle(c, p)
	}
}

// again marks positions for redelivery.
func (d *shared) again(positions []ledger.Position) {
	d.replay.add(positions...)
	for _, p := range positions {
		d.deliveries[p]++
	}
}

// settle takes an entry off c's account. It reports whether it was on it.
func (d *shared) settle(c *consumer, p ledger.Position) bool {
	messages, ok := c.pending[p]
	if !ok {
		return false
	}
	delete(c.pending, p)
	d.account(c, -messages)
	return true
}

// account changes what c and the subscription have out, and blocks or unblocks
// them: at the limit, until half of it is left.
func (d *shared) account(c *consumer, messages int) {
	mine := int(c.unacked.Add(int64(messages)))
	d.unacked += messages
	d.s.unacked.Store(int64(d.unacked))
	c.blocked.Store(blocked(c.blocked.Load(), mine, d.s.cfg.MaxUnackedPerConsumer))
	d.s.blocked.Store(blocked(d.s.blocked.Load(), d.unacked, d.s.cfg.MaxUnackedPerSubscription))
}

func blocked(was bool, n, limit int) bool {
	switch {
	case limit == 0 || n <= limit/2:
		return false
	case n >= limit:
		return true
	default:
		return was
	}
}

func (d *shared) redeliver(c *consumer, positions []ledger.Position, everything bool) {
	if everything {
		positions = slices.Collect(maps.Keys(c.pending))
	}
	given := make([]ledger.Position, 0, len(positions))
	for _, p := range positions {
		if d.settle(c, p) {
			given = append(given, p)
		}
	}
	d.again(given)
}

// acked settles positions, which another consumer than c may hold: they were
// delivered again while c was at work.
func (d *shared) acked(c *consumer, positions []ledger.Position) {
	for _, p := range positions {
		if !d.settle(c, p) {
			for _, other := range d.s.consumers {
				if d.settle(other, p) {
					break
				}
			}
		}
		delete(d.deliveries, p)
	}
	d.replay.remove(positions...)
}

func (d *shared) cleared() {
	d.replay.clear()
	clear(d.deliveries)
}

func (d *shared) step() (WhyIdle, time.Time) {
	permits, room, why := d.demand()
	if permits == 0 {
		return why, time.Time{}
	}
	limit := managedledger.Limit{
		Entries: min(permits, d.s.pace.entries()),
		Bytes:   int64(min(room, d.s.cfg.DispatcherMaxReadSizeBytes)),
	}
	var b *managedledger.Batch
	var until time.Time
	switch {
	case d.replay.len() > 0:
		b, why, until = d.readAgain(limit)
	case d.s.blocked.Load():
		return TooManyUnacked, time.Time{}
	default:
		b, why, until = d.s.read(d.s.reader.TryRead(limit))
	}
	if b == nil {
		return why, until
	}
	entries := slices.Clone(b.Entries)
	b.Release()
	if !d.s.owned() {
		d.keep(entries)
		return NotOwner, time.Now().Add(recheckInterval)
	}
	d.distribute(entries)
	return Dispatching, time.Time{}
}

// demand returns how many entries the consumers can take now, and bytes, or why
// they cannot.
func (d *shared) demand() (entries, room int, why WhyIdle) {
	why = NoPermits
	for _, c := range d.s.consumers {
		switch {
		case c.permits <= 0:
		case c.blocked.Load():
			why = TooManyUnacked
		default:
			free := c.sink.room(d.s.box)
			if free <= 0 {
				why = SlowConnection
				continue
			}
			entries += c.entries(c.permits)
			room += free
		}
	}
	return entries, room, why
}

// readAgain reads the oldest entries that are to be delivered again.
func (d *shared) readAgain(limit managedledger.Limit) (*managedledger.Batch, WhyIdle, time.Time) {
	asked := slices.Clone(d.replay.first(limit.Entries))
	b, err := d.s.reader.TryReplay(asked, limit)
	b, why, until := d.s.read(b, err)
	switch {
	case why == ReadBackoff:
		// Entries that were acknowledged and trimmed meanwhile cannot be read.
		d.replay.removeUpTo(d.s.reader.MarkDeleted())
		return nil, why, until
	case b == nil:
		return nil, why, until
	}
	gone := make([]ledger.Position, 0, len(asked))
	for _, e := range b.Entries {
		gone = append(gone, e.Position)
	}
	for _, p := range asked {
		if d.s.reader.IsAcked(p) {
			gone = append(gone, p)
			delete(d.deliveries, p)
		}
	}
	if len(gone) == 0 { // nothing delivered, nothing acknowledged: do not spin
		b.Release()
		return nil, Fetching, time.Now().Add(recheckInterval)
	}
	d.replay.remove(gone...)
	return b, Dispatching, time.Time{}
}

// keep puts entries that nobody got aside, to be read again first.
func (d *shared) keep(entries []ledger.Entry) {
	for _, e := range entries {
		d.replay.add(e.Position)
	}
}

// distribute hands entries to the consumers in turn.
func (d *shared) distribute(entries []ledger.Entry) {
	for len(entries) > 0 {
		c := d.turn()
		if c == nil {
			d.keep(entries)
			return
		}
		budget := min(c.permits, d.s.cfg.DispatcherMaxRoundRobinBatchSize)
		if limit := d.s.cfg.MaxUnackedPerConsumer; limit > 0 {
			budget = min(budget, limit-int(c.unacked.Load()))
		}
		room := c.sink.room(d.s.box)
		for len(entries) > 0 && budget > 0 && room > 0 {
			e := entries[0]
			entries = entries[1:]
			messages := messagesIn(e.Data)
			c.pending[e.Position] = messages // before it is out: the answer may be quick
			d.account(c, messages)
			c.send(e, messages, d.deliveries[e.Position])
			d.s.out.add(messages, len(e.Data))
			if d.deliveries[e.Position] > 0 {
				d.s.redeliver.add(messages, len(e.Data))
			}
			budget -= messages
			room -= len(e.Data)
		}
	}
}

// turn returns the consumer whose turn it is: the next one, of the best priority
// at which somebody can take a message; nil if nobody can.
func (d *shared) turn() *consumer {
	var best *consumer
	at := 0
	n := len(d.s.consumers)
	for i := range n {
		k := (d.next + i) % n
		c := d.s.consumers[k]
		if c.permits <= 0 || c.blocked.Load() || best != nil && best.priority <= c.priority || c.sink.room(d.s.box) <= 0 {
			continue
		}
		best, at = c, k
	}
	if best != nil {
		d.next = at + 1
	}
	return best
}
