package integration

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/verify"
)

// load publishes numbered messages to one topic from several producers and records
// what became of them.
type load struct {
	history   *verify.History
	plan      plan
	connected []pulsar.Producer
	acked     atomic.Int64
	failed    atomic.Int64

	mu    sync.Mutex // guards what follows
	since time.Time  // resumed looks at messages sent after this
	first time.Time  // when the first of them was acknowledged
	wake  chan struct{}

	producers sync.WaitGroup
}

// plan says what a load publishes.
type plan struct {
	topic     string
	name      string // of the producers, with a number behind
	producers int
	messages  int           // of each producer
	size      int           // of each message, in bytes
	perTick   int           // messages that a producer sends in a loadTick
	timeout   time.Duration // to give up a message after; -1: never
}

// loadTick is the beat of a load. Pacing keeps a load going long enough for things
// to be killed in the middle of it, whatever the machine.
const loadTick = 10 * time.Millisecond

// publish begins a load. It ends by itself; wait says when.
func publish(t *testing.T, client pulsar.Client, history *verify.History, p plan) *load {
	t.Helper()
	l := prepare(t, client, history, p)
	l.start(t)
	return l
}

// prepare connects the producers of a load.
func prepare(t *testing.T, client pulsar.Client, history *verify.History, p plan) *load {
	t.Helper()
	l := &load{history: history, plan: p, wake: make(chan struct{}, 1)}
	for i := range p.producers {
		l.connected = append(l.connected, produceTo(t, client, pulsar.ProducerOptions{
			Topic: p.topic, Name: fmt.Sprintf("%s-%d", p.name, i), SendTimeout: p.timeout,
			MaxPendingMessages: 2000, BatchingMaxMessages: 50, BatchingMaxPublishDelay: 5 * time.Millisecond,
		}))
	}
	return l
}

// start begins publishing.
func (l *load) start(t *testing.T) {
	for _, producer := range l.connected {
		l.producers.Go(func() { l.run(t.Context(), producer, l.plan) })
	}
}

func (l *load) run(ctx context.Context, producer pulsar.Producer, p plan) {
	tick := time.NewTicker(loadTick)
	defer tick.Stop()
	var pending sync.WaitGroup
	for n := range p.messages {
		payload := verify.Payload(producer.Name(), int64(n), p.size)
		l.history.Send(producer.Name(), int64(n), payload)
		sent := time.Now()
		pending.Add(1)
		producer.SendAsync(ctx, &pulsar.ProducerMessage{Payload: payload}, func(id pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
			defer pending.Done()
			l.settle(producer.Name(), int64(n), sent, id, err)
		})
		if (n+1)%p.perTick == 0 {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	}
	pending.Wait()
}

func (l *load) settle(producer string, sequence int64, sent time.Time, id pulsar.MessageID, err error) {
	if err != nil {
		l.history.Failed(producer, sequence)
		l.failed.Add(1)
		return
	}
	l.history.Acked(producer, sequence, ledger.Position{Ledger: ledger.ID(id.LedgerID()), Entry: ledger.EntryID(id.EntryID())})
	l.acked.Add(1)
	l.mu.Lock()
	if !l.since.IsZero() && l.first.IsZero() && sent.After(l.since) {
		l.first = time.Now()
	}
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// await waits until n messages were acknowledged.
func (l *load) await(t *testing.T, n int64, limit time.Duration) {
	t.Helper()
	deadline := time.After(limit)
	for l.acked.Load() < n {
		select {
		case <-l.wake:
		case <-deadline:
			t.Fatalf("%d messages were acknowledged within %v, want %d (%d failed)", l.acked.Load(), limit, n, l.failed.Load())
		}
	}
}

// mark begins to watch for publishing to continue after now.
func (l *load) mark() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.since, l.first = time.Now(), time.Time{}
}

// resumed returns how long after mark a message sent after it was acknowledged.
func (l *load) resumed(t *testing.T, limit time.Duration) time.Duration {
	t.Helper()
	deadline := time.After(limit)
	for {
		l.mu.Lock()
		since, first := l.since, l.first
		l.mu.Unlock()
		if !first.IsZero() {
			return first.Sub(since)
		}
		select {
		case <-l.wake:
		case <-deadline:
			t.Fatalf("no message sent in the last %v was acknowledged", limit)
		}
	}
}

// wait waits until every message was acknowledged or given up.
func (l *load) wait(t *testing.T, limit time.Duration) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.producers.Wait()
	}()
	select {
	case <-done:
	case <-time.After(limit):
		t.Fatalf("after %v only %d messages were acknowledged (%d failed)", limit, l.acked.Load(), l.failed.Load())
	}
}

// consume receives and acknowledges on the consumer, into the history, until the
// returned function is called.
func consume(t *testing.T, consumer pulsar.Consumer, history *verify.History) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	subscription := history.Subscription(consumer.Subscription())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			m, err := consumer.Receive(ctx)
			if errors.Is(err, context.Canceled) {
				return
			}
			if err != nil {
				t.Errorf("receive: %v", err)
				return
			}
			subscription.Received(consumer.Name(), m.Payload())
			// An ack that the client cannot send now means a redelivery, no more.
			_ = consumer.Ack(m)
		}
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	t.Cleanup(stop)
	return stop
}

// settled waits until everything acknowledged was delivered, and judges the history.
func settled(t *testing.T, history *verify.History, options verify.Options, limit time.Duration) verify.Verdict {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	waited := history.Wait(ctx)
	verdict := history.Judge(options)
	if err := errors.Join(waited, verdict.Err()); err != nil {
		t.Error(err)
	}
	t.Log(verdict)
	return verdict
}
