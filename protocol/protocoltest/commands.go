package protocoltest

import (
	"fmt"
	"slices"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// ledgerID is the ledger that all entries claim to be in.
const ledgerID = 7

type topic struct {
	name          string
	entries       [][]byte
	subscriptions map[string]*subscription
	producers     map[*Conn]map[uint64]string // id to name
	terminated    bool
}

type subscription struct {
	topic     *topic
	typ       pulsarpb.CommandSubscribe_SubType
	from      int // first entry
	acked     map[int]bool
	flying    map[int]*consumer
	again     map[int]uint32 // redeliveries
	consumers []*consumer    // the next to be served first
}

type consumer struct {
	conn    *Conn
	id      uint64
	permits int
	told    bool // of the end
}

func (s *subscription) remove(co *consumer) {
	s.consumers = slices.DeleteFunc(slices.Clone(s.consumers), func(o *consumer) bool { return o == co })
	for i, o := range s.flying {
		if o == co {
			delete(s.flying, i)
		}
	}
}

// dispatch sends what can be sent.
func (t *topic) dispatch() {
	for _, s := range t.subscriptions {
		through := true
		for i := s.from; i < len(t.entries); i++ {
			if s.acked[i] || s.flying[i] != nil {
				continue
			}
			if !s.deliver(i) {
				through = false
				break
			}
		}
		for _, co := range s.consumers {
			if t.terminated && through && !co.told {
				co.told = true
				co.conn.send(&pulsarpb.BaseCommand{
					Type:              pulsarpb.BaseCommand_REACHED_END_OF_TOPIC.Enum(),
					ReachedEndOfTopic: &pulsarpb.CommandReachedEndOfTopic{ConsumerId: &co.id},
				})
			}
		}
	}
}

func (s *subscription) deliver(i int) bool {
	n := 1
	if m, err := protocol.Peek(s.topic.entries[i]); err == nil {
		n = m.Messages
	}
	for j, co := range s.consumers {
		if co.permits <= 0 {
			continue
		}
		co.permits -= n
		s.flying[i] = co
		if s.typ == pulsarpb.CommandSubscribe_Shared {
			s.consumers = append(slices.Delete(slices.Clone(s.consumers), j, j+1), co)
		}
		again := s.again[i]
		co.conn.send(&pulsarpb.BaseCommand{
			Type:    pulsarpb.BaseCommand_MESSAGE.Enum(),
			Message: &pulsarpb.CommandMessage{ConsumerId: &co.id, MessageId: idOf(i), RedeliveryCount: &again},
		}, s.topic.entries[i]...)
		return true
	}
	return false
}

func idOf(entry int) *pulsarpb.MessageIdData {
	return &pulsarpb.MessageIdData{LedgerId: new(uint64(ledgerID)), EntryId: new(uint64(entry))}
}

// handle serves one command; the cluster's lock is held.
func (c *Conn) handle(f protocol.Frame) {
	k, command := c.broker.cluster, f.Command
	switch command.GetType() {
	case pulsarpb.BaseCommand_CONNECT:
		c.send(&pulsarpb.BaseCommand{
			Type:      pulsarpb.BaseCommand_CONNECTED.Enum(),
			Connected: &pulsarpb.CommandConnected{ServerVersion: new("fake"), ProtocolVersion: new(int32(20))},
		})
	case pulsarpb.BaseCommand_PING:
		c.send(&pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_PONG.Enum(), Pong: &pulsarpb.CommandPong{}})
	case pulsarpb.BaseCommand_PARTITIONED_METADATA:
		c.send(&pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_PARTITIONED_METADATA_RESPONSE.Enum(),
			PartitionMetadataResponse: &pulsarpb.CommandPartitionedTopicMetadataResponse{
				RequestId: command.GetPartitionMetadata().RequestId, Partitions: new(uint32(0)),
				Response: pulsarpb.CommandPartitionedTopicMetadataResponse_Success.Enum(),
			},
		})
	case pulsarpb.BaseCommand_LOOKUP:
		c.lookup(command.GetLookupTopic())
	case pulsarpb.BaseCommand_PRODUCER:
		c.openProducer(command.GetProducer())
	case pulsarpb.BaseCommand_SEND:
		c.publish(command.GetSend(), f.Payload)
	case pulsarpb.BaseCommand_CLOSE_PRODUCER:
		for _, t := range k.topics {
			delete(t.producers[c], command.GetCloseProducer().GetProducerId())
		}
		c.success(command.GetCloseProducer().GetRequestId())
	case pulsarpb.BaseCommand_SUBSCRIBE:
		c.openConsumer(command.GetSubscribe())
	default:
		c.handleConsumer(command)
	}
}

func (c *Conn) lookup(l *pulsarpb.CommandLookupTopic) {
	r := &pulsarpb.CommandLookupTopicResponse{
		RequestId: l.RequestId, Authoritative: new(true),
		Response: pulsarpb.CommandLookupTopicResponse_Connect.Enum(), BrokerServiceUrl: new(c.broker.URL()),
	}
	if owner := c.broker.cluster.owners[l.GetTopic()]; owner != nil && owner != c.broker {
		r.Response = pulsarpb.CommandLookupTopicResponse_Redirect.Enum()
		r.BrokerServiceUrl = new(owner.URL())
	}
	c.send(&pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_LOOKUP_RESPONSE.Enum(), LookupTopicResponse: r})
}

func (c *Conn) notOwner(name string, request uint64) bool {
	if owner := c.broker.cluster.owners[name]; owner != nil && owner != c.broker {
		c.Refuse(request, pulsarpb.ServerError_ServiceNotReady, "topic is served by another broker")
		return true
	}
	return false
}

func (c *Conn) openProducer(p *pulsarpb.CommandProducer) {
	k := c.broker.cluster
	if c.notOwner(p.GetTopic(), p.GetRequestId()) {
		return
	}
	t := k.topic(p.GetTopic())
	name := p.GetProducerName()
	if name == "" {
		k.names++
		name = fmt.Sprintf("fake-%d", k.names)
	}
	if t.producers[c] == nil {
		t.producers[c] = map[uint64]string{}
	}
	t.producers[c][p.GetProducerId()] = name
	c.send(&pulsarpb.BaseCommand{
		Type: pulsarpb.BaseCommand_PRODUCER_SUCCESS.Enum(),
		ProducerSuccess: &pulsarpb.CommandProducerSuccess{
			RequestId: p.RequestId, ProducerName: &name, LastSequenceId: new(int64(-1)), SchemaVersion: []byte{},
		},
	})
}

func (c *Conn) publish(s *pulsarpb.CommandSend, payload []byte) {
	for _, t := range c.broker.cluster.topics {
		if _, ok := t.producers[c][s.GetProducerId()]; !ok {
			continue
		}
		if err := protocol.CheckPayload(payload); err != nil {
			c.send(&pulsarpb.BaseCommand{
				Type: pulsarpb.BaseCommand_SEND_ERROR.Enum(),
				SendError: &pulsarpb.CommandSendError{
					ProducerId: s.ProducerId, SequenceId: s.SequenceId, Error: pulsarpb.ServerError_ChecksumError.Enum(), Message: new(err.Error()),
				},
			})
			return
		}
		t.entries = append(t.entries, payload)
		c.send(&pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_SEND_RECEIPT.Enum(),
			SendReceipt: &pulsarpb.CommandSendReceipt{
				ProducerId: s.ProducerId, SequenceId: s.SequenceId, HighestSequenceId: s.HighestSequenceId, MessageId: idOf(len(t.entries) - 1),
			},
		})
		t.dispatch()
		return
	}
}

func (c *Conn) openConsumer(s *pulsarpb.CommandSubscribe) {
	if c.notOwner(s.GetTopic(), s.GetRequestId()) {
		return
	}
	t := c.broker.cluster.topic(s.GetTopic())
	sub := t.subscriptions[s.GetSubscription()]
	if sub == nil {
		sub = &subscription{topic: t, from: len(t.entries), acked: map[int]bool{}, flying: map[int]*consumer{}, again: map[int]uint32{}}
		if s.GetInitialPosition() == pulsarpb.CommandSubscribe_Earliest {
			sub.from = 0
		}
		t.subscriptions[s.GetSubscription()] = sub
	}
	if start := s.GetStartMessageId(); start != nil {
		sub.from = max(0, min(len(t.entries), int(int64(start.GetEntryId()))))
		sub.acked = map[int]bool{}
	}
	if s.GetSubType() == pulsarpb.CommandSubscribe_Exclusive && len(sub.consumers) > 0 {
		c.Refuse(s.GetRequestId(), pulsarpb.ServerError_ConsumerBusy, "exclusive consumer is already connected")
		return
	}
	sub.typ = s.GetSubType()
	sub.consumers = append(sub.consumers, &consumer{conn: c, id: s.GetConsumerId()})
	c.success(s.GetRequestId())
}

// handleConsumer serves the commands of an open consumer.
func (c *Conn) handleConsumer(command *pulsarpb.BaseCommand) {
	switch command.GetType() {
	case pulsarpb.BaseCommand_FLOW:
		c.with(command.GetFlow().GetConsumerId(), func(_ *subscription, co *consumer) {
			co.permits += int(command.GetFlow().GetMessagePermits())
		})
	case pulsarpb.BaseCommand_ACK:
		c.ack(command.GetAck())
	case pulsarpb.BaseCommand_REDELIVER_UNACKNOWLEDGED_MESSAGES:
		r := command.GetRedeliverUnacknowledgedMessages()
		c.with(r.GetConsumerId(), func(s *subscription, co *consumer) {
			for i, o := range s.flying {
				wanted := slices.ContainsFunc(r.GetMessageIds(), func(d *pulsarpb.MessageIdData) bool { return d.GetEntryId() == uint64(i) })
				if o == co && (wanted || len(r.GetMessageIds()) == 0) {
					delete(s.flying, i)
					s.again[i]++
				}
			}
		})
	case pulsarpb.BaseCommand_CLOSE_CONSUMER:
		c.with(command.GetCloseConsumer().GetConsumerId(), func(s *subscription, co *consumer) { s.remove(co) })
		c.success(command.GetCloseConsumer().GetRequestId())
	case pulsarpb.BaseCommand_UNSUBSCRIBE:
		c.with(command.GetUnsubscribe().GetConsumerId(), func(s *subscription, _ *consumer) {
			for name, o := range s.topic.subscriptions {
				if o == s {
					delete(s.topic.subscriptions, name)
				}
			}
		})
		c.success(command.GetUnsubscribe().GetRequestId())
	case pulsarpb.BaseCommand_SEEK:
		c.seek(command.GetSeek())
	case pulsarpb.BaseCommand_GET_LAST_MESSAGE_ID:
		g := command.GetGetLastMessageId()
		c.with(g.GetConsumerId(), func(s *subscription, _ *consumer) {
			c.send(&pulsarpb.BaseCommand{
				Type: pulsarpb.BaseCommand_GET_LAST_MESSAGE_ID_RESPONSE.Enum(),
				GetLastMessageIdResponse: &pulsarpb.CommandGetLastMessageIdResponse{
					RequestId: g.RequestId, LastMessageId: idOf(len(s.topic.entries) - 1), ConsumerMarkDeletePosition: idOf(-1),
				},
			})
		})
	default: // answers nothing
	}
}

// with calls f for the consumer of that id, then dispatches.
func (c *Conn) with(id uint64, f func(*subscription, *consumer)) {
	for _, t := range c.broker.cluster.topics {
		for _, s := range t.subscriptions {
			for _, co := range s.consumers {
				if co.conn == c && co.id == id {
					f(s, co)
					t.dispatch()
					return
				}
			}
		}
	}
}

func (c *Conn) ack(a *pulsarpb.CommandAck) {
	c.with(a.GetConsumerId(), func(s *subscription, _ *consumer) {
		for _, d := range a.GetMessageId() {
			entry := int(int64(d.GetEntryId()))
			first := entry
			if a.GetAckType() == pulsarpb.CommandAck_Cumulative {
				first = s.from
			}
			for i := first; i <= entry; i++ {
				s.acked[i] = true
				delete(s.flying, i)
			}
		}
		if a.RequestId != nil {
			c.send(&pulsarpb.BaseCommand{
				Type:        pulsarpb.BaseCommand_ACK_RESPONSE.Enum(),
				AckResponse: &pulsarpb.CommandAckResponse{ConsumerId: a.ConsumerId, RequestId: a.RequestId},
			})
		}
	})
}

func (c *Conn) seek(k *pulsarpb.CommandSeek) {
	c.with(k.GetConsumerId(), func(s *subscription, co *consumer) {
		entry := int64(0) // a time is not looked up here: the start will do
		if d := k.GetMessageId(); d != nil {
			entry = int64(d.GetEntryId())
		}
		s.from = int(max(0, min(entry, int64(len(s.topic.entries)))))
		s.acked = map[int]bool{}
		s.remove(co)
		c.send(&pulsarpb.BaseCommand{
			Type:          pulsarpb.BaseCommand_CLOSE_CONSUMER.Enum(),
			CloseConsumer: &pulsarpb.CommandCloseConsumer{ConsumerId: &co.id, RequestId: new(^uint64(0))},
		})
		c.success(k.GetRequestId())
	})
}
