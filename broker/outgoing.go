package broker

import (
	"bufio"
	"errors"
	"io"
	"sync"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// settleBytes is after how many written bytes the queue's counts are corrected,
// and so how coarsely a slow connection is seen to drain.
const settleBytes = 256 << 10

// errAborted ends a writer whose connection is being closed.
var errAborted = errors.New("connection closed")

// outgoing is what waits to be written to one connection. Anybody adds to it and
// never waits; one writer empties it.
//
// Messages are bounded by their senders: each asks room first and stops at
// outgoingHigh. Replies are bounded by the connection's reader, which stops
// reading at maxRepliesBytes.
type outgoing struct {
	wake chan struct{} // capacity 1; a token means "look again"

	mu       sync.Mutex         // guards the following
	heads    []byte             // encoded commands, one after the other
	frames   []frame            // what belongs to them
	messages int                // bytes of messages queued or being written
	replies  int                // the same of everything else
	full     map[waker]struct{} // who wants to hear that messages fell to outgoingLow
	drained  chan struct{}      // closed when replies fell to half; nil if nobody waits
	closing  bool               // nothing more is accepted; the writer ends when empty
	aborted  bool               // the writer ends at once

	scratch scratch // guarded like the rest
}

// scratch is a MESSAGE command whose fields point into itself, so that encoding
// one allocates nothing.
type scratch struct {
	delivery
	epochValue uint64
	base       pulsarpb.BaseCommand
	message    pulsarpb.CommandMessage
	id         pulsarpb.MessageIdData
}

func (s *scratch) init() {
	s.base.Type, s.base.Message = pulsarpb.BaseCommand_MESSAGE.Enum(), &s.message
	s.message.ConsumerId, s.message.MessageId = &s.consumer, &s.id
	s.id.LedgerId, s.id.EntryId, s.id.Partition = &s.ledger, &s.entry, &s.partition
}

// set makes the command say d. Fields at their default are left out.
func (s *scratch) set(d delivery) *pulsarpb.BaseCommand {
	s.delivery, s.epochValue = d, uint64(d.epoch)
	s.message.RedeliveryCount, s.message.ConsumerEpoch = nil, nil
	if d.redeliveries > 0 {
		s.message.RedeliveryCount = &s.redeliveries
	}
	if d.epoch >= 0 {
		s.message.ConsumerEpoch = &s.epochValue
	}
	return &s.base
}

// frame is one command in heads and the payload that follows it.
type frame struct {
	head    int    // bytes in heads
	payload []byte // borrowed for good: payloads are immutable; nil = none
}

func newOutgoing() *outgoing {
	o := &outgoing{wake: make(chan struct{}, 1), full: map[waker]struct{}{}}
	o.scratch.init()
	return o
}

// reply queues a command without payload. It reports whether it was accepted.
func (o *outgoing) reply(c *pulsarpb.BaseCommand) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closing {
		return false
	}
	before := len(o.heads)
	o.heads = protocol.AppendFrame(o.heads, c)
	head := len(o.heads) - before
	o.frames = append(o.frames, frame{head: head})
	o.replies += head
	o.poke()
	return true
}

// room returns how many bytes of messages may be added. If that is none, w is
// poked once there is room.
func (o *outgoing) room(w waker) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	free := outgoingHigh - o.messages
	if free <= 0 && !o.closing {
		o.full[w] = struct{}{}
	}
	return free
}

// delivery is what a MESSAGE command says.
type delivery struct {
	consumer      uint64
	ledger, entry uint64
	partition     int32
	redeliveries  uint32
	epoch         int64 // -1 = the client counts none
}

// deliver queues one message. It reports whether it was accepted.
func (o *outgoing) deliver(d delivery, payload []byte) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closing {
		return false
	}
	before := len(o.heads)
	o.heads = protocol.AppendPayloadHeader(o.heads, o.scratch.set(d), len(payload))
	head := len(o.heads) - before
	o.frames = append(o.frames, frame{head: head, payload: payload})
	o.messages += head + len(payload)
	o.poke()
	return true
}

// poke wakes the writer. The caller holds mu, which does no harm: it never waits.
func (o *outgoing) poke() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// backlog returns nil if the reader may go on, or a channel that closes when
// enough replies were written.
func (o *outgoing) backlog() <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.replies < maxRepliesBytes || o.closing {
		return nil
	}
	if o.drained == nil {
		o.drained = make(chan struct{})
	}
	return o.drained
}

// close refuses what comes from now on and lets the writer end: once everything
// is written, or at once.
func (o *outgoing) close(abort bool) {
	o.mu.Lock()
	o.closing = true
	o.aborted = o.aborted || abort
	o.poke()
	wake := o.emptied(0, 0)
	o.mu.Unlock()
	for _, w := range wake {
		w.poke()
	}
}

// emptied corrects the counts and returns whom to poke. The caller holds mu, and
// pokes after letting go of it.
func (o *outgoing) emptied(messages, replies int) (wake []waker) {
	o.messages -= messages
	o.replies -= replies
	if o.drained != nil && (o.replies <= maxRepliesBytes/2 || o.closing) {
		close(o.drained)
		o.drained = nil
	}
	if len(o.full) > 0 && (o.messages <= outgoingLow || o.closing) {
		for w := range o.full {
			wake = append(wake, w)
		}
		clear(o.full)
	}
	return wake
}

// write empties the queue into w until close. It returns nil once everything was
// written, or why it was not.
func (o *outgoing) write(w io.Writer) error {
	out := bufio.NewWriterSize(w, 64<<10)
	var heads []byte
	var frames []frame
	for {
		o.mu.Lock()
		heads, o.heads = o.heads, heads[:0]
		frames, o.frames = o.frames, frames[:0]
		closing, aborted := o.closing, o.aborted
		o.mu.Unlock()
		switch {
		case aborted:
			return errAborted
		case len(frames) > 0:
			if err := o.flush(out, heads, frames); err != nil {
				return err
			}
			clear(frames) // let payloads go
			if cap(heads) > maxRepliesBytes {
				heads = nil // a burst must not be remembered for ever
			}
		case closing:
			return nil
		default:
			<-o.wake
		}
	}
}

func (o *outgoing) flush(out *bufio.Writer, heads []byte, frames []frame) error {
	messages, replies := 0, 0
	settle := func() {
		o.mu.Lock()
		wake := o.emptied(messages, replies)
		o.mu.Unlock()
		for _, w := range wake {
			w.poke()
		}
		messages, replies = 0, 0
	}
	for _, f := range frames {
		if _, err := out.Write(heads[:f.head]); err != nil {
			return err
		}
		heads = heads[f.head:]
		if f.payload == nil {
			replies += f.head
			continue
		}
		if _, err := out.Write(f.payload); err != nil {
			return err
		}
		if messages += f.head + len(f.payload); messages >= settleBytes {
			settle()
		}
	}
	err := out.Flush()
	settle()
	return err
}
