package broker

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"sync/atomic"
	"testing"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

type countingWaker struct{ n atomic.Int32 }

func (w *countingWaker) poke() { w.n.Add(1) }

func pong() *pulsarpb.BaseCommand {
	return &pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_PONG.Enum(), Pong: &pulsarpb.CommandPong{}}
}

func TestOutgoingKeepsOrderAndBytes(t *testing.T) {
	o := newOutgoing()
	first, second := payload("first", 1), payload("second", 3)
	o.deliver(delivery{consumer: 1, ledger: 7, entry: 42, partition: -1, epoch: -1}, first)
	o.reply(pong())
	o.deliver(delivery{consumer: 2, ledger: 8, entry: 1, partition: 3, redeliveries: 2, epoch: 5}, second)
	o.close(false)
	if o.reply(pong()) || o.deliver(delivery{}, first) {
		t.Error("accepted after close")
	}
	var wire bytes.Buffer
	if err := o.write(&wire); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReaderSize(&wire, 32<<10)
	read := func() protocol.Frame {
		f, err := protocol.ReadFrame(r, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	f := read()
	m := f.Command.GetMessage()
	if !bytes.Equal(f.Payload, first) || m.GetConsumerId() != 1 || m.GetMessageId().GetLedgerId() != 7 ||
		m.GetMessageId().GetEntryId() != 42 || m.GetMessageId().GetPartition() != -1 || m.RedeliveryCount != nil || m.ConsumerEpoch != nil {
		t.Errorf("first message: %v", f.Command)
	}
	if f = read(); f.Command.GetType() != pulsarpb.BaseCommand_PONG {
		t.Errorf("then %v, want PONG", f.Command)
	}
	f = read()
	m = f.Command.GetMessage()
	if !bytes.Equal(f.Payload, second) || m.GetRedeliveryCount() != 2 || m.GetConsumerEpoch() != 5 || m.GetMessageId().GetPartition() != 3 {
		t.Errorf("second message: %v", f.Command)
	}
	if _, err := protocol.ReadFrame(r, 1<<20); err != io.EOF { //nolint:errorlint // io.EOF is what the contract says
		t.Errorf("after all: %v, want EOF", err)
	}
}

func TestOutgoingIsBounded(t *testing.T) {
	o := newOutgoing()
	var w countingWaker
	big := make([]byte, 1<<20)
	n := 0
	for ; o.room(&w) > 0; n++ {
		o.deliver(delivery{epoch: -1}, big)
	}
	if n > outgoingHigh/len(big) {
		t.Errorf("%d MiB fitted, the bound is %d", n, outgoingHigh>>20)
	}
	for range maxRepliesBytes / 8 {
		o.reply(pong())
	}
	drained := o.backlog()
	if drained == nil {
		t.Fatal("the reader may go on though replies are at their bound")
	}
	if w.n.Load() != 0 {
		t.Fatal("poked before anything was written")
	}
	near, far := net.Pipe()
	done := make(chan error, 1)
	go func() { done <- o.write(near) }()
	go func() { _, _ = io.Copy(io.Discard, far) }()
	<-drained
	waitFor(t, "poked", func() bool { return w.n.Load() == 1 })
	if o.room(&w) <= 0 {
		t.Error("no room after it drained")
	}
	o.close(false)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if o.messages != 0 || o.replies != 0 {
		t.Errorf("counts after all was written: %d, %d", o.messages, o.replies)
	}
	_ = near.Close()
}

func TestOutgoingCloseFreesWhoeverWaits(t *testing.T) {
	o := newOutgoing()
	var w countingWaker
	o.deliver(delivery{epoch: -1}, make([]byte, outgoingHigh))
	if o.room(&w) > 0 {
		t.Fatal("there is room")
	}
	for range maxRepliesBytes / 8 {
		o.reply(pong())
	}
	drained := o.backlog()
	o.close(true)
	<-drained
	if w.n.Load() != 1 {
		t.Errorf("poked %d times, want once", w.n.Load())
	}
	if err := o.write(io.Discard); err == nil {
		t.Error("an aborted writer ended as if all was written")
	}
}

func BenchmarkOutgoingDeliver(b *testing.B) {
	o := newOutgoing()
	data := make([]byte, 1024)
	b.ReportAllocs()
	b.SetBytes(int64(len(data)))
	for n := 0; b.Loop(); n++ {
		o.deliver(delivery{consumer: 1, ledger: 7, entry: uint64(n), partition: -1, epoch: -1}, data)
		if n%1000 == 999 {
			o.heads, o.frames = o.heads[:0], o.frames[:0]
		}
	}
}
