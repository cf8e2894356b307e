package localcluster

import (
	"fmt"
	"os/exec"
	"strconv"
	"syscall"
)

// Guard makes sure that a process does not outlive the program that calls it, in
// whatever way that ends: for tests, which may be killed. A shell waits at the other
// end of a pipe; when the pipe closes, because this program is gone, it kills the
// process. Call release once the process has ended.
//
// The kernel could do this (PR_SET_PDEATHSIG), but it follows the thread that
// started the process, and Go does not promise which threads live on.
func Guard(pid int) (release func(), err error) {
	cmd := exec.Command("sh", "-c", "read -r nothing; kill -9 "+strconv.Itoa(pid)) //nolint:noctx,gosec // ends with the process; a number
	cmd.SysProcAttr = detached()
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("guard process %d: %w", pid, err)
	}
	return func() {
		_ = cmd.Process.Kill() // before the pipe closes: the id may be another process' by now
		_ = pipe.Close()
		_ = cmd.Wait()
	}, nil
}

// detached keeps a terminal's Ctrl-C, which is meant for the program in front, from
// a process.
func detached() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }
