package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/magnetar-io/magnetar/protocol"
)

// maxPeerAnswer bounds what another broker may answer about one topic, in bytes.
const maxPeerAnswer = 16 << 20

// peerCall is a call about one topic, as another broker is asked for it.
type peerCall struct {
	method string
	below  string // what follows the topic's path
	query  string
}

// onOwner does something to a topic at its owner: by local here, by call there.
func (h *Handler) onOwner(ctx context.Context, topic protocol.TopicName, call peerCall, local func(context.Context, protocol.TopicName) error) error {
	found, err := h.Ownership.Lookup(ctx, topic)
	if err != nil {
		return err
	}
	if found.Mine {
		return local(ctx, topic)
	}
	_, err = h.ask(ctx, found.Broker.WebServiceURL, topic, call)
	return err
}

// ask sends call to another broker and returns its answer. A refusal keeps its
// code and reason.
func (h *Handler) ask(ctx context.Context, base string, topic protocol.TopicName, call peerCall) ([]byte, error) {
	target := strings.TrimSuffix(base, "/") + topicPath(topic) + call.below
	if call.query != "" {
		target += "?" + call.query
	}
	//nolint:gosec // The address is what a broker registered in metadata, which only brokers write.
	req, err := http.NewRequestWithContext(ctx, call.method, target, http.NoBody)
	if err != nil {
		return nil, refuse(http.StatusServiceUnavailable, "web address %q of the broker that serves %s cannot be used: %v", base, topic, err)
	}
	resp, err := h.peers.Do(req) //nolint:gosec // as above
	if err != nil {
		return nil, refuse(http.StatusServiceUnavailable, "the broker that serves %s does not answer: %v", topic, err)
	}
	defer func() { _ = resp.Body.Close() }() // read to its end or given up; either way nothing is lost
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPeerAnswer+1))
	switch {
	case err != nil:
		return nil, refuse(http.StatusServiceUnavailable, "answer about %s: %v", topic, err)
	case len(body) > maxPeerAnswer:
		return nil, refuse(http.StatusInternalServerError, "the answer about %s has more than %d bytes", topic, maxPeerAnswer)
	case resp.StatusCode >= http.StatusMultipleChoices:
		var why reasonBody
		if json.Unmarshal(body, &why) != nil || why.Reason == "" {
			why.Reason = resp.Status
		}
		return nil, &statusError{resp.StatusCode, why.Reason}
	}
	return body, nil
}

// statsOf returns the statistics of each of n partitions or, for n = 0, of the
// topic itself, which must be ours then.
func (h *Handler) statsOf(ctx context.Context, topic protocol.TopicName, n int) ([]map[string]any, error) {
	if n == 0 {
		stats, err := h.localStats(ctx, topic)
		return []map[string]any{stats}, err
	}
	all := make([]map[string]any, n)
	err := eachPartition(ctx, topic, 0, n, func(ctx context.Context, i int, partition protocol.TopicName) (err error) {
		all[i], err = h.anyStats(ctx, partition)
		if notFound(err) { // not used yet, or just deleted
			all[i], err = nil, nil
		}
		return err
	})
	return all, err
}

// anyStats returns a topic's statistics from its owner.
func (h *Handler) anyStats(ctx context.Context, topic protocol.TopicName) (map[string]any, error) {
	found, err := h.Ownership.Lookup(ctx, topic)
	if err != nil {
		return nil, err
	}
	if found.Mine {
		return h.localStats(ctx, topic)
	}
	body, err := h.ask(ctx, found.Broker.WebServiceURL, topic, peerCall{method: http.MethodGet, below: "/stats"})
	if err != nil {
		return nil, err
	}
	return decodeStats(body)
}

func (h *Handler) localStats(ctx context.Context, topic protocol.TopicName) (map[string]any, error) {
	stats, err := h.Broker.Stats(ctx, topic)
	if err != nil {
		return nil, err
	}
	body, err := json.Marshal(stats)
	if err != nil {
		return nil, fmt.Errorf("statistics of %s: %w", topic, err)
	}
	return decodeStats(body)
}

// decodeStats keeps whole numbers whole: a position or a counter does not fit
// into a float64.
func decodeStats(body []byte) (map[string]any, error) {
	d := json.NewDecoder(strings.NewReader(string(body)))
	d.UseNumber()
	var stats map[string]any
	if err := d.Decode(&stats); err != nil {
		return nil, fmt.Errorf("statistics are not a JSON object: %w", err)
	}
	if stats == nil || d.More() {
		return nil, errors.New("statistics are not one JSON object")
	}
	return stats, nil
}
