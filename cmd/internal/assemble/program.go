package assemble

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/magnetar-io/magnetar/internal/config"
)

// closeLimit bounds an orderly end: after it, what is still open is left to the
// recovery of the next start.
const closeLimit = 25 * time.Second

// ErrUsage in an error's chain means that the command line or the configuration is
// wrong, and nothing was started.
var ErrUsage = errors.New("not started")

// ErrInterrupted is what a start returns that was told to end before it was done. All
// that it had opened is closed again.
var ErrInterrupted = errors.New("told to end before it was ready")

// interrupted says why a start ended: by itself, or because ctx did.
func interrupted(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return fmt.Errorf("%w: %w", ErrInterrupted, err)
}

// Settings are the flags by which every program is configured.
type Settings struct {
	File      string
	Overrides []string
}

// AddTo adds the flags to a command.
func (s *Settings) AddTo(cmd *cobra.Command) {
	cmd.Flags().StringVar(&s.File, "config", "", "properties `file`; the samples are in configs/")
	cmd.Flags().StringArrayVar(&s.Overrides, "set", nil, "a `key=value` that counts more than the file; may be repeated")
}

// Load fills the keys of a set.
func (s *Settings) Load(keys *config.Set) error {
	if err := keys.Load(s.File, s.Overrides); err != nil {
		return fmt.Errorf("%w: %w", ErrUsage, err)
	}
	return nil
}

// Main runs a program and ends the process: with 0 after an orderly end, 2 if it was
// called wrongly, else 1. The first SIGINT or SIGTERM ends the command's context, the
// second one ends the process at once.
func Main(root *cobra.Command) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // from then on signals do what they do by default
	root.SilenceUsage, root.SilenceErrors = true, true
	err := root.ExecuteContext(ctx)
	if err == nil {
		os.Exit(0)
	}
	fmt.Fprintf(os.Stderr, "%s: %v\n", root.Name(), err)
	switch {
	case errors.Is(err, ErrInterrupted):
		os.Exit(0)
	case errors.Is(err, ErrUsage):
		os.Exit(2)
	default:
		os.Exit(1)
	}
}

// Fatal is what a room calls when it can no longer keep its promises, such as after
// a failed disk write. It ends the process: what was not answered is settled by the
// recovery of the next start, and by the other bookies.
func Fatal(log *slog.Logger) func(error) {
	return func(err error) {
		log.Error("cannot go on; the process ends", "err", err)
		os.Exit(1)
	}
}

// closer closes what was opened, in reverse.
type closer struct {
	steps []step
}

type step struct {
	name string
	do   func(context.Context) error
}

func (c *closer) add(name string, do func(context.Context) error) {
	c.steps = append(c.steps, step{name, do})
}

// close runs the steps, the latest first. A step that fails does not keep the others
// from running. All of them share closeLimit; that ctx was cancelled, which is how a
// program learns that it should end, does not shorten it.
func (c *closer) close(ctx context.Context, log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
	defer cancel()
	var errs []error
	for _, s := range slices.Backward(c.steps) {
		began := time.Now()
		err := s.do(ctx)
		if err != nil {
			errs = append(errs, fmt.Errorf("close %s: %w", s.name, err))
		}
		log.Debug("closed", "what", s.name, "took", time.Since(began), "err", err)
	}
	c.steps = nil
	return errors.Join(errs...)
}
