package admin

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/magnetar-io/magnetar/broker"
)

// The real broker is what this room was written for.
var _ Broker = (*broker.Broker)(nil)

func TestMergeStats(t *testing.T) {
	partitions := []string{
		`{"msgInCounter":9007199254740993,"msgRateIn":1.5,"averageMsgSize":10,"topicCreationTimeStamp":200,"lastPublishTimestamp":5,
		  "publishers":[{"producerName":"a"}],"msgChunkPublished":false,
		  "subscriptions":{"s":{"msgBacklog":3,"type":"","isDurable":true,"consumers":[{"consumerName":"x"}],"lastAckedTimestamp":7}}}`,
		`{"msgInCounter":1,"msgRateIn":2,"averageMsgSize":30,"topicCreationTimeStamp":100,"lastPublishTimestamp":0,
		  "publishers":[{"producerName":"b"}],"msgChunkPublished":true,
		  "subscriptions":{"s":{"msgBacklog":4,"type":"Shared","isDurable":true,"consumers":[{"consumerName":"y"}],"lastAckedTimestamp":9},
		                   "only-here":{"msgBacklog":1}}}`,
	}
	want := `{"msgInCounter":9007199254740994,"msgRateIn":3.5,"averageMsgSize":30,"topicCreationTimeStamp":100,"lastPublishTimestamp":5,
		"publishers":[{"producerName":"a"},{"producerName":"b"}],"msgChunkPublished":true,
		"subscriptions":{"s":{"msgBacklog":7,"type":"Shared","isDurable":true,"consumers":[{"consumerName":"x"},{"consumerName":"y"}],"lastAckedTimestamp":9},
		                 "only-here":{"msgBacklog":1}}}`
	sum := map[string]any{}
	for _, p := range partitions {
		stats, err := decodeStats([]byte(p))
		if err != nil {
			t.Fatal(err)
		}
		before, err := json.Marshal(stats)
		if err != nil {
			t.Fatal(err)
		}
		merge(sum, stats)
		if after, _ := json.Marshal(stats); string(after) != string(before) {
			t.Errorf("merging changed what was merged: %s, was %s", after, before)
		}
	}
	expected, err := decodeStats([]byte(want))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(expected, sum); d != "" {
		t.Errorf("sum of two partitions (-want +got):\n%s", d)
	}
	// The first partition's statistics are shown beside the sum, so adding more
	// must not have reached into them.
	first, err := decodeStats([]byte(partitions[0]))
	if err != nil {
		t.Fatal(err)
	}
	again := map[string]any{}
	merge(again, first)
	merge(again, expected)
	if n := number(first["subscriptions"].(map[string]any)["s"].(map[string]any)["msgBacklog"]); n != 3 {
		t.Errorf("the first partition's backlog became %v in the sum", n)
	}
}

func TestStatsThatAreNotAnObject(t *testing.T) {
	for _, body := range []string{"", "null", "null1", "[1]", "{", "{}{}"} {
		if stats, err := decodeStats([]byte(body)); err == nil {
			t.Errorf("decodeStats(%q) = %v, want an error", body, stats)
		}
	}
}
