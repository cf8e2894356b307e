package localcluster

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
)

// healthLimit bounds one question to one process.
const healthLimit = 2 * time.Second

// Health is what a process answers on /health. Brokers answer State only.
type Health struct {
	State  string        `json:"state"` // "ready", or why not
	Node   string        `json:"node,omitempty"`
	Groups []GroupHealth `json:"groups,omitempty"`
}

// GroupHealth is one Raft group as one of its members sees it.
type GroupHealth struct {
	ID      uint32   `json:"group"`
	State   string   `json:"state"` // leader, follower or candidate
	Leader  string   `json:"leader"`
	Term    uint64   `json:"term"`
	Commit  uint64   `json:"commit"`
	Applied uint64   `json:"applied"`
	LastLog uint64   `json:"lastLog"`
	Members []Member `json:"members"`
}

// Member is one member of a Raft group.
type Member struct {
	Node  string `json:"node"`
	Addr  string `json:"address"`
	Voter bool   `json:"voter"`
}

// Status is the state of the whole cluster.
type Status struct {
	Name      string          `json:"name"`
	Dir       string          `json:"dir"`
	Processes []ProcessStatus `json:"processes"`
	Groups    []GroupStatus   `json:"groups"`
}

// ProcessStatus is the state of one process.
type ProcessStatus struct {
	Role   Role           `json:"role"`
	Number int            `json:"number"`
	Pid    int            `json:"pid"`   // 0: not running
	State  string         `json:"state"` // "running", "starting" or "stopped"
	Ports  map[string]int `json:"ports"`
	Node   string         `json:"node,omitempty"` // a bookie's name@disk
	Detail string         `json:"detail,omitempty"`
	Log    string         `json:"log"`
}

// GroupStatus is the state of one Raft group, as its leader sees it or else the
// member with the highest term.
type GroupStatus struct {
	Group    uint32   `json:"group"`
	Leader   int      `json:"leader"` // the number of the bookie that leads; 0: none
	Node     string   `json:"node"`   // its name@disk
	Term     uint64   `json:"term"`
	Commit   uint64   `json:"commit"`
	Voters   []string `json:"voters"`
	Learners []string `json:"learners"` // members without a vote, catching up
}

// health asks a process how it is. An answer is an answer, whatever its HTTP
// status.
func (c *Cluster) health(ctx context.Context, p Process) (Health, error) {
	ctx, cancel := context.WithTimeout(ctx, healthLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.WebURL(p)+"/health", nil)
	if err != nil {
		return Health{}, err
	}
	response, err := healthClient.Do(request)
	if err != nil {
		return Health{}, err
	}
	defer func() { _ = response.Body.Close() }() // it was read
	const most = 1 << 20
	text, err := io.ReadAll(io.LimitReader(response.Body, most))
	if err != nil {
		return Health{}, err
	}
	var h Health
	if json.Unmarshal(text, &h) != nil || h.State == "" {
		h.State = strings.TrimSpace(string(text)) // a plain answer
	}
	if response.StatusCode == http.StatusOK {
		h.State = "ready"
	}
	return h, nil
}

// healthClient keeps no connection open between questions: the processes come and
// go.
var healthClient = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// Status asks every process that runs.
func (c *Cluster) Status(ctx context.Context) Status {
	all := c.Processes()
	answers := make([]Health, len(all))
	status := Status{Name: c.state.Name, Dir: c.dir, Processes: make([]ProcessStatus, len(all))}
	var asks sync.WaitGroup
	for i, p := range all {
		asks.Go(func() { status.Processes[i], answers[i] = c.processStatus(ctx, p) })
	}
	asks.Wait()
	status.Groups = groupsOf(answers)
	return status
}

func (c *Cluster) processStatus(ctx context.Context, p Process) (ProcessStatus, Health) {
	s := ProcessStatus{
		Role: p.Role, Number: p.Number, Pid: c.Pid(p), State: "stopped", Log: c.LogFile(p),
		Ports: map[string]int{"http": c.HTTPPort(p), string(p.Role): c.Port(p)},
	}
	if s.Pid == 0 {
		return s, Health{}
	}
	h, err := c.health(ctx, p)
	switch {
	case err != nil:
		s.State, s.Detail = "starting", "no answer on its HTTP port"
	case h.State != "ready":
		s.State, s.Detail = "starting", h.State
	default:
		s.State = "running"
	}
	s.Node = h.Node
	return s, h
}

// groupsOf merges what the bookies say about their groups. A group's leader is the
// member that says it leads at the highest term: one that was cut off may go on
// saying so at a lower one.
func groupsOf(answers []Health) []GroupStatus {
	best := map[uint32]GroupStatus{}
	leads := map[uint32]bool{}
	for _, h := range answers {
		for _, g := range h.Groups {
			old, seen := best[g.ID]
			leader := g.State == "leader"
			better := !seen || leader && !leads[g.ID] || leader == leads[g.ID] && g.Term > old.Term
			if !better {
				continue
			}
			leads[g.ID] = leader
			merged := GroupStatus{Group: g.ID, Term: g.Term, Commit: g.Commit, Voters: []string{}, Learners: []string{}}
			if leader {
				merged.Node, merged.Leader = h.Node, bookieNumber(h.Node)
			}
			for _, m := range g.Members {
				if m.Voter {
					merged.Voters = append(merged.Voters, m.Node)
				} else {
					merged.Learners = append(merged.Learners, m.Node)
				}
			}
			best[g.ID] = merged
		}
	}
	groups := make([]GroupStatus, 0, len(best))
	for _, g := range best {
		groups = append(groups, g)
	}
	slices.SortFunc(groups, func(a, b GroupStatus) int { return int(a.Group) - int(b.Group) })
	return groups
}

// bookieNumber takes the 2 out of "bookie-2@disk".
func bookieNumber(node string) int {
	name, _, _ := strings.Cut(node, "@")
	n, _ := strconv.Atoi(strings.TrimPrefix(name, string(Bookie)+"-")) // 0 is the answer then
	return n
}

// WaitGroups waits until every running bookie is ready and every Raft group has a
// leader and as many voters as the cluster has bookies, all of them of disks in use.
func (c *Cluster) WaitGroups(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyLimit, fmt.Errorf("not within %v", readyLimit))
	defer cancel()
	missing := ""
	err := poll(ctx, func() (bool, error) {
		missing = c.missing(c.Status(ctx))
		return missing == "", nil
	})
	if err != nil {
		return fmt.Errorf("wait for the Raft groups: %s: %w (logs: %s)", missing, err, c.file("log"))
	}
	return nil
}

// missing says what keeps the groups from being complete, "" if nothing.
func (c *Cluster) missing(s Status) string {
	inUse := map[string]bool{}
	for _, p := range s.Processes {
		if p.Role == Bookie && p.State == "running" {
			inUse[p.Node] = true
		} else if p.Role == Bookie && p.State == "starting" {
			return fmt.Sprintf("bookie %d is starting: %s", p.Number, p.Detail)
		}
	}
	if len(s.Groups) == 0 {
		return "no bookie answers"
	}
	for _, g := range s.Groups {
		if g.Leader == 0 {
			return fmt.Sprintf("group %d has no leader", g.Group)
		}
		if len(g.Voters) != c.state.Bookies {
			return fmt.Sprintf("group %d has the voters %v, want %d", g.Group, g.Voters, c.state.Bookies)
		}
		present := 0
		for _, v := range g.Voters {
			if inUse[v] {
				present++
			}
		}
		if present != len(inUse) {
			return fmt.Sprintf("group %d has the voters %v, of which %d of the %d running bookies are part", g.Group, g.Voters, present, len(inUse))
		}
	}
	return ""
}

// WaitReady waits until a process says that it is ready.
func (c *Cluster) WaitReady(ctx context.Context, p Process) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyLimit, fmt.Errorf("not ready within %v", readyLimit))
	defer cancel()
	last := "no answer yet"
	err := poll(ctx, func() (bool, error) {
		s, _ := c.processStatus(ctx, p)
		last = s.Detail
		if s.Pid == 0 {
			return false, fmt.Errorf("it ended; the last lines of %s:\n%s", c.LogFile(p), c.tail(p))
		}
		return s.State == "running", nil
	})
	if err != nil {
		return fmt.Errorf("wait for %s (%s): %w", p.spoken(), last, err)
	}
	return nil
}

// Leader returns the number of the bookie that leads a group, 0 if none does.
func (s Status) Leader(group uint32) int {
	for _, g := range s.Groups {
		if g.Group == group {
			return g.Leader
		}
	}
	return 0
}

// Print writes the status for people.
func (s Status) Print(w io.Writer) error {
	var out strings.Builder
	fmt.Fprintf(&out, "cluster %s in %s\n\n", s.Name, s.Dir)
	fmt.Fprintln(&out, "PROCESS\tSTATE\tPID\tPORT\tHTTP\tDETAIL")
	for _, p := range s.Processes {
		detail := p.Detail
		if detail == "" {
			detail = p.Node
		}
		fmt.Fprintf(&out, "%s %d\t%s\t%d\t%d\t%d\t%s\n", p.Role, p.Number, p.State, p.Pid, p.Ports[string(p.Role)], p.Ports["http"], detail)
	}
	fmt.Fprintln(&out, "\nGROUP\tLEADER\tTERM\tCOMMIT\tVOTERS")
	for _, g := range s.Groups {
		leader := "none"
		if g.Leader != 0 {
			leader = "bookie " + strconv.Itoa(g.Leader)
		}
		fmt.Fprintf(&out, "%d\t%s\t%d\t%d\t%s\n", g.Group, leader, g.Term, g.Commit, strings.Join(g.Voters, " "))
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if _, err := io.WriteString(table, out.String()); err != nil {
		return err
	}
	return table.Flush()
}
