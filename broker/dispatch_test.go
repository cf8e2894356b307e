package broker

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

const (
	exclusive = pulsarpb.CommandSubscribe_Exclusive
	sharedSub = pulsarpb.CommandSubscribe_Shared
	failover  = pulsarpb.CommandSubscribe_Failover
)

func TestSingleDeliversInOrderAsPermitsAllow(t *testing.T) {
	g := newRig(t, testConfig(t))
	g.r.publish(10, 1)
	c, sink := g.join("a", exclusive, 4)
	g.expect(sink, texts(0, 4)...)
	g.idle(NoPermits)
	g.flow(c, 100)
	g.expect(sink, texts(4, 10)...)
	g.idle(CaughtUp)
	g.r.publish(2, 1)
	g.expect(sink, texts(10, 12)...)
}

func TestPermitsCountMessagesAndGoBelowZero(t *testing.T) {
	for _, kind := range []subType{exclusive, sharedSub} {
		t.Run(typeName(kind), func(t *testing.T) {
			g := newRig(t, testConfig(t))
			g.r.publish(5, 10)
			c, sink := g.join("a", kind, 15)
			g.expect(sink, texts(0, 2)...) // 20 messages for 15 permits: an entry is indivisible
			g.idle(NoPermits)
			if got := c.available.Load(); got != -5 {
				t.Errorf("permits = %d, want -5", got)
			}
			g.flow(c, 5)
			if why := g.settled(); why != NoPermits {
				t.Errorf("with 0 permits: %q, want %q", why, NoPermits)
			}
			g.flow(c, 1)
			g.expect(sink, "2")
		})
	}
}

// Entries that were read and had no permits must not come once they are cleared.
func TestClearedEntriesAreNotDelivered(t *testing.T) {
	for _, kind := range []subType{exclusive, sharedSub} {
		t.Run(typeName(kind), func(t *testing.T) {
			g := newRig(t, testConfig(t))
			g.r.publish(5, 10)
			c, sink := g.join("a", kind, 15)
			g.expect(sink, texts(0, 2)...)
			result := make(chan error, 1)
			g.s.clearBacklog(t.Context(), func(err error) { result <- err })
			if err := <-result; err != nil {
				t.Fatal(err)
			}
			g.r.publish(1, 1)
			g.flow(c, 100)
			g.expect(sink, "5")
		})
	}
}

func TestExclusiveRefusesASecondConsumer(t *testing.T) {
	g := newRig(t, testConfig(t))
	c, _ := g.join("a", exclusive, 1)
	err := g.tryJoin(&consumer{name: "b", sink: newFakeSink()}, exclusive)
	if !errors.Is(err, ErrConsumerBusy) {
		t.Fatalf("second consumer: %v, want ErrConsumerBusy", err)
	}
	if _, busy := asBusy(err); !busy {
		t.Errorf("the error does not say who holds it: %v", err)
	}
	if err := g.tryJoin(&consumer{name: "b", sink: newFakeSink()}, sharedSub); !errors.Is(err, ErrConsumerBusy) {
		t.Errorf("other type while in use: %v, want ErrConsumerBusy", err)
	}
	g.leave(c)
	g.r.publish(1, 1)
	_, sink := g.join("b", sharedSub, 1) // a type may change while nobody is connected
	g.expect(sink, "0")
}

func TestExclusiveRedeliversFromTheFirstUnacknowledged(t *testing.T) {
	g := newRig(t, testConfig(t))
	g.r.publish(6, 1)
	c, sink := g.join("a", exclusive, 100)
	g.expect(sink, texts(0, 6)...)
	if err := g.ack(c, 0, 3); err != nil {
		t.Fatal(err)
	}
	// Which messages are named does not matter.
	if err := g.s.giveBack(t.Context(), c, []ledger.Position{at(5)}, false, 7); err != nil {
		t.Fatal(err)
	}
	g.expect(sink, "1", "2", "4", "5")
	if c.epoch != 7 {
		t.Errorf("epoch = %d, want the client's 7", c.epoch)
	}
}

func TestFailoverSwitchesAfterTheDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRigOn(t, testConfig(t), "persistent://public/default/t-partition-1", 1)
		g.r.publish(3, 1)
		start := time.Now()
		a, sinkA := g.join("a", failover, 100)
		time.Sleep(999 * time.Millisecond)
		synctest.Wait()
		if got := sinkA.take(); len(got) > 0 {
			t.Fatalf("delivered %v before the delay", got)
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if got := sinkA.take(); !slices.Equal(got, texts(0, 3)) {
			t.Fatalf("after %v got %v, want all", time.Since(start), got)
		}
		if !slices.Equal(sinkA.active, []bool{true}) {
			t.Errorf("a heard %v, want that it is active", sinkA.active)
		}
		if err := g.ack(a, 0); err != nil {
			t.Fatal(err)
		}

		// Of two, partition 1 belongs to the second by name.
		_, sinkB := g.join("b", failover, 100)
		g.r.publish(1, 1)
		time.Sleep(999 * time.Millisecond)
		synctest.Wait()
		if got := append(sinkA.take(), sinkB.take()...); len(got) > 0 {
			t.Errorf("delivered %v during the delay", got)
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if got := sinkB.take(); !slices.Equal(got, texts(1, 4)) {
			t.Errorf("b got %v, want what a had not acknowledged and the rest", got)
		}
		if !slices.Equal(sinkA.active, []bool{true, false}) || !slices.Equal(sinkB.active, []bool{true}) {
			t.Errorf("a heard %v, b heard %v", sinkA.active, sinkB.active)
		}
	})
}

func TestFailoverTakesOverWhenTheActiveLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRigOn(t, testConfig(t), "persistent://public/default/t-partition-0", 0)
		a, sinkA := g.join("a", failover, 100)
		_, sinkB := g.join("b", failover, 100)
		g.r.publish(4, 1)
		time.Sleep(time.Second)
		synctest.Wait()
		if got := sinkA.take(); len(got) != 4 {
			t.Fatalf("a got %v", got)
		}
		if err := g.ack(a, 0, 2); err != nil {
			t.Fatal(err)
		}
		g.leave(a)
		time.Sleep(time.Second)
		synctest.Wait()
		if got := sinkB.take(); !slices.Equal(got, []string{"1", "3"}) {
			t.Errorf("b got %v, want what a left unacknowledged", got)
		}
	})
}

func TestFailoverChoice(t *testing.T) {
	type member struct {
		name     string
		priority int32
	}
	tests := []struct {
		name      string
		partition int
		members   []member
		want      string
	}{
		{"by-name", 0, []member{{"b", 0}, {"a", 0}}, "a"},
		{"partition-modulo", 4, []member{{"c", 0}, {"b", 0}, {"a", 0}}, "b"},
		{"best-priority-only", 1, []member{{"a", 1}, {"b", 0}, {"c", 1}}, "b"},
		{"modulo-within-priority", 3, []member{{"a", 0}, {"b", 0}, {"c", 5}}, "b"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := newSingle(&subscription{kind: failover, partition: tt.partition})
			for _, m := range tt.members {
				d.s.consumers = append(d.s.consumers, &consumer{name: m.name, priority: m.priority})
			}
			if got := d.choose().name; got != tt.want {
				t.Errorf("active is %q, want %q", got, tt.want)
			}
		})
	}
}

// Topics that are no partitions spread over the consumers, and most stay where
// they are when one more comes.
func TestFailoverSpreadsPlainTopics(t *testing.T) {
	count := map[string]int{}
	moved := 0
	for i := range 1000 {
		d := newSingle(&subscription{kind: failover, partition: -1, topic: "persistent://public/default/" + texts(i, i+1)[0]})
		for _, n := range []string{"c-1", "c-2", "c-3"} {
			d.s.consumers = append(d.s.consumers, &consumer{name: n})
		}
		before := d.choose().name
		count[before]++
		d.s.consumers = append(d.s.consumers, &consumer{name: "c-4"})
		if after := d.choose().name; after != before {
			moved++
			if after != "c-4" {
				t.Fatalf("topic %d moved from %s to %s, though both were there before", i, before, after)
			}
		}
	}
	for n, k := range count {
		if k < 250 || k > 420 {
			t.Errorf("%s is active on %d of 1000 topics, want about a third", n, k)
		}
	}
	if moved < 180 || moved > 320 {
		t.Errorf("%d of 1000 topics moved, want about a quarter", moved)
	}
}

func TestSharedGoesRoundByPermits(t *testing.T) {
	g := newRig(t, testConfig(t, "dispatcherMaxRoundRobinBatchSize=2"))
	a, sinkA := g.join("a", sharedSub, 0)
	b, sinkB := g.join("b", sharedSub, 0)
	g.r.publish(9, 1)
	g.idle(NoPermits)
	g.s.box.post(func() { a.addPermits(100); b.addPermits(3) })
	g.idle(CaughtUp)
	gotA, gotB := sinkA.take(), sinkB.take()
	if len(gotB) != 3 || len(gotA) != 6 {
		t.Fatalf("a got %v, b got %v: want b its 3 permits, a the rest", gotA, gotB)
	}
	if !slices.Equal(gotA[:2], texts(0, 2)) || !slices.Equal(gotB[:2], texts(2, 4)) {
		t.Errorf("a got %v, b got %v: want turns of 2", gotA, gotB)
	}
	if all := numerically(append(gotA, gotB...)); !slices.Equal(all, texts(0, 9)) {
		t.Errorf("together %v, want each once", all)
	}
}

func TestSharedServesTheBestPriorityFirst(t *testing.T) {
	g := newRig(t, testConfig(t))
	low := func(c *consumer) { c.priority = 1 }
	a, sinkA := g.join("a", sharedSub, 0, low)
	b, sinkB := g.join("b", sharedSub, 0)
	g.r.publish(6, 1)
	g.s.box.post(func() { a.addPermits(100); b.addPermits(4) })
	g.expect(sinkB, texts(0, 4)...)
	g.expect(sinkA, texts(4, 6)...)
}

func TestSharedRedelivers(t *testing.T) {
	g := newRig(t, testConfig(t))
	g.r.publish(5, 1)
	c, sink := g.join("a", sharedSub, 100)
	g.expect(sink, texts(0, 5)...)
	if err := g.ack(c, 1); err != nil {
		t.Fatal(err)
	}
	giveBack := func(all bool, n ...int) {
		var ps []ledger.Position
		for _, i := range n {
			ps = append(ps, at(i))
		}
		if err := g.s.giveBack(t.Context(), c, ps, all, -1); err != nil {
			t.Fatal(err)
		}
	}
	sink.mu.Lock()
	sink.counts = nil
	sink.mu.Unlock()
	giveBack(false, 3, 2, 1) // 1 is acknowledged: it stays away
	g.expect(sink, "2", "3")
	giveBack(true)
	g.expect(sink, "0", "2", "3", "4")
	g.settled()
	if want := []int{1, 1, 1, 2, 2, 1}; !slices.Equal(sink.counts, want) {
		t.Errorf("redelivery counts %v, want %v", sink.counts, want)
	}
	if got := c.unacked.Load(); got != 4 {
		t.Errorf("unacknowledged = %d, want 4", got)
	}
}

// A client may acknowledge what it gave back before.
func TestSharedAckOfWhatWaitsToBeDeliveredAgain(t *testing.T) {
	g := newRig(t, testConfig(t))
	g.r.publish(2, 1)
	c, sink := g.join("a", sharedSub, 2)
	g.expect(sink, "0", "1")
	if err := g.s.giveBack(t.Context(), c, nil, true, -1); err != nil {
		t.Fatal(err)
	}
	if err := g.ack(c, 0); err != nil {
		t.Fatal(err)
	}
	st, err := g.s.stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if st.MsgInReplay != 1 {
		t.Errorf("%d wait to be delivered again, want 1", st.MsgInReplay)
	}
	g.flow(c, 10)
	g.expect(sink, "1")
}

func TestSharedLeaverHandsOnAtOnceAndInOrder(t *testing.T) {
	g := newRig(t, testConfig(t, "dispatcherMaxRoundRobinBatchSize=3"))
	a, sinkA := g.join("a", sharedSub, 0)
	b, sinkB := g.join("b", sharedSub, 0)
	g.r.publish(6, 1)
	g.s.box.post(func() { a.addPermits(3); b.addPermits(3) })
	g.expect(sinkA, texts(0, 3)...)
	g.expect(sinkB, texts(3, 6)...)
	if err := g.ack(a, 1); err != nil {
		t.Fatal(err)
	}
	g.r.publish(1, 1)
	g.leave(a)
	g.flow(b, 10)
	g.expect(sinkB, "0", "2", "6")
	if got := sinkB.counts[3]; got != 1 {
		t.Errorf("redelivery count = %d, want 1", got)
	}
	// The last one leaves: everything unacknowledged is delivered anew.
	g.leave(b)
	_, sinkC := g.join("c", sharedSub, 100)
	g.expect(sinkC, "0", "2", "3", "4", "5", "6")
	if got := sinkC.counts[0]; got != 0 {
		t.Errorf("redelivery count = %d, want 0 after all had left", got)
	}
}

func TestSharedAckThroughAnotherConsumer(t *testing.T) {
	g := newRig(t, testConfig(t))
	g.r.publish(1, 1)
	a, sinkA := g.join("a", sharedSub, 1)
	g.expect(sinkA, "0")
	b, _ := g.join("b", sharedSub, 1)
	if err := g.ack(b, 0); err != nil {
		t.Fatal(err)
	}
	if got := a.unacked.Load(); got != 0 {
		t.Errorf("a still has %d unacknowledged", got)
	}
}

func TestUnackedLimits(t *testing.T) {
	tests := []struct {
		name, key string
		first     int // delivered before it blocks
	}{
		{"consumer", "maxUnackedMessagesPerConsumer=4", 4},
		{"subscription", "maxUnackedMessagesPerSubscription=4", 4},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g := newRig(t, testConfig(t, tt.key, "dispatcherMaxReadBatchSize=1"))
			g.r.publish(10, 1)
			c, sink := g.join("a", sharedSub, 100)
			g.expect(sink, texts(0, tt.first)...)
			g.idle(TooManyUnacked)
			if err := g.ack(c, 0); err != nil {
				t.Fatal(err)
			}
			if why := g.settled(); why != TooManyUnacked {
				t.Errorf("above half: %q, want %q", why, TooManyUnacked)
			}
			if err := g.ack(c, 1); err != nil {
				t.Fatal(err)
			}
			g.expect(sink, "4", "5")
			g.idle(TooManyUnacked)
			// What is given back is delivered again, blocked or not.
			if err := g.s.giveBack(t.Context(), c, nil, true, -1); err != nil {
				t.Fatal(err)
			}
			g.expect(sink, texts(2, 6)...)
		})
	}
}

func TestSlowConsumerGetsNothingUntilDrained(t *testing.T) {
	for _, kind := range []subType{exclusive, sharedSub} {
		t.Run(typeName(kind), func(t *testing.T) {
			g := newRig(t, testConfig(t))
			_, sink := g.join("a", kind, 0)
			sink.limit = 2 * len(payload("0", 1))
			g.r.publish(10, 1)
			g.s.box.post(func() { g.s.consumers[0].addPermits(100) })
			g.expect(sink, texts(0, 2)...)
			g.idle(SlowConnection)
			g.r.publish(1, 1)
			if why := g.settled(); why != SlowConnection {
				t.Errorf("%q, want %q", why, SlowConnection)
			}
			sink.drain(1 << 20)
			g.expect(sink, texts(2, 11)...)
		})
	}
}

func TestSharedGoesOnWithoutTheSlowOne(t *testing.T) {
	g := newRig(t, testConfig(t))
	_, slow := g.join("a", sharedSub, 0)
	slow.limit = 0
	g.join("b", sharedSub, 0)
	g.s.box.post(func() {
		for _, c := range g.s.consumers {
			c.addPermits(1000)
		}
	})
	fast := g.s.consumers[1].sink.(*fakeSink)
	g.r.publish(50, 1)
	g.expect(fast, texts(0, 50)...)
	if got := slow.take(); len(got) > 0 {
		t.Errorf("the full one got %v", got)
	}
}

func TestReadFailuresAreRetriedWithBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, testConfig(t))
		g.r.failing(errors.New("no leader"))
		g.r.publish(1, 1)
		_, sink := g.join("a", exclusive, 10)
		time.Sleep(100 * time.Millisecond) // retries at 100, 300, 700, 1500 ms
		synctest.Wait()
		if why := *g.s.why.Load(); why != ReadBackoff {
			t.Errorf("why idle is %q, want %q", why, ReadBackoff)
		}
		time.Sleep(600 * time.Millisecond)
		synctest.Wait()
		if g.r.reads != 4 {
			t.Errorf("%d reads in 700 ms, want 4", g.r.reads)
		}
		g.r.failing(nil)
		time.Sleep(800 * time.Millisecond)
		synctest.Wait()
		if got := sink.take(); !slices.Equal(got, []string{"0"}) {
			t.Errorf("got %v after the reads work again", got)
		}
	})
}

func TestNothingIsSentOrAckedWithoutOwnership(t *testing.T) {
	for _, kind := range []subType{exclusive, sharedSub} {
		t.Run(typeName(kind), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newRig(t, testConfig(t))
				c, sink := g.join("a", kind, 10)
				synctest.Wait()
				g.owned.Store(false)
				g.r.publish(2, 1)
				time.Sleep(time.Minute)
				synctest.Wait()
				if got := sink.take(); len(got) > 0 {
					t.Errorf("delivered %v", got)
				}
				if err := g.ack(c, 0); !errors.Is(err, ErrClosed) {
					t.Errorf("acknowledgement: %v, want ErrClosed", err)
				}
				if g.r.isAcked(0) {
					t.Error("it was acknowledged")
				}
				g.owned.Store(true)
				time.Sleep(recheckInterval)
				synctest.Wait()
				if got := sink.take(); !slices.Equal(got, texts(0, 2)) {
					t.Errorf("got %v when ownership is confirmed again", got)
				}
			})
		})
	}
}

func TestCumulativeAck(t *testing.T) {
	g := newRig(t, testConfig(t))
	g.r.publish(5, 1)
	c, sink := g.join("a", exclusive, 100)
	g.expect(sink, texts(0, 5)...)
	upTo := func(n int) error {
		done := make(chan error, 1)
		g.s.ackCumulative(t.Context(), c, at(n), func(err error) { done <- err })
		return <-done
	}
	if err := errors.Join(upTo(2), upTo(1)); err != nil {
		t.Fatal(err)
	}
	if got := g.r.MarkDeleted(); got != at(2) {
		t.Errorf("mark-delete = %v, want %v", got, at(2))
	}
	g.leave(c)
	c, _ = g.join("a", sharedSub, 0)
	if err := upTo(3); !errors.Is(err, ErrNotAllowed) {
		t.Errorf("cumulative on Shared: %v, want ErrNotAllowed", err)
	}
}

func TestSeekDisconnectsAllAndStartsAnew(t *testing.T) {
	g := newRig(t, testConfig(t))
	g.r.publish(5, 1)
	c, sink := g.join("a", sharedSub, 100)
	_, other := g.join("b", sharedSub, 0)
	g.expect(sink, texts(0, 5)...)
	if err := g.ack(c, 0, 1); err != nil {
		t.Fatal(err)
	}
	moving, move := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	g.s.seek(t.Context(), c, func(ctx context.Context) error {
		close(moving)
		<-move
		return g.r.Seek(ctx, at(1))
	}, func(err error) { done <- err })
	<-moving
	g.idle(Seeking)
	// What comes during the seek waits, or is void.
	joined := make(chan error, 1)
	late, sinkLate := &consumer{name: "late", sink: newFakeSink()}, newFakeSink()
	late.sink = sinkLate
	g.s.add(t.Context(), late, sharedSub, func(err error) { joined <- err })
	acked := make(chan error, 1)
	g.s.ack(t.Context(), c, []ledger.Position{at(1)}, func(err error) { acked <- err })
	close(move)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if !sink.closed || !other.closed {
		t.Error("not all consumers were disconnected")
	}
	if err := <-joined; err != nil {
		t.Fatal(err)
	}
	if err := <-acked; !errors.Is(err, ErrConsumerNotFound) {
		t.Errorf("acknowledgement of a consumer from before the seek: %v, want ErrConsumerNotFound", err)
	}
	g.flow(late, 100)
	g.expect(sinkLate, texts(1, 5)...)
	g.s.seek(t.Context(), c, nil, func(err error) { done <- err })
	if err := <-done; !errors.Is(err, ErrConsumerNotFound) {
		t.Errorf("seek by a disconnected consumer: %v, want ErrConsumerNotFound", err)
	}
}

func TestSeekThatFailsChangesNothing(t *testing.T) {
	g := newRig(t, testConfig(t))
	g.r.publish(3, 1)
	c, sink := g.join("a", exclusive, 2)
	g.expect(sink, texts(0, 2)...)
	bad := errors.New("bad")
	done := make(chan error, 1)
	g.s.seek(t.Context(), c, func(context.Context) error { return bad }, func(err error) { done <- err })
	if err := <-done; !errors.Is(err, bad) {
		t.Fatal(err)
	}
	g.flow(c, 1)
	g.expect(sink, "2")
}

func TestNonDurableEndsWithItsReaderButSurvivesASeek(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, testConfig(t))
		g.r.durable = false
		ended := 0
		g.s.box.post(func() { g.s.ended = func(*subscription) { ended++ } })
		c, sink := g.join("a", exclusive, 10)
		done := make(chan error, 1)
		g.s.seek(t.Context(), c, func(context.Context) error { return nil }, func(err error) { done <- err })
		if err := <-done; err != nil || !sink.closed {
			t.Fatal(err, sink.closed)
		}
		time.Sleep(seekGrace - time.Second)
		c, _ = g.join("a", exclusive, 10)
		time.Sleep(2 * seekGrace)
		synctest.Wait()
		if ended != 0 {
			t.Fatal("it ended though its reader came back")
		}
		g.leave(c)
		synctest.Wait()
		if ended != 1 {
			t.Fatal("it did not end with its reader")
		}
		if err := g.tryJoin(c, exclusive); !errors.Is(err, ErrClosed) {
			t.Errorf("joining what has ended: %v, want ErrClosed", err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, testConfig(t))
		g.r.durable = false
		ended := make(chan struct{})
		g.s.box.post(func() { g.s.ended = func(*subscription) { close(ended) } })
		c, _ := g.join("a", exclusive, 10)
		g.s.seek(t.Context(), c, func(context.Context) error { return nil }, func(error) {})
		start := time.Now()
		<-ended
		if got := time.Since(start); got != seekGrace {
			t.Errorf("deserted after a seek it ended after %v, want %v", got, seekGrace)
		}
	})
}

func TestEndRefusesWhileOthersAreConnected(t *testing.T) {
	g := newRig(t, testConfig(t))
	a, sinkA := g.join("a", sharedSub, 0)
	_, sinkB := g.join("b", sharedSub, 0)
	end := func(force bool) error {
		done := make(chan error, 1)
		g.s.end(t.Context(), a, force, func(err error) { done <- err })
		return <-done
	}
	if err := end(false); !errors.Is(err, ErrConsumerBusy) || !strings.Contains(err.Error(), "force") {
		t.Fatalf("%v, want ErrConsumerBusy that names the way out", err)
	}
	if err := end(true); err != nil {
		t.Fatal(err)
	}
	<-g.s.done
	if !sinkB.closed || sinkA.closed {
		t.Errorf("disconnected: the other %t, the asker %t; want only the other", sinkB.closed, sinkA.closed)
	}
}

func TestStopDisconnectsAndAnswersWhoeverWaits(t *testing.T) {
	g := newRig(t, testConfig(t))
	c, sink := g.join("a", exclusive, 1)
	moving := make(chan struct{})
	done, joined := make(chan error, 1), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	g.s.seek(ctx, c, func(ctx context.Context) error {
		close(moving)
		<-ctx.Done()
		return ctx.Err()
	}, func(err error) { done <- err })
	<-moving
	g.s.add(t.Context(), &consumer{sink: newFakeSink()}, exclusive, func(err error) { joined <- err })
	time.AfterFunc(10*time.Millisecond, cancel)
	g.s.stop()
	if !sink.closed {
		t.Error("the consumer was not disconnected")
	}
	if err := <-joined; !errors.Is(err, ErrClosed) {
		t.Errorf("who waited to join got %v, want ErrClosed", err)
	}
	if err := <-done; !errors.Is(err, ErrClosed) {
		t.Errorf("who was seeking got %v, want ErrClosed", err)
	}
	if why := *g.s.why.Load(); why != Ended {
		t.Errorf("why idle is %q, want %q", why, Ended)
	}
}

// Whatever happens, in whatever order, each entry that is not acknowledged is
// delivered to somebody who is there, and what is counted adds up.
func TestSharedModel(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	g := newRig(t, testConfig(t, "maxUnackedMessagesPerConsumer=40"))
	var cs []*consumer
	for range 3000 {
		switch k := rng.IntN(10); {
		case k < 2 && len(cs) < 4:
			c, _ := g.join("c", sharedSub, rng.IntN(20))
			cs = append(cs, c)
		case len(cs) == 0:
		case k == 2:
			i := rng.IntN(len(cs))
			g.leave(cs[i])
			cs = slices.Delete(cs, i, i+1)
		case k < 5:
			g.flow(cs[rng.IntN(len(cs))], 1+rng.IntN(20))
		case k < 7:
			g.r.publish(1+rng.IntN(5), 1+rng.IntN(3))
		default:
			c := cs[rng.IntN(len(cs))]
			ack := rng.IntN(3) > 0
			part := rng.IntN(3)
			g.s.box.post(func() {
				var ps []ledger.Position
				for p := range c.pending {
					if int(p.Entry)%3 <= part {
						ps = append(ps, p)
					}
				}
				if ack {
					_ = g.s.ackNow(c, ps)
				} else {
					g.s.dispatcher.redeliver(c, ps, false)
				}
			})
		}
		checked := make(chan string, 1)
		g.s.box.post(func() { checked <- g.broken() })
		if what := <-checked; what != "" {
			t.Fatal(what)
		}
	}
	// Somebody with permits for everything gets everything.
	c, _ := g.join("last", sharedSub, 1<<20)
	waitFor(t, "all acknowledged", func() bool {
		g.s.box.post(func() {
			for _, one := range g.s.consumers {
				one.addPermits(1 << 20)
				var ps []ledger.Position
				for p := range one.pending {
					ps = append(ps, p)
				}
				_ = g.s.ackNow(c, ps)
			}
		})
		g.settled()
		return g.r.Backlog() == 0
	})
}

// broken returns what does not add up, or "". It runs on the loop.
func (g *rig) broken() string {
	d, ok := g.s.dispatcher.(*shared)
	if !ok {
		return ""
	}
	held := map[ledger.Position]bool{}
	total := 0
	for _, c := range g.s.consumers {
		mine := 0
		for p, n := range c.pending {
			if held[p] {
				return p.String() + " is held twice"
			}
			held[p] = true
			if g.r.IsAcked(p) {
				return p.String() + " is held and acknowledged"
			}
			mine += n
		}
		if int(c.unacked.Load()) != mine {
			return "a consumer's count is wrong"
		}
		total += mine
	}
	if total != d.unacked {
		return "the subscription's count is wrong"
	}
	if len(g.s.consumers) == 0 {
		return ""
	}
	waiting := map[ledger.Position]bool{}
	for _, p := range d.replay.first(1 << 30) {
		waiting[p] = true
		if g.r.IsAcked(p) {
			return p.String() + " is acknowledged and waits to be delivered again"
		}
		if held[p] {
			return p.String() + " is held and waits to be delivered again"
		}
	}
	next := int(g.r.ReadPosition().Entry)
	for i := range next {
		if p := at(i); !held[p] && !waiting[p] && !g.r.IsAcked(p) {
			return p.String() + " is lost"
		}
	}
	return ""
}

// What clients ask for during a seek is bounded like what waits for the loop.
func TestWorkDuringASeekIsBounded(t *testing.T) {
	g := newRig(t, testConfig(t))
	c, _ := g.join("a", exclusive, 1)
	moving, goOn, seeked := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	g.s.seek(t.Context(), c, func(context.Context) error {
		close(moving)
		<-goOn
		return errors.ErrUnsupported
	}, func(err error) { seeked <- err })
	<-moving
	const each, count = 1000, 500 // 8 MB in all
	var applied atomic.Int64
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		for range count {
			g.s.ack(t.Context(), c, make([]ledger.Position, each), func(error) { applied.Add(1) })
		}
	}()
	select {
	case <-sent:
		t.Errorf("all of %d bytes were taken during the seek", count*each*16)
	case <-time.After(200 * time.Millisecond):
	}
	close(goOn)
	<-sent
	<-seeked
	waitFor(t, "everything is answered", func() bool { return applied.Load() == count })
}
