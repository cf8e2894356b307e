package server

import (
	"container/heap"
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/magnetar-io/magnetar/metadata"
)

const (
	// maxExpiring bounds the expiries proposed at once.
	maxExpiring = 64

	// expireRetry is how long a failed proposal to expire rests.
	expireRetry = 500 * time.Millisecond
)

// lessor is the leader's clock of leases. It holds nothing that must survive: a
// new leader starts every lease's TTL anew, so a lease lives at least its TTL
// after the last renewal, and longer after an election.
//
// It begins with a KindLead command, and its expiries name that command's
// revision. So a leader that lost its place, and got it back before it heard of
// the loss, cannot end a lease that the leader in between has renewed.
type lessor struct {
	machine *Machine
	group   Group
	log     *slog.Logger
	wake    chan struct{} // capacity 1; the loop's cue that its next alarm may be earlier

	mu       sync.Mutex // guards all below; nothing blocks while holding it
	phase    phase
	era      uint64           // counts changes of phase: proposals of earlier eras mean nothing
	retry    time.Time        // in phase taking: when to propose KindLead
	leader   metadata.Version // in phase leading: the revision of our KindLead
	leases   map[metadata.LeaseID]*ticking
	alarms   alarms // one per lease that is not expiring, due no later than its deadline
	expiring int    // proposals under way
}

// phase is what a lessor is at.
type phase uint8

const (
	following phase = iota // another node leads, or nobody
	taking                 // this node leads; KindLead is not applied yet
	leading                // the clock runs
)

type ticking struct {
	id       metadata.LeaseID
	era      uint64           // in which the deadline counts
	leader   metadata.Version // that era's
	ttl      time.Duration
	deadline time.Time
	alarm    time.Time // when to look at it again; kept apart so that a renewal need not move the heap
	// expiring: an expiry was proposed. From then on nobody may renew the lease
	// here, whatever became of the proposal.
	expiring bool
}

func newLessor(m *Machine, group Group, log *slog.Logger) *lessor {
	l := &lessor{machine: m, group: group, log: log, wake: make(chan struct{}, 1)}
	observe := l.observe
	m.observe.Store(&observe)
	return l
}

// lead makes the clock start soon, or stop.
func (l *lessor) lead(leads bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.moveLocked(following)
	if leads {
		l.moveLocked(taking)
		l.retry = time.Now()
		l.cue()
	}
}

func (l *lessor) moveLocked(to phase) {
	l.phase, l.leases, l.alarms, l.expiring = to, nil, nil, 0
	l.era++
}

// take proposes to be the leader whose expiries count.
func (l *lessor) take(era uint64) {
	c := Command{Kind: KindLead}
	l.group.Propose(c.Encode(), func(result any, err error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.era != era {
			return
		}
		defer l.cue()
		if err != nil {
			l.log.Warn("lease clock not started; will try again while this bookie leads", "err", err)
			l.retry = time.Now().Add(expireRetry)
			return
		}
		r, _ := result.(Result)
		l.moveLocked(leading)
		l.leader, l.leases = r.Revision, map[metadata.LeaseID]*ticking{}
		s := l.machine.State() // what is applied after this comes through observe
		now := time.Now()
		for _, id := range s.leaseIDs() {
			ttl, _, _ := s.Lease(id)
			l.addLocked(id, ttl, now)
		}
	})
}

func (l *lessor) addLocked(id metadata.LeaseID, ttl time.Duration, now time.Time) {
	if l.leases[id] != nil {
		return
	}
	t := &ticking{id: id, era: l.era, leader: l.leader, ttl: ttl, deadline: now.Add(ttl), alarm: now.Add(ttl)}
	l.leases[id] = t
	heap.Push(&l.alarms, t)
}

// observe follows the machine: leases that came and went.
func (l *lessor) observe(granted, ended []metadata.LeaseID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.phase != leading {
		return
	}
	s := l.machine.State()
	now := time.Now()
	for _, id := range granted {
		if ttl, _, ok := s.Lease(id); ok { // else it ended within the same batch
			l.addLocked(id, ttl, now)
		}
	}
	for _, id := range ended {
		delete(l.leases, id) // its alarm finds it gone
	}
	if len(granted) > 0 {
		l.cue()
	}
}

func (l *lessor) cue() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// renewal is the answer to a renewal.
type renewal uint8

const (
	renewed    renewal = iota + 1
	expired            // the lease has ended, or is about to
	notLeading         // the clock does not run here
)

// renew restarts a lease's TTL. Call it after a read barrier that began after
// the request came in: then no other leader can have ended the lease.
func (l *lessor) renew(id metadata.LeaseID) renewal {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.phase != leading {
		return notLeading
	}
	t := l.leases[id]
	if t == nil || t.expiring {
		return expired
	}
	t.deadline = time.Now().Add(t.ttl) // its alarm goes off early and is set again
	return renewed
}

// ending reports that this leader has proposed to expire the lease.
func (l *lessor) ending(id metadata.LeaseID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.leases[id]
	return t != nil && t.expiring
}

// run proposes expiries until ctx ends.
func (l *lessor) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		due, era, wait := l.due(time.Now())
		if era > 0 {
			l.take(era)
		}
		for _, t := range due {
			l.expire(t)
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-l.wake:
		case <-ctx.Done():
			return
		}
	}
}

// due marks the leases that are to be expired now, and tells how long until the
// next alarm. take is the era in which KindLead is to be proposed now, or 0.
func (l *lessor) due(now time.Time) (due []*ticking, take uint64, wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.phase == taking {
		if wait := l.retry.Sub(now); wait > 0 {
			return nil, 0, wait
		}
		l.retry = now.Add(time.Hour) // until the proposal ends
		return nil, l.era, time.Hour
	}
	for len(l.alarms) > 0 && l.expiring < maxExpiring {
		t := l.alarms[0]
		if wait := t.alarm.Sub(now); wait > 0 {
			return due, 0, wait
		}
		switch {
		case l.leases[t.id] != t: // ended meanwhile
			heap.Pop(&l.alarms)
		case t.deadline.After(now): // renewed meanwhile
			t.alarm = t.deadline
			heap.Fix(&l.alarms, 0)
		default:
			heap.Pop(&l.alarms)
			t.expiring = true
			l.expiring++
			due = append(due, t)
		}
	}
	return due, 0, time.Hour // the end of a proposal cues the loop
}

// expire proposes to end a lease, naming the revision it has now: if a key is
// attached before the proposal is applied, it is decided anew.
func (l *lessor) expire(t *ticking) {
	_, revision, ok := l.machine.State().Lease(t.id)
	if !ok {
		l.proposed(t, Result{}, nil)
		return
	}
	c := Command{Kind: KindExpire, Lease: t.id, Revision: revision, Leader: t.leader}
	l.log.Info("lease expired", "lease", int64(t.id), "ttl", t.ttl)
	l.group.Propose(c.Encode(), func(result any, err error) {
		r, _ := result.(Result)
		l.proposed(t, r, err)
	})
}

// proposed counts a proposal's end, and sets another alarm if the lease is still
// there.
func (l *lessor) proposed(t *ticking, result Result, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t.era != l.era {
		return
	}
	if err == nil && result.Code == CodeDeposed {
		l.moveLocked(following) // the group is about to tell us as well
		return
	}
	l.expiring--
	defer l.cue()
	if l.leases[t.id] != t || err == nil && result.Code != CodeBadVersion {
		return
	}
	if err != nil {
		l.log.Warn("lease not ended; will try again while this bookie leads", "lease", int64(t.id), "err", err)
		t.alarm = time.Now().Add(expireRetry)
	}
	heap.Push(&l.alarms, t)
}

// alarms is a heap by alarm.
type alarms []*ticking

func (a alarms) Len() int           { return len(a) }
func (a alarms) Less(i, j int) bool { return a[i].alarm.Before(a[j].alarm) }
func (a alarms) Swap(i, j int)      { a[i], a[j] = a[j], a[i] }

// Push implements heap.Interface.
func (a *alarms) Push(x any) { *a = append(*a, x.(*ticking)) } //nolint:forcetypeassert // only ours are pushed

// Pop implements heap.Interface.
func (a *alarms) Pop() any {
	last := len(*a) - 1
	t := (*a)[last]
	(*a)[last] = nil
	*a = (*a)[:last]
	return t
}
