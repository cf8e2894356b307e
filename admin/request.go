package admin

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/protocol"
)

// handle routes pattern to f and answers with the error it returns, if any.
func (h *Handler) handle(pattern string, f func(w http.ResponseWriter, r *http.Request) error) {
	h.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		err := f(w, r)
		if err == nil {
			return
		}
		code, reason := status(err)
		if code >= http.StatusInternalServerError {
			h.log.Warn("request failed", "method", r.Method, "path", r.URL.EscapedPath(), "status", code, "err", err)
		}
		writeReason(w, code, reason)
	})
}

// topicHandler answers a request about one topic.
type topicHandler func(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error

// handleTopic is handle for paths that name a topic of the given domain.
func (h *Handler) handleTopic(pattern, domain string, f topicHandler) {
	h.handle(pattern, func(w http.ResponseWriter, r *http.Request) error {
		topic, err := protocol.ParseTopic(domain + "://" + namespaceOf(r) + "/" + r.PathValue("topic"))
		if err != nil {
			return err
		}
		return f(w, r, topic)
	})
}

func namespaceOf(r *http.Request) string {
	return r.PathValue("tenant") + "/" + r.PathValue("namespace")
}

// topicPath is the path of a topic, below which its calls are.
func topicPath(topic protocol.TopicName) string {
	domain := "persistent"
	if !topic.Persistent {
		domain = "non-persistent"
	}
	return "/admin/v2/" + domain + "/" + topic.NamespaceName() + "/" + url.PathEscape(topic.Local)
}

// owned reports whether this broker owns topic. If it does not, owned has
// answered with a redirect to the broker that does or should.
func (h *Handler) owned(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) (bool, error) {
	answer, err := h.Ownership.Lookup(r.Context(), topic)
	if err != nil {
		return false, err
	}
	// Another broker sent the client here: take the topic unless it has an owner,
	// so that two brokers that disagree do not send it to and fro.
	if !answer.Mine && boolQuery(r, "authoritative") {
		_, err := h.Ownership.Acquire(r.Context(), topic)
		other, elsewhere := errors.AsType[*ownership.NotOwnerError](err)
		switch {
		case err == nil:
			return true, nil
		case !elsewhere:
			return false, err
		}
		answer.Broker = other.Broker
	}
	if answer.Mine {
		return true, nil
	}
	target, err := url.Parse(answer.Broker.WebServiceURL)
	if err != nil || target.Host == "" {
		return false, refuse(http.StatusServiceUnavailable, "the topic is served by broker %s, whose web address %q cannot be redirected to", answer.Broker.ID, answer.Broker.WebServiceURL)
	}
	query := r.URL.Query()
	query.Set("authoritative", "true")
	w.Header().Set("Location", strings.TrimSuffix(target.String(), "/")+r.URL.EscapedPath()+"?"+query.Encode())
	w.WriteHeader(http.StatusTemporaryRedirect)
	return false, nil
}

// readBody decodes a JSON body into v. An empty body and null leave v as it is:
// Pulsar's clients send either when they have nothing to say.
func readBody(r *http.Request, v any) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	if len(strings.TrimSpace(string(body))) == 0 {
		return nil
	}
	if err := json.Unmarshal(body, v); err != nil {
		return refuse(http.StatusBadRequest, "the body is not the JSON wanted here: %v", err)
	}
	return nil
}

func boolQuery(r *http.Request, name string) bool {
	b, err := strconv.ParseBool(r.URL.Query().Get(name))
	return err == nil && b
}

// done answers a change that has nothing to show.
func done(w http.ResponseWriter) error {
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func answer(w http.ResponseWriter, v any) error {
	writeJSON(w, http.StatusOK, v)
	return nil
}
