package admin

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/magnetar-io/magnetar/broker"
	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/internal/config"
	"github.com/magnetar-io/magnetar/protocol"
)

const (
	maxBodyBytes = 1 << 20

	// requestTimeout bounds one request. It is what Pulsar's clients wait.
	requestTimeout = 30 * time.Second
	// healthTimeout bounds how long metadata may take to answer a health check.
	healthTimeout = 5 * time.Second

	// socketTimeout bounds reading a body and writing an answer; it leaves a
	// request that used all its time some to say so.
	socketTimeout = requestTimeout + 10*time.Second
	// idleTimeout is how long an unused connection to another broker is kept.
	idleTimeout = 2 * time.Minute

	// fanOut is how many partitions of one topic are worked on side by side.
	fanOut = 8
)

// Config is this room's part of the broker's configuration.
type Config struct {
	ClusterName   string
	MaxConcurrent int // requests under way at once; more get 429
}

// Register adds this room's keys to s.
func (c *Config) Register(s *config.Set) {
	s.String(&c.ClusterName, "clusterName", "standalone", "Name of the cluster; the same on every bookie and broker of it.")
	s.Int(&c.MaxConcurrent, "maxConcurrentHttpRequests", 1024, 1, 65536,
		"HTTP requests that this broker works on at once. More are refused with status 429.")
}

// Broker is what admin needs of broker.Broker. Every method concerns topics
// that this broker owns, except Topics, which lists all of a namespace.
type Broker interface {
	CreateTopic(ctx context.Context, topic protocol.TopicName) error
	DeleteTopic(ctx context.Context, topic protocol.TopicName, force bool) error
	Topics(ctx context.Context, namespace string) ([]string, error)
	Stats(ctx context.Context, topic protocol.TopicName) (*broker.TopicStats, error)
	InternalStats(ctx context.Context, topic protocol.TopicName) (*broker.InternalStats, error)
	Unload(ctx context.Context, topic protocol.TopicName) error
	DeleteSubscription(ctx context.Context, topic protocol.TopicName, subscription string, force bool) error
	ClearBacklog(ctx context.Context, topic protocol.TopicName, subscription string) error
}

// Ownership is what admin needs of ownership.Service.
type Ownership interface {
	Lookup(ctx context.Context, topic protocol.TopicName) (ownership.Answer, error)
	Acquire(ctx context.Context, topic protocol.TopicName) (*ownership.Claim, error)
	Bundle(ctx context.Context, topic protocol.TopicName) (string, error)
	Brokers(ctx context.Context) ([]ownership.BrokerInfo, error)
	Self() ownership.BrokerInfo
	Check(ctx context.Context) error
}

// Deps are the rooms that admin shows to the world.
type Deps struct {
	Broker     Broker
	Ownership  Ownership
	Namespaces *ownership.Namespaces
	Gatherer   prometheus.Gatherer
}

// Handler answers every HTTP request to a broker.
type Handler struct {
	Deps
	cluster string
	log     *slog.Logger
	mux     *http.ServeMux
	slots   chan struct{} // one element for each request under way
	peers   *http.Client  // to other brokers
}

// New wires a Handler. It does no I/O.
func New(cfg Config, deps Deps, log *slog.Logger) *Handler {
	if cfg.MaxConcurrent == 0 {
		cfg.MaxConcurrent = 1024
	}
	h := &Handler{
		Deps: deps, cluster: cfg.ClusterName, log: log.With("component", "admin"),
		mux:   http.NewServeMux(),
		slots: make(chan struct{}, cfg.MaxConcurrent),
		peers: &http.Client{Timeout: requestTimeout, Transport: &http.Transport{
			MaxIdleConnsPerHost: fanOut, IdleConnTimeout: idleTimeout,
			ResponseHeaderTimeout: requestTimeout,
		}},
	}
	h.routes()
	return h
}

// Close drops idle connections to other brokers. Requests under way are the
// server's to end.
func (h *Handler) Close() { h.peers.CloseIdleConnections() }

// ServeHTTP admits the request, bounds it, and routes it.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	select {
	case h.slots <- struct{}{}:
		defer func() { <-h.slots }()
	default:
		w.Header().Set("Retry-After", "1")
		writeReason(w, http.StatusTooManyRequests, "too many requests under way on this broker: try again")
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
	defer cancel()
	r = squeezeSlashes(r.WithContext(ctx))
	r.Body = http.MaxBytesReader(w, r.Body, maxBodyBytes)
	// Deadlines are set here, so that they hold whatever server we run under. A
	// writer that has none is not a socket.
	socket, until := http.NewResponseController(w), time.Now().Add(socketTimeout)
	_ = errors.Join(socket.SetReadDeadline(until), socket.SetWriteDeadline(until))

	found, pattern := h.mux.Handler(r)
	if pattern != "" {
		h.mux.ServeHTTP(w, r)
		return
	}
	// The mux's own answers are text. Learn its code and say it our way.
	answer := &refusal{header: http.Header{}, code: http.StatusNotFound}
	found.ServeHTTP(answer, r)
	reason := "there is nothing at " + r.Method + " " + r.URL.EscapedPath() + ": docs/rest.md lists what this broker serves"
	if allow := answer.header.Get("Allow"); allow != "" {
		w.Header().Set("Allow", allow)
		reason = r.Method + " is not served at " + r.URL.EscapedPath() + ": allowed are " + allow
	}
	writeReason(w, answer.code, reason)
}

// refusal records what the mux answers to a request that no route takes.
type refusal struct {
	header http.Header
	code   int
}

func (r *refusal) Header() http.Header         { return r.header }
func (r *refusal) WriteHeader(code int)        { r.code = code }
func (r *refusal) Write(p []byte) (int, error) { return len(p), nil }

// squeezeSlashes makes repeated slashes one, where the mux would redirect, which
// clients do not follow for every method.
func squeezeSlashes(r *http.Request) *http.Request {
	escaped := r.URL.EscapedPath()
	if !strings.Contains(escaped, "//") {
		return r
	}
	for strings.Contains(escaped, "//") {
		escaped = strings.ReplaceAll(escaped, "//", "/")
	}
	clone := *r.URL
	u, err := clone.Parse(escaped)
	if err != nil {
		return r
	}
	u.RawQuery = r.URL.RawQuery
	r.URL = u
	return r
}

// routes lists every path. The order is docs/rest.md's.
func (h *Handler) routes() {
	h.mux.Handle("GET /metrics", promhttp.HandlerFor(h.Gatherer, promhttp.HandlerOpts{Timeout: requestTimeout}))
	h.handle("GET /health", h.health)
	h.handle("GET /admin/v2/brokers/health", h.health)
	h.handle("GET /admin/v2/brokers", h.listBrokers)
	h.handle("GET /admin/v2/brokers/{cluster}", h.listBrokers)
	h.handle("GET /admin/v2/clusters", h.listClusters)
	h.handle("GET /admin/v2/clusters/{cluster}", h.getCluster)

	h.handle("GET /admin/v2/tenants", h.listTenants)
	h.handle("GET /admin/v2/tenants/{tenant}", h.getTenant)
	h.handle("PUT /admin/v2/tenants/{tenant}", h.createTenant)
	h.handle("POST /admin/v2/tenants/{tenant}", h.updateTenant)
	h.handle("DELETE /admin/v2/tenants/{tenant}", h.deleteTenant)

	h.handle("GET /admin/v2/namespaces/{tenant}", h.listNamespaces)
	h.handle("GET /admin/v2/namespaces/{tenant}/{namespace}", h.getNamespace)
	h.handle("PUT /admin/v2/namespaces/{tenant}/{namespace}", h.createNamespace)
	h.handle("DELETE /admin/v2/namespaces/{tenant}/{namespace}", h.deleteNamespace)
	h.handle("GET /admin/v2/namespaces/{tenant}/{namespace}/bundles", h.getBundles)
	h.handle("GET /admin/v2/namespaces/{tenant}/{namespace}/topics", h.namespaceTopics)

	for _, domain := range []string{"persistent", "non-persistent"} {
		h.topicRoutes(domain)
	}
}

func (h *Handler) topicRoutes(domain string) {
	namespace := "/admin/v2/" + domain + "/{tenant}/{namespace}"
	h.handle("GET "+namespace, h.listTopics(domain))
	h.handle("GET "+namespace+"/partitioned", h.listPartitioned(domain))

	topic := namespace + "/{topic}"
	h.handleTopic("PUT "+topic, domain, h.createTopic)
	h.handleTopic("DELETE "+topic, domain, h.deleteTopic)
	h.handleTopic("GET "+topic+"/partitions", domain, h.getPartitions)
	h.handleTopic("PUT "+topic+"/partitions", domain, h.createPartitioned)
	h.handleTopic("POST "+topic+"/partitions", domain, h.updatePartitions)
	h.handleTopic("DELETE "+topic+"/partitions", domain, h.deletePartitioned)
	h.handleTopic("GET "+topic+"/stats", domain, h.topicStats)
	h.handleTopic("GET "+topic+"/internalStats", domain, h.internalStats)
	h.handleTopic("GET "+topic+"/partitioned-stats", domain, h.partitionedStats)
	h.handleTopic("GET "+topic+"/subscriptions", domain, h.subscriptions)
	h.handleTopic("DELETE "+topic+"/subscription/{subscription}", domain, h.deleteSubscription)
	h.handleTopic("POST "+topic+"/subscription/{subscription}/skip_all", domain, h.skipAll)
	h.handleTopic("PUT "+topic+"/unload", domain, h.unload)

	lookup := "GET /lookup/v2/topic/" + domain + "/{tenant}/{namespace}/{topic}"
	h.handleTopic(lookup, domain, h.lookup)
	h.handleTopic(lookup+"/bundle", domain, h.lookupBundle)
}
