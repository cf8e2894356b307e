package broker

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/magnetar-io/magnetar/protocol"
)

// registry holds the topics that are open on this broker, and sees to it that
// each is opened and closed by one goroutine at a time.
type registry struct {
	mu     sync.Mutex          // guards the following
	open   map[string]*opening // by full name; also those being opened or closed
	closed bool
}

// opening is a topic in the registry, from the first wish to have it until it is
// closed.
type opening struct {
	ready  chan struct{} // closed once topic or err is set
	topic  *topic        // nil if it could not be opened
	err    error
	bundle string // set, under the registry's mu, before ready

	closing bool          // guarded by the registry's mu
	gone    chan struct{} // closed once the topic is closed and out of the registry
	closed  error         // why closing failed; read after gone
}

// creation says whether a missing topic is made.
type creation int

const (
	createAllowed creation = iota // if allowAutoTopicCreation says so
	createForced
	createListed // only a partition that its partitioned topic has, and so is listed
	createNever
)

// topic returns an open topic, opening it if need be: the bundle is claimed, the
// managed ledger opened, and its subscriptions started. Errors wrap
// ErrTopicNotFound, are *ownership.NotOwnerError, or come from below.
func (b *Broker) topic(ctx context.Context, name protocol.TopicName, create creation) (*topic, error) {
	for {
		o, mine, err := b.topics.enter(name.String(), &b.running)
		if err != nil {
			return nil, err
		}
		if mine { // opening goes on if the one who asked first goes away
			go func() { //nolint:contextcheck // the opening outlives this request
				defer b.running.Done()
				b.openTopic(name, create, o)
			}()
		}
		select {
		case <-o.ready:
		case <-ctx.Done():
			return nil, fmt.Errorf("open topic %s: %w", name, ctx.Err())
		}
		if o.topic == nil {
			if !mine && create != createNever && errors.Is(o.err, ErrTopicNotFound) {
				continue // somebody else asked who would not create it
			}
			return nil, o.err
		}
		if !b.topics.isClosing(o) {
			return o.topic, nil
		}
		select {
		case <-o.gone:
		case <-ctx.Done():
			return nil, fmt.Errorf("open topic %s, which is being closed: %w", name, ctx.Err())
		}
	}
}

// enter returns the topic's opening, and whether it is the caller's to carry out;
// then it is counted in running, which the broker's Close waits for.
func (r *registry) enter(name string, running *sync.WaitGroup) (o *opening, mine bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if o := r.open[name]; o != nil {
		return o, false, nil
	}
	if r.closed {
		return nil, false, fmt.Errorf("topic %s: %w", name, ErrClosed)
	}
	o = &opening{ready: make(chan struct{}), gone: make(chan struct{})}
	r.open[name] = o
	running.Add(1)
	return o, true, nil
}

func (r *registry) isClosing(o *opening) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return o.closing
}

// openTopic carries out an opening.
func (b *Broker) openTopic(name protocol.TopicName, create creation, o *opening) {
	ctx, cancel := context.WithTimeout(b.ctx, requestTimeout)
	defer cancel()
	t, err := b.load(ctx, name, create, o)
	if err != nil {
		o.err = fmt.Errorf("open topic %s: %w", name, err)
		b.topics.mu.Lock()
		delete(b.topics.open, name.String())
		b.topics.mu.Unlock()
		close(o.gone)
	} else {
		o.topic = t
		b.log.Info("topic opened", "topic", t.full, "bundle", o.bundle)
		lost := t.claim.Lost()
		b.running.Go(func() { b.watch(t, lost) })
	}
	close(o.ready)
}

// load does the work of opening.
func (b *Broker) load(ctx context.Context, name protocol.TopicName, create creation, o *opening) (*topic, error) {
	if err := b.needNamespace(ctx, name); err != nil {
		return nil, err
	}
	claim, err := b.ownership.Acquire(ctx, name)
	if err != nil {
		return nil, err
	}
	b.topics.mu.Lock()
	o.bundle = claim.Bundle()
	b.topics.mu.Unlock()
	if err := b.mayOpen(ctx, name, create); err != nil {
		return nil, err
	}
	ml, err := b.factory.Open(ctx, name.ManagedLedgerName())
	if err != nil {
		return nil, err
	}
	if !claim.Valid() {
		return nil, errors.Join(fmt.Errorf("its bundle %s was lost meanwhile: %w", claim.Bundle(), ErrClosed), ml.Close(ctx))
	}
	return newTopic(b, name, ml, claim, o), nil
}

// mayOpen fails if the topic is missing and not to be made, or cannot be a topic.
func (b *Broker) mayOpen(ctx context.Context, name protocol.TopicName, create creation) error {
	exists, err := b.factory.Exists(ctx, name.ManagedLedgerName())
	if err != nil || exists {
		return err
	}
	n, err := b.namespaces.Partitions(ctx, name)
	if err != nil {
		return err
	}
	if n > 0 {
		return fmt.Errorf("it has %d partitions: use %s to %s: %w", n, name.WithPartition(0).Local, name.WithPartition(n-1).Local, ErrNotAllowed)
	}
	if name.Partition >= 0 {
		n, err := b.namespaces.Partitions(ctx, name.Base())
		switch {
		case err != nil:
			return err
		case name.Partition < n && create != createNever:
			return nil // it was created when the partitioned topic was
		case n > 0:
			return fmt.Errorf("%s has %d partitions: %w", name.Base(), n, ErrTopicNotFound)
		}
	}
	if create >= createListed || create == createAllowed && !b.cfg.AllowAutoTopicCreation {
		return fmt.Errorf("%w: create it first, or set allowAutoTopicCreation=true", ErrTopicNotFound)
	}
	return nil
}

// watch closes a topic that this broker may no longer serve.
func (b *Broker) watch(t *topic, lost <-chan struct{}) {
	var why string
	select {
	case <-lost:
		why = "ownership lost"
	case <-t.ml.Fenced():
		why = "another broker took its managed ledger"
	case <-t.opening.gone:
		return
	}
	b.log.Warn("topic closing: its clients look it up again", "topic", t.full, "why", why)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.ctx), closeTimeout)
	defer cancel()
	if err := b.topics.close(ctx, b, t, nil); err != nil {
		b.log.Warn("topic not closed cleanly: acknowledgements since the last flush may be lost", "topic", t.full, "err", err)
	}
}

// errOvertaken reports that somebody else closed the topic first, and after did not
// run.
var errOvertaken = errors.New("closed by somebody else meanwhile")

// close closes a topic, then runs after, if any, and takes it out of the
// registry. Everybody who calls gets the result of the first, or errOvertaken.
func (r *registry) close(ctx context.Context, b *Broker, t *topic, after func(context.Context) error) error {
	o := t.opening
	r.mu.Lock()
	if o.closing {
		r.mu.Unlock()
		select {
		case <-o.gone:
			if after != nil {
				return errOvertaken
			}
			return o.closed
		case <-ctx.Done():
			return fmt.Errorf("close topic %s: %w", t.full, ctx.Err())
		}
	}
	o.closing = true
	r.mu.Unlock()

	err := t.close(ctx)
	if after != nil {
		err = errors.Join(err, after(ctx))
	}
	o.closed = err
	r.mu.Lock()
	delete(r.open, t.full)
	r.mu.Unlock()
	close(o.gone)
	b.log.Info("topic closed", "topic", t.full)
	return err
}

// loaded returns a topic if it is open here, waiting for it if it is being
// opened; nil if it is not.
func (r *registry) loaded(ctx context.Context, name string) (*topic, error) {
	r.mu.Lock()
	o := r.open[name]
	r.mu.Unlock()
	if o == nil {
		return nil, nil //nolint:nilnil // not open is an answer, not a failure
	}
	select {
	case <-o.ready:
		return o.topic, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// all returns the topics that are open.
func (r *registry) all() []*topic {
	r.mu.Lock()
	defer r.mu.Unlock()
	topics := make([]*topic, 0, len(r.open))
	for _, o := range r.open {
		select {
		case <-o.ready:
			if o.topic != nil && !o.closing {
				topics = append(topics, o.topic)
			}
		default:
		}
	}
	return topics
}

// closeAll refuses to open any more topics and closes those there are.
func (r *registry) closeAll(ctx context.Context, b *Broker) error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	return r.closeWhere(ctx, b, func(*opening) bool { return true })
}

// releaseBundle closes the topics of a bundle before it is given up.
func (b *Broker) releaseBundle(ctx context.Context, bundle string) {
	err := b.topics.closeWhere(ctx, b, func(o *opening) bool { return o.bundle == bundle })
	if err != nil {
		b.log.Warn("topics of a bundle not closed cleanly: acknowledgements since the last flush may be lost", "bundle", bundle, "err", err)
	}
}

// closeParallel is how many topics are closed at once.
const closeParallel = 16

func (r *registry) closeWhere(ctx context.Context, b *Broker, which func(*opening) bool) error {
	r.mu.Lock()
	var chosen []*opening
	for _, o := range r.open {
		if which(o) {
			chosen = append(chosen, o)
		}
	}
	r.mu.Unlock()

	var closing sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	slots := make(chan struct{}, closeParallel)
	for _, o := range chosen {
		slots <- struct{}{}
		closing.Go(func() {
			defer func() { <-slots }()
			select {
			case <-o.ready:
			case <-ctx.Done():
				return // what is being opened finds its claim ended
			}
			if o.topic == nil {
				return
			}
			tctx, cancel := context.WithTimeout(ctx, closeTimeout)
			defer cancel()
			if err := r.close(tctx, b, o.topic, nil); err != nil {
				mu.Lock()
				errs = append(errs, err)
				mu.Unlock()
			}
		})
	}
	closing.Wait()
	return errors.Join(errs...)
}
