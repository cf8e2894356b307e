package localcluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// DefaultPortBase puts broker 1 on Pulsar's usual ports, 6650 and 8080.
const DefaultPortBase = 6650

// The limits of a port base: all ports that follow from it are unprivileged and
// valid.
const (
	minPortBase = 1024
	maxPortBase = 65535 - httpOffset - bookieOffset - 10*(maxProcesses-1)
)

// Offsets from the port base; see the package comment.
const (
	bookieOffset = 5
	httpOffset   = 1430
	maxProcesses = 3 // of one role
)

// Role is what a process is.
type Role string

// The roles.
const (
	Bookie Role = "bookie"
	Broker Role = "broker"
)

// Process names one process of a cluster. Numbers start at 1.
type Process struct {
	Role   Role
	Number int
}

// String returns the form that log and pid files are named after: "bookie-1".
func (p Process) String() string { return string(p.Role) + "-" + strconv.Itoa(p.Number) }

// spoken is how commands and errors spell a process: "bookie 1".
func (p Process) spoken() string { return string(p.Role) + " " + strconv.Itoa(p.Number) }

// Options says which cluster.
type Options struct {
	Dir string // where everything is; made by Up
	Bin string // the directory with the programs bookie and broker

	// What a new cluster gets. For one that exists, zero values mean "as it is"
	// and other values must agree.
	Name        string
	PortBase    int
	BookieSet   []string // further "key=value" for every bookie
	BrokerSet   []string // further "key=value" for every broker
	ProgressLog func(line string)

	// EndWithParent kills the processes when the program that started them ends; see
	// [Guard].
	EndWithParent bool
}

// Cluster is one cluster's directory, and what is needed to run processes there.
type Cluster struct {
	dir      string
	bin      string
	progress func(line string)
	reapers  sync.WaitGroup

	endWithParent bool

	mu    sync.Mutex
	state state // mu guards Formatted; the rest does not change once Open has returned
}

// state is the content of cluster.json.
type state struct {
	Name      string   `json:"name"`
	PortBase  int      `json:"portBase"`
	Bookies   int      `json:"bookies"`
	Brokers   int      `json:"brokers"`
	Formatted bool     `json:"formatted"` // bookie 1 was formatted; never again, whatever is wiped
	BookieSet []string `json:"bookieSet,omitempty"`
	BrokerSet []string `json:"brokerSet,omitempty"`
}

// ErrNoCluster reports a directory without a cluster. Up makes one.
var ErrNoCluster = errors.New("no cluster here")

// Open opens the cluster in o.Dir. If there is none and create is set, it will be
// a new one, which first exists on disk once Up has begun; without create that is
// [ErrNoCluster].
func Open(o Options, create bool) (*Cluster, error) {
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("cluster directory %q: %w", o.Dir, err)
	}
	bin, err := filepath.Abs(o.Bin) // the programs run in directories of their own
	if err != nil {
		return nil, fmt.Errorf("programs in %q: %w", o.Bin, err)
	}
	c := &Cluster{dir: dir, bin: bin, progress: o.ProgressLog, endWithParent: o.EndWithParent}
	if c.progress == nil {
		c.progress = func(string) {}
	}
	text, err := os.ReadFile(c.file("cluster.json"))
	switch {
	case errors.Is(err, fs.ErrNotExist) && create:
		return c, c.fresh(o)
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%s: %w: start one with `up`, or say which with --dir", dir, ErrNoCluster)
	case err != nil:
		return nil, err
	}
	if err := json.Unmarshal(text, &c.state); err != nil {
		return nil, fmt.Errorf("%s: %w", c.file("cluster.json"), err)
	}
	return c, c.agree(o)
}

func (c *Cluster) fresh(o Options) error {
	c.state = state{
		Name: o.Name, PortBase: o.PortBase, Bookies: 3, Brokers: 2,
		BookieSet: o.BookieSet, BrokerSet: o.BrokerSet,
	}
	if c.state.Name == "" {
		c.state.Name = "local"
	}
	if c.state.PortBase == 0 {
		c.state.PortBase = DefaultPortBase
	}
	if n := c.state.PortBase; n < minPortBase || n > maxPortBase {
		return fmt.Errorf("port base %d: want %d to %d", n, minPortBase, maxPortBase)
	}
	return nil
}

// agree checks that what the caller asks for is what the directory holds, and
// takes over new settings, which count from each process' next start.
func (c *Cluster) agree(o Options) error {
	s := &c.state
	if o.Name != "" && o.Name != s.Name {
		return fmt.Errorf("%s holds the cluster %q, not %q: leave --name out, use another --dir, or remove this one with `down` and `wipe`",
			c.dir, s.Name, o.Name)
	}
	if o.PortBase != 0 && o.PortBase != s.PortBase {
		return fmt.Errorf("the cluster in %s has port base %d, not %d: leave --port-base out, use another --dir, or remove this one with `down` and `wipe`",
			c.dir, s.PortBase, o.PortBase)
	}
	if o.BookieSet != nil {
		s.BookieSet = o.BookieSet
	}
	if o.BrokerSet != nil {
		s.BrokerSet = o.BrokerSet
	}
	return nil
}

// save writes cluster.json, whole or not at all.
func (c *Cluster) save() error {
	text, err := json.MarshalIndent(c.state, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(c.dir, 0o750); err != nil {
		return err
	}
	return replaceFile(c.file("cluster.json"), append(text, '\n'))
}

// replaceFile writes a file so that a reader sees the old or the new content.
func replaceFile(name string, content []byte) error {
	temporary := name + ".new"
	if err := os.WriteFile(temporary, content, 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, name)
}

// Name returns the cluster's name.
func (c *Cluster) Name() string { return c.state.Name }

// Dir returns the cluster's directory, as an absolute path.
func (c *Cluster) Dir() string { return c.dir }

// Processes lists the cluster's processes, bookies first.
func (c *Cluster) Processes() []Process {
	return slices.Concat(numbered(Bookie, c.state.Bookies), numbered(Broker, c.state.Brokers))
}

func numbered(role Role, n int) []Process {
	all := make([]Process, n)
	for i := range all {
		all[i] = Process{role, i + 1}
	}
	return all
}

// Check says whether the cluster has such a process.
func (c *Cluster) Check(p Process) error {
	count := map[Role]int{Bookie: c.state.Bookies, Broker: c.state.Brokers}[p.Role]
	if count == 0 {
		return fmt.Errorf("no role %q: want bookie or broker", p.Role)
	}
	if p.Number < 1 || p.Number > count {
		return fmt.Errorf("no %s: want %s 1 to %d", p.spoken(), p.Role, count)
	}
	return nil
}

// Port returns the port that others connect to: a broker's Pulsar port, a bookie's
// inter-node port.
func (c *Cluster) Port(p Process) int {
	port := c.state.PortBase + 10*(p.Number-1)
	if p.Role == Bookie {
		port += bookieOffset
	}
	return port
}

// HTTPPort returns the port of the process' HTTP server.
func (c *Cluster) HTTPPort(p Process) int { return c.Port(p) + httpOffset }

// ServiceURL is what a Pulsar client connects to. It names all brokers.
func (c *Cluster) ServiceURL() string {
	addrs := make([]string, c.state.Brokers)
	for i, p := range numbered(Broker, c.state.Brokers) {
		addrs[i] = loopback(c.Port(p))
	}
	return "pulsar://" + strings.Join(addrs, ",")
}

// BrokerURL is the service URL of one broker.
func (c *Cluster) BrokerURL(number int) string {
	return "pulsar://" + loopback(c.Port(Process{Broker, number}))
}

// WebURL is the base URL of a process' HTTP server.
func (c *Cluster) WebURL(p Process) string { return "http://" + loopback(c.HTTPPort(p)) }

// DataDir is the directory with a bookie's data.
func (c *Cluster) DataDir(p Process) string { return c.file(p.String()) }

// LogFile is where a process' output goes.
func (c *Cluster) LogFile(p Process) string { return c.file("log", p.String()+".log") }

func (c *Cluster) pidFile(p Process) string { return c.file("run", p.String()+".pid") }

func (c *Cluster) file(parts ...string) string {
	return filepath.Join(append([]string{c.dir}, parts...)...)
}

func loopback(port int) string { return "127.0.0.1:" + strconv.Itoa(port) }
