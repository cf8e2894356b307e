package protocol

import (
	"bytes"
	"encoding/hex"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

const goldenTopic = "persistent://public/default/compat"

// goldenCommands says what the frames of testdata/client-frames.txt mean.
var goldenCommands = map[string]*pulsarpb.BaseCommand{
	"connect": {Type: pulsarpb.BaseCommand_CONNECT.Enum(), Connect: &pulsarpb.CommandConnect{
		ClientVersion: new("Pulsar-Go-version-unknown"), ProtocolVersion: new(int32(20)), AuthMethodName: new(""),
		FeatureFlags: &pulsarpb.FeatureFlags{SupportsAuthRefresh: new(true), SupportsBrokerEntryMetadata: new(true)},
	}},
	"partitioned-metadata": {
		Type:              pulsarpb.BaseCommand_PARTITIONED_METADATA.Enum(),
		PartitionMetadata: &pulsarpb.CommandPartitionedTopicMetadata{Topic: new(goldenTopic), RequestId: new(uint64(1))},
	},
	"lookup": {Type: pulsarpb.BaseCommand_LOOKUP.Enum(), LookupTopic: &pulsarpb.CommandLookupTopic{
		Topic: new(goldenTopic), RequestId: new(uint64(2)), Authoritative: new(false), AdvertisedListenerName: new(""),
	}},
	"producer": {Type: pulsarpb.BaseCommand_PRODUCER.Enum(), Producer: &pulsarpb.CommandProducer{
		Topic: new(goldenTopic), ProducerId: new(uint64(1)), RequestId: new(uint64(3)), ProducerName: new("golden"),
		Epoch: new(uint64(0)), UserProvidedProducerName: new(true),
		ProducerAccessMode: pulsarpb.ProducerAccessMode_Shared.Enum(), InitialSubscriptionName: new(""),
	}},
	"subscribe": {Type: pulsarpb.BaseCommand_SUBSCRIBE.Enum(), Subscribe: &pulsarpb.CommandSubscribe{
		Topic: new(goldenTopic), Subscription: new("s"), SubType: pulsarpb.CommandSubscribe_Exclusive.Enum(),
		ConsumerId: new(uint64(1)), RequestId: new(uint64(10)), ConsumerName: new("vdyfk"), Durable: new(true),
		ReadCompacted: new(false), InitialPosition: pulsarpb.CommandSubscribe_Latest.Enum(), ReplicateSubscriptionState: new(false),
	}},
	"flow": {
		Type: pulsarpb.BaseCommand_FLOW.Enum(),
		Flow: &pulsarpb.CommandFlow{ConsumerId: new(uint64(1)), MessagePermits: new(uint32(1000))},
	},
	"send-single": {
		Type: pulsarpb.BaseCommand_SEND.Enum(),
		Send: &pulsarpb.CommandSend{ProducerId: new(uint64(2)), SequenceId: new(uint64(0))},
	},
	"send-batch": {
		Type: pulsarpb.BaseCommand_SEND.Enum(),
		Send: &pulsarpb.CommandSend{ProducerId: new(uint64(1)), SequenceId: new(uint64(0)), NumMessages: new(int32(3))},
	},
	"ack": {Type: pulsarpb.BaseCommand_ACK.Enum(), Ack: &pulsarpb.CommandAck{
		ConsumerId: new(uint64(1)), AckType: pulsarpb.CommandAck_Individual.Enum(), RequestId: new(uint64(11)),
		MessageId: []*pulsarpb.MessageIdData{{LedgerId: new(uint64(7)), EntryId: new(uint64(0))}},
	}},
	"close-consumer": {
		Type:          pulsarpb.BaseCommand_CLOSE_CONSUMER.Enum(),
		CloseConsumer: &pulsarpb.CommandCloseConsumer{ConsumerId: new(uint64(1)), RequestId: new(uint64(13))},
	},
	"close-producer": {
		Type:          pulsarpb.BaseCommand_CLOSE_PRODUCER.Enum(),
		CloseProducer: &pulsarpb.CommandCloseProducer{ProducerId: new(uint64(1)), RequestId: new(uint64(14))},
	},
}

// goldenPayloads says what the payload sections mean.
var goldenPayloads = map[string]struct {
	meta *pulsarpb.MessageMetadata
	body string
}{
	"send-single": {
		&pulsarpb.MessageMetadata{
			ProducerName: new("single"), SequenceId: new(uint64(0)), PublishTime: new(uint64(goldenTime)),
			Properties:   []*pulsarpb.KeyValue{{Key: new("a"), Value: new("b")}},
			PartitionKey: new("k"), UncompressedSize: new(uint32(5)), EventTime: new(uint64(1_600_000_000_123)),
		}, "hello",
	},
	"send-batch": {
		&pulsarpb.MessageMetadata{
			ProducerName: new("golden"), SequenceId: new(uint64(0)), PublishTime: new(uint64(goldenTime)),
			PartitionKey: new("0"), UncompressedSize: new(uint32(39)), NumMessagesInBatch: new(int32(3)),
		},
		"\x00\x00\x00\x07\x12\x010\x18\x02\x40\x00m0" +
			"\x00\x00\x00\x07\x12\x011\x18\x02\x40\x01m1" +
			"\x00\x00\x00\x07\x12\x012\x18\x02\x40\x02m2",
	},
}

// goldenTime is when the frames were recorded, in Unix milliseconds.
const goldenTime = 1_796_047_208_422

func TestGoldenFrames(t *testing.T) {
	file, err := os.ReadFile("testdata/client-frames.txt")
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for line := range strings.Lines(string(file)) {
		name, digits, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok || name == "#" {
			continue
		}
		seen++
		raw, err := hex.DecodeString(digits)
		if err != nil {
			t.Fatal(err)
		}
		f, err := ReadFrame(reader(raw), testMaxFrame)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if diff := cmp.Diff(goldenCommands[name], f.Command, protocmp.Transform()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		again := append(AppendPayloadHeader(nil, f.Command, len(f.Payload)), f.Payload...)
		if !bytes.Equal(again, raw) {
			t.Errorf("%s is written differently:\n%x\n%x", name, again, raw)
		}
		want, ok := goldenPayloads[name]
		if !ok {
			continue
		}
		meta, body, err := ParseMetadata(f.Payload)
		if err != nil || CheckPayload(f.Payload) != nil || string(body) != want.body {
			t.Errorf("%s: body %q, %v, %v", name, body, err, CheckPayload(f.Payload))
		}
		if diff := cmp.Diff(want.meta, meta, protocmp.Transform()); diff != "" {
			t.Errorf("%s metadata (-want +got):\n%s", name, diff)
		}
		if !bytes.Equal(BuildPayload(meta, body), f.Payload) {
			t.Errorf("%s: its payload is built differently", name)
		}
	}
	if seen != len(goldenCommands) {
		t.Errorf("%d frames, want %d", seen, len(goldenCommands))
	}
}
