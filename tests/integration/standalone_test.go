package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/internal/localcluster"
)

// standalone is one running `magnetar standalone`.
type standalone struct {
	dir  string
	url  string // pulsar://…
	web  string // http://…
	log  string // file with its output
	cmd  *exec.Cmd
	done chan struct{} // closed once the process has ended
	err  error         // how; read after done
	took time.Duration // from the start of the process to its being ready
}

// startLimit is the most that a test waits for a start. The promise, a second on an
// idle machine, is TestStandaloneIsReadyWithinASecond's.
const startLimit = 20 * time.Second

// launchStandalone starts a standalone on ports that are free, without waiting.
func launchStandalone(dir string, base int, settings ...string) (*standalone, error) {
	s := &standalone{
		dir: dir, done: make(chan struct{}),
		url: "pulsar://127.0.0.1:" + strconv.Itoa(base),
		web: "http://127.0.0.1:" + strconv.Itoa(base+1430),
		log: filepath.Clean(dir) + ".log",
	}
	args := []string{
		"standalone", "--dir", dir,
		"--set", "brokerServicePort=" + strconv.Itoa(base),
		"--set", "webServicePort=" + strconv.Itoa(base+1430),
	}
	for _, setting := range settings {
		args = append(args, "--set", setting)
	}
	out, err := os.OpenFile(s.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	s.cmd = exec.Command(filepath.Join(programs, "magnetar"), args...)
	s.cmd.Stdout, s.cmd.Stderr = out, out
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	release, err := localcluster.Guard(s.cmd.Process.Pid)
	if err != nil {
		return nil, errors.Join(err, s.cmd.Process.Kill(), s.cmd.Wait())
	}
	go func() {
		defer close(s.done)
		s.err = s.cmd.Wait()
		release()
	}()
	return s, nil
}

// awaitReady waits until the standalone says on /health that it is ready.
func (s *standalone) awaitReady() error {
	began := time.Now()
	for time.Since(began) < startLimit {
		if code, _ := get(s.web + "/health"); code == http.StatusOK {
			s.took = time.Since(began)
			return nil
		}
		select {
		case <-s.done:
			return fmt.Errorf("the standalone ended: %w\n%s", s.err, s.output())
		case <-time.After(5 * time.Millisecond):
		}
	}
	return fmt.Errorf("the standalone is not ready after %v\n%s", startLimit, s.output())
}

func (s *standalone) output() string {
	text, _ := os.ReadFile(s.log)
	return string(text[max(0, len(text)-8192):])
}

// end sends a signal and waits for the end.
func (s *standalone) end(signal syscall.Signal) error {
	if err := s.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-s.done:
		return s.err
	case <-time.After(startLimit):
		s.cmd.Process.Kill()
		<-s.done
		return fmt.Errorf("no end within %v of %v\n%s", startLimit, signal, s.output())
	}
}

// stop ends the standalone in order and wants it to say that all went well.
func (s *standalone) stop(t *testing.T) {
	t.Helper()
	if err := s.end(syscall.SIGTERM); err != nil {
		t.Fatalf("SIGTERM: %v\n%s", err, s.output())
	}
}

// kill ends the standalone with SIGKILL.
func (s *standalone) kill() { _ = s.end(syscall.SIGKILL) }

// start starts a standalone for this test alone.
func start(t *testing.T, dir string, settings ...string) *standalone {
	t.Helper()
	base, err := localcluster.FreePortBase()
	if err != nil {
		t.Fatal(err)
	}
	s, err := launchStandalone(dir, base, settings...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.kill)
	if err := s.awaitReady(); err != nil {
		t.Fatal(err)
	}
	return s
}

// shared is the standalone of the tests that only need some broker.
var shared sharedStandalone

type sharedStandalone struct {
	once sync.Once
	dir  string
	s    *standalone
	err  error
}

func (h *sharedStandalone) get(t *testing.T) *standalone {
	t.Helper()
	h.once.Do(func() {
		// Not t.TempDir: the standalone outlives the test that happens to be first.
		if h.dir, h.err = os.MkdirTemp("", "magnetar-standalone-"); h.err != nil { //nolint:usetesting // see above
			return
		}
		base, err := localcluster.FreePortBase()
		if err != nil {
			h.err = err
			return
		}
		if h.s, h.err = launchStandalone(filepath.Join(h.dir, "data"), base, "logLevel=debug"); h.err == nil {
			h.err = h.s.awaitReady()
		}
	})
	if h.err != nil {
		t.Fatal(h.err)
	}
	return h.s
}

// close ends the shared standalone, in order.
func (h *sharedStandalone) close() error {
	if h.s == nil {
		return nil
	}
	err := h.s.end(syscall.SIGTERM)
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, h.s.output())
	}
	return errors.Join(err, os.RemoveAll(h.dir))
}

func get(url string) (int, string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err.Error()
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close()
	var body bytes.Buffer
	if _, err := body.ReadFrom(response.Body); err != nil {
		return 0, err.Error()
	}
	return response.StatusCode, body.String()
}

func TestStandaloneTellsWhatToDoNext(t *testing.T) {
	s := start(t, filepath.Join(t.TempDir(), "data"))
	for _, want := range []string{s.url, s.web, "magnetar produce", "magnetar consume"} {
		// It says so right after it is ready.
		for end := time.Now().Add(startLimit); !strings.Contains(s.output(), want); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("the output of the start lacks %q:\n%s", want, s.output())
			}
		}
	}
	s.stop(t)
}

func TestStandaloneIsReadyWithinASecond(t *testing.T) {
	// Other tests may be using the machine: the best of a few is the program's own.
	const attempts, limit = 5, time.Second
	best := startLimit
	for range attempts {
		s := start(t, filepath.Join(t.TempDir(), "data"))
		best = min(best, s.took)
		s.stop(t)
		if best < limit {
			break
		}
	}
	t.Logf("ready after %v", best)
	if best > limit {
		t.Errorf("ready after %v, want at most %v", best, limit)
	}
}

// refusedStart runs a program that must refuse to start, and returns what it said.
func refusedStart(t *testing.T, program string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startLimit)
	defer cancel()
	out, err := exec.CommandContext(ctx, filepath.Join(programs, program), args...).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() <= 0 {
		t.Errorf("%s %q ended with %v, want an exit code above 0:\n%s", program, args, err, out)
	}
	return string(out)
}

func TestStartIsRefused(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	port := strconv.Itoa(busy.Addr().(*net.TCPAddr).Port)
	running := shared.get(t)
	dir := filepath.Join(t.TempDir(), "data") // no test may touch it

	tests := []struct {
		name    string
		program string
		args    []string
		want    []string
	}{
		{"port-in-use", "magnetar", []string{"standalone", "--dir", dir, "--set", "brokerServicePort=" + port}, []string{"brokerServicePort", port, "in use"}},
		{"web-port-in-use", "magnetar", []string{"standalone", "--dir", dir, "--set", "brokerServicePort=0", "--set", "webServicePort=" + port}, []string{"webServicePort", port, "in use"}},
		{"data-in-use", "magnetar", []string{"standalone", "--dir", running.dir, "--set", "brokerServicePort=0", "--set", "webServicePort=0"}, []string{running.dir}},
		{"unknown-key", "magnetar", []string{"standalone", "--dir", dir, "--set", "brokerServicePrt=1"}, []string{"brokerServicePrt", "did you mean brokerServicePort?"}},
		{"out-of-range", "broker", []string{"--set", "webServicePort=65536"}, []string{"webServicePort=65536", "0 to 65535"}},
		{"bind-beyond-loopback", "magnetar", []string{"standalone", "--dir", dir, "--set", "bindAddress=0.0.0.0"}, []string{"bindAddress=0.0.0.0", "allowInsecure=true"}},
		{"advertise-beyond-loopback", "broker", []string{"--set", "advertisedAddress=192.0.2.1"}, []string{"advertisedAddress=192.0.2.1", "allowInsecure=true"}},
		{"bookie-without-format", "bookie", []string{"--set", "journalDirectory=" + dir, "--set", "bookiePort=0", "--set", "httpServerPort=0", "--set", "bookies="}, []string{"bookie format"}},
		{"missing-file", "bookie", []string{"--config", dir + "/none.conf"}, []string{"none.conf"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			said := refusedStart(t, tt.program, tt.args...)
			for _, want := range tt.want {
				if !strings.Contains(said, want) {
					t.Errorf("%s %q does not mention %q:\n%s", tt.program, tt.args, want, said)
				}
			}
			if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the refused start touched its directory: %v", err)
			}
		})
	}
}

func TestBookieFormatRefusesDataThatIsThere(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "bookie")
	args := []string{"format", "--set", "journalDirectory=" + dir}
	ctx, cancel := context.WithTimeout(t.Context(), startLimit)
	defer cancel()
	if out, err := exec.CommandContext(ctx, filepath.Join(programs, "bookie"), args...).CombinedOutput(); err != nil {
		t.Fatalf("first format: %v\n%s", err, out)
	}
	if said := refusedStart(t, "bookie", args...); !strings.Contains(said, dir) {
		t.Errorf("the refusal does not name %s:\n%s", dir, said)
	}
}

// TestStandaloneIsIdle guards the promise of 64 MB and about 0 % CPU with some room
// for slower machines.
func TestStandaloneIsIdle(t *testing.T) {
	if _, err := os.Stat("/proc/self/statm"); err != nil {
		t.Skip("needs /proc")
	}
	s := start(t, filepath.Join(t.TempDir(), "data"))
	const settle, window = 2 * time.Second, 4 * time.Second
	time.Sleep(settle) // nothing to wait for: this measures a process that does nothing
	before := cpuTicks(t, s.cmd.Process.Pid)
	time.Sleep(window)
	const ticksPerSecond = 100 // USER_HZ, fixed in Linux's ABI
	share := float64(cpuTicks(t, s.cmd.Process.Pid)-before) / ticksPerSecond / window.Seconds()
	resident := residentBytes(t, s.cmd.Process.Pid)
	t.Logf("idle: %.1f MiB resident, %.1f %% of one core", float64(resident)/(1<<20), share*100)
	if resident > 64<<20 {
		t.Errorf("%d bytes resident, want at most 64 MiB", resident)
	}
	if share > 0.03 {
		t.Errorf("%.1f %% of a core, want about 0", share*100)
	}
	s.stop(t)
}

func cpuTicks(t *testing.T, pid int) int {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	user, err1 := strconv.Atoi(fields[11])
	system, err2 := strconv.Atoi(fields[12])
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	return user + system
}

func residentBytes(t *testing.T, pid int) int {
	t.Helper()
	statm, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.Atoi(strings.Fields(string(statm))[1])
	if err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize()
}
