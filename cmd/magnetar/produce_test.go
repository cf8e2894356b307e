package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/protocoltest"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

const testTopic = "persistent://public/default/my-topic"

// run runs "magnetar ARGS" against a broker and returns what it prints.
func run(t *testing.T, b *protocoltest.Broker, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	cmd := produceCommand()
	if args[0] == "consume" {
		cmd = consumeCommand()
	}
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(io.Discard)
	cmd.SetArgs(append(args[1:], "--url", b.URL()))
	err := cmd.ExecuteContext(ctx)
	return out.String(), err
}

func TestProduceThenConsume(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	out, err := run(t, b, "produce", "my-topic", "-m", "hello", "-m", "you there", "-k", "k 1", "-p", "b=2", "-p", "a=1")
	if err != nil || out != "7:0\n7:1\n" {
		t.Fatalf("produce prints %q, %v", out, err)
	}
	out, err = run(t, b, "consume", "my-topic", "-s", "sub", "-n", "2", "--earliest")
	want := "7:0 key=\"k 1\" a=\"1\" b=\"2\" hello\n7:1 key=\"k 1\" a=\"1\" b=\"2\" you there\n"
	if err != nil || out != want {
		t.Errorf("consume prints %q, %v, want %q", out, err, want)
	}
	if n := k.Unacknowledged(testTopic, "sub"); n != 0 {
		t.Errorf("%d messages are not acknowledged", n)
	}
}

func TestConsumeTakesNoMoreThanAsked(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	if _, err := run(t, b, "produce", "my-topic", "-m", "x", "-n", "5"); err != nil {
		t.Fatal(err)
	}
	out, err := run(t, b, "consume", "my-topic", "-s", "sub", "-n", "2", "--earliest", "--type", "shared")
	if err != nil || strings.Count(out, "\n") != 2 {
		t.Errorf("consume prints %q, %v", out, err)
	}
	if n := k.Unacknowledged(testTopic, "sub"); n != 3 {
		t.Errorf("%d messages left, want 3", n)
	}
}

func TestConsumeUntilInterrupted(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	ctx, interrupt := context.WithCancel(t.Context())
	cmd := consumeCommand()
	r, w := io.Pipe()
	cmd.SetOut(w)
	cmd.SetArgs([]string{"my-topic", "-s", "sub", "-n", "0", "--earliest", "--url", b.URL()})
	done := make(chan error, 1)
	go func() { done <- cmd.ExecuteContext(ctx) }()
	k.Store(testTopic, protocol.BuildPayload(&pulsarpb.MessageMetadata{
		ProducerName: new("p"), SequenceId: new(uint64(0)), PublishTime: new(uint64(0)), Compression: pulsarpb.CompressionType_ZSTD.Enum(),
	}, []byte("abc")))
	line := make([]byte, 100)
	n, err := r.Read(line)
	if got := string(line[:n]); err != nil || got != "7:0 (3 bytes, compressed with ZSTD)\n" {
		t.Errorf("consume prints %q, %v", got, err)
	}
	interrupt()
	if err := <-done; err != nil {
		t.Errorf("interrupted consume ends with %v", err)
	}
}

func TestProduceReportsRateAndLatency(t *testing.T) {
	for _, mode := range [][]string{{"--producers", "3"}, {"--async", "--producers", "2", "--pending", "10"}} {
		k := protocoltest.NewCluster()
		b := k.NewBroker(t)
		out, err := run(t, b, append([]string{"produce", "my-topic", "--size", "100", "-n", "301"}, mode...)...)
		if err != nil {
			t.Fatal(err)
		}
		entries := k.Entries(testTopic)
		_, body, err := protocol.ParseMetadata(entries[0])
		if len(entries) != 301 || len(body) != 100 || err != nil {
			t.Errorf("%d entries of %d bytes, %v", len(entries), len(body), err)
		}
		form := regexp.MustCompile(`^301 messages, [23] producers, .*: [0-9.]+ s, [0-9.]+ messages/s\nlatency ms: p50 [0-9.]+, p95 [0-9.]+, p99 [0-9.]+, p99.9 [0-9.]+, max [0-9.]+\n$`)
		if !form.MatchString(out) {
			t.Errorf("%v prints %q", mode, out)
		}
	}
}

func TestPartitionedTopic(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	b.SetHook(func(c *protocoltest.Conn, f protocol.Frame) bool {
		ask := f.Command.GetPartitionMetadata()
		if ask == nil {
			return false
		}
		c.Send(&pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_PARTITIONED_METADATA_RESPONSE.Enum(),
			PartitionMetadataResponse: &pulsarpb.CommandPartitionedTopicMetadataResponse{
				RequestId: ask.RequestId, Partitions: new(uint32(3)),
				Response: pulsarpb.CommandPartitionedTopicMetadataResponse_Success.Enum(),
			},
		})
		return true
	})
	if _, err := run(t, b, "produce", "my-topic", "-m", "x", "-n", "6"); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		if n := len(k.Entries(testTopic + "-partition-" + strconv.Itoa(i))); n != 2 {
			t.Errorf("partition %d has %d messages, want 2", i, n)
		}
	}
	out, err := run(t, b, "consume", "my-topic", "-s", "sub", "-n", "6", "--earliest")
	if err != nil || strings.Count(out, "\n") != 6 {
		t.Errorf("consume prints %q, %v", out, err)
	}
}

func TestProduceFails(t *testing.T) {
	k := protocoltest.NewCluster()
	b := k.NewBroker(t)
	b.SetHook(func(c *protocoltest.Conn, f protocol.Frame) bool {
		if p := f.Command.GetProducer(); p != nil {
			c.Refuse(p.GetRequestId(), pulsarpb.ServerError_TopicNotFound, "no such topic")
			return true
		}
		return false
	})
	if _, err := run(t, b, "produce", "my-topic", "-m", "x"); err == nil || !strings.Contains(err.Error(), "TopicNotFound: no such topic") {
		t.Errorf("produce: %v", err)
	}
	b.SetDown(true)
	_, err := run(t, b, "produce", "my-topic", "-m", "x", "--timeout", "50ms")
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("produce without a broker: %v", err)
	}
}

func TestFlags(t *testing.T) {
	b := protocoltest.NewCluster().NewBroker(t)
	tests := []struct {
		name, text string
		args       []string
	}{
		{"nothing-to-send", "-m, or their size", []string{"produce", "t"}},
		{"text-and-size", "-m, or their size", []string{"produce", "t", "-m", "x", "--size", "3"}},
		{"count", "--count is 0: want 1", []string{"produce", "t", "-m", "x", "-n", "0"}},
		{"producers", "--producers is 0", []string{"produce", "t", "-m", "x", "--producers", "0"}},
		{"pending", "--pending is -1", []string{"produce", "t", "-m", "x", "--pending", "-1"}},
		{"property", `--property is "x": want key=value`, []string{"produce", "t", "-m", "x", "-p", "x"}},
		{"topic", "invalid topic name", []string{"produce", "a/b", "-m", "x"}},
		{"consume-count", "--count is -1", []string{"consume", "t", "-s", "s", "-n", "-1"}},
		{"consume-type", `--type is "some": want exclusive, failover, key_shared, shared`, []string{"consume", "t", "-s", "s", "--type", "some"}},
		{"consume-subscription", "--subscription is empty", []string{"consume", "t", "-s", ""}},
		{"consume-topic", "invalid topic name", []string{"consume", "a/b", "-s", "s"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := run(t, b, tt.args...); err == nil || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("%v: %v, want %q", tt.args, err, tt.text)
			}
		})
	}
}

func TestLatencies(t *testing.T) {
	var l latencies
	for i := range 10_000 {
		l.add(time.Duration(i+1) * time.Microsecond)
	}
	for q, want := range map[float64]float64{0.5: 5, 0.95: 9.5, 0.99: 9.9, 1: 10} {
		got, err := strconv.ParseFloat(l.milliseconds(q), 64)
		if err != nil || got < want*0.98 || got > want*1.02 {
			t.Errorf("quantile %v is %v ms, want about %v", q, got, want)
		}
	}
	if got := (&latencies{}).milliseconds(0.5); got != "0.000" {
		t.Errorf("quantile of nothing is %s", got)
	}
}
