package admin

import (
	"errors"
	"net/http"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/protocol"
)

// bundlesData is Pulsar's form of a namespace's split.
type bundlesData struct {
	Boundaries []string `json:"boundaries"`
	NumBundles int      `json:"numBundles"`
}

// policies is the part of Pulsar's namespace policies that is kept here.
type policies struct {
	ReplicationClusters []string    `json:"replication_clusters"`
	Bundles             bundlesData `json:"bundles"`
}

func (h *Handler) listNamespaces(w http.ResponseWriter, r *http.Request) error {
	names, err := h.Namespaces.Namespaces(r.Context(), r.PathValue("tenant"))
	if err != nil {
		return err
	}
	return answer(w, names)
}

func (h *Handler) getNamespace(w http.ResponseWriter, r *http.Request) error {
	ns, err := h.Namespaces.Namespace(r.Context(), namespaceOf(r))
	if err != nil {
		return err
	}
	return answer(w, policies{
		ReplicationClusters: []string{h.cluster},
		Bundles:             bundlesData{ns.Boundaries(), ns.Bundles},
	})
}

func (h *Handler) getBundles(w http.ResponseWriter, r *http.Request) error {
	ns, err := h.Namespaces.Namespace(r.Context(), namespaceOf(r))
	if err != nil {
		return err
	}
	return answer(w, bundlesData{ns.Boundaries(), ns.Bundles})
}

// createNamespace takes the number of bundles from the body's policies. Other
// policies are not kept yet; a client that sends them is not refused.
func (h *Handler) createNamespace(w http.ResponseWriter, r *http.Request) error {
	var wanted policies
	if err := readBody(r, &wanted); err != nil {
		return err
	}
	err := h.Namespaces.CreateNamespace(r.Context(), namespaceOf(r), wanted.Bundles.NumBundles)
	if errors.Is(err, ownership.ErrExists) {
		return refuse(http.StatusConflict, "Namespace already exists")
	}
	if err != nil {
		return err
	}
	return done(w)
}

// deleteNamespace deletes an empty namespace or, with force, first its topics.
func (h *Handler) deleteNamespace(w http.ResponseWriter, r *http.Request) error {
	ns := namespaceOf(r)
	if boolQuery(r, "force") {
		if err := h.emptyNamespace(r, ns); err != nil {
			return err
		}
	}
	err := h.Namespaces.DeleteNamespace(r.Context(), ns)
	if errors.Is(err, ownership.ErrNotEmpty) {
		return refuse(http.StatusConflict, "Cannot delete non empty namespace")
	}
	if err != nil {
		return err
	}
	return done(w)
}

// emptyNamespace deletes every topic of ns with force, then the records of its
// partitioned topics.
func (h *Handler) emptyNamespace(r *http.Request, ns string) error {
	if _, err := h.Namespaces.Namespace(r.Context(), ns); err != nil {
		return err
	}
	names, err := h.Broker.Topics(r.Context(), ns)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(r.Context())
	g.SetLimit(fanOut)
	for _, name := range names {
		g.Go(func() error {
			topic, err := protocol.ParseTopic(name)
			if err != nil {
				return err
			}
			return ignoreNotFound(h.deleteAnywhere(ctx, topic, true))
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	partitioned, err := h.Namespaces.ListPartitioned(r.Context(), ns)
	if err != nil {
		return err
	}
	for _, name := range partitioned {
		topic, err := protocol.ParseTopic(name)
		if err != nil {
			return err
		}
		if err := h.Namespaces.DeletePartitioned(r.Context(), topic); err != nil && !errors.Is(err, ownership.ErrNotPartitioned) {
			return err
		}
	}
	return nil
}

// namespaceTopics lists a namespace's topics. The mode is PERSISTENT if it is
// missing: one of Pulsar's clients drops it.
func (h *Handler) namespaceTopics(w http.ResponseWriter, r *http.Request) error {
	var keep func(domain string) bool
	switch mode := r.URL.Query().Get("mode"); mode {
	case "", "PERSISTENT":
		keep = func(d string) bool { return d == "persistent" }
	case "NON_PERSISTENT":
		keep = func(d string) bool { return d == "non-persistent" }
	case "ALL":
		keep = func(string) bool { return true }
	default:
		return refuse(http.StatusBadRequest, "mode is %q: want PERSISTENT, NON_PERSISTENT or ALL", mode)
	}
	return h.writeTopics(w, r, keep)
}

func (h *Handler) listTopics(domain string) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		return h.writeTopics(w, r, func(d string) bool { return d == domain })
	}
}

func (h *Handler) writeTopics(w http.ResponseWriter, r *http.Request, keep func(domain string) bool) error {
	ns := namespaceOf(r)
	if _, err := h.Namespaces.Namespace(r.Context(), ns); err != nil {
		return err
	}
	names, err := h.Broker.Topics(r.Context(), ns)
	if err != nil {
		return err
	}
	return answer(w, ofDomain(names, keep))
}

func (h *Handler) listPartitioned(domain string) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		names, err := h.Namespaces.ListPartitioned(r.Context(), namespaceOf(r))
		if err != nil {
			return err
		}
		return answer(w, ofDomain(names, func(d string) bool { return d == domain }))
	}
}

func ofDomain(names []string, keep func(domain string) bool) []string {
	kept := make([]string, 0, len(names))
	for _, name := range names {
		if domain, _, _ := strings.Cut(name, "://"); keep(domain) {
			kept = append(kept, name)
		}
	}
	return kept
}
