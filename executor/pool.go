package executor

import "sync"

// Pool runs tasks on a fixed number of goroutines, in no promised order. It is
// where work goes that must leave the goroutine it is on and must not wait
// behind anybody's ordered work.
type Pool struct {
	guard   *Guard
	workers sync.WaitGroup

	mu     sync.Mutex
	wake   sync.Cond // L is &mu; signalled when queue or closed changes
	queue  []Task    // guarded by mu; queue[head:] waits
	head   int       // guarded by mu
	idle   int       // guarded by mu: workers asleep on wake
	closed bool      // guarded by mu
}

// NewPool starts a pool of n workers, at least 1.
func NewPool(n int, g *Guard) *Pool {
	p := &Pool{guard: g}
	p.wake.L = &p.mu
	for range max(n, 1) {
		p.workers.Add(1)
		go p.work()
	}
	return p
}

// Submit queues task. It never blocks and returns [ErrShutdown] after Close.
func (p *Pool) Submit(task Task) error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return ErrShutdown
	}
	if p.head > 0 && len(p.queue) == cap(p.queue) {
		n := copy(p.queue, p.queue[p.head:]) // make room in place rather than grow
		clear(p.queue[n:])
		p.queue, p.head = p.queue[:n], 0
	}
	p.queue = append(p.queue, task)
	asleep := p.idle > 0
	p.mu.Unlock()
	if asleep {
		p.wake.Signal()
	}
	return nil
}

// Close refuses new tasks, lets the queued ones run, and waits for the workers
// to end. It may be called more than once.
func (p *Pool) Close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.wake.Broadcast()
	p.workers.Wait()
}

// work is one worker. A task that ends the goroutine by runtime.Goexit is
// replaced, so that the pool keeps its size.
func (p *Pool) work() {
	finished := false
	defer func() {
		if !finished {
			go p.work()
			return
		}
		p.workers.Done()
	}()
	for {
		task, ok := p.take()
		if !ok {
			finished = true
			return
		}
		p.guard.run(task)
	}
}

// take waits for a task. It returns false once the pool is closed and empty.
func (p *Pool) take() (Task, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.head == len(p.queue) {
		if p.closed {
			return nil, false
		}
		p.idle++
		p.wake.Wait()
		p.idle--
	}
	task := p.queue[p.head]
	p.queue[p.head] = nil
	p.head++
	if p.head == len(p.queue) {
		p.head = 0
		p.queue = p.queue[:0]
		if cap(p.queue) > keepSlots {
			p.queue = nil // a burst this large is rare; do not keep its memory
		}
	}
	return task, true
}
