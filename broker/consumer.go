package broker

import (
	"context"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/protocol"
)

// sink is a consumer's way to its client. None of its methods waits.
type sink interface {
	// room returns how many bytes of messages may be sent now. If that is none,
	// w is poked once there is room again.
	room(w waker) int
	// deliver sends one entry.
	deliver(c *consumer, e ledger.Entry, redeliveries int)
	// tellActive says whether the consumer is its subscription's active one.
	tellActive(c *consumer, active bool)
	// disconnect takes the consumer off its connection and tells the client to
	// look its topic up again.
	disconnect(c *consumer)
}

// waker is told to look again. poke never waits.
type waker interface{ poke() }

// consumer is one client's end of a subscription. The subscription's loop owns
// everything but what is fixed at creation and the atomics.
type consumer struct {
	id        uint64 // the client's number, unique on its connection
	name      string
	priority  int32 // 0 is served first
	sink      sink
	holder    holder // whose connection it is; asked whether it lives
	partition int32  // of the topic; -1 = it is none
	metadata  map[string]string
	address   string
	client    string // the client's version
	since     time.Time

	// Loop only.
	permits int     // messages that may still be sent; below 0 after a large batch
	average float64 // messages per entry, moving average; 0 = nothing sent yet
	pending map[ledger.Position]int
	epoch   int64 // of the client's last redelivery request; -1 = it counts none
	told    int8  // what it knows of being active: 0 nothing, 1 yes, -1 no
	gone    bool  // removed from its subscription
	serial  int64 // counts the subscription's consumers

	// Written by the loop, read by anybody.
	available atomic.Int64 // permits
	unacked   atomic.Int64 // messages in pending
	blocked   atomic.Bool  // by its limit of unacknowledged messages
	out       traffic
	redeliver traffic
	acks      traffic
	lastFlow  atomic.Int64 // Unix milliseconds; so are the others
	lastAck   atomic.Int64
	lastSent  atomic.Int64
}

// holder is a connection that may hold a name or a subscription.
type holder interface {
	// alive asks the peer for a sign of life. If none comes in time it closes the
	// connection, waits until all that it held is free, and returns false.
	alive(ctx context.Context) bool
}

// averageWeight is how much of the old average of messages per entry stays.
const averageWeight = 0.9

// entries returns how many entries are worth reading for messages permits.
func (c *consumer) entries(messages int) int {
	if c.average <= 1 {
		return messages
	}
	return max(1, int(float64(messages)/c.average+0.5))
}

func (c *consumer) addPermits(n int) {
	c.permits += n
	c.available.Store(int64(c.permits))
}

// send hands one entry of the given number of messages to the client.
func (c *consumer) send(e ledger.Entry, messages, redeliveries int) {
	c.addPermits(-messages)
	if c.average == 0 {
		c.average = float64(messages)
	} else {
		c.average = averageWeight*c.average + (1-averageWeight)*float64(messages)
	}
	c.out.add(messages, len(e.Data))
	if redeliveries > 0 {
		c.redeliver.add(messages, len(e.Data))
	}
	c.lastSent.Store(time.Now().UnixMilli())
	c.sink.deliver(c, e, redeliveries)
}

// label tells consumers apart in metrics: two connections may use the same id.
func (c *consumer) label() string {
	return strconv.FormatUint(c.id, 10) + "." + strconv.FormatInt(c.serial, 10)
}

// messagesIn returns how many messages an entry holds.
func messagesIn(data []byte) int {
	meta, err := protocol.Peek(data)
	if err != nil {
		return 1 // its bytes go out as they are; the client will refuse them
	}
	return meta.Messages
}
