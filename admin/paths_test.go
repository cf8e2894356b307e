package admin

import (
	"strings"
	"testing"
)

func TestClusterPaths(t *testing.T) {
	c := newCluster(t, 1, Config{})
	host := strings.TrimPrefix(c.nodes[0].url, "http://")
	c.run([]step{
		{"metrics", "GET", "/metrics", "", 200, "…test_answer 42"},
		{"health", "GET", "/health", "", 200, "ok"},
		{"broker-health", "GET", "/admin/v2/brokers/health?topicVersion=V2", "", 200, "ok"},
		{"clusters", "GET", "/admin/v2/clusters", "", 200, `["test"]`},
		{"cluster", "GET", "/admin/v2/clusters/test", "", 200, `…"brokerServiceUrl":"pulsar://127.0.0.1:6650"`},
		{"no-cluster", "GET", "/admin/v2/clusters/other", "", 404, "…Cluster does not exist"},
		{"brokers", "GET", "/admin/v2/brokers", "", 200, `["` + host + `"]`},
		{"brokers-of-cluster", "GET", "/admin/v2/brokers/test", "", 200, `["` + host + `"]`},
		{"brokers-of-no-cluster", "GET", "/admin/v2/brokers/other", "", 404, "…Cluster does not exist"},
		{"nothing-there", "GET", "/admin/v3/nothing", "", 404, "…there is nothing at GET /admin/v3/nothing"},
		{"wrong-method", "PATCH", "/admin/v2/clusters", "", 405, "…allowed are"},
		{"double-slash", "GET", "//admin//v2/clusters", "", 200, `["test"]`},
	})
}

func TestTenantPaths(t *testing.T) {
	newCluster(t, 1, Config{}).run([]step{
		{"list", "GET", "/admin/v2/tenants", "", 200, `["public","pulsar"]`},
		{"get", "GET", "/admin/v2/tenants/public", "", 200, `{"allowedClusters":[],"adminRoles":[]}`},
		{"get-missing", "GET", "/admin/v2/tenants/acme", "", 404, `{"reason":"Tenant does not exist"}`},
		{"create", "PUT", "/admin/v2/tenants/acme", `{"adminRoles":["ann"],"allowedClusters":["test"]}`, 204, ""},
		{"create-again", "PUT", "/admin/v2/tenants/acme", "null", 409, `{"reason":"Tenant already exists"}`},
		{"create-bad-name", "PUT", "/admin/v2/tenants/a%20b", "", 412, "…letters, digits"},
		{"create-bad-body", "PUT", "/admin/v2/tenants/bad", "{", 400, "…the body is not the JSON"},
		{"get-created", "GET", "/admin/v2/tenants/acme", "", 200, `{"allowedClusters":["test"],"adminRoles":["ann"]}`},
		{"update", "POST", "/admin/v2/tenants/acme", `{"adminRoles":["bob"]}`, 204, ""},
		{"update-missing", "POST", "/admin/v2/tenants/nobody", `{}`, 404, `{"reason":"Tenant does not exist"}`},
		{"get-updated", "GET", "/admin/v2/tenants/acme", "", 200, `{"allowedClusters":[],"adminRoles":["bob"]}`},
		{"namespace", "PUT", "/admin/v2/namespaces/acme/one", "", 204, ""},
		{"delete-in-use", "DELETE", "/admin/v2/tenants/acme", "", 409, `{"reason":"The tenant still has active namespaces"}`},
		{"delete-namespace", "DELETE", "/admin/v2/namespaces/acme/one", "", 204, ""},
		{"delete", "DELETE", "/admin/v2/tenants/acme", "", 204, ""},
		{"delete-again", "DELETE", "/admin/v2/tenants/acme", "", 404, `{"reason":"Tenant does not exist"}`},
	})
}

func TestNamespacePaths(t *testing.T) {
	newCluster(t, 1, Config{}).run([]step{
		{"list", "GET", "/admin/v2/namespaces/public", "", 200, `["public/default"]`},
		{"list-of-nobody", "GET", "/admin/v2/namespaces/nobody", "", 404, `{"reason":"Tenant does not exist"}`},
		{"create", "PUT", "/admin/v2/namespaces/public/two", `{"replication_clusters":["test"],"bundles":{"numBundles":2}}`, 204, ""},
		{"create-again", "PUT", "/admin/v2/namespaces/public/two", "null", 409, `{"reason":"Namespace already exists"}`},
		{"create-for-nobody", "PUT", "/admin/v2/namespaces/nobody/x", "", 404, `{"reason":"Tenant does not exist"}`},
		{"create-bad-bundles", "PUT", "/admin/v2/namespaces/public/many", `{"bundles":{"numBundles":100000}}`, 412, "…1 to 1024"},
		{"get", "GET", "/admin/v2/namespaces/public/two", "", 200, `{"replication_clusters":["test"],"bundles":{"boundaries":["0x00000000","0x80000000","0xffffffff"],"numBundles":2}}`},
		{"bundles", "GET", "/admin/v2/namespaces/public/two/bundles", "", 200, `{"boundaries":["0x00000000","0x80000000","0xffffffff"],"numBundles":2}`},
		{"get-missing", "GET", "/admin/v2/namespaces/public/none", "", 404, `{"reason":"Namespace does not exist"}`},
		{"no-topics", "GET", "/admin/v2/namespaces/public/two/topics", "", 200, `[]`},
		{"topic", "PUT", "/admin/v2/persistent/public/two/t", "", 204, ""},
		{"topics", "GET", "/admin/v2/namespaces/public/two/topics?mode=PERSISTENT", "", 200, `["persistent://public/two/t"]`},
		{"topics-all", "GET", "/admin/v2/namespaces/public/two/topics?mode=ALL", "", 200, `["persistent://public/two/t"]`},
		{"topics-non-persistent", "GET", "/admin/v2/namespaces/public/two/topics?mode=NON_PERSISTENT", "", 200, `[]`},
		{"topics-bad-mode", "GET", "/admin/v2/namespaces/public/two/topics?mode=SOME", "", 400, "…mode is"},
		{"topics-of-nowhere", "GET", "/admin/v2/namespaces/public/none/topics", "", 404, `{"reason":"Namespace does not exist"}`},
		{"partitioned", "PUT", "/admin/v2/persistent/public/two/p/partitions", "2", 204, ""},
		{"delete-in-use", "DELETE", "/admin/v2/namespaces/public/two", "", 409, `{"reason":"Cannot delete non empty namespace"}`},
		{"delete-force", "DELETE", "/admin/v2/namespaces/public/two?force=true", "", 204, ""},
		{"delete-again", "DELETE", "/admin/v2/namespaces/public/two?force=true", "", 404, `{"reason":"Namespace does not exist"}`},
	})
}

func TestTopicPaths(t *testing.T) {
	const p = "/admin/v2/persistent/public/default"
	c := newCluster(t, 1, Config{})
	c.run([]step{
		{"list-none", "GET", p, "", 200, `[]`},
		{"list-nowhere", "GET", "/admin/v2/persistent/public/none", "", 404, `{"reason":"Namespace does not exist"}`},
		{"create", "PUT", p + "/t", "null", 204, ""},
		{"create-again", "PUT", p + "/t", "", 409, `{"reason":"This topic already exists"}`},
		{"create-nowhere", "PUT", "/admin/v2/persistent/public/none/t", "", 404, `{"reason":"Namespace does not exist"}`},
		{"create-escaped", "PUT", p + "/a%20b%3Fc%25", "", 204, ""},
		{"create-slash", "PUT", p + "/a%2Fb", "", 412, "…'/'"},
		{"list", "GET", p, "", 200, `["persistent://public/default/a b?c%","persistent://public/default/t"]`},
		{"stats", "GET", p + "/t/stats?getPreciseBacklog=true", "", 200, `…"msgInCounter":1`},
		{"stats-escaped", "GET", p + "/a%20b%3Fc%25/stats", "", 200, `…"msgInCounter":1`},
		{"stats-missing", "GET", p + "/none/stats", "", 404, `{"reason":"Topic not found"}`},
		{"internal-stats", "GET", p + "/t/internalStats", "", 200, `…"state":"LedgerOpened"`},
		{"internal-stats-missing", "GET", p + "/none/internalStats", "", 404, `{"reason":"Topic not found"}`},
		{"unload", "PUT", p + "/t/unload", "null", 204, ""},
		{"unload-missing", "PUT", p + "/none/unload", "", 404, `{"reason":"Topic not found"}`},
		{"no-subscriptions", "GET", p + "/t/subscriptions", "", 200, `[]`},
		{"no-partitions", "GET", p + "/t/partitions?checkAllowAutoCreation=true", "", 200, `{"partitions":0}`},
		{"partitions-of-unknown", "GET", p + "/none/partitions", "", 200, `{"partitions":0}`},
		{"partitions-nowhere", "GET", "/admin/v2/persistent/public/none/t/partitions", "", 404, `{"reason":"Namespace does not exist"}`},
		{"lookup", "GET", "/lookup/v2/topic/persistent/public/default/t", "", 200, `{"brokerUrl":"pulsar://127.0.0.1:6650","brokerUrlTls":"","httpUrl":"` + c.nodes[0].url + `","httpUrlTls":"","nativeUrl":"pulsar://127.0.0.1:6650"}`},
		{"lookup-nowhere", "GET", "/lookup/v2/topic/persistent/public/none/t", "", 404, `{"reason":"Namespace does not exist"}`},
		{"bundle", "GET", "/lookup/v2/topic/persistent/public/default/my-topic/bundle", "", 200, "0x00000000_0x40000000"},
		{"non-persistent-list", "GET", "/admin/v2/non-persistent/public/default", "", 200, `[]`},
	})

	c.topics.mu.Lock()
	c.topics.all["persistent://public/default/t"].subscriptions = []string{"s 1", "s2", "s3"}
	c.topics.all["persistent://public/default/t"].inUse = true
	c.topics.mu.Unlock()
	c.run([]step{
		{"subscriptions", "GET", p + "/t/subscriptions", "", 200, `["s 1","s2","s3"]`},
		{"delete-subscription-in-use", "DELETE", p + "/t/subscription/s2", "", 412, "…in use"},
		{"delete-subscription-force", "DELETE", p + "/t/subscription/s%201?force=true", "", 204, ""},
		{"delete-subscription-missing", "DELETE", p + "/t/subscription/none", "", 404, `{"reason":"Subscription not found"}`},
		{"skip-all", "POST", p + "/t/subscription/s2/skip_all", "", 204, ""},
		{"skip-all-missing", "POST", p + "/t/subscription/none/skip_all", "", 404, `{"reason":"Subscription not found"}`},
		{"delete-in-use", "DELETE", p + "/t", "", 412, "…in use"},
		{"delete-force", "DELETE", p + "/t?force=true", "", 204, ""},
		{"delete-again", "DELETE", p + "/t", "", 404, `{"reason":"Topic not found"}`},
	})
}

func TestPartitionedPaths(t *testing.T) {
	const p = "/admin/v2/persistent/public/default"
	c := newCluster(t, 1, Config{})
	c.run([]step{
		{"list-none", "GET", p + "/partitioned", "", 200, `[]`},
		{"create", "PUT", p + "/t/partitions", "2", 204, ""},
		{"create-again", "PUT", p + "/t/partitions", "2", 409, `{"reason":"This topic already exists"}`},
		{"create-object", "PUT", p + "/u/partitions", `{"partitions":1,"properties":null}`, 204, ""},
		{"create-zero", "PUT", p + "/z/partitions", "0", 406, "…more than 0"},
		{"create-bad-body", "PUT", p + "/z/partitions", `"x"`, 400, "…number of partitions"},
		{"create-no-body", "PUT", p + "/z/partitions", "", 400, "…number of partitions"},
		{"create-nowhere", "PUT", "/admin/v2/persistent/public/none/t/partitions", "1", 404, `{"reason":"Namespace does not exist"}`},
		{"create-a-partition", "PUT", p + "/t-partition-0/partitions", "1", 409, "…already exists"},
		{"create-plain-over-it", "PUT", p + "/t", "", 409, "…This topic already exists"},
		{"plain", "PUT", p + "/plain", "", 204, ""},
		{"create-over-plain", "PUT", p + "/plain/partitions", "2", 409, "…This topic already exists"},
		{"list", "GET", p + "/partitioned", "", 200, `["persistent://public/default/t","persistent://public/default/u"]`},
		{"list-partitions", "GET", p, "", 200, `["persistent://public/default/plain","persistent://public/default/t-partition-0","persistent://public/default/t-partition-1","persistent://public/default/u-partition-0"]`},
		{"get", "GET", p + "/t/partitions", "", 200, `{"partitions":2}`},
		{"shrink", "POST", p + "/t/partitions", "1", 422, "…can't less than current"},
		{"grow", "POST", p + "/t/partitions", "3", 204, ""},
		{"grow-plain", "POST", p + "/plain/partitions", "3", 404, "…zero partitions"},
		{"get-grown", "GET", p + "/t/partitions", "", 200, `{"partitions":3}`},
		{"grown-partition", "GET", p + "/t-partition-2/stats", "", 200, `…"msgInCounter":1`},
		{"stats", "GET", p + "/t/partitioned-stats?perPartition=true", "", 200, `…"persistent://public/default/t-partition-2":{`},
		{"stats-sum", "GET", p + "/t/partitioned-stats?perPartition=false", "", 200, `…"msgInCounter":3`},
		{"stats-of-plain", "GET", p + "/plain/partitioned-stats", "", 404, "…zero partitions"},
		{"unload", "PUT", p + "/t/unload", "", 204, ""},
		{"delete-as-plain", "DELETE", p + "/t", "", 412, "…partitioned topic"},
		{"delete-plain-as-partitioned", "DELETE", p + "/plain/partitions", "", 404, "…zero partitions"},
	})

	c.topics.mu.Lock()
	c.topics.all["persistent://public/default/t-partition-0"].subscriptions = []string{"a", "b"}
	c.topics.all["persistent://public/default/t-partition-1"].subscriptions = []string{"b"}
	c.topics.all["persistent://public/default/t-partition-1"].inUse = true
	c.topics.mu.Unlock()
	c.run([]step{
		{"subscriptions", "GET", p + "/t/subscriptions", "", 200, `["a","b"]`},
		{"delete-subscription-of-some", "DELETE", p + "/t/subscription/a", "", 204, ""},
		{"delete-subscription-of-none", "DELETE", p + "/t/subscription/c", "", 404, `{"reason":"Subscription not found"}`},
		{"delete-subscription-in-use", "DELETE", p + "/t/subscription/b", "", 412, "…in use"},
		{"delete-in-use", "DELETE", p + "/t/partitions", "", 412, "…in use"},
		{"get-after-refusal", "GET", p + "/t/partitions", "", 200, `{"partitions":3}`},
		{"delete-force", "DELETE", p + "/t/partitions?force=true", "", 204, ""},
		{"delete-again", "DELETE", p + "/t/partitions", "", 404, "…zero partitions"},
		{"nothing-left", "GET", p, "", 200, `["persistent://public/default/plain","persistent://public/default/u-partition-0"]`},
	})
}
