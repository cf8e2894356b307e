package bookie

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
)

const (
	// maxUnanswered bounds the appends of one stream that are not answered; at
	// it the stream is not read.
	maxUnanswered = 8192

	// maxAnswers bounds the answers in one message.
	maxAnswers = 1024
)

// appendStream is one client's stream of appends. Appends are answered in the
// order of their arrival, whatever the order in which they are decided.
//
// One goroutine receives and admits, the handler's own sends.
type appendStream struct {
	server *ledgersServer
	wire   bookiepb.Ledgers_AppendServer

	room  chan struct{} // a token per append that is not answered; sent by receive, taken by send
	ready chan struct{} // capacity 1: the oldest append may have been decided; never closed

	mu    sync.Mutex // guards what follows, and every slot's decided and outcome
	slots []*slot    // not answered, oldest first
}

// slot is one append's place in the order of answers.
type slot struct {
	ledger  ledger.ID
	first   ledger.EntryID
	outcome outcome
	decided bool
}

// Append implements the RPC. It returns once the client has finished sending and
// everything is answered, or when the stream breaks or the bookie shuts down.
func (s *ledgersServer) Append(wire bookiepb.Ledgers_AppendServer) error {
	a := &appendStream{
		server: s, wire: wire,
		room: make(chan struct{}, maxUnanswered), ready: make(chan struct{}, 1),
	}
	// The receiver blocks in Recv until this handler has returned, so it cannot
	// be awaited here; shutdown awaits it.
	received := make(chan error, 1)
	if !s.begin(func() { received <- a.receive(wire.Context()) }) {
		return errStopping
	}
	finished := false
	for {
		select {
		case <-a.ready:
			if err := a.send(); err != nil {
				return err
			}
		case err := <-received:
			if !errors.Is(err, io.EOF) {
				return err
			}
			finished = true
		case <-s.closing.Done():
			return errStopping
		case <-wire.Context().Done():
			return wire.Context().Err()
		}
		if finished && a.empty() {
			return nil
		}
	}
}

// receive reads requests until the stream ends; io.EOF is the client's good
// end. It waits while the group's queue or this stream's is full.
func (a *appendStream) receive(ctx context.Context) error {
	for {
		request, err := a.wire.Recv()
		if err != nil {
			return err
		}
		for _, r := range request.GetAppends() {
			select {
			case a.room <- struct{}{}:
			case <-ctx.Done():
				return ctx.Err()
			}
			if err := a.append(ctx, r); err != nil {
				return err
			}
		}
	}
}

// append takes one append: checks it, waits for room in its group's queue and
// submits it. What is wrong with it becomes its answer; an error ends the stream.
func (a *appendStream) append(ctx context.Context, r *bookiepb.LedgerAppend) error {
	o := op{
		kind: opAppend, ledger: ledger.ID(r.GetLedger()), epoch: r.GetEpoch(),
		first: ledger.EntryID(r.GetFirst()), frames: r.GetEntries(),
	}
	s := &slot{ledger: o.ledger, first: o.first}
	a.mu.Lock()
	a.slots = append(a.slots, s)
	a.mu.Unlock()

	entries, refusal := o.checkEntries()
	if refusal == nil {
		refusal = a.server.store.admit()
	}
	if refusal != nil {
		a.decide(s, outcome{err: refusal})
		return nil //nolint:nilerr // the refusal is this append's answer; the stream goes on
	}
	g := a.server.groupOf(o.ledger)
	size := len(o.frames)
	if err := g.proposer.admit(ctx, size); err != nil {
		return err
	}
	g.proposer.submit(task{op: o, entries: entries, done: func(out outcome) {
		g.proposer.release(size)
		a.decide(s, out)
	}})
	return nil
}

// checkEntries verifies what a client sent before any of it reaches the log, and
// returns the number of entries.
func (o op) checkEntries() (int, error) {
	if err := o.validate(); err != nil {
		return 0, fmt.Errorf("ledger %d, entry %d: %w: %w", o.ledger, o.first, rpc.ErrInvalid, err)
	}
	n, _, err := bookiepb.Check(o.frames)
	if err != nil {
		// Not ErrDamaged, which is for entries that are stored.
		return 0, fmt.Errorf("ledger %d, append at entry %d: %w: %s", o.ledger, o.first, rpc.ErrInvalid, err.Error())
	}
	return n, nil
}

func (a *appendStream) decide(s *slot, o outcome) {
	if o.err != nil {
		a.server.metrics.refused.WithLabelValues(refusal(o.err)).Inc()
	}
	a.mu.Lock()
	s.outcome, s.decided = o, true
	oldest := len(a.slots) > 0 && a.slots[0].decided
	a.mu.Unlock()
	if oldest {
		select {
		case a.ready <- struct{}{}:
		default: // a wake-up is waiting already
		}
	}
}

func (a *appendStream) empty() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.slots) == 0
}

// send answers everything that is decided and has nothing undecided before it.
func (a *appendStream) send() error {
	for {
		answers := a.take()
		if len(answers) == 0 {
			return nil
		}
		if err := a.wire.Send(&bookiepb.AppendReply{Answers: answers}); err != nil {
			return err
		}
		for range answers {
			<-a.room
		}
	}
}

func (a *appendStream) take() []*bookiepb.AppendAnswer {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for n < len(a.slots) && n < maxAnswers && a.slots[n].decided {
		n++
	}
	answers := make([]*bookiepb.AppendAnswer, n)
	for i, s := range a.slots[:n] {
		answers[i] = &bookiepb.AppendAnswer{
			Ledger: int64(s.ledger), First: int64(s.first), Last: int64(s.outcome.last),
			Failure: rpc.ToFailure(s.outcome.err),
		}
	}
	rest := copy(a.slots, a.slots[n:])
	clear(a.slots[rest:])
	a.slots = a.slots[:rest]
	return answers
}
