package executor

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// ErrShutdown reports a task that was refused because its executor is closed. It
// will not run; whoever submitted it must answer for it.
var ErrShutdown = errors.New("executor is shut down")

// Task is a piece of work. An object that waits for its turn anyway should
// implement Task itself, so that submitting it allocates nothing.
type Task interface{ Run() }

// Func makes a Task of a function. Making one from a closure allocates.
type Func func()

// Run calls f.
func (f Func) Run() { f() }

// Guard is what strands and pools share: where a panicking task is counted and
// logged. One Guard serves a whole program.
type Guard struct {
	log    *slog.Logger
	panics prometheus.Counter
}

// NewGuard registers the counter of panics with reg, which may be nil.
func NewGuard(log *slog.Logger, reg prometheus.Registerer) *Guard {
	return &Guard{
		log: log,
		panics: promauto.With(reg).NewCounter(prometheus.CounterOpts{
			Name: "executor_task_panics_total",
			Help: "Tasks that ended in a panic. Each one is a bug; the log has its stack.",
		}),
	}
}

func (g *Guard) caught(value any) {
	g.panics.Inc()
	g.log.Error("task panicked; the next task runs", "err", fmt.Sprint(value), "stack", string(debug.Stack()))
}

// run runs one task and catches its panic.
func (g *Guard) run(task Task) {
	defer func() {
		if value := recover(); value != nil {
			g.caught(value)
		}
	}()
	task.Run()
}
