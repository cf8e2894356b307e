package broker

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// A client may ask for its producer again at the very moment at which the broker
// closes it.
func TestProducerAskedForAgainWhileItsTopicCloses(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	name, _ := protocol.ParseTopic(topicA)
	c.produce(topicA, 1)
	server := n.only()
	server.mu.Lock()
	slot := server.producers[1]
	server.mu.Unlock()
	p := slot.producer
	cmd := protocol.Frame{Command: producerCommand(topicA, 1, c.id())}
	var asking sync.WaitGroup
	asking.Go(func() {
		for range 2000 {
			server.mu.Lock()
			server.producers[1] = slot
			slot.producer, slot.closed = p, false
			server.mu.Unlock()
			server.producerClosed(p)
		}
	})
	for range 2000 {
		if err := server.openProducer(cmd); err != nil {
			t.Fatal(err)
		}
	}
	asking.Wait()
	if err := n.Unload(t.Context(), name); err != nil {
		t.Error(err)
	}
}

// A producer that its topic closes right after it was opened must not be told
// first that it is closed and then that it is open: what it sends would be dropped.
func TestProducerIsNotOpenAfterItWasClosed(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 0)
	server := n.only()
	topic, err := n.topics.loaded(t.Context(), topicA)
	if err != nil || topic == nil {
		t.Fatal(topic, err)
	}
	const count = 3000
	var opening sync.WaitGroup
	defer opening.Wait()
	opening.Go(func() {
		for id := uint64(1); id <= count; id++ {
			p := &producer{id: id, name: strconv.FormatUint(id, 10), topic: topic, conn: server}
			slot := &producerSlot{}
			server.mu.Lock()
			server.producers[id] = slot
			server.mu.Unlock()
			var both sync.WaitGroup
			both.Go(func() { server.producerOpened(id, id, slot, p, nil) })
			both.Go(func() { p.disconnect() })
			both.Wait()
		}
	})
	closed := map[uint64]bool{}
	for answered := 0; answered < count; {
		f, err := c.next()
		if err != nil {
			t.Fatal(err)
		}
		switch f.Command.GetType() {
		case pulsarpb.BaseCommand_CLOSE_PRODUCER:
			closed[f.Command.GetCloseProducer().GetProducerId()] = true
		case pulsarpb.BaseCommand_ERROR:
			answered++
		case pulsarpb.BaseCommand_PRODUCER_SUCCESS:
			answered++
			if id := f.Command.GetProducerSuccess().GetRequestId(); closed[id] {
				t.Errorf("producer %d is open after it was closed", id)
			}
		default:
			t.Fatalf("unexpected %v", f.Command.GetType())
		}
	}
}

// Whoever deletes a topic while somebody else closes it must not hear that it is
// deleted when it is not.
func TestDeleteDuringAnUnloadDeletes(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	topic, err := n.topics.loaded(t.Context(), topicA)
	if err != nil || topic == nil {
		t.Fatal(topic, err)
	}
	began, goOn := make(chan struct{}), make(chan struct{})
	var closing sync.WaitGroup
	closing.Go(func() {
		err := n.topics.close(t.Context(), n.Broker, topic, func(context.Context) error {
			close(began)
			<-goOn
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	<-began
	time.AfterFunc(50*time.Millisecond, func() { close(goOn) })
	ran := false
	err = n.topics.close(t.Context(), n.Broker, topic, func(context.Context) error { ran = true; return nil })
	if err == nil && !ran {
		t.Error("the second close reports success and did not do what should follow it")
	}
	closing.Wait()
}

// A seek that storage holds up does not hold up the end of its subscription.
func TestStopEndsASeek(t *testing.T) {
	g := newRig(t, testConfig(t))
	c, _ := g.join("a", exclusive, 1)
	moving := make(chan struct{})
	ended := make(chan error, 1)
	g.s.seek(t.Context(), c, func(ctx context.Context) error {
		close(moving)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(5 * time.Second):
			return nil
		}
	}, func(err error) { ended <- err })
	<-moving
	began := time.Now()
	g.s.stop()
	if took := time.Since(began); took > time.Second {
		t.Errorf("stop took %v", took)
	}
	if err := <-ended; err == nil {
		t.Error("the seek succeeded")
	}
}

// slowDeletes takes a moment to delete a cursor, and gives up with its caller.
type slowDeletes struct{ metadata.Store }

func (s slowDeletes) Delete(ctx context.Context, key string, version metadata.Version) error {
	if strings.HasPrefix(key, "/cursors/") {
		select {
		case <-time.After(300 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return s.Store.Delete(ctx, key, version)
}

// A client that unsubscribes and goes at once has unsubscribed.
func TestUnsubscribeOutlivesItsClient(t *testing.T) {
	d := newBed(t)
	d.store = slowDeletes{d.store}
	n := d.node("broker-1")
	c := n.connect()
	c.subscribe(topicA, "s", exclusive, 1)
	name, _ := protocol.ParseTopic(topicA)
	id := uint64(1)
	c.write(&pulsarpb.BaseCommand{
		Type:        pulsarpb.BaseCommand_UNSUBSCRIBE.Enum(),
		Unsubscribe: &pulsarpb.CommandUnsubscribe{ConsumerId: &id, RequestId: c.id()},
	})
	waitFor(t, "the deletion began", func() bool { return len(n.stats(topicA).Subscriptions) == 0 })
	_ = c.nc.Close()
	waitFor(t, "the cursor is gone", func() bool {
		all, err := metadata.List(t.Context(), n.store, "/cursors/"+name.ManagedLedgerName()+"/")
		return err == nil && len(all) == 0
	})
}

// A consumer whose unsubscription failed half-way is off its subscription, and its
// client must hear of it to come back.
func TestFailedUnsubscribeSendsItsClientAway(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.subscribe(topicA, "s", exclusive, 1)
	topic, err := n.topics.loaded(t.Context(), topicA)
	if err != nil || topic == nil {
		t.Fatal(topic, err)
	}
	if err := topic.ml.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	id := uint64(1)
	c.write(&pulsarpb.BaseCommand{
		Type:        pulsarpb.BaseCommand_UNSUBSCRIBE.Enum(),
		Unsubscribe: &pulsarpb.CommandUnsubscribe{ConsumerId: &id, RequestId: c.id()},
	})
	c.expectError(pulsarpb.ServerError_ServiceNotReady)
	c.expect(pulsarpb.BaseCommand_CLOSE_CONSUMER)
}
