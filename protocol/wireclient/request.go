package wireclient

import (
	"context"
	"fmt"

	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// request sends the command that build makes for a new request id and waits for
// its answer. An ERROR becomes a *ServerError.
func (c *conn) request(ctx context.Context, build func(id uint64) *pulsarpb.BaseCommand) (*pulsarpb.BaseCommand, error) {
	id := c.client.requestID.Add(1)
	command := build(id)
	answer := make(chan *pulsarpb.BaseCommand, 1)
	c.mu.Lock()
	c.requests[id] = answer
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.requests, id)
		c.mu.Unlock()
	}()
	if err := c.sendCommand(command); err != nil {
		return nil, err
	}
	select {
	case a := <-answer:
		if e := a.GetError(); e != nil {
			return nil, &ServerError{e.GetError(), e.GetMessage(), c.address}
		}
		return a, nil
	case <-c.done:
		return nil, fmt.Errorf("%v to %s: %w: %w", command.GetType(), c.address, ErrDisconnected, c.reason())
	case <-ctx.Done():
		return nil, fmt.Errorf("%v to %s: no answer: %w", command.GetType(), c.address, context.Cause(ctx))
	}
}

// answer hands a command to the request that waits for it. Answers that nobody
// waits for any more are dropped.
func (c *conn) answer(command *pulsarpb.BaseCommand) {
	id, ok := requestOf(command)
	if !ok {
		c.log.Debug("command ignored", "type", command.GetType().String())
		return
	}
	c.mu.Lock()
	waiting := c.requests[id]
	delete(c.requests, id)
	c.mu.Unlock()
	if waiting != nil {
		waiting <- command
	} else if e := command.GetError(); e != nil {
		c.log.Warn("error from the broker that answers no request", "code", e.GetError().String(), "message", e.GetMessage())
	}
}

// requestOf returns the request that a command answers.
func requestOf(c *pulsarpb.BaseCommand) (uint64, bool) {
	switch c.GetType() {
	case pulsarpb.BaseCommand_SUCCESS:
		return c.GetSuccess().GetRequestId(), true
	case pulsarpb.BaseCommand_ERROR:
		return c.GetError().GetRequestId(), true
	case pulsarpb.BaseCommand_PRODUCER_SUCCESS:
		return c.GetProducerSuccess().GetRequestId(), true
	case pulsarpb.BaseCommand_PARTITIONED_METADATA_RESPONSE:
		return c.GetPartitionMetadataResponse().GetRequestId(), true
	case pulsarpb.BaseCommand_LOOKUP_RESPONSE:
		return c.GetLookupTopicResponse().GetRequestId(), true
	case pulsarpb.BaseCommand_ACK_RESPONSE:
		return c.GetAckResponse().GetRequestId(), true
	case pulsarpb.BaseCommand_GET_LAST_MESSAGE_ID_RESPONSE:
		return c.GetGetLastMessageIdResponse().GetRequestId(), true
	default:
		return 0, false
	}
}
