package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"

	"github.com/magnetar-io/magnetar/internal/localcluster"
	"github.com/magnetar-io/magnetar/verify"
)

// How long a cluster may take for what, on a slow machine with other tests beside.
const (
	recoveryLimit = 60 * time.Second // to have everything work again after a kill
	takeoverLimit = 10 * time.Second // for another broker to serve a dead one's topics: a promise
	publishLimit  = 5 * time.Second  // for publishing to continue after a bookie's death: a promise
)

func bookie(n int) localcluster.Process {
	return localcluster.Process{Role: localcluster.Bookie, Number: n}
}

func broker(n int) localcluster.Process {
	return localcluster.Process{Role: localcluster.Broker, Number: n}
}

// cluster is a running cluster under test.
type cluster struct{ *localcluster.Cluster }

// startCluster starts a cluster and ends it, by force, with the test.
func startCluster(t *testing.T, o localcluster.Options) cluster {
	t.Helper()
	var err error
	if o.PortBase, err = localcluster.FreePortBase(); err != nil {
		t.Fatal(err)
	}
	o.Bin, o.Dir, o.EndWithParent = programs, filepath.Join(t.TempDir(), "cluster"), true
	c, err := localcluster.Open(o, true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		keepLogs(t, c)
		if err := errors.Join(c.KillAll(ctx), c.Down(ctx)); err != nil {
			t.Error(err)
		}
	})
	if err := c.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	return cluster{c}
}

// keepLogs copies the logs of the processes to $MAGNETAR_TEST_LOGS, if that is set:
// the test's own directory is about to be removed.
func keepLogs(t *testing.T, c *localcluster.Cluster) {
	keep := os.Getenv("MAGNETAR_TEST_LOGS")
	switch {
	case keep == "" && t.Failed():
		t.Log("set MAGNETAR_TEST_LOGS=DIR to keep the logs of the cluster's processes")
		return
	case keep == "":
		return
	}
	to := filepath.Join(keep, strings.ReplaceAll(t.Name(), "/", "-")+"-"+strconv.Itoa(os.Getpid()))
	if err := os.CopyFS(to, os.DirFS(filepath.Join(c.Dir(), "log"))); err != nil {
		t.Log(err)
	}
	t.Logf("logs are kept in %s", to)
}

// whole brings everything up again and waits until every group is complete.
func (c cluster) whole(t *testing.T) {
	t.Helper()
	if err := c.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (c cluster) must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// owner returns the number of the broker that serves a topic.
func (c cluster) owner(t *testing.T, topic string) int {
	t.Helper()
	path := "/lookup/v2/topic/" + strings.Replace(topic, "://", "/", 1)
	var answer struct {
		BrokerURL string `json:"brokerUrl"`
	}
	c.ask(t, path, &answer)
	for n := 1; n <= 2; n++ {
		if c.BrokerURL(n) == answer.BrokerURL {
			return n
		}
	}
	t.Fatalf("the owner of %s is %q, which is neither %s nor %s", topic, answer.BrokerURL, c.BrokerURL(1), c.BrokerURL(2))
	return 0
}

// leaderOf returns the number of the bookie that leads the group of the ledger which
// the topic's messages go to.
func (c cluster) leaderOf(t *testing.T, topic string) int {
	t.Helper()
	var stats struct {
		Ledgers []struct {
			LedgerID int64 `json:"ledgerId"`
		} `json:"ledgers"`
	}
	c.ask(t, "/admin/v2/"+strings.Replace(topic, "://", "/", 1)+"/internalStats", &stats)
	if len(stats.Ledgers) == 0 {
		t.Fatalf("%s has no ledgers", topic)
	}
	last := stats.Ledgers[len(stats.Ledgers)-1].LedgerID
	status := c.Status(t.Context())
	group := 1 + (last-1)%int64(len(status.Groups)-1)
	leader := status.Leader(uint32(group))
	if leader == 0 {
		t.Fatalf("group %d of ledger %d has no leader", group, last)
	}
	return leader
}

// ask gets a JSON answer from a broker that runs.
func (c cluster) ask(t *testing.T, path string, answer any) {
	t.Helper()
	for n := 1; n <= 2; n++ {
		if c.Pid(broker(n)) == 0 {
			continue
		}
		code, body := get(c.WebURL(broker(n)) + path)
		if code != http.StatusOK {
			t.Fatalf("GET %s of broker %d: %d %s", path, n, code, body)
		}
		if err := json.Unmarshal([]byte(body), answer); err != nil {
			t.Fatalf("GET %s of broker %d: %v in %s", path, n, err, body)
		}
		return
	}
	t.Fatal("no broker runs")
}

func put(t *testing.T, url, body string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPut, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	if response.StatusCode/100 != 2 {
		t.Fatalf("PUT %s: %s %s", url, response.Status, text)
	}
}

// TestCluster runs what needs a cluster one after the other on the same one: each
// part begins by making it whole again, and uses topics of its own.
func TestCluster(t *testing.T) {
	if testing.Short() {
		t.Skip("starts five processes and kills them")
	}
	c := startCluster(t, localcluster.Options{Name: "first"})
	parts := []struct {
		name string
		run  func(t *testing.T, c cluster)
	}{
		{"both-brokers-are-entry-points", bothBrokersAreEntryPoints},
		{"metrics", clusterMetrics},
		{"other-clusters-are-refused", otherClustersAreRefused},
		{"kill-leader-and-owner", killLeaderAndOwner},
		{"two-bookies-down", twoBookiesDown},
		{"kill-everything", killEverything},
		{"wiped-bookie-rejoins", wipedBookieRejoins},
		{"laggard-never-leads", laggardNeverLeads},
		{"orderly-restart", orderlyRestart},
	}
	for _, part := range parts {
		t.Run(part.name, func(t *testing.T) {
			c.whole(t)
			part.run(t, c)
		})
	}
}

func bothBrokersAreEntryPoints(t *testing.T, c cluster) {
	first, second := connect(t, c.BrokerURL(1)), connect(t, c.BrokerURL(2))
	for i := range 8 { // several topics, so that both brokers own some
		topic := topicFor(t) + "-" + strconv.Itoa(i)
		consumer := subscribe(t, second, pulsar.ConsumerOptions{Topic: topic})
		sendNumbers(t, produceTo(t, first, pulsar.ProducerOptions{Topic: topic}), 1, 3)
		numbers, _ := receiveNumbers(t, consumer, 3)
		wantNumbers(t, numbers, 1, 3)
	}
}

func killLeaderAndOwner(t *testing.T, c cluster) {
	topic := topicFor(t)
	client := connect(t, c.ServiceURL())
	history := verify.New()
	stop := consume(t, subscribe(t, client, pulsar.ConsumerOptions{Topic: topic}), history)
	const producers, each = 4, 12_500
	l := publish(t, client, history, plan{topic: topic, name: "load", producers: producers, messages: each, size: 200, perTick: 10, timeout: -1})

	const all = producers * each
	l.await(t, all/5, recoveryLimit)
	victim := bookie(c.leaderOf(t, topic))
	l.mark()
	c.must(t, c.Kill(t.Context(), victim))
	took := l.resumed(t, recoveryLimit)
	t.Logf("%v, the leader, was killed: publishing continued after %v", victim, took)
	if took > publishLimit {
		t.Errorf("publishing continued %v after %v was killed, want at most %v", took, victim, publishLimit)
	}

	l.await(t, all*2/5, recoveryLimit)
	c.must(t, c.Start(t.Context(), victim))
	l.await(t, all*3/5, recoveryLimit)
	dead := broker(c.owner(t, topic))
	l.mark()
	c.must(t, c.Kill(t.Context(), dead))
	took = l.resumed(t, recoveryLimit)
	t.Logf("%v, the owner, was killed: publishing continued after %v", dead, took)
	if took > takeoverLimit {
		t.Errorf("publishing continued %v after %v was killed, want at most %v", took, dead, takeoverLimit)
	}
	c.must(t, c.Start(t.Context(), dead))

	l.wait(t, 2*recoveryLimit)
	if n := l.failed.Load(); n > 0 {
		t.Errorf("%d messages were given up, although nothing told the client to", n)
	}
	v := settled(t, history, verify.Options{}, recoveryLimit)
	stop()
	if v.Acknowledged != all {
		t.Errorf("%d messages were acknowledged, want %d", v.Acknowledged, all)
	}
	t.Logf("duplicates after broken connections: %d", v.Duplicates)
}

func twoBookiesDown(t *testing.T, c cluster) {
	topic := topicFor(t)
	client := connect(t, c.ServiceURL())
	history := verify.New()
	// The consumer takes ten messages and no more, so that the rest waits in the broker.
	slow := subscribe(t, client, pulsar.ConsumerOptions{Topic: topic, ReceiverQueueSize: 10})
	const messages = 200
	l := publish(t, client, history, plan{topic: topic, name: "before", producers: 1, messages: messages, size: 1000, perTick: 10, timeout: -1})
	l.wait(t, recoveryLimit)
	hasty := prepare(t, client, history, plan{topic: topic, name: "hasty", producers: 1, messages: 5, size: 1000, perTick: 10, timeout: 2 * time.Second})
	patient := prepare(t, client, history, plan{topic: topic, name: "patient", producers: 1, messages: 20, size: 1000, perTick: 10, timeout: -1})

	survivor := c.leaderOf(t, topic)
	for n := 1; n <= 3; n++ {
		if n != survivor {
			c.must(t, c.Kill(t.Context(), bookie(n)))
		}
	}
	stop := consume(t, slow, history)
	settled(t, history, verify.Options{}, 5*time.Second) // before the broker's lease can run out
	stop()

	hasty.start(t)
	patient.start(t)
	hasty.wait(t, recoveryLimit)
	if n := hasty.acked.Load() + patient.acked.Load(); n > 0 {
		t.Errorf("%d messages were acknowledged with one bookie of three", n)
	}
	stop = consume(t, slow, history)
	c.whole(t)
	patient.wait(t, recoveryLimit)
	settled(t, history, verify.Options{}, recoveryLimit)
	stop()
}

func killEverything(t *testing.T, c cluster) {
	topic := topicFor(t)
	options := pulsar.ConsumerOptions{Topic: topic, AckWithResponse: true}
	client := connectFor(t, c.ServiceURL(), orphanLimit)
	consumer := subscribe(t, client, options)
	keep(t, client, topic)
	producer := produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	const all, standing, fresh = 100, 40, 60
	sendNumbers(t, producer, 1, all)
	numbers, messages := receiveNumbers(t, consumer, all)
	wantNumbers(t, numbers, 1, all)
	ack(t, consumer, messages[:standing]...)
	ack(t, consumer, messages[all-1]) // alone, far ahead
	time.Sleep(2 * cursorFlush)       // the flush is the broker's, and leaves no trace to wait for
	ack(t, consumer, messages[standing:fresh]...)
	c.must(t, c.KillAll(t.Context()))
	client.Close()

	c.whole(t)
	client = connect(t, c.ServiceURL())
	consumer = subscribe(t, client, options)
	seen := map[int]bool{}
	for last := 0; last != all-1; { // 100 was acknowledged; 99 is the last that must come
		m := receive(t, consumer)
		n, err := strconv.Atoi(string(m.Payload()))
		c.must(t, err)
		if n <= last {
			t.Errorf("%d came after %d", n, last)
		}
		if n <= standing || n == all {
			t.Errorf("%d came again, although its ack was older than the flush", n)
		}
		seen[n], last = true, n
		ack(t, consumer, m)
	}
	for n := fresh + 1; n < all; n++ {
		if !seen[n] {
			t.Errorf("%d was not acknowledged and did not come", n)
		}
	}
	sendNumbers(t, produceTo(t, client, pulsar.ProducerOptions{Topic: topic}), all+1, all+1)
	numbers, _ = receiveNumbers(t, consumer, 1)
	wantNumbers(t, numbers, all+1, all+1)
	everything := readNumbers(t, client, topic)
	wantNumbers(t, everything, 1, all+1)
}

// keep holds everything in the topic: what no subscription wants any more is trimmed.
func keep(t *testing.T, client pulsar.Client, topic string) {
	t.Helper()
	subscribe(t, client, pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "keep", ReceiverQueueSize: 1})
}

// readNumbers reads a topic from its first message to its last.
func readNumbers(t *testing.T, client pulsar.Client, topic string) []int {
	t.Helper()
	reader, err := client.CreateReader(pulsar.ReaderOptions{Topic: topic, StartMessageID: pulsar.EarliestMessageID()})
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	var numbers []int
	for reader.HasNext() {
		ctx, cancel := context.WithTimeout(t.Context(), receiveLimit)
		m, err := reader.Next(ctx)
		cancel()
		if err != nil {
			t.Fatalf("after %d messages: %v", len(numbers), err)
		}
		n, _ := strconv.Atoi(string(m.Payload()))
		numbers = append(numbers, n)
	}
	return numbers
}

func wipedBookieRejoins(t *testing.T, c cluster) {
	topic := topicFor(t)
	client := connect(t, c.ServiceURL())
	keep(t, client, topic)
	producer := produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	sendNumbers(t, producer, 1, 50)

	victim := bookie(c.leaderOf(t, topic))
	before := c.node(t, victim)
	c.must(t, c.Kill(t.Context(), victim))
	c.must(t, c.Wipe(victim))
	sendNumbers(t, producer, 51, 100)
	c.must(t, c.Start(t.Context(), victim))
	c.must(t, c.WaitGroups(t.Context())) // three voters each, on disks in use
	after := c.node(t, victim)
	if after == before || !strings.HasPrefix(after, victim.String()+"@") {
		t.Errorf("the wiped %v is %q, was %q: want another disk of the same name", victim, after, before)
	}

	// It carries the cluster with one of the others.
	other := bookie(victim.Number%3 + 1)
	c.must(t, c.Kill(t.Context(), other))
	sendNumbers(t, producer, 101, 110)
	wantNumbers(t, readNumbers(t, client, topic), 1, 110)
}

// node returns a bookie's name@disk.
func (c cluster) node(t *testing.T, p localcluster.Process) string {
	t.Helper()
	for _, s := range c.Status(t.Context()).Processes {
		if s.Role == p.Role && s.Number == p.Number && s.Node != "" {
			return s.Node
		}
	}
	t.Fatalf("%v does not say who it is", p)
	return ""
}

func laggardNeverLeads(t *testing.T, c cluster) {
	topic := topicFor(t)
	client := connect(t, c.ServiceURL())
	keep(t, client, topic)
	producer := produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	sendNumbers(t, producer, 1, 20)
	leader := c.leaderOf(t, topic)
	laggard, forgetful := leader%3+1, (leader+1)%3+1
	c.must(t, c.Kill(t.Context(), bookie(laggard)))
	sendNumbers(t, producer, 21, 60) // on the leader and the forgetful one only

	c.must(t, c.Kill(t.Context(), bookie(forgetful)))
	c.must(t, c.Wipe(bookie(forgetful)))
	c.must(t, c.Kill(t.Context(), bookie(leader)))
	c.must(t, c.Start(t.Context(), bookie(laggard)))
	c.must(t, c.Start(t.Context(), bookie(forgetful)))
	// Long enough for several elections.
	for end := time.Now().Add(8 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		for _, g := range c.Status(t.Context()).Groups {
			if g.Leader != 0 {
				t.Fatalf("bookie %d leads group %d, although only a laggard and an empty disk are up", g.Leader, g.Group)
			}
		}
	}
	c.must(t, c.Start(t.Context(), bookie(leader)))
	c.must(t, c.WaitGroups(t.Context()))
	sendNumbers(t, producer, 61, 70)
	wantNumbers(t, readNumbers(t, client, topic), 1, 70)
}

func orderlyRestart(t *testing.T, c cluster) {
	topic := topicFor(t)
	options := pulsar.ConsumerOptions{Topic: topic, AckWithResponse: true}
	client := connectFor(t, c.ServiceURL(), orphanLimit)
	consumer := subscribe(t, client, options)
	sendNumbers(t, produceTo(t, client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true}), 1, 10)
	_, messages := receiveNumbers(t, consumer, 10)
	ack(t, consumer, messages[:5]...) // an orderly end flushes at once
	began := time.Now()
	c.must(t, c.Down(t.Context()))
	t.Logf("down took %v", time.Since(began))
	client.Close()
	c.whole(t)
	client = connect(t, c.ServiceURL())
	numbers, _ := receiveNumbers(t, subscribe(t, client, options), 5)
	wantNumbers(t, numbers, 6, 10)
}

// otherClustersAreRefused starts a bookie and a broker of another name that are told
// to use this cluster's bookies.
func otherClustersAreRefused(t *testing.T, c cluster) {
	seeds := "bookies=127.0.0.1:" + strconv.Itoa(c.Port(bookie(1)))
	tests := []struct {
		program string
		args    []string
	}{
		{"bookie", []string{
			"--set", "clusterName=second", "--set", seeds, "--set", "bookieId=stranger", "--set", "bookiePort=0",
			"--set", "httpServerPort=0", "--set", "journalDirectory=" + filepath.Join(t.TempDir(), "bookie"),
		}},
		{"broker", []string{
			"--set", "clusterName=second", "--set", seeds, "--set", "brokerServicePort=0", "--set", "webServicePort=0",
		}},
	}
	for _, tt := range tests {
		t.Run(tt.program, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), startLimit)
			defer cancel()
			cmd := exec.CommandContext(ctx, filepath.Join(programs, tt.program), tt.args...)
			var out watched
			out.found = make(chan struct{})
			out.want = []string{"first", "second"} // a refusal that names both sides
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			select {
			case <-out.found:
			case <-ctx.Done():
				t.Errorf("no refusal that names both clusters within %v", startLimit)
			}
			cancel()
			cmd.Wait()
			if t.Failed() {
				t.Log(out.text.String())
			}
		})
	}
	for _, g := range c.Status(t.Context()).Groups {
		if members := fmt.Sprint(g.Voters, g.Learners); strings.Contains(members, "stranger") {
			t.Errorf("group %d has the members %s", g.Group, members)
		}
	}
}

// watched is an output that tells when a line has all the words that are wanted.
// Only the process' copying goroutine writes; text is read after Wait.
type watched struct {
	text  bytes.Buffer
	want  []string
	found chan struct{}
	done  bool
}

func (w *watched) Write(p []byte) (int, error) {
	w.text.Write(p)
	for line := range strings.Lines(w.text.String()) {
		all := true
		for _, word := range w.want {
			all = all && strings.Contains(line, word)
		}
		if all && !w.done {
			w.done = true
			close(w.found)
		}
	}
	return len(p), nil
}

// clusterMetrics checks that what an operator watches is there, under Pulsar's names
// where Pulsar has them.
func clusterMetrics(t *testing.T, c cluster) {
	topic := topicFor(t)
	client := connect(t, c.ServiceURL())
	subscribe(t, client, pulsar.ConsumerOptions{Topic: topic})
	sendNumbers(t, produceTo(t, client, pulsar.ProducerOptions{Topic: topic}), 1, 10)
	owner := broker(c.owner(t, topic))
	wantMetrics(t, c.WebURL(owner), "pulsar_rate_in", "pulsar_rate_out", "pulsar_throughput_in", "pulsar_msg_backlog",
		"pulsar_subscription_back_log", "pulsar_active_connections", "pulsar_broker_topics_count", "pulsar_ml_cache_used_size")
	for n := 1; n <= 3; n++ {
		wantMetrics(t, c.WebURL(bookie(n)), "raft_group_", "bookie_", "process_resident_memory_bytes")
	}
}

// wantMetrics wants a sample of each family, or of one that begins so.
func wantMetrics(t *testing.T, web string, families ...string) {
	t.Helper()
	code, text := get(web + "/metrics")
	if code != http.StatusOK {
		t.Fatalf("GET %s/metrics: %d", web, code)
	}
	for _, family := range families {
		if !strings.HasPrefix(text, family) && !strings.Contains(text, "\n"+family) {
			t.Errorf("%s/metrics has no %s", web, family)
		}
	}
}

func TestStandaloneMetrics(t *testing.T) {
	s := shared.get(t)
	client := connect(t, s.url)
	topic := topicFor(t)
	subscribe(t, client, pulsar.ConsumerOptions{Topic: topic})
	sendNumbers(t, produceTo(t, client, pulsar.ProducerOptions{Topic: topic}), 1, 10)
	wantMetrics(t, s.web, "pulsar_rate_in", "pulsar_msg_backlog", "pulsar_active_connections", "pulsar_ml_cache_used_size", "raft_group_", "bookie_")
}

// TestScript runs scripts/cluster as a person would.
func TestScript(t *testing.T) {
	if testing.Short() {
		t.Skip("starts five processes")
	}
	base, err := localcluster.FreePortBase()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "cluster")
	script := func(args ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, repository+"/scripts/cluster", append(args, "--dir", dir)...)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("scripts/cluster %s: %v\n%s%s", strings.Join(args, " "), err, out, stderr.String())
		}
		return string(out)
	}
	t.Cleanup(func() {
		script("down")
		script("wipe")
	})
	script("up", "--name", "scripted", "--port-base", strconv.Itoa(base))
	client := connect(t, "pulsar://127.0.0.1:"+strconv.Itoa(base))
	topic := topicFor(t)
	producer := produceTo(t, client, pulsar.ProducerOptions{Topic: topic})
	sendNumbers(t, producer, 1, 10)
	script("kill", "bookie", "2")
	script("stop", "broker", "2")
	sendNumbers(t, producer, 11, 20)

	var status localcluster.Status
	if err := json.Unmarshal([]byte(script("status", "--json")), &status); err != nil {
		t.Fatal(err)
	}
	if status.Name != "scripted" || len(status.Processes) != 5 || len(status.Groups) < 4 {
		t.Errorf("status: name %q, %d processes, %d groups", status.Name, len(status.Processes), len(status.Groups))
	}
	for _, p := range status.Processes {
		down := p.Role == localcluster.Bookie && p.Number == 2 || p.Role == localcluster.Broker && p.Number == 2
		if down != (p.State == "stopped") || down != (p.Pid == 0) {
			t.Errorf("%s %d is %s with pid %d", p.Role, p.Number, p.State, p.Pid)
		}
	}
	for _, g := range status.Groups {
		if g.Leader == 0 || g.Leader == 2 {
			t.Errorf("group %d is led by bookie %d", g.Group, g.Leader)
		}
	}
	script("start", "bookie", "2")
	script("start", "broker", "2")
}
