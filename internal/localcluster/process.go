package localcluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// pollInterval is how often a wait looks again.
const pollInterval = 20 * time.Millisecond

// pidRecord is the content of a pid file.
type pidRecord struct {
	Pid     int    `json:"pid"`
	Started string `json:"started"` // see startTime; another value means a recycled id
}

// launch starts a process of the cluster, detached, and records it. It returns
// once the process exists, not once it is ready.
func (c *Cluster) launch(p Process) error {
	if pid := c.Pid(p); pid != 0 {
		return fmt.Errorf("%s is running already (pid %d)", p.spoken(), pid)
	}
	for _, dir := range []string{filepath.Dir(c.LogFile(p)), filepath.Dir(c.pidFile(p))} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return err
		}
	}
	out, err := os.OpenFile(c.LogFile(p), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }() // the process has its own

	// Not CommandContext: the process must outlive whoever starts it.
	cmd := exec.Command(c.program(p.Role), c.arguments(p)...) //nolint:noctx,gosec // see above; our own programs
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Dir = c.dir
	cmd.SysProcAttr = detached()
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.spoken(), err)
	}
	release := func() {}
	if c.endWithParent {
		if release, err = Guard(cmd.Process.Pid); err != nil {
			return errors.Join(err, cmd.Process.Kill(), cmd.Wait())
		}
	}
	c.reapers.Go(func() {
		_ = cmd.Wait() // its end is seen through Pid; its exit code is in nobody's interest
		release()
	})
	record, err := json.Marshal(pidRecord{Pid: cmd.Process.Pid, Started: startTime(cmd.Process.Pid)})
	if err == nil {
		err = replaceFile(c.pidFile(p), append(record, '\n'))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("record %s: %w", p.spoken(), err), cmd.Process.Kill())
	}
	return nil
}

func (c *Cluster) program(role Role) string { return filepath.Join(c.bin, string(role)) }

// arguments are the flags that make a program this process of this cluster.
func (c *Cluster) arguments(p Process) []string {
	bookies := make([]string, c.state.Bookies)
	for i, b := range numbered(Bookie, c.state.Bookies) {
		bookies[i] = loopback(c.Port(b))
	}
	settings := []string{
		"clusterName=" + c.state.Name,
		"bindAddress=127.0.0.1",
		"advertisedAddress=127.0.0.1",
		"bookies=" + strings.Join(bookies, ","),
	}
	if p.Role == Bookie {
		settings = append(settings,
			"bookieId="+p.String(),
			"bookiePort="+strconv.Itoa(c.Port(p)),
			"httpServerPort="+strconv.Itoa(c.HTTPPort(p)),
			"journalDirectory="+c.DataDir(p),
			"expectedBookies="+strconv.Itoa(c.state.Bookies))
		settings = append(settings, c.state.BookieSet...)
	} else {
		settings = append(settings,
			"brokerId="+p.String(),
			"brokerServicePort="+strconv.Itoa(c.Port(p)),
			"webServicePort="+strconv.Itoa(c.HTTPPort(p)))
		settings = append(settings, c.state.BrokerSet...)
	}
	args := make([]string, 0, 2*len(settings))
	for _, s := range settings {
		args = append(args, "--set", s)
	}
	return args
}

// format bootstraps the cluster on bookie 1, the only one that is ever formatted.
func (c *Cluster) format(ctx context.Context) error {
	first := Process{Bookie, 1}
	cmd := exec.CommandContext(ctx, c.program(Bookie), append([]string{"format"}, c.arguments(first)...)...) //nolint:gosec // our own program
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("format %s: %w\n%s", first.spoken(), err, bytes.TrimSpace(out))
	}
	return nil
}

// Pid returns the id of a running process, 0 if it does not run.
func (c *Cluster) Pid(p Process) int {
	text, err := os.ReadFile(c.pidFile(p))
	if err != nil {
		return 0
	}
	var r pidRecord
	if json.Unmarshal(text, &r) != nil || r.Pid <= 0 || r.Started == "" || startTime(r.Pid) != r.Started {
		return 0
	}
	return r.Pid
}

// signal sends a signal to a running process.
func (c *Cluster) signal(p Process, s syscall.Signal) error {
	if err := c.Check(p); err != nil {
		return err
	}
	pid := c.Pid(p)
	if pid == 0 {
		return fmt.Errorf("%s is not running: start it with `start %s`", p.spoken(), p.spoken())
	}
	handle, err := os.FindProcess(pid) // on Linux a handle that a recycled id cannot fool
	if err != nil {
		return fmt.Errorf("%s (pid %d): %w", p.spoken(), pid, err)
	}
	if c.Pid(p) != pid {
		return nil // ended just now, which is what was wanted
	}
	if err := handle.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("%s (pid %d): %w", p.spoken(), pid, err)
	}
	return nil
}

// awaitEnd waits until the process does not run any more.
func (c *Cluster) awaitEnd(ctx context.Context, p Process) error {
	err := poll(ctx, func() (bool, error) { return c.Pid(p) == 0, nil })
	if err != nil {
		return fmt.Errorf("%s (pid %d) does not end (`kill %s` ends it at once; its log is %s): %w",
			p.spoken(), c.Pid(p), p.spoken(), c.LogFile(p), err)
	}
	if err := os.Remove(c.pidFile(p)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// poll calls done until it returns true or an error, or ctx ends.
func poll(ctx context.Context, done func() (bool, error)) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// startTime tells two processes apart that had the same id at different times. It
// is "" if there is no such process or it has ended and was not reaped yet.
func startTime(pid int) string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err == nil {
		return linuxStartTime(string(stat))
	}
	if _, err := os.Stat("/proc/self/stat"); err == nil {
		return "" // Linux, and no such process
	}
	out, err := exec.Command("ps", "-o", "stat=,lstart=", "-p", strconv.Itoa(pid)).Output() //nolint:noctx,gosec // ends by itself; a number
	text := strings.TrimSpace(string(out))
	state, started, _ := strings.Cut(text, " ")
	if err != nil || strings.HasPrefix(state, "Z") {
		return ""
	}
	return strings.TrimSpace(started)
}

// linuxStartTime takes the start time, in ticks since boot, out of
// /proc/PID/stat: the 22nd field, where the second is the program's name in
// brackets, which may hold blanks and brackets itself. The state is the third. Of
// a killed process it may be that of an ended first thread while others, the 20th
// field, still hold its ports.
func linuxStartTime(stat string) string {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	const stateField, threadsField, startField = 0, 17, 19
	if len(fields) <= startField || fields[stateField] == "X" || fields[stateField] == "Z" && fields[threadsField] == "1" {
		return ""
	}
	return fields[startField] + bootID()
}

func bootID() string {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // without it the ticks alone must do
	return "@" + strings.TrimSpace(string(id))
}
