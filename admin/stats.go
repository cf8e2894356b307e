package admin

import (
	"encoding/json"
	"net/http"
	"strings"

	"github.com/magnetar-io/magnetar/protocol"
)

// partitionedStats answers with the sum of the partitions' statistics and, with
// perPartition (which is the default), each partition's own.
func (h *Handler) partitionedStats(w http.ResponseWriter, r *http.Request, topic protocol.TopicName) error {
	n, err := h.partitionsOf(r.Context(), topic)
	if err != nil {
		return err
	}
	if n == 0 {
		return refuse(http.StatusNotFound, "Partitioned Topic not found: %s has zero partitions", topic)
	}
	all, err := h.statsOf(r.Context(), topic, n)
	if err != nil {
		return err
	}
	sum := map[string]any{}
	partitions := map[string]any{}
	for i, s := range all {
		if s == nil {
			continue
		}
		merge(sum, s)
		partitions[topic.WithPartition(i).String()] = s
	}
	if v := r.URL.Query().Get("perPartition"); v == "" || boolQuery(r, "perPartition") {
		sum["partitions"] = partitions
	} else {
		sum["partitions"] = map[string]any{}
	}
	sum["metadata"] = partitionsData{n}
	delete(sum, "ownerBroker") // they may have several
	if messages := number(sum["msgInCounter"]); messages > 0 {
		sum["averageMsgSize"] = number(sum["bytesInCounter"]) / messages
	}
	return answer(w, sum)
}

// merge adds the statistics from to those in into: counters and rates are
// summed, of times the latest counts (of creation the first), averages are left
// as the larger, lists are joined, objects merged by key, true beats false, and of
// anything else the first value that says something stays. It changes only into, never from.
func merge(into, from map[string]any) {
	for key, v := range from {
		old, there := into[key]
		switch v := v.(type) {
		case json.Number:
			if oldNumber, ok := old.(json.Number); ok {
				into[key] = combine(key, oldNumber, v)
				continue
			}
			into[key] = v
		case []any:
			oldList, _ := old.([]any)
			joined := make([]any, 0, len(oldList)+len(v))
			into[key] = append(append(joined, oldList...), v...)
		case map[string]any:
			oldMap, ok := old.(map[string]any)
			if !ok {
				oldMap = map[string]any{}
				into[key] = oldMap
			}
			merge(oldMap, v)
		case bool:
			oldBool, _ := old.(bool)
			into[key] = oldBool || v
		default:
			if !there || old == nil || old == "" {
				into[key] = v
			}
		}
	}
}

// number returns a number of the statistics, 0 for anything else.
func number(v any) float64 {
	n, _ := v.(json.Number)
	f, err := n.Float64()
	if err != nil {
		return 0
	}
	return f
}

// combine merges two numbers called name.
func combine(name string, a, b json.Number) json.Number {
	x, errX := a.Int64()
	y, errY := b.Int64()
	if errX != nil || errY != nil {
		return combineFloats(name, a, b)
	}
	switch lower := strings.ToLower(name); {
	case strings.HasPrefix(lower, "topiccreation"), strings.HasPrefix(lower, "earliest"):
		if x == 0 || (y != 0 && y < x) {
			return b
		}
		return a
	case strings.HasPrefix(lower, "last"), strings.HasPrefix(lower, "average"), strings.HasSuffix(lower, "timestamp"), strings.HasSuffix(lower, "epoch"):
		if y > x {
			return b
		}
		return a
	}
	sum, err := json.Marshal(x + y)
	if err != nil {
		return a
	}
	return json.Number(sum)
}

func combineFloats(name string, a, b json.Number) json.Number {
	x, errX := a.Float64()
	y, errY := b.Float64()
	if errX != nil || errY != nil {
		return a
	}
	if strings.HasPrefix(strings.ToLower(name), "average") {
		if y > x {
			return b
		}
		return a
	}
	sum, err := json.Marshal(x + y)
	if err != nil {
		return a // infinite
	}
	return json.Number(sum)
}
