package executor

import (
	"runtime"
	"sync"
)

const (
	// keepSlots is the queue capacity a strand keeps for ever (64 KiB).
	keepSlots = 4096
	// shrinkAfter is how many drains in a row must use less than an eighth of a
	// larger queue before it is cut to a quarter. Cutting at once oscillates and
	// costs an allocation for each burst.
	shrinkAfter = 64
	// yieldEvery is how many tasks a strand runs before it lets others have the
	// processor.
	yieldEvery = 256
)

// Strand runs its tasks one at a time, in the order submitted. Use [NewStrand].
//
// The queue is two slices that change places: submitters fill one while the
// runner empties the other, so the lock is taken once per task on the way in and
// once per batch on the way out, and nothing is allocated once both have grown.
type Strand struct {
	guard *Guard

	mu      sync.Mutex
	queue   []Task        // guarded by mu: what is to be run next
	running bool          // guarded by mu: a goroutine is responsible for the queue
	closed  bool          // guarded by mu: nothing is admitted any more
	drained chan struct{} // guarded by mu: made by Close, closed by the last runner

	// The runner's own; handed from one runner to the next under mu.
	batch []Task
	next  int // batch[next:] has not run yet
	calm  int // drains in a row that used little of a large queue
}

// NewStrand returns an idle strand.
func NewStrand(g *Guard) *Strand { return &Strand{guard: g} }

// Submit queues task behind the tasks submitted before it. It never blocks and
// returns [ErrShutdown] after Close.
func (s *Strand) Submit(task Task) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrShutdown
	}
	s.queue = append(s.queue, task)
	start := !s.running
	s.running = true
	s.mu.Unlock()
	if start {
		go s.run()
	}
	return nil
}

// SubmitAll queues tasks in order, with nothing between them, at the price of
// one Submit. It keeps no reference to the slice. Either all are admitted or none.
func (s *Strand) SubmitAll(tasks []Task) error {
	if len(tasks) == 0 {
		return nil
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrShutdown
	}
	s.queue = append(s.queue, tasks...)
	start := !s.running
	s.running = true
	s.mu.Unlock()
	if start {
		go s.run()
	}
	return nil
}

// Close refuses new tasks, lets the queued ones run, and waits for them. It may
// be called more than once. Admission and closing share one lock, so a task that
// races with Close either runs or gets [ErrShutdown].
func (s *Strand) Close() {
	s.mu.Lock()
	s.closed = true
	if !s.running {
		s.mu.Unlock()
		return
	}
	if s.drained == nil {
		s.drained = make(chan struct{})
	}
	drained := s.drained
	s.mu.Unlock()
	<-drained
}

// run empties the queue and ends. If a task ends the goroutine by
// runtime.Goexit, a new one goes on with the rest.
func (s *Strand) run() {
	finished := false
	defer func() {
		if !finished {
			go s.run()
		}
	}()
	for {
		for s.next < len(s.batch) {
			s.drain()
		}
		if !s.swap() {
			finished = true
			return
		}
	}
}

// drain runs the rest of the batch, or as much of it as runs without a panic.
func (s *Strand) drain() {
	defer func() {
		if value := recover(); value != nil {
			s.guard.caught(value)
		}
	}()
	for s.next < len(s.batch) {
		task := s.batch[s.next]
		s.batch[s.next] = nil // let the task's memory go as soon as it has run
		s.next++
		task.Run()
		if s.next%yieldEvery == 0 {
			runtime.Gosched()
		}
	}
}

// swap takes the queue as the next batch. It returns false if there is nothing
// to run: the strand is idle from then on.
func (s *Strand) swap() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	empty := s.fitted()
	if len(s.queue) == 0 {
		s.batch, s.next = empty, 0
		s.running = false
		if s.drained != nil {
			close(s.drained)
			s.drained = nil
		}
		return false
	}
	s.batch, s.queue, s.next = s.queue, empty, 0
	return true
}

// fitted returns the finished batch as an empty queue, smaller if it has been
// much too large for a while.
func (s *Strand) fitted() []Task {
	switch {
	case cap(s.batch) <= keepSlots:
	case len(s.batch) >= cap(s.batch)/8:
		s.calm = 0
	default:
		if s.calm++; s.calm >= shrinkAfter {
			s.calm = 0
			return make([]Task, 0, max(keepSlots, cap(s.batch)/4))
		}
	}
	return s.batch[:0]
}
