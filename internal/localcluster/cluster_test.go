package localcluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// TestMain is also the programs bookie and broker: the tests put links to this
// test binary under those names.
func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case "bookie", "broker":
		if err := pretend(filepath.Base(os.Args[0]), os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	case "guarding":
		pid, err := strconv.Atoi(os.Args[1])
		if err == nil {
			_, err = Guard(pid)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0) // without releasing
	}
	goleak.VerifyTestMain(m)
}

// pretend behaves like the real program as far as this package sees it: it formats,
// answers /health, and ends on SIGTERM.
func pretend(role string, args []string) error {
	settings := map[string]string{}
	for _, a := range args {
		if key, value, ok := strings.Cut(a, "="); ok {
			settings[key] = value
		}
	}
	if args[0] == "format" {
		return os.MkdirAll(settings["journalDirectory"], 0o750)
	}
	if settings["fail"] == "true" {
		return errors.New("told to fail: some reason")
	}
	h := Health{State: "ready"}
	port := settings["webServicePort"]
	if role == "bookie" {
		port = settings["httpServerPort"]
		h.Node = settings["bookieId"] + "@disk"
		g := GroupHealth{ID: 1, State: "follower", Term: 3}
		for i := range 3 {
			g.Members = append(g.Members, Member{Node: fmt.Sprintf("bookie-%d@disk", i+1), Voter: true})
		}
		if settings["bookieId"] == "bookie-2" {
			g.State = "leader"
		}
		h.Groups = append(h.Groups, g)
	}
	l, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		return err
	}
	http.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) { json.NewEncoder(w).Encode(h) })
	go http.Serve(l, nil)
	if settings["stubborn"] == "true" {
		signal.Ignore(syscall.SIGTERM)
		select {}
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM)
	<-ended
	return nil
}

// newCluster opens a cluster of pretended programs on free ports.
func newCluster(t *testing.T, o Options) *Cluster {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	o.Bin, o.EndWithParent = t.TempDir(), true
	for _, name := range []string{"bookie", "broker"} {
		if err := os.Symlink(self, filepath.Join(o.Bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	o.Dir = t.TempDir()
	if o.PortBase, err = FreePortBase(); err != nil {
		t.Fatal(err)
	}
	c, err := Open(o, true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if err := errors.Join(c.KillAll(ctx), c.Down(ctx)); err != nil {
			t.Error(err)
		}
	})
	return c
}

func up(t *testing.T, c *Cluster) {
	t.Helper()
	if err := c.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func wantError(t *testing.T, err error, part string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), part) {
		t.Errorf("error is %v, want one with %q", err, part)
	}
}

func TestPortsFollowFromBase(t *testing.T) {
	c, err := Open(Options{Dir: t.TempDir()}, true)
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		p          Process
		port, http int
	}{
		{Process{Broker, 1}, 6650, 8080},
		{Process{Broker, 2}, 6660, 8090},
		{Process{Bookie, 1}, 6655, 8085},
		{Process{Bookie, 3}, 6675, 8105},
	}
	for _, tt := range tests {
		if got := c.Port(tt.p); got != tt.port {
			t.Errorf("Port(%v) = %d, want %d", tt.p, got, tt.port)
		}
		if got := c.HTTPPort(tt.p); got != tt.http {
			t.Errorf("HTTPPort(%v) = %d, want %d", tt.p, got, tt.http)
		}
	}
	if got, want := c.ServiceURL(), "pulsar://127.0.0.1:6650,127.0.0.1:6660"; got != want {
		t.Errorf("ServiceURL() = %q, want %q", got, want)
	}
}

func TestLifeOfACluster(t *testing.T) {
	c := newCluster(t, Options{Name: "east"})
	ctx := t.Context()
	up(t, c)
	s := c.Status(ctx)
	for _, p := range s.Processes {
		if p.State != "running" || p.Pid == 0 {
			t.Errorf("%s %d is %s (pid %d) after Up", p.Role, p.Number, p.State, p.Pid)
		}
	}
	if got := s.Leader(1); got != 2 {
		t.Errorf("group 1 is led by bookie %d, want 2", got)
	}
	before := c.Pid(Process{Bookie, 3})
	up(t, c) // changes nothing
	if got := c.Pid(Process{Bookie, 3}); got != before {
		t.Errorf("a second Up changed bookie 3's pid from %d to %d", before, got)
	}

	if err := c.Kill(ctx, Process{Bookie, 3}); err != nil {
		t.Fatal(err)
	}
	if pid := c.Pid(Process{Bookie, 3}); pid != 0 {
		t.Errorf("bookie 3 runs (pid %d) after Kill", pid)
	}
	wantError(t, c.Kill(ctx, Process{Bookie, 3}), "bookie 3 is not running")
	wantError(t, c.Kill(ctx, Process{Bookie, 4}), "want bookie 1 to 3")
	wantError(t, c.Stop(ctx, Process{"zookeeper", 1}), "want bookie or broker")
	wantError(t, c.Start(ctx, Process{Bookie, 1}), "bookie 1 is running already")
	wantError(t, c.Wipe(Process{Bookie, 1}), "stop it first")
	wantError(t, c.Wipe(Process{Broker, 1}), "stateless")
	wantError(t, c.WipeAll(), "stop the cluster first")
	if err := c.Start(ctx, Process{Bookie, 3}); err != nil {
		t.Fatal(err)
	}

	// Another program finds the same cluster, and need not know its ports.
	again, err := Open(Options{Dir: c.Dir(), Bin: c.bin}, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Stop(ctx, Process{Broker, 2}); err != nil {
		t.Fatal(err)
	}
	if pid := c.Pid(Process{Broker, 2}); pid != 0 {
		t.Errorf("broker 2 runs (pid %d) after another program's Stop", pid)
	}
	if err := c.Down(ctx); err != nil {
		t.Fatal(err)
	}
	for _, p := range c.Status(ctx).Processes {
		if p.State != "stopped" {
			t.Errorf("%s %d is %s after Down", p.Role, p.Number, p.State)
		}
	}
	if err := c.WipeAll(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: c.Dir()}, false); !errors.Is(err, ErrNoCluster) {
		t.Errorf("Open after WipeAll = %v, want ErrNoCluster", err)
	}
}

func TestWipedFirstBookieIsNotFormattedAgain(t *testing.T) {
	c := newCluster(t, Options{})
	up(t, c)
	first := Process{Bookie, 1}
	if err := c.Stop(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	if err := c.Wipe(first); err != nil {
		t.Fatal(err)
	}
	up(t, c)
	if _, err := os.Stat(c.DataDir(first)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the second Up formatted bookie 1: %v", err)
	}
}

func TestStartReportsTheLog(t *testing.T) {
	c := newCluster(t, Options{BookieSet: []string{"fail=true"}})
	wantError(t, c.Up(t.Context()), "told to fail: some reason")
}

func TestPortInUse(t *testing.T) {
	c := newCluster(t, Options{})
	l, err := net.Listen("tcp", loopback(c.Port(Process{Broker, 2})))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	wantError(t, c.Up(t.Context()), fmt.Sprintf("ports in use: %d (broker 2)", c.Port(Process{Broker, 2})))
}

func TestOpenRefusesDisagreement(t *testing.T) {
	c := newCluster(t, Options{Name: "east"})
	up(t, c)
	_, err := Open(Options{Dir: c.Dir(), Name: "west"}, true)
	wantError(t, err, `holds the cluster "east", not "west"`)
	_, err = Open(Options{Dir: c.Dir(), PortBase: 7000}, true)
	wantError(t, err, "not 7000")
	_, err = Open(Options{Dir: t.TempDir(), PortBase: 70000}, true)
	wantError(t, err, "port base 70000: want 1024 to")
}

func TestStopThatDoesNotEndSaysWhatToDo(t *testing.T) {
	c := newCluster(t, Options{BrokerSet: []string{"stubborn=true"}})
	up(t, c)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	wantError(t, c.Stop(ctx, Process{Broker, 1}), "`kill broker 1` ends it at once")
}

func TestRecycledPidIsLeftAlone(t *testing.T) {
	c := newCluster(t, Options{})
	p := Process{Bookie, 1}
	record, _ := json.Marshal(pidRecord{Pid: os.Getpid(), Started: "1@another-boot"})
	if err := os.MkdirAll(filepath.Dir(c.pidFile(p)), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.pidFile(p), record, 0o600); err != nil {
		t.Fatal(err)
	}
	wantError(t, c.Kill(t.Context(), p), "bookie 1 is not running") // and this test lives
}

func TestGuard(t *testing.T) {
	began := func() *exec.Cmd {
		t.Helper()
		cmd := exec.Command("sleep", "60")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	// Released, the guard leaves whoever has the id alone.
	kept := began()
	release, err := Guard(kept.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	release()
	if startTime(kept.Process.Pid) == "" {
		t.Error("the released guard killed the process")
	}
	kept.Process.Kill()
	kept.Wait()

	// The guarding program dies: here, one that is this test binary under another name.
	guarded := began()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	parent := filepath.Join(t.TempDir(), "guarding")
	if err := os.Symlink(self, parent); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(parent, strconv.Itoa(guarded.Process.Pid)).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := guarded.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("the process ended with %v, want it killed", err)
	}
}

func TestPortBasesDiffer(t *testing.T) {
	seen := map[int]bool{}
	for range 20 {
		base, err := FreePortBase()
		if err != nil {
			t.Fatal(err)
		}
		if seen[base] {
			t.Errorf("port base %d was given twice", base)
		}
		seen[base] = true
	}
}

func TestLinuxStartTime(t *testing.T) {
	rest := " 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 1000 200"
	tests := []struct{ name, stat, want string }{
		{"plain", "17 (bookie) S" + rest, "98765"},
		{"blanks-and-brackets", "17 (a) (b c) R" + rest, "98765"},
		{"zombie", "17 (bookie) Z" + rest, ""},
		{"zombie-whose-threads-still-run", "17 (bookie) Z" + strings.Replace(rest, "20 0 1 0", "20 0 4 0", 1), "98765"},
		{"short", "17 (bookie) S 1", ""},
		{"empty", "", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, _, _ := strings.Cut(linuxStartTime(tt.stat), "@")
			if got != tt.want {
				t.Errorf("linuxStartTime(%q) = %q, want %q", tt.stat, got, tt.want)
			}
		})
	}
}

func TestGroupsBelieveTheHighestTerm(t *testing.T) {
	answer := func(node, state string, term uint64) Health {
		return Health{Node: node, Groups: []GroupHealth{{ID: 1, State: state, Term: term}}}
	}
	got := groupsOf([]Health{
		answer("bookie-1@a", "leader", 4), // cut off, does not know it yet
		answer("bookie-2@b", "follower", 5),
		answer("bookie-3@c", "leader", 5),
	})
	if len(got) != 1 || got[0].Leader != 3 || got[0].Term != 5 {
		t.Errorf("groupsOf = %+v, want bookie 3 to lead group 1 at term 5", got)
	}
}
