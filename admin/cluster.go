package admin

import (
	"context"
	"errors"
	"net/http"
	"net/url"

	"github.com/magnetar-io/magnetar/broker/ownership"
)

// health answers "ok" if this broker can serve: its session is valid and
// metadata answers.
func (h *Handler) health(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := context.WithTimeout(r.Context(), healthTimeout)
	defer cancel()
	if err := h.Ownership.Check(ctx); err != nil {
		return refuse(http.StatusServiceUnavailable, "%v", err)
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, err := w.Write([]byte("ok"))
	return err
}

// listBrokers lists the live brokers as host:port of their web address.
func (h *Handler) listBrokers(w http.ResponseWriter, r *http.Request) error {
	if c := r.PathValue("cluster"); c != "" && c != h.cluster {
		return refuse(http.StatusNotFound, "Cluster does not exist: cluster=%s", c)
	}
	brokers, err := h.Ownership.Brokers(r.Context())
	if err != nil {
		return err
	}
	names := make([]string, 0, len(brokers))
	for _, b := range brokers {
		name := b.ID
		if u, err := url.Parse(b.WebServiceURL); err == nil && u.Host != "" {
			name = u.Host
		}
		names = append(names, name)
	}
	return answer(w, names)
}

func (h *Handler) listClusters(w http.ResponseWriter, _ *http.Request) error {
	return answer(w, []string{h.cluster})
}

// clusterData is what Pulsar shows of a cluster: an entry point to it.
type clusterData struct {
	ServiceURL       string `json:"serviceUrl"`
	BrokerServiceURL string `json:"brokerServiceUrl"`
}

func (h *Handler) getCluster(w http.ResponseWriter, r *http.Request) error {
	if c := r.PathValue("cluster"); c != h.cluster {
		return refuse(http.StatusNotFound, "Cluster does not exist: cluster=%s", c)
	}
	self := h.Ownership.Self()
	return answer(w, clusterData{self.WebServiceURL, self.ServiceURL})
}

func (h *Handler) listTenants(w http.ResponseWriter, r *http.Request) error {
	tenants, err := h.Namespaces.Tenants(r.Context())
	if err != nil {
		return err
	}
	return answer(w, tenants)
}

func (h *Handler) getTenant(w http.ResponseWriter, r *http.Request) error {
	tenant, err := h.Namespaces.Tenant(r.Context(), r.PathValue("tenant"))
	if err != nil {
		return err
	}
	return answer(w, tenant)
}

func (h *Handler) createTenant(w http.ResponseWriter, r *http.Request) error {
	var tenant ownership.Tenant
	if err := readBody(r, &tenant); err != nil {
		return err
	}
	err := h.Namespaces.CreateTenant(r.Context(), r.PathValue("tenant"), tenant)
	if errors.Is(err, ownership.ErrExists) {
		return refuse(http.StatusConflict, "Tenant already exists")
	}
	if err != nil {
		return err
	}
	return done(w)
}

func (h *Handler) updateTenant(w http.ResponseWriter, r *http.Request) error {
	var tenant ownership.Tenant
	if err := readBody(r, &tenant); err != nil {
		return err
	}
	if err := h.Namespaces.UpdateTenant(r.Context(), r.PathValue("tenant"), tenant); err != nil {
		return err
	}
	return done(w)
}

func (h *Handler) deleteTenant(w http.ResponseWriter, r *http.Request) error {
	err := h.Namespaces.DeleteTenant(r.Context(), r.PathValue("tenant"))
	if errors.Is(err, ownership.ErrNotEmpty) {
		return refuse(http.StatusConflict, "The tenant still has active namespaces")
	}
	if err != nil {
		return err
	}
	return done(w)
}
