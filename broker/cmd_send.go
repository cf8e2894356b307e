package broker

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/protocol"
)

// payloadMagic opens every payload that a client may send.
const payloadMagic = 0x0e01

// send serves SEND: the payload is checked, stored untouched as one entry, and
// answered with SEND_RECEIPT once it is stored, or SEND_ERROR if it was refused.
// Batches, compression, encryption and chunks are the clients' business.
//
// While too many publishes wait for storage, of this connection or of the whole
// broker, the reader waits here; that is how producers are slowed down.
//
// A SEND to a producer that the broker closed is dropped: the client sends it
// again where it reconnects. One to a producer that never was costs the
// connection.
func (c *conn) send(f protocol.Frame) error {
	cmd := f.Command.GetSend()
	c.mu.Lock()
	slot := c.producers[cmd.GetProducerId()]
	var p *producer
	if slot != nil {
		p = slot.producer
	}
	c.mu.Unlock()
	if slot == nil {
		return badRequest(noRequest, fmt.Errorf("SEND to producer %d, which is not open on this connection", cmd.GetProducerId()))
	}
	if p == nil {
		return nil
	}
	op := p.begin(cmd)
	if op == nil {
		return nil
	}
	messages, err := checkPublish(f)
	if err != nil {
		c.b.metrics.publishRefused.Inc()
		c.log.Warn("publish refused", "topic", p.topic.full, "producer", p.name, "sequence", op.sequence, "err", err)
		op.refuse(err)
		return nil
	}
	op.messages, op.size = messages, len(f.Payload)
	release, err := c.reserve(int64(len(f.Payload)))
	if err != nil {
		return err
	}
	p.topic.ml.Append(f.Payload, func(at ledger.Position, err error) {
		release()
		op.stored(at, err)
	})
	return nil
}

// checkPublish returns how many messages a SEND brings, or why it cannot be
// stored.
func checkPublish(f protocol.Frame) (messages int, err error) {
	if cmd := f.Command.GetSend(); cmd.TxnidMostBits != nil || cmd.TxnidLeastBits != nil {
		return 0, fmt.Errorf("SEND in a transaction: %w", ErrUnsupported)
	}
	if len(f.Payload) == 0 {
		return 0, errNoPayload
	}
	if len(f.Payload) < 2 || binary.BigEndian.Uint16(f.Payload) != payloadMagic {
		return 0, fmt.Errorf("%w payload: it does not start with %#04x", protocol.ErrMalformed, payloadMagic)
	}
	if err := protocol.CheckPayload(f.Payload); err != nil {
		return 0, err
	}
	meta, err := protocol.Peek(f.Payload)
	return meta.Messages, err
}

// reserve takes room for a publish of n bytes, waiting for it if need be, and
// returns what gives it back.
func (c *conn) reserve(n int64) (release func(), err error) {
	mine, all := min(n, maxPublishBytesPerConnection), min(n, c.b.publishLimit)
	if !c.publish.TryAcquire(1) {
		resume := c.pause()
		err = c.publish.Acquire(c.ctx, 1)
		resume()
	}
	if err == nil && !c.bytes.TryAcquire(mine) {
		resume := c.pause()
		err = c.bytes.Acquire(c.ctx, mine)
		resume()
	}
	if err == nil && !c.b.publishBytes.TryAcquire(all) {
		c.b.metrics.publishPaused.Inc()
		resume := c.pause()
		err = c.b.publishBytes.Acquire(c.ctx, all)
		resume()
	}
	if err != nil { // the connection is ending, and its own counts with it
		return nil, context.Cause(c.ctx)
	}
	return func() {
		c.publish.Release(1)
		c.bytes.Release(mine)
		c.b.publishBytes.Release(all)
	}, nil
}
