package admin

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"

	"golang.org/x/sync/errgroup"

	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/protocol"
)

// partitionsData is Pulsar's answer about a partitioned topic.
type partitionsData struct {
	Partitions int `json:"partitions"`
}

// getPartitions answers 0 for a topic that is not partitioned or not there.
func (h *Handler) getPartitions(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	n, err := h.partitionsOf(r.Context(), topic)
	if err != nil {
		return err
	}
	return answer(w, partitionsData{n})
}

// createPartitioned records the topic and then creates its partitions, so that
// they are listed and have statistics before their first use. If that stops
// half-way, a partition is created when a client first uses it.
func (h *Handler) createPartitioned(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	n, err := readPartitions(r)
	if err != nil {
		return err
	}
	if _, err := h.partitionsOf(r.Context(), topic); err != nil {
		return err
	}
	names, err := h.Broker.Topics(r.Context(), topic.NamespaceName())
	if err != nil {
		return err
	}
	for _, name := range names {
		if name == topic.String() {
			return refuse(http.StatusConflict, "This topic already exists: it is not partitioned")
		}
	}
	err = h.Namespaces.CreatePartitioned(r.Context(), topic, n)
	if errors.Is(err, ownership.ErrExists) {
		return refuse(http.StatusConflict, "This topic already exists")
	}
	if err != nil {
		return err
	}
	if err := h.createPartitions(r.Context(), topic, 0, n); err != nil {
		return err
	}
	return done(w)
}

// updatePartitions raises the number of partitions. Asking for the number that
// there is creates the partitions that are missing.
func (h *Handler) updatePartitions(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	n, err := readPartitions(r)
	if err != nil {
		return err
	}
	old, err := h.partitionsOf(r.Context(), topic)
	switch {
	case err != nil:
		return err
	case old == 0:
		return refuse(http.StatusNotFound, "Partitioned Topic not found: %s has zero partitions", topic)
	case n < old:
		return refuse(http.StatusUnprocessableEntity, "Expect partitions %d can't less than current partitions %d.", n, old)
	}
	if err := h.Namespaces.UpdatePartitions(r.Context(), topic, n); err != nil {
		return err
	}
	if err := h.createPartitions(r.Context(), topic, 0, n); err != nil {
		return err
	}
	return done(w)
}

// deletePartitioned deletes the partitions and then the record. A partition in
// use stops it, unless force is set; what was deleted until then stays deleted.
func (h *Handler) deletePartitioned(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	n, err := h.partitionsOf(r.Context(), topic)
	if err != nil {
		return err
	}
	if n == 0 {
		return refuse(http.StatusNotFound, "Partitioned Topic not found: %s has zero partitions", topic)
	}
	force := boolQuery(r, "force")
	err = eachPartition(r.Context(), topic, 0, n, func(ctx context.Context, _ int, partition protocol.TopicName) error {
		return ignoreNotFound(h.deleteAnywhere(ctx, partition, force))
	})
	if err != nil {
		return err
	}
	if err := h.Namespaces.DeletePartitioned(r.Context(), topic); err != nil && !errors.Is(err, ownership.ErrNotPartitioned) {
		return err
	}
	return done(w)
}

// createPartitions creates partitions from first to n-1, each at its owner.
func (h *Handler) createPartitions(ctx context.Context, topic protocol.TopicName, first, n int) error {
	return eachPartition(ctx, topic, first, n, func(ctx context.Context, _ int, partition protocol.TopicName) error {
		err := h.onOwner(ctx, partition, peerCall{method: http.MethodPut}, h.Broker.CreateTopic)
		if hasStatus(err, http.StatusConflict) {
			return nil // there already
		}
		return err
	})
}

// deleteAnywhere deletes a topic at its owner.
func (h *Handler) deleteAnywhere(ctx context.Context, topic protocol.TopicName, force bool) error {
	call := peerCall{method: http.MethodDelete}
	if force {
		call.query = "force=true"
	}
	return h.onOwner(ctx, topic, call, func(ctx context.Context, t protocol.TopicName) error {
		return h.Broker.DeleteTopic(ctx, t, force)
	})
}

// eachPartition runs f for the partitions from first to n-1, several at a time,
// and returns the first error.
func eachPartition(ctx context.Context, topic protocol.TopicName, first, n int, f func(ctx context.Context, i int, partition protocol.TopicName) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(fanOut)
	for i := first; i < n; i++ {
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return f(ctx, i, topic.WithPartition(i))
		})
	}
	return g.Wait()
}

// readPartitions reads a number of partitions: bare, or as a field.
func readPartitions(r *http.Request) (int, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return 0, err
	}
	var n int
	if json.Unmarshal(body, &n) != nil {
		var data struct {
			Partitions *int `json:"partitions"`
		}
		if err := json.Unmarshal(body, &data); err != nil || data.Partitions == nil {
			return 0, refuse(http.StatusBadRequest, `the body is not a number of partitions: want 3 or {"partitions": 3}`)
		}
		n = *data.Partitions
	}
	if n < 1 || n > ownership.MaxPartitions {
		return 0, refuse(http.StatusNotAcceptable, "Number of partitions should be more than 0 and at most %d", ownership.MaxPartitions)
	}
	return n, nil
}
