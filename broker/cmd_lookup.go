package broker

import (
	"context"
	"time"

	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// lookup serves LOOKUP: which broker serves a topic. If it is this one, or
// becomes it, the client is told to connect; else it is sent on to ask there.
//
// Failures go inside the response: clients repeat the question on an ERROR. A
// state that passes, such as the lease of a dead owner running out, is waited for
// here, because most clients give up on the first failure.
//
// Ignored: authoritative (ownership is decided by metadata, so a redirect cannot
// go round in circles for long), listener names and properties.
func (c *conn) lookup(f protocol.Frame) error {
	cmd := f.Command.GetLookupTopic()
	return c.async(func(ctx context.Context) {
		r := &pulsarpb.CommandLookupTopicResponse{RequestId: cmd.RequestId}
		answer, err := c.b.lookup(ctx, cmd.GetTopic())
		switch {
		case err != nil:
			code, text := lookupError(err), err.Error()
			r.Response = pulsarpb.CommandLookupTopicResponse_Failed.Enum()
			r.Error, r.Message = &code, &text
		case answer.Mine:
			r.Response = pulsarpb.CommandLookupTopicResponse_Connect.Enum()
			r.BrokerServiceUrl, r.Authoritative = &answer.Broker.ServiceURL, &answer.Mine
		default:
			r.Response = pulsarpb.CommandLookupTopicResponse_Redirect.Enum()
			r.BrokerServiceUrl, r.Authoritative = &answer.Broker.ServiceURL, &answer.Mine
		}
		c.out.reply(&pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_LOOKUP_RESPONSE.Enum(), LookupTopicResponse: r})
	})
}

func (b *Broker) lookup(ctx context.Context, name string) (ownership.Answer, error) {
	topic, err := parseTopic(name)
	if err != nil {
		return ownership.Answer{}, err
	}
	var answer ownership.Answer
	err = patiently(ctx, func() (err error) {
		answer, err = b.ownership.Lookup(ctx, topic)
		return err
	})
	return answer, err
}

// patience is how long a failure that may pass is waited out, and how often it
// is tried again. It ends before clients give up on the request.
const (
	patience      = 15 * time.Second
	patienceStep  = 50 * time.Millisecond
	patienceSteps = 500 * time.Millisecond
)

// patiently repeats try while it fails in a way that may pass.
func patiently(ctx context.Context, try func() error) error {
	until := time.Now().Add(patience)
	for wait := patienceStep; ; wait = min(2*wait, patienceSteps) {
		err := try()
		if err == nil || !passing(err) || time.Now().After(until) {
			return err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return err
		}
	}
}
