package rpc

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/magnetar-io/magnetar/ledger"
)

const (
	minBackoff = 10 * time.Millisecond // after a failed attempt or a round without a leader
	maxBackoff = 500 * time.Millisecond

	// statusTimeout bounds one question about who leads.
	statusTimeout = time.Second

	// AttemptTimeout bounds one attempt of [Pool.Call].
	AttemptTimeout = 5 * time.Second
)

// pause sleeps for a random part of *wait, then doubles *wait up to maxBackoff.
// It returns early when ctx ends.
func pause(ctx context.Context, wait *time.Duration) {
	timer := time.NewTimer(*wait/2 + rand.N(*wait/2+1))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	*wait = min(2*(*wait), maxBackoff)
}

// Leader returns the address of group's leader. Without a hint it asks every
// known bookie, again and again until one knows or ctx ends; then the error
// wraps [ledger.ErrUnavailable] and ctx's error.
func (p *Pool) Leader(ctx context.Context, group uint32) (string, error) {
	var last error
	for wait := minBackoff; ; pause(ctx, &wait) {
		if err := ctx.Err(); err != nil {
			return "", fmt.Errorf("group %d: no leader found among %v: %w: %w%s", group, p.Addrs(), err, ledger.ErrUnavailable, because(last))
		}
		p.mu.Lock()
		addr, closed := p.leaders[group], p.closed
		p.mu.Unlock()
		switch {
		case closed:
			return "", errPoolClosed
		case addr != "":
			return addr, nil
		}
		addr, last = p.ask(ctx, group)
		if addr != "" {
			return addr, nil
		}
	}
}

func because(err error) string {
	if err == nil {
		return ""
	}
	return " (last: " + err.Error() + ")"
}

// ask lets one caller at a time put the question to every bookie; the others
// wait for that round to end and then look at the hint.
func (p *Pool) ask(ctx context.Context, group uint32) (string, error) {
	p.mu.Lock()
	if round := p.asking[group]; round != nil {
		p.mu.Unlock()
		select {
		case <-round:
		case <-ctx.Done():
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.leaders[group], nil
	}
	round := make(chan struct{})
	p.asking[group] = round
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.asking, group)
		p.mu.Unlock()
		close(round)
	}()
	addr, err := p.askAll(ctx, group)
	if addr != "" {
		p.SetLeader(group, addr)
	}
	return addr, err
}

// askAll asks every known bookie at once. The first that says it leads group
// ends the round; else the leader named by the highest term wins.
func (p *Pool) askAll(ctx context.Context, group uint32) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	var (
		mu     sync.Mutex // guards what follows
		leader string
		term   uint64
		sure   bool
		failed []error
	)
	var asked sync.WaitGroup
	for _, addr := range p.Addrs() {
		asked.Go(func() {
			reply, err := p.status(ctx, addr)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = append(failed, err)
				return
			}
			for _, g := range reply.GetGroups() {
				if g.GetId() != group || g.GetLeaderAddress() == "" || sure {
					continue
				}
				if sure = g.GetState() == "leader"; sure || g.GetTerm() > term || leader == "" {
					leader, term = g.GetLeaderAddress(), g.GetTerm()
				}
			}
			if sure {
				cancel() // the rest of the round cannot know better
			}
		})
	}
	asked.Wait()
	if leader == "" {
		return "", errors.Join(failed...)
	}
	return leader, nil
}

// status asks one bookie for its view and learns members and the number of
// groups from it.
func (p *Pool) status(ctx context.Context, addr string) (*StatusReply, error) {
	conn, err := p.Conn(addr)
	if err != nil {
		return nil, err
	}
	reply, err := NewClusterClient(conn).Status(ctx, &StatusRequest{})
	if err != nil {
		return nil, fmt.Errorf("status of bookie %s: %w", addr, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.groups = max(p.groups, len(reply.GetGroups())-1)
	for _, g := range reply.GetGroups() {
		if g.GetState() != "leader" && len(p.members[g.GetId()]) > 0 {
			continue // a leader's list is newer than anybody else's
		}
		addrs := make([]string, 0, len(g.GetMembers()))
		for _, m := range g.GetMembers() {
			addrs = append(addrs, m.GetAddress())
		}
		p.members[g.GetId()] = addrs
	}
	return reply, nil
}

// Groups returns the number of ledger groups, which is fixed when a cluster is
// formatted. It asks the bookies the first time, until one answers or ctx ends.
func (p *Pool) Groups(ctx context.Context) (int, error) {
	for wait := minBackoff; ; pause(ctx, &wait) {
		p.mu.Lock()
		groups, closed := p.groups, p.closed
		p.mu.Unlock()
		switch {
		case groups > 0:
			return groups, nil
		case closed:
			return 0, errPoolClosed
		case ctx.Err() != nil:
			return 0, fmt.Errorf("number of ledger groups: none of %v answered: %w: %w", p.Addrs(), ctx.Err(), ledger.ErrUnavailable)
		}
		p.ask(ctx, 0) //nolint:errcheck // the loop looks at what was learned, and asks again
	}
}

// Call runs fn against group's leader until it succeeds, fails for good, or ctx
// ends. fn may run many times, so what it asks for must be idempotent. Each run
// gets a context that ends after [AttemptTimeout].
//
// fn's error is one of [FromStatus] or a gRPC status. A [NotLeader] sends the
// next attempt to the leader it names; [ledger.ErrUnavailable],
// [ledger.ErrUnknownOutcome] and a passed attempt deadline are tried again after
// 10 to 500 ms; any other error is returned as it is. When ctx ends, the error
// wraps ctx's error and either [ledger.ErrUnknownOutcome], if an attempt may have
// taken effect, or [ledger.ErrUnavailable].
func (p *Pool) Call(ctx context.Context, group uint32, fn func(ctx context.Context, conn *grpc.ClientConn) error) error {
	return p.CallWithin(ctx, group, AttemptTimeout, fn)
}

// CallWithin is [Pool.Call] with another bound on each attempt, for callers who
// cannot afford to wait that long for a leader that hangs.
func (p *Pool) CallWithin(ctx context.Context, group uint32, attempt time.Duration, fn func(ctx context.Context, conn *grpc.ClientConn) error) error {
	c := call{group: group, outcome: ledger.ErrUnavailable}
	for wait := minBackoff; ; {
		addr, err := p.Leader(ctx, group)
		if err != nil {
			return c.ended(ctx, err)
		}
		redirected, err := c.try(ctx, p, addr, attempt, fn)
		if err == nil {
			return nil
		}
		if !c.retry {
			return err
		}
		if ctx.Err() != nil {
			return c.ended(ctx, err)
		}
		if !redirected { // a redirect costs no wait, once: two nodes may name each other
			pause(ctx, &wait)
		}
	}
}

// call is the state of one CallWithin.
type call struct {
	group      uint32
	attempts   int
	outcome    error // the class of the final error: unknown once an attempt may have taken effect
	retry      bool  // whether the last error may be retried
	redirected bool  // whether the last attempt was a redirect
}

func (c *call) try(ctx context.Context, p *Pool, addr string, attempt time.Duration, fn func(ctx context.Context, conn *grpc.ClientConn) error) (redirected bool, err error) {
	c.attempts++
	conn, err := p.Conn(addr)
	if err == nil {
		attemptCtx, cancel := context.WithTimeout(ctx, attempt)
		err = FromStatus(fn(attemptCtx, conn))
		cancel()
	}
	if err == nil {
		return false, nil
	}
	timedOut := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
	c.retry = timedOut || errors.Is(err, ledger.ErrUnavailable) || errors.Is(err, ledger.ErrUnknownOutcome)
	if !c.retry || errors.Is(err, errPoolClosed) {
		c.retry = false
		return false, err
	}
	if timedOut || errors.Is(err, ledger.ErrUnknownOutcome) {
		c.outcome = ledger.ErrUnknownOutcome
	}
	p.Forget(c.group, addr)
	var notLeader *NotLeader
	if errors.As(err, &notLeader) && notLeader.Addr != "" && notLeader.Addr != addr {
		p.SetLeader(c.group, notLeader.Addr)
		redirected = !c.redirected
	}
	c.redirected = redirected
	return redirected, fmt.Errorf("bookie %s: %w", addr, err)
}

// ended is the error of a call whose context ended.
func (c *call) ended(ctx context.Context, last error) error {
	cause := ctx.Err()
	if cause == nil { // the pool was closed
		return last
	}
	return fmt.Errorf("group %d: no answer after %d attempts: %w: %w%s", c.group, c.attempts, cause, c.outcome, because(last))
}
