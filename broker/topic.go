package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/managedledger"
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// claim is the right to serve a topic: an [ownership.Claim].
type claim interface {
	Valid() bool
	Lost() <-chan struct{}
	Bundle() string
}

// topic is one open topic: its managed ledger, its producers and subscriptions.
type topic struct {
	b       *Broker
	name    protocol.TopicName
	full    string // name in full
	ml      *managedledger.ManagedLedger
	claim   claim
	opening *opening
	log     *slog.Logger
	since   time.Time

	mu            sync.Mutex // guards the following; never held while calling out
	closed        bool
	producers     map[string]*producer // by name
	subscriptions map[string]*starting // by name

	in         traffic
	lastIn     atomic.Int64 // Unix milliseconds of the last receipt
	removedOut traffic      // what subscriptions that are gone sent
}

// starting is a subscription's place in its topic, from the first wish to have
// it.
type starting struct {
	ready chan struct{} // closed once sub or err is set
	sub   *subscription
	err   error
}

// newTopic starts an open topic with the subscriptions that its managed ledger
// has.
func newTopic(b *Broker, name protocol.TopicName, ml *managedledger.ManagedLedger, right claim, o *opening) *topic {
	t := &topic{
		b: b, name: name, full: name.String(), ml: ml, claim: right, opening: o, since: time.Now(),
		producers: map[string]*producer{}, subscriptions: map[string]*starting{},
	}
	t.log = b.log.With("topic", t.full)
	for _, r := range ml.Cursors() {
		t.subscriptions[r.Name()] = t.started(r)
	}
	return t
}

// started makes a place for a subscription that reads through r.
func (t *topic) started(r *managedledger.Reader) *starting {
	s := &starting{ready: make(chan struct{})}
	s.sub = newSubscription(r.Name(), t.home(), r)
	close(s.ready)
	return s
}

func (t *topic) home() subscriptionHome {
	return subscriptionHome{
		name: t.full, partition: t.name.Partition, cfg: &t.b.cfg,
		owned: func() bool { return t.claim.Valid() }, last: t.ml.LastConfirmed, ended: t.forget, log: t.log,
	}
}

// clients returns how many producers and consumers are connected.
func (t *topic) clients() int {
	t.mu.Lock()
	n := len(t.producers)
	t.mu.Unlock()
	for _, s := range t.subs() {
		n += int(s.members.Load())
	}
	return n
}

// subs returns the subscriptions that are open, in no order.
func (t *topic) subs() []*subscription {
	t.mu.Lock()
	defer t.mu.Unlock()
	subs := make([]*subscription, 0, len(t.subscriptions))
	for _, s := range t.subscriptions {
		select {
		case <-s.ready:
			if s.sub != nil {
				subs = append(subs, s.sub)
			}
		default:
		}
	}
	return subs
}

func (t *topic) closedError() error { return fmt.Errorf("topic %s: %w", t.full, ErrClosed) }

// close sends all clients away, stops the subscriptions, and closes the managed
// ledger, which saves their positions. The registry calls it once.
func (t *topic) close(ctx context.Context) error {
	t.mu.Lock()
	t.closed = true
	producers := make([]*producer, 0, len(t.producers))
	for _, p := range t.producers {
		producers = append(producers, p)
	}
	places := make([]*starting, 0, len(t.subscriptions))
	for _, s := range t.subscriptions {
		places = append(places, s)
	}
	t.mu.Unlock()

	t.retire(ctx, producers)
	for _, s := range places {
		select {
		case <-s.ready:
			if s.sub != nil {
				s.sub.stop()
			}
		case <-ctx.Done(): // whoever starts it finds the topic closed
		}
	}
	if err := t.ml.Close(ctx); err != nil {
		return fmt.Errorf("close topic %s: %w", t.full, err)
	}
	return nil
}

// retireTimeout is how long the closing of a topic waits for publishes that are
// under way. Those that are not answered by then are sent again elsewhere, and may
// be stored twice.
const retireTimeout = 3 * time.Second

// retire sends producers away: each once what it has sent is answered, and all
// after retireTimeout, or at once if this broker may not answer any more.
func (t *topic) retire(ctx context.Context, producers []*producer) {
	if t.claim.Valid() && len(producers) > 0 {
		left := make(chan struct{}, len(producers))
		for _, p := range producers {
			p.finish(func() {
				p.conn.producerClosed(p)
				left <- struct{}{}
			})
		}
		timeout := time.NewTimer(retireTimeout)
		defer timeout.Stop()
		for range producers {
			select {
			case <-left:
				continue
			case <-timeout.C:
			case <-t.ml.Fenced():
			case <-t.claim.Lost():
			case <-ctx.Done():
			}
			break
		}
	}
	for _, p := range producers {
		p.disconnect()
	}
}

// --- Producers

// addProducer gives p its name. If a producer has it that p succeeds, that one is
// dropped; any other is in the way, and the error says whose it is.
func (t *topic) addProducer(p *producer) error {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return t.closedError()
	}
	old := t.producers[p.name]
	if old != nil && !p.succeeds(old) {
		t.mu.Unlock()
		return &busyError{
			holder: old.conn, kind: ErrProducerBusy,
			text: fmt.Sprintf("producer name %q on %s: the producer at %s has it", p.name, t.full, old.conn.address),
		}
	}
	t.producers[p.name] = p
	t.mu.Unlock()
	if old != nil {
		old.drop()
	}
	return nil
}

// removeProducer frees p's name, if p still has it.
func (t *topic) removeProducer(p *producer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.producers[p.name] == p {
		delete(t.producers, p.name)
	}
}

// --- Subscriptions

// request is what a SUBSCRIBE asks for.
type request struct {
	name     string
	kind     subType
	durable  bool
	earliest bool             // where a new durable subscription begins
	start    *ledger.Position // where a non-durable one begins; nil = at the end
	rollback time.Duration    // how much earlier by publish time; 0 = not
	create   bool             // whether a missing durable one may be made
}

// subscription returns the named subscription, making it if need be.
func (t *topic) subscription(ctx context.Context, r request) (*subscription, error) {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return nil, t.closedError()
	}
	place := t.subscriptions[r.name]
	if place == nil {
		if r.durable && !r.create {
			t.mu.Unlock()
			return nil, fmt.Errorf("subscription %q of %s: %w: create it first, or set allowAutoSubscriptionCreation=true", r.name, t.full, ErrSubscriptionNotFound)
		}
		place = &starting{ready: make(chan struct{})}
		t.subscriptions[r.name] = place
		t.mu.Unlock()
		t.start(ctx, r, place)
	} else {
		t.mu.Unlock()
	}
	select {
	case <-place.ready:
	case <-ctx.Done():
		return nil, fmt.Errorf("subscription %q of %s: %w", r.name, t.full, ctx.Err())
	}
	switch {
	case place.err != nil:
		return nil, place.err
	case place.sub.reader.Durable() != r.durable:
		return nil, fmt.Errorf("subscription %q of %s: it exists, and durable is %t: %w", r.name, t.full, !r.durable, ErrNotAllowed)
	}
	return place.sub, nil
}

// start opens a subscription for its place and announces the outcome.
func (t *topic) start(ctx context.Context, r request, place *starting) {
	defer close(place.ready)
	cursor, err := t.openReader(ctx, r)
	t.mu.Lock()
	if err == nil && t.closed {
		err = t.closedError() // the managed ledger closes its cursors
	}
	if err != nil {
		place.err = fmt.Errorf("subscription %q of %s: %w", r.name, t.full, err)
		delete(t.subscriptions, r.name)
	} else {
		place.sub = newSubscription(r.name, t.home(), cursor)
	}
	t.mu.Unlock()
}

func (t *topic) openReader(ctx context.Context, r request) (*managedledger.Reader, error) {
	if r.durable {
		at := managedledger.Latest
		if r.earliest {
			at = managedledger.Earliest
		}
		return t.ml.OpenCursor(ctx, r.name, at)
	}
	start := t.ml.LastConfirmed().Next()
	if r.start != nil {
		start = t.place(*r.start)
	}
	reader := t.ml.NewReader(r.name, start)
	if r.rollback > 0 {
		if err := reader.SeekTime(ctx, publishTime, time.Now().Add(-r.rollback).UnixMilli()); err != nil {
			return nil, errors.Join(err, reader.Close(ctx))
		}
	}
	return reader, nil
}

// place turns a client's position into one that exists, or follows the last:
// clients write the largest number for "the end" and -1 for "the beginning".
func (t *topic) place(p ledger.Position) ledger.Position {
	switch {
	case p.Ledger == math.MaxInt64 || p.Entry == math.MaxInt64:
		return t.ml.LastConfirmed().Next()
	case p.Ledger < 0:
		return t.ml.FirstPosition()
	case p.Entry < 0:
		return ledger.Position{Ledger: p.Ledger}
	default:
		return p
	}
}

// publishTime reads the time at which an entry was published, in Unix
// milliseconds.
func publishTime(entry []byte) (int64, error) {
	meta, err := protocol.Peek(entry)
	return int64(meta.PublishTime), err
}

// subscribe lets c join the subscription that r asks for. joined runs on the
// subscription's loop, before the first message; it is not called on an error.
func (t *topic) subscribe(ctx context.Context, r request, c *consumer, joined func(*subscription)) (*subscription, error) {
	for attempt := 0; ; attempt++ {
		s, err := t.subscription(ctx, r)
		if err != nil {
			return nil, err
		}
		result := make(chan error, 1)
		s.add(ctx, c, r.kind, func(err error) {
			if err == nil {
				joined(s)
			}
			result <- err
		})
		// The loop always answers; to leave before would lose track of c.
		switch err = <-result; {
		case err == nil:
			return s, nil
		case errors.Is(err, ErrClosed) && attempt < 3:
			<-s.done // a non-durable one that just ended; the next is a new one
			continue
		}
		if h, busy := asBusy(err); busy && attempt < 3 && !h.alive(ctx) {
			continue
		}
		return nil, err
	}
}

// forget takes a subscription out that ended by itself. Its loop calls it.
func (t *topic) forget(s *subscription) {
	t.mu.Lock()
	if place := t.subscriptions[s.name]; place != nil && place.sub == s {
		delete(t.subscriptions, s.name)
	}
	t.mu.Unlock()
	t.removedOut.add(int(s.out.messages.Load()), int(s.out.bytes.Load()))
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if err := s.reader.Close(ctx); err != nil { // memory only: it is not durable
		s.log.Warn("reader not closed", "err", err)
	}
}

// unsubscribe deletes a subscription on behalf of its consumer c, or of nobody.
func (t *topic) unsubscribe(ctx context.Context, s *subscription, c *consumer, force bool) error {
	result := make(chan error, 1)
	s.end(ctx, c, force, func(err error) { result <- err })
	if err := <-result; err != nil {
		return err
	}
	<-s.done
	// Nobody can use the subscription any more, so its cursor goes too, whether or
	// not whoever asked is still there.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	t.mu.Lock()
	place := t.subscriptions[s.name]
	mine := place != nil && place.sub == s
	if mine { // nobody may join until the cursor is gone
		place = &starting{ready: make(chan struct{})}
		t.subscriptions[s.name] = place
	}
	t.mu.Unlock()
	t.removedOut.add(int(s.out.messages.Load()), int(s.out.bytes.Load()))
	var err error
	if s.reader.Durable() {
		err = t.ml.DeleteCursor(ctx, s.name)
	} else {
		err = s.reader.Close(ctx)
	}
	if mine {
		t.mu.Lock()
		place.err = fmt.Errorf("subscription %q of %s is being deleted: %w", s.name, t.full, ErrBusy)
		delete(t.subscriptions, s.name)
		t.mu.Unlock()
		close(place.ready)
	}
	if err != nil {
		if c != nil { // its client thinks that it is still there
			c.sink.disconnect(c)
		}
		return fmt.Errorf("unsubscribe %q of %s: %w", s.name, t.full, err)
	}
	return nil
}

// seekTo returns what moves s to a position or a time: exactly one is given.
func (t *topic) seekTo(s *subscription, p *ledger.Position, millis uint64) func(context.Context) error {
	if p != nil {
		return func(ctx context.Context) error { return s.reader.Seek(ctx, t.place(*p)) }
	}
	return func(ctx context.Context) error {
		return s.reader.SeekTime(ctx, publishTime, int64(min(millis, math.MaxInt64)))
	}
}

// last returns the position of the newest entry and the index of its last message
// in its batch, or -1 where there is none.
func (t *topic) last(ctx context.Context) (ledger.Position, int, error) {
	p := t.ml.LastConfirmed()
	if p.Entry < 0 {
		return p, -1, nil
	}
	data, err := t.ml.ReadEntry(ctx, p)
	if errors.Is(err, ledger.ErrNoSuchEntry) || errors.Is(err, ledger.ErrNoSuchLedger) {
		return ledger.Position{Ledger: p.Ledger, Entry: ledger.BeforeFirst}, -1, nil // trimmed
	}
	if err != nil {
		return p, -1, fmt.Errorf("read the last entry of %s: %w", t.full, err)
	}
	meta, err := protocol.Peek(data)
	if err != nil || !meta.Batch {
		return p, -1, err
	}
	return p, meta.Messages - 1, nil
}

// tick closes a period of every rate of the topic.
func (t *topic) tick(d time.Duration) {
	t.in.tick(d)
	t.mu.Lock()
	for _, p := range t.producers {
		p.in.tick(d)
	}
	t.mu.Unlock()
	for _, s := range t.subs() {
		s.out.tick(d)
		s.redeliver.tick(d)
		s.acks.tick(d)
		s.box.post(func() {
			for _, c := range s.consumers {
				c.out.tick(d)
				c.redeliver.tick(d)
				c.acks.tick(d)
			}
		})
	}
}

// typeName is a subscription type as Pulsar spells it in statistics.
func typeName(kind subType) string {
	if kind == pulsarpb.CommandSubscribe_Key_Shared {
		return "Key_Shared"
	}
	return strings.ToUpper(kind.String()[:1]) + kind.String()[1:]
}
