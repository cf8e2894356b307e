package admin

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/protocol"
)

// TestRedirectToOwner asks both brokers for every kind of per-topic call: one
// answers, the other redirects to it with the query kept.
func TestRedirectToOwner(t *testing.T) {
	c := newCluster(t, 2, Config{})
	for i := range 8 {
		name := fmt.Sprintf("t-%d", i)
		answer, err := c.nodes[0].owner.Lookup(t.Context(), parse(t, name))
		if err != nil {
			t.Fatal(err)
		}
		owner, other := 0, 1
		if answer.Broker.ID == "broker-2" {
			owner, other = 1, 0
		}
		path := "/admin/v2/persistent/public/default/" + name
		if resp, body := c.send(owner, "PUT", path, "null"); resp.code != 204 {
			t.Fatalf("create at the owner = %d %s", resp.code, body)
		}
		for _, call := range []struct{ method, below string }{
			{"PUT", ""},
			{"DELETE", ""},
			{"GET", "/stats"},
			{"GET", "/internalStats"},
			{"GET", "/subscriptions"},
			{"PUT", "/unload"},
			{"DELETE", "/subscription/s%201"},
			{"POST", "/subscription/s/skip_all"},
		} {
			resp, body := c.send(other, call.method, path+call.below+"?force=true", "null")
			want := c.nodes[owner].url + path + call.below + "?authoritative=true&force=true"
			if got := resp.header.Get("Location"); resp.code != http.StatusTemporaryRedirect || got != want {
				t.Errorf("%s %s at the other broker = %d %s to %q, want 307 to %q", call.method, call.below, resp.code, body, got, want)
			}
		}
		_, one := c.send(0, "GET", "/lookup/v2/topic/persistent/public/default/"+name, "")
		_, two := c.send(1, "GET", "/lookup/v2/topic/persistent/public/default/"+name, "")
		if one != two || !strings.Contains(one, answer.Broker.ServiceURL) {
			t.Errorf("lookup of %s answers %s and %s, want both to name %s", name, one, two, answer.Broker.ServiceURL)
		}
	}
}

// TestRedirectedClientIsServed: a client that another broker sent here is served
// although the hash advises that other broker, so nobody is sent to and fro.
func TestRedirectedClientIsServed(t *testing.T) {
	c := newCluster(t, 2, Config{})
	path := "/admin/v2/persistent/public/default/t"
	resp, _ := c.send(0, "GET", path+"/stats", "")
	advised := 0
	if resp.code == http.StatusTemporaryRedirect {
		advised = 1
	}
	// Free the bundle, which the question may have made its broker take.
	for _, n := range c.nodes {
		bundle, err := n.owner.Bundle(t.Context(), parse(t, "t"))
		if err != nil {
			t.Fatal(err)
		}
		if err := n.owner.Release(t.Context(), "public/default/"+bundle); err != nil {
			t.Fatal(err)
		}
	}
	if resp, body := c.send(1-advised, "PUT", path+"?authoritative=true", ""); resp.code != 204 {
		t.Errorf("create where a redirect led = %d %s, want 204", resp.code, body)
	}
	eventually(t, "the advised broker redirects to the owner", func() bool {
		resp, _ := c.send(advised, "GET", path+"/stats", "")
		return resp.code == http.StatusTemporaryRedirect
	})
}

// TestPartitionsAcrossBrokers works on a partitioned topic whose partitions
// belong to two brokers, through one of them.
func TestPartitionsAcrossBrokers(t *testing.T) {
	c := newCluster(t, 2, Config{})
	const p = "/admin/v2/persistent/public/default/t"
	c.run([]step{
		{"create", "PUT", p + "/partitions", "16", 204, ""},
		{"stats", "GET", p + "/partitioned-stats", "", 200, `…"msgInCounter":16`},
		{"unload", "PUT", p + "/unload", "", 204, ""},
	})
	by := map[string]int{}
	c.topics.mu.Lock()
	for _, topic := range c.topics.all {
		by[topic.createdBy]++
		topic.subscriptions = []string{"s"}
	}
	c.topics.mu.Unlock()
	if by["broker-1"]+by["broker-2"] != 16 || by["broker-1"] == 0 || by["broker-2"] == 0 {
		t.Errorf("partitions were created by %v, want 16 by both brokers together", by)
	}
	c.run([]step{
		{"subscriptions", "GET", p + "/subscriptions", "", 200, `["s"]`},
		{"delete-subscription", "DELETE", p + "/subscription/s", "", 204, ""},
		{"delete-subscription-again", "DELETE", p + "/subscription/s", "", 404, `{"reason":"Subscription not found"}`},
		{"delete", "DELETE", p + "/partitions", "", 204, ""},
		{"nothing-left", "GET", "/admin/v2/persistent/public/default", "", 200, `[]`},
	})
}

func TestUnhealthyWithoutRegistration(t *testing.T) {
	c := newCluster(t, 1, Config{})
	if err := c.store.Delete(t.Context(), "/brokers/broker-1", -1); err != nil {
		t.Fatal(err)
	}
	c.run([]step{
		{"health", "GET", "/health", "", 503, "…not registered"},
		{"broker-health", "GET", "/admin/v2/brokers/health", "", 503, "…not registered"},
	})
}

func TestBodyIsBounded(t *testing.T) {
	c := newCluster(t, 1, Config{})
	resp, body := c.send(0, "PUT", "/admin/v2/tenants/big", strings.Repeat(" ", maxBodyBytes-1)+"{}")
	if resp.code != http.StatusRequestEntityTooLarge {
		t.Errorf("a body one byte too large = %d %.80s, want 413", resp.code, body)
	}
	resp, body = c.send(0, "PUT", "/admin/v2/persistent/public/default/t/partitions", strings.Repeat(" ", maxBodyBytes-1)+"1")
	if resp.code != http.StatusNoContent {
		t.Errorf("the largest body = %d %.80s, want 204", resp.code, body)
	}
}

func TestConcurrencyIsBounded(t *testing.T) {
	c := newCluster(t, 1, Config{MaxConcurrent: 2})
	hold := make(chan struct{})
	c.topics.mu.Lock()
	c.topics.wait = hold
	c.topics.mu.Unlock()
	answers := make(chan int, 2)
	for range 2 {
		go func() {
			resp, _ := c.send(0, "GET", "/admin/v2/persistent/public/default", "")
			answers <- resp.code
		}()
	}
	eventually(t, "two requests under way", func() bool { return len(c.nodes[0].handler.slots) == 2 })
	resp, body := c.send(0, "GET", "/admin/v2/clusters", "")
	if resp.code != http.StatusTooManyRequests || resp.header.Get("Retry-After") == "" {
		t.Errorf("the third request = %d %s, want 429 with Retry-After", resp.code, body)
	}
	close(hold)
	for range 2 {
		select {
		case code := <-answers:
			if code != 200 {
				t.Errorf("a request within the bound = %d, want 200", code)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("a request within the bound did not end")
		}
	}
	if resp, _ := c.send(0, "GET", "/admin/v2/clusters", ""); resp.code != 200 {
		t.Errorf("after the two ended = %d, want 200", resp.code)
	}
}

// TestOwnerGone redirects nowhere when the owner's address is unusable, and says
// so when a partition's owner does not answer.
func TestOwnerGone(t *testing.T) {
	c := newCluster(t, 2, Config{})
	const p = "/admin/v2/persistent/public/default/t"
	c.run([]step{{"create", "PUT", p + "/partitions", "16", 204, ""}})
	c.nodes[1].server.Close()
	c.run([]step{{"stats", "GET", p + "/partitioned-stats", "", 503, "…does not answer"}})
}

func parse(t *testing.T, name string) protocol.TopicName {
	t.Helper()
	topic, err := protocol.ParseTopic(name)
	if err != nil {
		t.Fatal(err)
	}
	return topic
}
