package admin

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"

	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/protocol"
)

// lookupData is Pulsar's answer to a lookup.
type lookupData struct {
	BrokerURL    string `json:"brokerUrl"`
	BrokerURLTLS string `json:"brokerUrlTls"`
	HTTPURL      string `json:"httpUrl"`
	HTTPURLTLS   string `json:"httpUrlTls"`
	NativeURL    string `json:"nativeUrl"`
}

// lookup says which broker serves a topic. It names the owner at once rather
// than redirecting to it; a bundle without an owner gets the broker that takes it
// when the client arrives.
func (h *Handler) lookup(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	found, err := h.Ownership.Lookup(r.Context(), topic)
	if err != nil {
		return err
	}
	b := found.Broker
	return answer(w, lookupData{BrokerURL: b.ServiceURL, HTTPURL: b.WebServiceURL, NativeURL: b.ServiceURL})
}

func (h *Handler) lookupBundle(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	bundle, err := h.Ownership.Bundle(r.Context(), topic)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, err = io.WriteString(w, bundle) //nolint:gosec // two numbers that we made, as plain text
	return err
}

// createTopic creates a topic that is not partitioned, or one partition.
func (h *Handler) createTopic(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	n, err := h.partitionsOf(r.Context(), topic)
	if err != nil {
		return err
	}
	if n > 0 {
		return refuse(http.StatusConflict, "This topic already exists: it is partitioned")
	}
	if mine, err := h.owned(w, r, topic); !mine {
		return err
	}
	err = h.Broker.CreateTopic(r.Context(), topic)
	if errors.Is(err, ownership.ErrExists) {
		return refuse(http.StatusConflict, "This topic already exists")
	}
	if err != nil {
		return err
	}
	return done(w)
}

func (h *Handler) deleteTopic(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	n, err := h.partitionsOf(r.Context(), topic)
	if err != nil {
		return err
	}
	if n > 0 {
		return refuse(http.StatusPreconditionFailed, "%s is a partitioned topic: delete %s/partitions", topic, topicPath(topic))
	}
	if mine, err := h.owned(w, r, topic); !mine {
		return err
	}
	if err := h.Broker.DeleteTopic(r.Context(), topic, boolQuery(r, "force")); err != nil {
		return err
	}
	return done(w)
}

func (h *Handler) topicStats(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	if mine, err := h.owned(w, r, topic); !mine {
		return err
	}
	stats, err := h.Broker.Stats(r.Context(), topic)
	if err != nil {
		return err
	}
	return answer(w, stats)
}

func (h *Handler) internalStats(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	if mine, err := h.owned(w, r, topic); !mine {
		return err
	}
	stats, err := h.Broker.InternalStats(r.Context(), topic)
	if err != nil {
		return err
	}
	return answer(w, stats)
}

// subscriptions lists a topic's subscriptions; those of all partitions together.
func (h *Handler) subscriptions(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	n, err := h.partitionsOf(r.Context(), topic)
	if err != nil {
		return err
	}
	if n == 0 {
		if mine, err := h.owned(w, r, topic); !mine {
			return err
		}
	}
	stats, err := h.statsOf(r.Context(), topic, n)
	if err != nil {
		return err
	}
	names := map[string]bool{}
	for _, s := range stats {
		subscriptions, _ := s["subscriptions"].(map[string]any)
		for name := range subscriptions {
			names[name] = true
		}
	}
	list := make([]string, 0, len(names))
	for name := range names {
		list = append(list, name)
	}
	slices.Sort(list)
	return answer(w, list)
}

func (h *Handler) deleteSubscription(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	subscription, force := r.PathValue("subscription"), boolQuery(r, "force")
	call := peerCall{method: http.MethodDelete, below: "/subscription/" + url.PathEscape(subscription)}
	if force {
		call.query = "force=true"
	}
	return h.onTopic(w, r, topic, call, func(ctx context.Context, t protocol.TopicName) error {
		return h.Broker.DeleteSubscription(ctx, t, subscription, force)
	})
}

// skipAll acknowledges everything that a subscription has not acknowledged.
func (h *Handler) skipAll(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	subscription := r.PathValue("subscription")
	call := peerCall{method: http.MethodPost, below: "/subscription/" + url.PathEscape(subscription) + "/skip_all"}
	return h.onTopic(w, r, topic, call, func(ctx context.Context, t protocol.TopicName) error {
		return h.Broker.ClearBacklog(ctx, t, subscription)
	})
}

func (h *Handler) unload(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	return h.onTopic(w, r, topic, peerCall{method: http.MethodPut, below: "/unload"}, h.Broker.Unload)
}

// onTopic does a change to a topic here if we own it and redirects if not; for a
// partitioned topic it does it to each partition, wherever that is. Partitions
// that lack what is changed are passed over as long as one has it.
func (h *Handler) onTopic(w http.ResponseWriter, r *http.Request, topic protocol.TopicName, call peerCall, local func(context.Context, protocol.TopicName) error) error {
	n, err := h.partitionsOf(r.Context(), topic)
	if err != nil {
		return err
	}
	if n == 0 {
		if mine, err := h.owned(w, r, topic); !mine {
			return err
		}
		if err := local(r.Context(), topic); err != nil {
			return err
		}
		return done(w)
	}
	missing := make([]error, n)
	err = eachPartition(r.Context(), topic, 0, n, func(ctx context.Context, i int, partition protocol.TopicName) error {
		err := h.onOwner(ctx, partition, call, local)
		if notFound(err) {
			missing[i] = err
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	if !slices.Contains(missing, nil) {
		return missing[0]
	}
	return done(w)
}

// partitionsOf returns the number of a topic's partitions, or an error if its
// namespace does not exist.
func (h *Handler) partitionsOf(ctx context.Context, topic protocol.TopicName) (int, error) {
	if _, err := h.Namespaces.Namespace(ctx, topic.NamespaceName()); err != nil {
		return 0, err
	}
	return h.Namespaces.Partitions(ctx, topic)
}

// notFound reports whether err says that a topic or subscription is not there.
func notFound(err error) bool { return hasStatus(err, http.StatusNotFound) }

// hasStatus reports whether err, which may be nil, is told with code.
func hasStatus(err error, code int) bool {
	if err == nil {
		return false
	}
	got, _ := status(err)
	return got == code
}

func ignoreNotFound(err error) error {
	if notFound(err) {
		return nil
	}
	return err
}
