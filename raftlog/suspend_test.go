//go:build unix

package raftlog

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// suspendHang is how long a write may take in the suspended process.
const suspendHang = time.Second

// TestSuspendedProcessIsNoHangingDisk stops a process in the middle of a write, for
// longer than a write may take. The write ends soon after the process goes on.
func TestSuspendedProcessIsNoHangingDisk(t *testing.T) {
	if os.Getenv("RAFTLOG_SUSPENDED") != "" {
		writeWhileSuspended()
		return
	}
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	child.Env = append(os.Environ(), "RAFTLOG_SUSPENDED=1")
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "writing" {
		t.Fatalf("the process says %q, want that it writes", lines.Text())
	}
	signal := func(s os.Signal) {
		if err := child.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
	}
	signal(syscall.SIGSTOP)
	time.Sleep(2 * suspendHang) // what is tested is that this time does not count
	signal(syscall.SIGCONT)
	time.Sleep(suspendHang / 4) // the watch wakes up before the disk does
	if _, err := in.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	if !lines.Scan() || lines.Text() != "written" {
		t.Errorf("the process says %q, want that the write was done", lines.Text())
	}
	for lines.Scan() { // the end of the test run
	}
	if err := child.Wait(); err != nil {
		t.Error(err)
	}
}

// writeWhileSuspended makes one write, which takes until a line comes in.
func writeWhileSuspended() {
	s := newGuardedStore(nil, suspendHang, nil, func(err error) {
		fmt.Println("fatal:", strings.ReplaceAll(err.Error(), "\n", " "))
	})
	s.release() // a write after a failure does not wait
	err := s.write("write", 0, func() error {
		fmt.Println("writing")
		_, err := bufio.NewReader(os.Stdin).ReadString('\n')
		return err
	})
	if err == nil {
		fmt.Println("written")
	} else if !errors.Is(err, errReleased) {
		fmt.Println("error:", err)
	}
}
