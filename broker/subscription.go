package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/managedledger"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// subType is a subscription's type.
type subType = pulsarpb.CommandSubscribe_SubType

// reader is what a subscription needs of a [managedledger.Reader].
type reader interface {
	TryRead(managedledger.Limit) (*managedledger.Batch, error)
	TryReplay([]ledger.Position, managedledger.Limit) (*managedledger.Batch, error)
	Ready() <-chan struct{}
	Ack([]ledger.Position) error
	AckCumulative(ledger.Position) error
	IsAcked(ledger.Position) bool
	Rewind()
	Seek(context.Context, ledger.Position) error
	SeekTime(ctx context.Context, publishTime func(entry []byte) (int64, error), t int64) error
	ClearBacklog(ctx context.Context) error
	Backlog() int64
	MarkDeleted() ledger.Position
	ReadPosition() ledger.Position
	Durable() bool
	Close(context.Context) error
}

// WhyIdle is what a subscription waits for.
type WhyIdle string

// What a subscription may wait for. Each ends by an event that pokes its loop, or
// at a time that the loop's timer knows.
const (
	Dispatching    WhyIdle = "dispatching"             // it does not wait
	NoConsumer     WhyIdle = "no consumer"             // ends when one subscribes
	NoPermits      WhyIdle = "no permits"              // ends with a FLOW
	CaughtUp       WhyIdle = "no messages"             // ends with a publish
	Fetching       WhyIdle = "waiting for storage"     // ends with the reader's notice
	SlowConnection WhyIdle = "connection full"         // ends when the connection drained
	TooManyUnacked WhyIdle = "too many unacknowledged" // ends with acknowledgements
	FailoverDelay  WhyIdle = "failover delay"          // ends at a time
	ReadBackoff    WhyIdle = "read failed, will retry" // ends at a time
	Seeking        WhyIdle = "seeking"                 // ends when the seek does
	NotOwner       WhyIdle = "ownership unconfirmed"   // ends at a time, or the topic closes
	EndOfTopic     WhyIdle = "end of topic"            // the topic is terminated and read
	Ended          WhyIdle = "closed"                  // for good
)

// recheckInterval is how often a loop looks again whether it may serve, while
// ownership is unconfirmed.
const recheckInterval = 100 * time.Millisecond

// dispatcher decides who gets what. It belongs to a subscription's loop.
type dispatcher interface {
	// admit says whether c may join.
	admit(c *consumer) error
	// added and removed tell of a change that s.consumers already shows.
	added(c *consumer)
	removed(c *consumer)
	// redeliver gives back what c has not acknowledged: positions, or everything.
	redeliver(c *consumer, positions []ledger.Position, everything bool)
	// acked tells that c acknowledged positions one by one.
	acked(c *consumer, positions []ledger.Position)
	// cleared tells that everything there was is acknowledged: what was read or set
	// aside for later must not be delivered any more.
	cleared()
	// step does one piece of work. If there was none to do it says why, and until
	// when it should be left alone; zero means until poked.
	step() (why WhyIdle, until time.Time)
}

// subscription is one reading of a topic, shared by its consumers.
//
// One goroutine, begun by newSubscription and ended by stop, owns it. Everybody
// else leaves work in its mailbox. The loop never waits for a connection or for
// storage: it asks, and is poked.
type subscription struct {
	name      string
	topic     string
	partition int // of the topic; -1 = it is not one
	reader    reader
	cfg       *Config
	owned     func() bool            // whether this broker may serve the topic right now
	last      func() ledger.Position // the topic's last entry
	log       *slog.Logger
	box       *mailbox
	done      chan struct{}       // closed once the loop has returned
	movers    sync.WaitGroup      // seeks under way beside the loop
	ctx       context.Context     // of seeks; ends with the loop
	cancel    context.CancelFunc  // ends ctx
	ended     func(*subscription) // called by the loop when it ends by itself

	why      atomic.Pointer[WhyIdle]
	kindSeen atomic.Int32 // kind, for anybody
	members  atomic.Int32 // len(consumers), for anybody

	// Loop only.
	kind       subType
	consumers  []*consumer // in order of arrival
	dispatcher dispatcher  // nil until somebody subscribed
	pace       pace
	seeking    bool
	waiting    []func()  // work that waits for the seek to end
	joined     int64     // consumers there ever were
	graceUntil time.Time // when a deserted non-durable subscription ends
	over       bool

	// Written by the loop, read by anybody.
	unacked   atomic.Int64
	blocked   atomic.Bool
	out       traffic
	redeliver traffic
	acks      traffic
}

// newSubscription starts the loop of a subscription.
func newSubscription(name string, t subscriptionHome, r reader) *subscription {
	s := &subscription{
		name: name, topic: t.name, partition: t.partition, reader: r, cfg: t.cfg,
		owned: t.owned, last: t.last, ended: t.ended, log: t.log.With("subscription", name),
		box: newMailbox(), done: make(chan struct{}),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.pace = pace{
		low: t.cfg.DispatcherMinReadBatchSize, high: t.cfg.DispatcherMaxReadBatchSize,
		first: millis(t.cfg.ReadFailureBackoffInitialMillis), last: millis(t.cfg.ReadFailureBackoffMaxMillis),
	}
	s.idle(NoConsumer)
	go s.loop()
	return s
}

// subscriptionHome is what a subscription needs to know of its topic.
type subscriptionHome struct {
	name      string
	partition int
	cfg       *Config
	owned     func() bool
	last      func() ledger.Position
	ended     func(*subscription)
	log       *slog.Logger
}

func (s *subscription) loop() {
	defer close(s.done)
	defer s.cancel()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var work []func()
	for {
		work = s.box.take(work)
		for i, w := range work {
			work[i] = nil // let the work's captures go as soon as it has run
			w()
		}
		if s.over {
			break
		}
		why, until := s.step()
		if why == Dispatching {
			continue
		}
		s.idle(why)
		var timeout <-chan time.Time
		if !until.IsZero() {
			timer.Reset(time.Until(until))
			timeout = timer.C
		}
		select {
		case <-s.box.wake:
		case <-s.reader.Ready():
		case <-timeout:
		}
	}
	s.idle(Ended)
	for _, w := range s.box.close() {
		w() // finds the loop over and says so to whoever waits
	}
	for _, w := range s.waiting {
		w()
	}
}

func (s *subscription) idle(why WhyIdle) {
	if p := s.why.Load(); p == nil || *p != why {
		s.why.Store(&why)
	}
}

// step does one piece of dispatching.
func (s *subscription) step() (WhyIdle, time.Time) {
	switch {
	case s.seeking:
		return Seeking, time.Time{}
	case len(s.consumers) == 0:
		if s.graceUntil.IsZero() {
			return NoConsumer, time.Time{}
		}
		if !time.Now().Before(s.graceUntil) {
			s.desert()
			return Dispatching, time.Time{}
		}
		return NoConsumer, s.graceUntil
	case time.Now().Before(s.pace.retryAt):
		return ReadBackoff, s.pace.retryAt
	}
	return s.dispatcher.step()
}

// read turns the result of a read into a batch or a reason to wait.
func (s *subscription) read(b *managedledger.Batch, err error) (*managedledger.Batch, WhyIdle, time.Time) {
	switch {
	case err == nil:
		s.pace.succeeded()
		return b, Dispatching, time.Time{}
	case errors.Is(err, managedledger.ErrWouldBlock):
		if s.reader.ReadPosition().After(s.last()) {
			return nil, CaughtUp, time.Time{}
		}
		return nil, Fetching, time.Time{}
	case errors.Is(err, managedledger.ErrTerminated):
		return nil, EndOfTopic, time.Time{}
	case errors.Is(err, managedledger.ErrClosed), errors.Is(err, managedledger.ErrFenced):
		return nil, Ended, time.Time{} // the topic's close ends the loop
	default:
		s.pace.failed(time.Now())
		s.log.Warn("read failed; will retry", "position", s.reader.ReadPosition(), "in", s.pace.wait, "err", err)
		return nil, ReadBackoff, s.pace.retryAt
	}
}

// onLoop makes work of a request: cost is what it weighs in the mailbox, done
// hears of the failure to run it, and during a seek it waits.
func (s *subscription) onLoop(ctx context.Context, cost int, work func(), done func(error)) {
	var run func()
	run = func() {
		switch {
		case s.over:
			done(fmt.Errorf("subscription %q of %s: %w", s.name, s.topic, ErrClosed))
		case s.seeking:
			s.waiting = append(s.waiting, run)
			s.box.hold(cost)
		default:
			work()
		}
	}
	if err := s.box.put(ctx, cost, run); err != nil {
		done(fmt.Errorf("subscription %q of %s: %w", s.name, s.topic, err))
	}
}

// add lets c join as a consumer of the given type. done runs on the loop, before
// c gets its first message, or anywhere with an error.
func (s *subscription) add(ctx context.Context, c *consumer, kind subType, done func(error)) {
	s.onLoop(ctx, 1024, func() { done(s.join(c, kind)) }, done)
}

func (s *subscription) join(c *consumer, kind subType) error {
	if len(s.consumers) == 0 && (s.dispatcher == nil || s.kind != kind) {
		s.kind = kind
		s.kindSeen.Store(int32(kind))
		if kind == pulsarpb.CommandSubscribe_Shared {
			s.dispatcher = newShared(s)
		} else {
			s.dispatcher = newSingle(s)
		}
	}
	if s.kind != kind {
		return fmt.Errorf("subscription %q of %s has %d %v consumers, so a %v one cannot join: %w",
			s.name, s.topic, len(s.consumers), s.kind, kind, ErrConsumerBusy)
	}
	if err := s.dispatcher.admit(c); err != nil {
		return err
	}
	s.graceUntil = time.Time{}
	s.joined++
	c.serial = s.joined
	s.consumers = append(s.consumers, c)
	s.members.Store(int32(len(s.consumers)))
	s.dispatcher.added(c)
	return nil
}

// remove takes c off, because its client closed it or is gone. It never waits;
// done, if not nil, runs once c is off.
func (s *subscription) remove(c *consumer, done func()) {
	var run func()
	run = func() {
		if s.seeking && !s.over {
			s.waiting = append(s.waiting, run)
			return
		}
		s.leave(c)
		if len(s.consumers) == 0 && !s.reader.Durable() && s.graceUntil.IsZero() && !s.over {
			s.desert()
		}
		if done != nil {
			done()
		}
	}
	if !s.box.post(run) && done != nil {
		done()
	}
}

func (s *subscription) leave(c *consumer) {
	i := slices.Index(s.consumers, c)
	if i < 0 {
		return
	}
	c.gone = true
	s.consumers = slices.Delete(s.consumers, i, i+1)
	s.members.Store(int32(len(s.consumers)))
	s.dispatcher.removed(c)
}

// desert ends a non-durable subscription that nobody reads any more.
func (s *subscription) desert() {
	s.over = true
	s.ended(s)
}

// flow grants c permits for n more messages.
func (s *subscription) flow(ctx context.Context, c *consumer, n int) error {
	return s.box.put(ctx, 64, func() {
		c.lastFlow.Store(time.Now().UnixMilli())
		// A client that grants without end must not overflow the sum.
		c.addPermits(min(n, 1<<30-max(0, c.permits)))
	})
}

// ack acknowledges positions one by one. done runs on the loop.
func (s *subscription) ack(ctx context.Context, c *consumer, positions []ledger.Position, done func(error)) {
	s.onLoop(ctx, 64+16*len(positions), func() { done(s.ackNow(c, positions)) }, done)
}

func (s *subscription) ackNow(c *consumer, positions []ledger.Position) error {
	if err := s.mayAck(c); err != nil {
		return err
	}
	if err := s.reader.Ack(positions); err != nil {
		return fmt.Errorf("acknowledge %d entries of subscription %q: %w", len(positions), s.name, err)
	}
	s.noteAck(c, len(positions))
	s.dispatcher.acked(c, positions)
	return nil
}

// ackCumulative acknowledges everything up to p. done runs on the loop.
func (s *subscription) ackCumulative(ctx context.Context, c *consumer, p ledger.Position, done func(error)) {
	s.onLoop(ctx, 64, func() { done(s.ackCumulativeNow(c, p)) }, done)
}

func (s *subscription) ackCumulativeNow(c *consumer, p ledger.Position) error {
	if err := s.mayAck(c); err != nil {
		return err
	}
	if s.kind == pulsarpb.CommandSubscribe_Shared {
		return fmt.Errorf("cumulative acknowledgement on %v subscription %q: only Exclusive and Failover have it: %w", s.kind, s.name, ErrNotAllowed)
	}
	if p.Compare(s.reader.MarkDeleted()) <= 0 {
		return nil // an old one that was overtaken
	}
	if err := s.reader.AckCumulative(p); err != nil {
		return fmt.Errorf("acknowledge up to %v of subscription %q: %w", p, s.name, err)
	}
	s.noteAck(c, 1)
	return nil
}

// mayAck refuses acknowledgements that could hit what this consumer never saw: a
// seek disconnected it, or another broker may own the topic by now.
func (s *subscription) mayAck(c *consumer) error {
	switch {
	case c.gone:
		return fmt.Errorf("consumer %d of subscription %q is disconnected: %w", c.id, s.name, ErrConsumerNotFound)
	case !s.owned():
		return fmt.Errorf("acknowledge on subscription %q: topic %s is moving: %w", s.name, s.topic, ErrClosed)
	default:
		return nil
	}
}

func (s *subscription) noteAck(c *consumer, entries int) {
	c.lastAck.Store(time.Now().UnixMilli())
	c.acks.add(entries, 0)
	s.acks.add(entries, 0)
}

// giveBack asks for c's unacknowledged messages to be delivered again: those at
// positions, or everything. epoch is the client's count of such requests, or -1.
func (s *subscription) giveBack(ctx context.Context, c *consumer, positions []ledger.Position, everything bool, epoch int64) error {
	return s.box.put(ctx, 64+16*len(positions), func() {
		if s.over || s.seeking || c.gone {
			return // a seek delivers all anew in any case
		}
		c.epoch = max(c.epoch, epoch)
		s.dispatcher.redeliver(c, positions, everything)
	})
}

// seek moves the subscription on behalf of c, by calling move beside the loop.
// Then it disconnects all consumers, which come back by themselves. done runs on
// the loop, after the disconnections.
func (s *subscription) seek(ctx context.Context, c *consumer, move func(context.Context) error, done func(error)) {
	s.onLoop(ctx, 64, func() {
		if c.gone {
			done(fmt.Errorf("seek: consumer %d of subscription %q is disconnected: %w", c.id, s.name, ErrConsumerNotFound))
			return
		}
		s.seeking = true
		s.movers.Go(func() {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			defer context.AfterFunc(s.ctx, cancel)() //nolint:contextcheck // the loop's end cuts the seek short
			err := move(ctx)
			if !s.box.post(func() { s.seeked(err, done) }) {
				done(fmt.Errorf("seek on subscription %q of %s: %w", s.name, s.topic, ErrClosed))
			}
		})
	}, done)
}

// seeked ends a seek.
func (s *subscription) seeked(err error, done func(error)) {
	s.seeking = false
	if err == nil && !s.over {
		if !s.reader.Durable() {
			s.graceUntil = time.Now().Add(seekGrace)
		}
		s.disconnectAll(nil)
		// What was known of deliveries is void: the next consumer starts from the
		// new position.
		s.dispatcher = nil
		s.unacked.Store(0)
		s.blocked.Store(false)
	}
	done(err)
	waiting := s.waiting
	s.waiting = nil
	s.box.unhold()
	for _, w := range waiting {
		w()
	}
}

// clearBacklog acknowledges everything there is at this moment. What consumers
// already have stays on their accounts until they acknowledge it.
func (s *subscription) clearBacklog(ctx context.Context, done func(error)) {
	s.onLoop(ctx, 64, func() {
		err := s.reader.ClearBacklog(ctx)
		if err == nil && s.dispatcher != nil {
			s.dispatcher.cleared()
		}
		done(err)
	}, done)
}

// disconnectAll takes every consumer off but keep, and sends its client away.
func (s *subscription) disconnectAll(keep *consumer) {
	for _, c := range slices.Clone(s.consumers) {
		if c != keep {
			s.leave(c)
			c.sink.disconnect(c)
		}
	}
}

// end ends the subscription on behalf of c, which is about to delete it. With
// others connected it refuses unless forced, and then disconnects them. c's
// client stays connected, without its consumer. done runs on the loop.
func (s *subscription) end(ctx context.Context, c *consumer, force bool, done func(error)) {
	s.onLoop(ctx, 64, func() {
		if !force && (len(s.consumers) > 1 || len(s.consumers) == 1 && s.consumers[0] != c) {
			done(fmt.Errorf("unsubscribe %q of %s: %d consumers are connected, close the others first or use force: %w",
				s.name, s.topic, len(s.consumers), ErrConsumerBusy))
			return
		}
		s.disconnectAll(c)
		if c != nil {
			s.leave(c)
		}
		s.over = true
		done(nil)
	}, done)
}

// stop disconnects every consumer, ends a seek, and waits for the loop to end. It
// leaves the reader open. It may be called more than once.
func (s *subscription) stop() {
	s.box.post(func() {
		s.disconnectAll(nil)
		s.over = true
	})
	<-s.done
	s.movers.Wait()
}
