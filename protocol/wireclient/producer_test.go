package wireclient

import (
	"bytes"
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/protocoltest"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
	"github.com/magnetar-io/magnetar/verify"
)

func TestPublishWritesWhatWasAsked(t *testing.T) {
	k := protocoltest.NewCluster()
	c := dial(t, k.NewBroker(t).URL(), quick())
	p := produce(t, c, ProducerOptions{Topic: "orders", Name: "me"})
	at, event := time.UnixMilli(1_900_000_000_000), time.UnixMilli(1_600_000_000_000)
	id, err := p.Send(testContext(t), OutMessage{
		Payload: []byte("hello"), Key: "k", Properties: map[string]string{"a": "b"}, EventTime: event, DeliverAt: at,
	})
	if err != nil || id.String() != "7:0" {
		t.Fatalf("Send = %v, %v", id, err)
	}
	entry := k.Entries(testTopic)[0]
	if err := protocol.CheckPayload(entry); err != nil {
		t.Fatal(err)
	}
	meta, body, err := protocol.ParseMetadata(entry)
	if err != nil {
		t.Fatal(err)
	}
	if string(body) != "hello" || meta.GetProducerName() != "me" || meta.GetSequenceId() != 0 || meta.GetPartitionKey() != "k" ||
		meta.GetProperties()[0].GetValue() != "b" || meta.NumMessagesInBatch != nil ||
		meta.GetEventTime() != uint64(event.UnixMilli()) || meta.GetDeliverAtTime() != at.UnixMilli() ||
		time.Since(time.UnixMilli(int64(meta.GetPublishTime()))).Abs() > time.Minute {
		t.Errorf("body %q, metadata %v", body, meta)
	}
	if id, err := p.Send(testContext(t), OutMessage{SequenceID: new(uint64(10))}); err != nil || id.String() != "7:1" {
		t.Errorf("second Send = %v, %v", id, err)
	}
	if m, err := protocol.Peek(k.Entries(testTopic)[1]); err != nil || m.SequenceID != 10 {
		t.Errorf("own sequence id: %+v, %v", m, err)
	}
	if err := p.Close(testContext(t)); err != nil {
		t.Error(err)
	}
	if _, err := p.Send(testContext(t), OutMessage{}); !errors.Is(err, ErrClosed) {
		t.Errorf("Send after Close: %v", err)
	}
}

// TestNothingIsLostOverBrokenConnections cuts connections and moves the topic
// while producers and a consumer work, then judges.
func TestNothingIsLostOverBrokenConnections(t *testing.T) {
	k := protocoltest.NewCluster()
	a, b := k.NewBroker(t), k.NewBroker(t)
	c := dial(t, a.URL()+","+b.Address(), quick())
	h := verify.New()
	consumer := subscribe(t, c, SubscribeOptions{FromEarliest: true, QueueSize: 50})

	const producers, each = 3, 1500
	var working sync.WaitGroup
	for i := range producers {
		p := produce(t, c, ProducerOptions{Name: "p" + strconv.Itoa(i), MaxPending: 100})
		working.Go(func() {
			for seq := range int64(each) {
				payload := verify.Payload(p.Name(), seq, 100)
				h.Send(p.Name(), seq, payload)
				err := p.SendAsync(testContext(t), OutMessage{Payload: payload}, func(id MessageID, err error) {
					if err != nil {
						t.Errorf("%s/%d: %v", p.Name(), seq, err)
						h.Failed(p.Name(), seq)
						return
					}
					h.Acked(p.Name(), seq, id.Position)
				})
				if err != nil {
					t.Error(err)
				}
				if seq%100 == 0 {
					if err := p.Flush(testContext(t)); err != nil {
						t.Error(err)
					}
				}
			}
			if err := p.Close(testContext(t)); err != nil {
				t.Error(err)
			}
		})
	}
	ctx, stop := context.WithCancel(t.Context())
	var reading, breaking sync.WaitGroup
	reading.Go(func() {
		for {
			m, err := consumer.Receive(ctx)
			if err != nil {
				return
			}
			h.Received("c", m.Payload)
			_ = consumer.Ack(m) // lost with a connection now and then: the message comes again
		}
	})
	var cuts int
	breakCtx, stopBreaking := context.WithCancel(t.Context())
	breaking.Go(func() {
		for breakCtx.Err() == nil {
			select {
			case <-time.After(15 * time.Millisecond):
			case <-breakCtx.Done():
			}
			switch cuts++; cuts % 3 {
			case 0:
				k.SetOwner(testTopic, a)
			case 1:
				a.Disconnect()
			case 2:
				k.SetOwner(testTopic, b)
				b.Disconnect()
			}
		}
	})
	working.Wait()
	stopBreaking()
	breaking.Wait()
	if err := h.Wait(testContext(t)); err != nil {
		t.Error(err)
	}
	stop()
	reading.Wait()
	v := h.Judge(verify.Options{})
	t.Logf("%d cuts: %v", cuts, v)
	if err := v.Err(); err != nil || v.Acknowledged != producers*each {
		t.Errorf("%v, %v", v, err)
	}
	if cuts < 3 {
		t.Errorf("only %d cuts: the test shows little", cuts)
	}
}

func TestResendInOrder(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	c := dial(t, b.URL(), quick())
	p := produce(t, c, ProducerOptions{})
	var epochs []uint64
	var sends atomic.Int32
	b.SetHook(func(conn *protocoltest.Conn, f protocol.Frame) bool {
		switch f.Command.GetType() {
		case pulsarpb.BaseCommand_PRODUCER:
			epochs = append(epochs, f.Command.GetProducer().GetEpoch())
			if f.Command.GetProducer().GetProducerName() != "fake-1" || f.Command.GetProducer().GetUserProvidedProducerName() {
				t.Errorf("reconnects as %v", f.Command.GetProducer())
			}
		case pulsarpb.BaseCommand_SEND:
			if n := sends.Add(1); n <= 10 {
				if n == 10 {
					conn.Close()
				}
				return true // the first ten vanish with their connection
			}
		default:
		}
		return false
	})
	results := make(chan string, 20)
	for i := range 20 {
		if err := p.SendAsync(testContext(t), OutMessage{Payload: []byte{byte(i)}}, func(id MessageID, _ error) {
			results <- strconv.Itoa(i) + "@" + id.String()
		}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 20 {
		if got, want := <-results, strconv.Itoa(i)+"@7:"+strconv.Itoa(i); got != want {
			t.Errorf("receipt %d is %s, want %s", i, got, want)
		}
	}
	for i, e := range k.Entries(testTopic) {
		if _, body, _ := protocol.ParseMetadata(e); !bytes.Equal(body, []byte{byte(i)}) {
			t.Errorf("entry %d is message %v", i, body)
		}
	}
	if len(epochs) != 1 || epochs[0] != 1 {
		t.Errorf("epochs of the reconnections: %v, want [1]", epochs)
	}
}

func TestProducerBounds(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	c := dial(t, b.URL(), quick())
	var hold atomic.Bool
	hold.Store(true)
	var held []func()
	b.SetHook(hookOn(pulsarpb.BaseCommand_SEND, func(conn *protocoltest.Conn, command *pulsarpb.BaseCommand) bool {
		held = append(held, func() { sendReceipt(conn, command.GetSend().GetProducerId(), command.GetSend().GetSequenceId()) })
		if !hold.Load() {
			for _, f := range held {
				f()
			}
			held = nil
		}
		return true
	}))
	check := func(p *Producer, m OutMessage, fit int) {
		t.Helper()
		for range fit {
			if err := p.SendAsync(testContext(t), m, func(MessageID, error) {}); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		if err := p.SendAsync(ctx, m, func(MessageID, error) {}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("message %d: %v, want it to wait for room", fit+1, err)
		}
	}
	check(produce(t, c, ProducerOptions{MaxPending: 3}), OutMessage{}, 3)
	byBytes := produce(t, c, ProducerOptions{MaxPendingBytes: 10_000})
	big := OutMessage{Payload: make([]byte, 4000)}
	check(byBytes, big, 2)
	if err := byBytes.SendAsync(t.Context(), OutMessage{Payload: make([]byte, 10_001)}, nil); !errors.Is(err, ErrMessageTooLarge) {
		t.Errorf("message over MaxPendingBytes: %v", err)
	}
	whole := produce(t, c, ProducerOptions{MaxPendingBytes: 1 << 30})
	if err := whole.SendAsync(t.Context(), OutMessage{Payload: make([]byte, protocol.DefaultMaxMessageSize)}, nil); !errors.Is(err, ErrMessageTooLarge) {
		t.Errorf("message over the broker's maximum: %v", err)
	}
	hold.Store(false)
	if _, err := produce(t, c, ProducerOptions{}).Send(testContext(t), OutMessage{}); err != nil {
		t.Fatal(err)
	}
	if err := byBytes.SendAsync(testContext(t), big, func(MessageID, error) {}); err != nil {
		t.Errorf("after the receipts: %v", err)
	}
}

func sendReceipt(c *protocoltest.Conn, producer, sequence uint64) {
	c.Send(&pulsarpb.BaseCommand{
		Type:        pulsarpb.BaseCommand_SEND_RECEIPT.Enum(),
		SendReceipt: &pulsarpb.CommandSendReceipt{ProducerId: &producer, SequenceId: &sequence, MessageId: Earliest.data()},
	})
}

func TestSendTimeout(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	c := dial(t, b.URL(), quick())
	p := produce(t, c, ProducerOptions{SendTimeout: 20 * time.Millisecond})
	b.SetHook(hookOn(pulsarpb.BaseCommand_SEND, func(*protocoltest.Conn, *pulsarpb.BaseCommand) bool { return true }))
	if _, err := p.Send(testContext(t), OutMessage{}); !errors.Is(err, ErrTimeout) {
		t.Errorf("Send without receipt: %v, want ErrTimeout", err)
	}
	b.SetHook(nil)
	patient := produce(t, c, ProducerOptions{SendTimeout: -1})
	if _, err := patient.Send(testContext(t), OutMessage{}); err != nil {
		t.Errorf("Send afterwards: %v", err)
	}
}

// TestStrangeReceipts: a receipt that is too new means that one was lost, and the
// messages are sent again; one that is too old is a repeat.
func TestStrangeReceipts(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	c := dial(t, b.URL(), quick())
	p := produce(t, c, ProducerOptions{})
	var lost atomic.Bool
	b.SetHook(hookOn(pulsarpb.BaseCommand_SEND, func(conn *protocoltest.Conn, command *pulsarpb.BaseCommand) bool {
		s := command.GetSend()
		switch {
		case s.GetSequenceId() == 0 && !lost.Load():
			return true
		case s.GetSequenceId() == 1 && !lost.Load():
			lost.Store(true)
			sendReceipt(conn, s.GetProducerId(), 1)
			return true
		case s.GetSequenceId() == 1:
			sendReceipt(conn, s.GetProducerId(), 0)
		}
		return false
	}))
	var wg sync.WaitGroup
	for range 2 {
		wg.Add(1)
		if err := p.SendAsync(testContext(t), OutMessage{}, func(id MessageID, err error) {
			if err != nil || id.Entry < 0 {
				t.Errorf("%v, %v: the id is from a receipt that is not its own", id, err)
			}
			wg.Done()
		}); err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
	if n := len(k.Entries(testTopic)); n != 2 || !lost.Load() {
		t.Errorf("%d entries stored, want 2", n)
	}
}

func TestSendErrors(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	c := dial(t, b.URL(), quick())
	var answer atomic.Int32
	b.SetHook(hookOn(pulsarpb.BaseCommand_SEND, func(conn *protocoltest.Conn, command *pulsarpb.BaseCommand) bool {
		code := answer.Swap(-1)
		if code < 0 {
			return false
		}
		s := command.GetSend()
		conn.Send(&pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_SEND_ERROR.Enum(),
			SendError: &pulsarpb.CommandSendError{
				ProducerId: s.ProducerId, SequenceId: s.SequenceId, Error: pulsarpb.ServerError(code).Enum(), Message: new("no"),
			},
		})
		return true
	}))
	p := produce(t, c, ProducerOptions{})
	for _, passing := range []pulsarpb.ServerError{pulsarpb.ServerError_PersistenceError, pulsarpb.ServerError_ServiceNotReady, pulsarpb.ServerError_ChecksumError} {
		answer.Store(int32(passing))
		if _, err := p.Send(testContext(t), OutMessage{}); err != nil {
			t.Errorf("%v once: %v, want it sent again", passing, err)
		}
	}
	answer.Store(int32(pulsarpb.ServerError_NotAllowedError))
	if _, err := p.Send(testContext(t), OutMessage{}); err == nil || !strings.Contains(err.Error(), "NotAllowedError: no") {
		t.Errorf("NotAllowedError: %v", err)
	}
	if _, err := p.Send(testContext(t), OutMessage{}); err != nil {
		t.Errorf("after NotAllowedError: %v", err)
	}
	answer.Store(int32(pulsarpb.ServerError_TopicTerminatedError))
	for range 2 {
		if _, err := p.Send(testContext(t), OutMessage{}); err == nil || !strings.Contains(err.Error(), "TopicTerminatedError") {
			t.Errorf("TopicTerminatedError: %v", err)
		}
	}
}

func TestProducerRefused(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	c := dial(t, b.URL(), quick())
	var attempts, answer atomic.Int32
	answer.Store(int32(pulsarpb.ServerError_ProducerBusy))
	hook := hookOn(pulsarpb.BaseCommand_PRODUCER, func(conn *protocoltest.Conn, command *pulsarpb.BaseCommand) bool {
		attempts.Add(1)
		conn.Refuse(command.GetProducer().GetRequestId(), pulsarpb.ServerError(answer.Load()), "taken")
		return true
	})
	b.SetHook(hook)
	_, err := c.CreateProducer(testContext(t), ProducerOptions{Topic: testTopic})
	var refused *ServerError
	if !errors.As(err, &refused) || refused.Code != pulsarpb.ServerError_ProducerBusy || attempts.Load() != 1 {
		t.Errorf("busy name: %v after %d attempts, want one", err, attempts.Load())
	}
	b.SetHook(nil)
	p := produce(t, c, ProducerOptions{})

	// On a reconnection the name may still be held by the lost connection: go on.
	attempts.Store(0)
	b.SetHook(hook)
	b.Disconnect()
	eventually(t, "three attempts", func() bool { return attempts.Load() >= 3 })
	b.SetHook(nil)
	if _, err := p.Send(testContext(t), OutMessage{}); err != nil {
		t.Error(err)
	}

	// But being fenced is final.
	answer.Store(int32(pulsarpb.ServerError_ProducerFenced))
	b.SetHook(hook)
	b.Disconnect()
	eventually(t, "the producer has ended", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := p.Send(ctx, OutMessage{})
		return err != nil && strings.Contains(err.Error(), "ProducerFenced")
	})
}

// TestClosedAtOnce: the broker takes a producer and a consumer and closes them
// with its next command, before the client has taken note of the first.
func TestClosedAtOnce(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	c := dial(t, b.URL(), quick())
	var closed atomic.Int32
	b.SetHook(func(conn *protocoltest.Conn, f protocol.Frame) bool {
		switch command := f.Command; command.GetType() {
		case pulsarpb.BaseCommand_PRODUCER:
			if closed.Add(1) > 5 {
				return false
			}
			id := command.GetProducer().GetProducerId()
			conn.SendRaw(append(
				protocol.AppendFrame(nil, &pulsarpb.BaseCommand{
					Type:            pulsarpb.BaseCommand_PRODUCER_SUCCESS.Enum(),
					ProducerSuccess: &pulsarpb.CommandProducerSuccess{RequestId: command.GetProducer().RequestId, ProducerName: new("p")},
				}),
				protocol.AppendFrame(nil, &pulsarpb.BaseCommand{
					Type:          pulsarpb.BaseCommand_CLOSE_PRODUCER.Enum(),
					CloseProducer: &pulsarpb.CommandCloseProducer{ProducerId: &id, RequestId: new(uint64(0))},
				})...))
			return true
		case pulsarpb.BaseCommand_SUBSCRIBE:
			if closed.Add(1) > 5 {
				return false
			}
			id := command.GetSubscribe().GetConsumerId()
			conn.SendRaw(append(
				protocol.AppendFrame(nil, &pulsarpb.BaseCommand{
					Type: pulsarpb.BaseCommand_SUCCESS.Enum(), Success: &pulsarpb.CommandSuccess{RequestId: command.GetSubscribe().RequestId},
				}),
				protocol.AppendFrame(nil, &pulsarpb.BaseCommand{
					Type:          pulsarpb.BaseCommand_CLOSE_CONSUMER.Enum(),
					CloseConsumer: &pulsarpb.CommandCloseConsumer{ConsumerId: &id, RequestId: new(uint64(0))},
				})...))
			return true
		default:
			return false
		}
	})
	consumer := subscribe(t, c, SubscribeOptions{FromEarliest: true})
	eventually(t, "the consumer is attached", func() bool { return closed.Load() > 5 && consumer.attachedTo() != nil })
	closed.Store(0)
	p := produce(t, c, ProducerOptions{})
	if _, err := p.Send(testContext(t), OutMessage{Payload: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	receive(t, consumer)
}

func BenchmarkSendAsync(b *testing.B) {
	k := protocoltest.NewCluster()
	broker := k.NewBroker(b)
	broker.SetHook(hookOn(pulsarpb.BaseCommand_SEND, func(conn *protocoltest.Conn, command *pulsarpb.BaseCommand) bool {
		sendReceipt(conn, command.GetSend().GetProducerId(), command.GetSend().GetSequenceId())
		return true
	}))
	c := dial(b, broker.URL(), quick())
	p := produce(b, c, ProducerOptions{})
	m := OutMessage{Payload: make([]byte, 1024)}
	b.ReportAllocs()
	b.SetBytes(1024)
	for b.Loop() {
		if err := p.SendAsync(b.Context(), m, func(MessageID, error) {}); err != nil {
			b.Fatal(err)
		}
	}
	if err := p.Flush(b.Context()); err != nil {
		b.Fatal(err)
	}
}
