package localcluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// How long to wait for what, unless the caller's context ends earlier.
const (
	startLimit = 30 * time.Second // from launching a process to its HTTP server's first answer
	readyLimit = 60 * time.Second // to every group having all voters and a leader
	stopLimit  = 30 * time.Second // from SIGTERM to the end
)

// Up formats bookie 1 if this is a new cluster, starts what is not running, and
// waits until every Raft group has all its voters and a leader and the brokers say
// that they are healthy. Calling it on a running cluster changes nothing.
func (c *Cluster) Up(ctx context.Context) error {
	if err := c.prepare(ctx); err != nil {
		return err
	}
	if err := c.startAll(ctx, numbered(Bookie, c.state.Bookies)); err != nil {
		return err
	}
	if err := c.WaitGroups(ctx); err != nil {
		return err
	}
	c.progress("every Raft group has its voters and a leader")
	brokers := numbered(Broker, c.state.Brokers)
	if err := c.startAll(ctx, brokers); err != nil {
		return err
	}
	for _, p := range brokers {
		if err := c.WaitReady(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

// prepare makes the directory and formats bookie 1, once in the cluster's life.
func (c *Cluster) prepare(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.state.Formatted {
		if err := c.portsFree(); err != nil {
			return err
		}
	}
	if err := c.save(); err != nil {
		return err
	}
	if c.state.Formatted {
		return nil
	}
	// A format that was cut short left no cluster that anyone has joined.
	if err := os.RemoveAll(c.DataDir(Process{Bookie, 1})); err != nil {
		return err
	}
	if err := c.format(ctx); err != nil {
		return err
	}
	c.progress("bookie 1 formatted: it holds the new cluster " + c.state.Name)
	c.state.Formatted = true
	return c.save()
}

// portsFree lists the ports that somebody else listens on.
func (c *Cluster) portsFree() error {
	var taken []string
	for _, p := range c.Processes() {
		for _, port := range []int{c.Port(p), c.HTTPPort(p)} {
			l, err := net.Listen("tcp", loopback(port)) //nolint:noctx // local, at once
			if err != nil {
				taken = append(taken, fmt.Sprintf("%d (%s)", port, p.spoken()))
				continue
			}
			_ = l.Close() // it was only a question
		}
	}
	if taken != nil {
		return fmt.Errorf("ports in use: %s: end what listens there or choose others with --port-base N", strings.Join(taken, ", "))
	}
	return nil
}

func (c *Cluster) startAll(ctx context.Context, all []Process) error {
	var started []Process
	for _, p := range all {
		if c.Pid(p) != 0 {
			continue
		}
		if err := c.launch(p); err != nil {
			return err
		}
		started = append(started, p)
	}
	for _, p := range started {
		if err := c.awaitStart(ctx, p); err != nil {
			return err
		}
		c.progress(fmt.Sprintf("%s started (pid %d)", p.spoken(), c.Pid(p)))
	}
	return nil
}

// Start starts a process that does not run. It returns once the process answers
// on its HTTP port: it may still be waiting for others, see [Cluster.WaitReady].
func (c *Cluster) Start(ctx context.Context, p Process) error {
	if err := c.Check(p); err != nil {
		return err
	}
	c.mu.Lock()
	formatted := c.state.Formatted
	c.mu.Unlock()
	if !formatted {
		return errors.New("the cluster was never formatted: start it with `up`")
	}
	if err := c.launch(p); err != nil {
		return err
	}
	return c.awaitStart(ctx, p)
}

func (c *Cluster) awaitStart(ctx context.Context, p Process) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startLimit, fmt.Errorf("no answer on HTTP port %d within %v", c.HTTPPort(p), startLimit))
	defer cancel()
	err := poll(ctx, func() (bool, error) {
		if c.Pid(p) == 0 {
			return false, errors.New("it ended")
		}
		_, err := c.health(ctx, p)
		return err == nil, nil
	})
	if err != nil {
		return fmt.Errorf("start %s: %w; the last lines of %s:\n%s", p.spoken(), err, c.LogFile(p), c.tail(p))
	}
	return nil
}

// tail returns the end of a process' log.
func (c *Cluster) tail(p Process) string {
	const lines, most = 8, 4096
	text, err := os.ReadFile(c.LogFile(p))
	if err != nil {
		return "  " + err.Error()
	}
	all := strings.Split(strings.TrimSpace(string(text[max(0, len(text)-most):])), "\n")
	return "  " + strings.Join(all[max(0, len(all)-lines):], "\n  ")
}

// Kill ends a process with SIGKILL and waits until it is gone.
func (c *Cluster) Kill(ctx context.Context, p Process) error {
	return c.end(ctx, p, syscall.SIGKILL)
}

// Stop ends a process with SIGTERM, which closes it in order, and waits until it is
// gone.
func (c *Cluster) Stop(ctx context.Context, p Process) error {
	return c.end(ctx, p, syscall.SIGTERM)
}

func (c *Cluster) end(ctx context.Context, p Process, s syscall.Signal) error {
	if err := c.signal(p, s); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, stopLimit, fmt.Errorf("still running after %v", stopLimit))
	defer cancel()
	return c.awaitEnd(ctx, p)
}

// KillAll ends every running process with SIGKILL, as close together as can be.
func (c *Cluster) KillAll(ctx context.Context) error {
	running := c.running()
	var errs []error
	for _, p := range running {
		errs = append(errs, c.signal(p, syscall.SIGKILL))
	}
	for _, p := range running {
		errs = append(errs, c.awaitEnd(ctx, p))
	}
	return errors.Join(errs...)
}

// Down stops everything in order: the brokers, then the bookies. What does not end
// by itself within 30 s is killed, and reported.
func (c *Cluster) Down(ctx context.Context) error {
	var errs []error
	for _, role := range []Role{Broker, Bookie} {
		var mu sync.Mutex // guards errs
		var stops sync.WaitGroup
		for _, p := range c.running() {
			if p.Role != role {
				continue
			}
			stops.Go(func() {
				err := c.Stop(ctx, p)
				if err != nil && c.Pid(p) != 0 {
					err = errors.Join(err, c.Kill(context.WithoutCancel(ctx), p))
				}
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			})
		}
		stops.Wait()
	}
	c.reapers.Wait()
	return errors.Join(errs...)
}

func (c *Cluster) running() []Process {
	return slices.DeleteFunc(c.Processes(), func(p Process) bool { return c.Pid(p) == 0 })
}

// Wipe deletes the data of a bookie that does not run, as if its disk had been
// replaced. The cluster is not formatted again: the bookie will join with an empty
// disk.
func (c *Cluster) Wipe(p Process) error {
	if err := c.Check(p); err != nil {
		return err
	}
	if p.Role != Bookie {
		return fmt.Errorf("%s has no data to wipe: brokers are stateless", p.spoken())
	}
	if pid := c.Pid(p); pid != 0 {
		return fmt.Errorf("%s is running (pid %d): stop it first with `stop %s`", p.spoken(), pid, p.spoken())
	}
	return os.RemoveAll(c.DataDir(p))
}

// WipeAll deletes the whole cluster, data, logs and settings. Nothing of it may
// run.
func (c *Cluster) WipeAll() error {
	if running := c.running(); len(running) > 0 {
		return fmt.Errorf("%s is running (pid %d): stop the cluster first with `down`", running[0].spoken(), c.Pid(running[0]))
	}
	var errs []error
	for _, p := range c.Processes() {
		errs = append(errs, os.RemoveAll(c.DataDir(p)))
	}
	// cluster.json last: a wipe that was cut short can be repeated.
	errs = append(errs, os.RemoveAll(c.file("log")), os.RemoveAll(c.file("run")), os.Remove(c.file("cluster.json")))
	// The directory itself only if nothing else is in it: it may be the user's.
	if err := os.Remove(c.dir); err != nil && !errors.Is(err, syscall.ENOTEMPTY) && !errors.Is(err, syscall.EEXIST) && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
