package broker

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

const topicA = "persistent://public/default/a"

func TestConnectNegotiates(t *testing.T) {
	n := newNode(t, "maxMessageSize=2000000")
	for _, tt := range []struct{ theirs, want int32 }{{0, 0}, {15, 15}, {protocolVersion, protocolVersion}, {99, protocolVersion}} {
		c := n.dial()
		c.write(connectCommand(tt.theirs))
		got := c.expect(pulsarpb.BaseCommand_CONNECTED).Command.GetConnected()
		if got.GetProtocolVersion() != tt.want || got.GetMaxMessageSize() != 2000000 {
			t.Errorf("for version %d: %v", tt.theirs, got)
		}
		c.works()
	}
}

// What no correct client sends costs that connection, after a clear ERROR, and
// nothing else.
func TestViolationsCostOnlyTheConnection(t *testing.T) {
	n := newNode(t, "maxMessageSize=100000")
	other := n.connect()
	other.produce(topicA, 1)
	ping := protocol.AppendFrame(nil, &pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_PING.Enum(), Ping: &pulsarpb.CommandPing{}})
	unknown := protocol.AppendFrame(nil, &pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_Type(999).Enum()})
	mine := protocol.AppendFrame(nil, &pulsarpb.BaseCommand{
		Type: pulsarpb.BaseCommand_CONNECTED.Enum(), Connected: &pulsarpb.CommandConnected{ServerVersion: new(string)},
	})
	tests := []struct {
		name      string
		connected bool
		bytes     []byte
		says      string
	}{
		{"not-connected", false, ping, "before CONNECT"},
		{"large-frame-before-connect", false, binary.BigEndian.AppendUint32(nil, maxFrameBeforeConnect+1), "65537 bytes"},
		{"connect-twice", true, protocol.AppendFrame(nil, connectCommand(20)), "twice"},
		{"unknown-command", true, unknown, "999"},
		{"command-of-brokers", true, mine, "CONNECTED"},
		{"large-frame", true, binary.BigEndian.AppendUint32(nil, 100_000+protocol.FramePadding+1), "at most"},
		{"garbage", true, []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), "frame"},
		{"bad-lengths", true, []byte{0, 0, 0, 8, 0, 0, 0, 99, 1, 2, 3, 4}, "malformed"},
		{"bad-protobuf", true, []byte{0, 0, 0, 8, 0, 0, 0, 4, 0xff, 0xff, 0xff, 0xff}, "malformed"},
		{"send-to-no-producer", true, func() []byte {
			id := uint64(77)
			return protocol.AppendPayloadHeader(nil, &pulsarpb.BaseCommand{
				Type: pulsarpb.BaseCommand_SEND.Enum(), Send: &pulsarpb.CommandSend{ProducerId: &id, SequenceId: &id},
			}, 0)
		}(), "77"},
	}
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := &node{Broker: n.Broker, t: t, addr: n.addr}
			c := n.dial()
			if tt.connected {
				c = n.connect()
			}
			// Bytes behind the offending frame must not swallow the answer.
			c.writeRaw(append(tt.bytes, bytes.Repeat([]byte{7}, 4096)...))
			start := time.Now()
			e := c.expect(pulsarpb.BaseCommand_ERROR).Command.GetError()
			if !strings.Contains(e.GetMessage(), tt.says) {
				t.Errorf("ERROR says %q, want %q in it", e.GetMessage(), tt.says)
			}
			c.expectClosed()
			if took := time.Since(start); took >= lingerTimeout {
				t.Errorf("the connection ended after %v", took)
			}
			other.t = t
			other.publish(1, i, i+1)
		})
	}
}

func TestSilenceBeforeConnectIsShort(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for connectTimeout")
	}
	t.Parallel()
	n := newNode(t)
	c := n.dial()
	start := time.Now()
	_ = c.nc.SetReadDeadline(start.Add(2 * connectTimeout))
	f, err := protocol.ReadFrame(c.r, 1<<20)
	if err != nil || !strings.Contains(f.Command.GetError().GetMessage(), "no CONNECT") {
		t.Errorf("after %v: %v, %v", time.Since(start), f.Command, err)
	}
	if took := time.Since(start); took < connectTimeout || took > connectTimeout+2*time.Second {
		t.Errorf("it took %v, want %v", took, connectTimeout)
	}
}

func TestConnectionLimits(t *testing.T) {
	tests := []struct{ name, key string }{
		{"all", "brokerMaxConnections=2"},
		{"per-address", "brokerMaxConnectionsPerIp=2"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(t, tt.key)
			first, second := n.connect(), n.connect()
			third := n.dial()
			e := third.expectError(pulsarpb.ServerError_TooManyRequests)
			if !strings.Contains(e.GetMessage(), strings.Split(tt.key, "=")[0]) {
				t.Errorf("ERROR %q does not name the key", e.GetMessage())
			}
			third.expectClosed()
			first.works()
			_ = second.nc.Close()
			waitFor(t, "a place is free", func() bool {
				n.mu.Lock()
				defer n.mu.Unlock()
				return len(n.conns) == 1
			})
			n.connect().works()
		})
	}
}

func TestTooManyThatDoNotIntroduceThemselves(t *testing.T) {
	n := newNode(t)
	n.connecting.Add(maxConnecting) // as if they were there
	c := n.dial()
	c.expectError(pulsarpb.ServerError_TooManyRequests)
	c.expectClosed()
	n.connecting.Add(-maxConnecting)
	c = n.connect()
	c.works()
	if got := n.connecting.Load(); got != 0 {
		t.Errorf("%d are counted as connecting, want 0", got)
	}
}

// cutAfterConnect is a connection whose peer resets it while it is being greeted.
type cutAfterConnect struct{ net.Conn }

func (c cutAfterConnect) SetReadDeadline(t time.Time) error {
	if t.IsZero() {
		return net.ErrClosed
	}
	return c.Conn.SetReadDeadline(t)
}

// One that goes right after it introduced itself is not counted for ever among
// those that have not.
func TestGoneRightAfterConnect(t *testing.T) {
	n := newNode(t)
	ours, theirs := net.Pipe()
	defer func() { _ = theirs.Close() }()
	go func() { _, _ = io.Copy(io.Discard, theirs) }()
	n.accept(cutAfterConnect{ours})
	server := n.only()
	if _, err := theirs.Write(protocol.AppendFrame(nil, connectCommand(20))); err != nil {
		t.Fatal(err)
	}
	<-server.done
	if got := n.connecting.Load(); got != 0 {
		t.Errorf("%d connections count as not introduced, want 0", got)
	}
}

func TestKeepAlive(t *testing.T) {
	t.Parallel()
	n := newNode(t, "keepAliveIntervalSeconds=1")
	silent := n.connect()
	start := time.Now()
	_ = silent.nc.SetReadDeadline(start.Add(10 * time.Second))
	f, err := protocol.ReadFrame(silent.r, 1<<20)
	if err != nil || f.Command.GetType() != pulsarpb.BaseCommand_PING {
		t.Fatalf("after %v: %v %v, want PING", time.Since(start), f.Command, err)
	}
	if _, err := protocol.ReadFrame(silent.r, 1<<20); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("a silent connection was not closed: %v", err)
	}
	if took := time.Since(start); took < 1900*time.Millisecond || took > 4*time.Second {
		t.Errorf("closed after %v, want 2s", took)
	}

	talks := n.connect()
	until := time.Now().Add(3 * time.Second)
	for time.Now().Before(until) {
		_ = talks.nc.SetReadDeadline(until)
		if f, err := protocol.ReadFrame(talks.r, 1<<20); err == nil && f.Command.GetType() == pulsarpb.BaseCommand_PING {
			talks.write(pong())
		}
	}
	talks.works()
}

// Known commands that are not served are answered, each in its own way, and the
// connection goes on.
func TestRefusedCommands(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	id, text := uint64(5), "x"
	tests := []struct {
		cmd  *pulsarpb.BaseCommand
		want pulsarpb.BaseCommand_Type // PONG = in silence
	}{
		{&command{Type: pulsarpb.BaseCommand_GET_SCHEMA.Enum(), GetSchema: &pulsarpb.CommandGetSchema{RequestId: &id, Topic: &text}}, pulsarpb.BaseCommand_GET_SCHEMA_RESPONSE},
		{&command{Type: pulsarpb.BaseCommand_GET_OR_CREATE_SCHEMA.Enum(), GetOrCreateSchema: &pulsarpb.CommandGetOrCreateSchema{RequestId: &id, Topic: &text, Schema: &pulsarpb.Schema{Name: &text, SchemaData: []byte{}, Type: pulsarpb.Schema_Json.Enum()}}}, pulsarpb.BaseCommand_GET_OR_CREATE_SCHEMA_RESPONSE},
		{&command{Type: pulsarpb.BaseCommand_TC_CLIENT_CONNECT_REQUEST.Enum(), TcClientConnectRequest: &pulsarpb.CommandTcClientConnectRequest{RequestId: &id, TcId: &id}}, pulsarpb.BaseCommand_TC_CLIENT_CONNECT_RESPONSE},
		{&command{Type: pulsarpb.BaseCommand_NEW_TXN.Enum(), NewTxn: &pulsarpb.CommandNewTxn{RequestId: &id}}, pulsarpb.BaseCommand_NEW_TXN_RESPONSE},
		{&command{Type: pulsarpb.BaseCommand_ADD_PARTITION_TO_TXN.Enum(), AddPartitionToTxn: &pulsarpb.CommandAddPartitionToTxn{RequestId: &id}}, pulsarpb.BaseCommand_ADD_PARTITION_TO_TXN_RESPONSE},
		{&command{Type: pulsarpb.BaseCommand_ADD_SUBSCRIPTION_TO_TXN.Enum(), AddSubscriptionToTxn: &pulsarpb.CommandAddSubscriptionToTxn{RequestId: &id}}, pulsarpb.BaseCommand_ADD_SUBSCRIPTION_TO_TXN_RESPONSE},
		{&command{Type: pulsarpb.BaseCommand_END_TXN.Enum(), EndTxn: &pulsarpb.CommandEndTxn{RequestId: &id}}, pulsarpb.BaseCommand_END_TXN_RESPONSE},
		{&command{Type: pulsarpb.BaseCommand_END_TXN_ON_PARTITION.Enum(), EndTxnOnPartition: &pulsarpb.CommandEndTxnOnPartition{RequestId: &id}}, pulsarpb.BaseCommand_END_TXN_ON_PARTITION_RESPONSE},
		{&command{Type: pulsarpb.BaseCommand_END_TXN_ON_SUBSCRIPTION.Enum(), EndTxnOnSubscription: &pulsarpb.CommandEndTxnOnSubscription{RequestId: &id}}, pulsarpb.BaseCommand_END_TXN_ON_SUBSCRIPTION_RESPONSE},
		{&command{Type: pulsarpb.BaseCommand_WATCH_TOPIC_LIST.Enum(), WatchTopicList: &pulsarpb.CommandWatchTopicList{RequestId: &id, WatcherId: &id, Namespace: &text, TopicsPattern: &text}}, pulsarpb.BaseCommand_ERROR},
		{&command{Type: pulsarpb.BaseCommand_WATCH_TOPIC_LIST_CLOSE.Enum(), WatchTopicListClose: &pulsarpb.CommandWatchTopicListClose{RequestId: &id, WatcherId: &id}}, pulsarpb.BaseCommand_ERROR},
		{&command{Type: pulsarpb.BaseCommand_AUTH_RESPONSE.Enum(), AuthResponse: &pulsarpb.CommandAuthResponse{}}, pulsarpb.BaseCommand_ERROR},
		{&command{Type: pulsarpb.BaseCommand_SCALABLE_TOPIC_LOOKUP.Enum(), ScalableTopicLookup: &pulsarpb.CommandScalableTopicLookup{SessionId: &id, Topic: &text}}, pulsarpb.BaseCommand_SCALABLE_TOPIC_UPDATE},
		{&command{Type: pulsarpb.BaseCommand_SCALABLE_TOPIC_CLOSE.Enum(), ScalableTopicClose: &pulsarpb.CommandScalableTopicClose{SessionId: &id}}, pulsarpb.BaseCommand_PONG},
		{&command{Type: pulsarpb.BaseCommand_SCALABLE_TOPIC_SUBSCRIBE.Enum(), ScalableTopicSubscribe: &pulsarpb.CommandScalableTopicSubscribe{RequestId: &id, Topic: &text, Subscription: &text, ConsumerName: &text, ConsumerId: &id, ConsumerType: pulsarpb.ScalableConsumerType_STREAM.Enum()}}, pulsarpb.BaseCommand_SCALABLE_TOPIC_SUBSCRIBE_RESPONSE},
		{&command{Type: pulsarpb.BaseCommand_WATCH_SCALABLE_TOPICS.Enum(), WatchScalableTopics: &pulsarpb.CommandWatchScalableTopics{WatchId: &id, Namespace: &text}}, pulsarpb.BaseCommand_WATCH_SCALABLE_TOPICS_UPDATE},
		{&command{Type: pulsarpb.BaseCommand_WATCH_SCALABLE_TOPICS_CLOSE.Enum(), WatchScalableTopicsClose: &pulsarpb.CommandWatchScalableTopicsClose{WatchId: &id}}, pulsarpb.BaseCommand_PONG},
		{&command{Type: pulsarpb.BaseCommand_WATCH_TC_ASSIGNMENTS.Enum(), WatchTcAssignments: &pulsarpb.CommandWatchTcAssignments{WatchId: &id}}, pulsarpb.BaseCommand_WATCH_TC_ASSIGNMENTS_UPDATE},
		{&command{Type: pulsarpb.BaseCommand_WATCH_TC_ASSIGNMENTS_CLOSE.Enum(), WatchTcAssignmentsClose: &pulsarpb.CommandWatchTcAssignmentsClose{WatchId: &id}}, pulsarpb.BaseCommand_PONG},
	}
	tested := map[pulsarpb.BaseCommand_Type]bool{}
	for _, tt := range tests {
		tested[tt.cmd.GetType()] = true
		c.write(tt.cmd)
		if tt.want != pulsarpb.BaseCommand_PONG {
			f, err := c.next()
			if err != nil || f.Command.GetType() != tt.want {
				t.Fatalf("%v is answered by %v, %v; want %v", tt.cmd.GetType(), f.Command, err, tt.want)
			}
			if !strings.Contains(f.Command.String(), "not supported") && !strings.Contains(f.Command.String(), "no schema") {
				t.Errorf("%v: the answer %v does not say why", tt.cmd.GetType(), f.Command)
			}
		}
		c.works()
	}
	for kind := range refusals {
		if !tested[kind] {
			t.Errorf("%v is not tested", kind)
		}
	}
}

// Every command of the protocol that is a client's is either served or refused.
func TestEveryCommandHasAHandler(t *testing.T) {
	brokers := map[string]bool{ // said by brokers only
		"CONNECTED": true, "SEND_RECEIPT": true, "SEND_ERROR": true, "MESSAGE": true, "SUCCESS": true, "ERROR": true,
		"PRODUCER_SUCCESS": true, "REACHED_END_OF_TOPIC": true, "ACTIVE_CONSUMER_CHANGE": true, "AUTH_CHALLENGE": true,
		"WATCH_TOPIC_LIST_SUCCESS": true, "WATCH_TOPIC_UPDATE": true, "TOPIC_MIGRATED": true,
		"SCALABLE_TOPIC_UPDATE": true, "SCALABLE_TOPIC_ASSIGNMENT_UPDATE": true, "WATCH_SCALABLE_TOPICS_UPDATE": true,
		"WATCH_TC_ASSIGNMENTS_UPDATE": true,
	}
	for number, name := range pulsarpb.BaseCommand_Type_name {
		_, handled := handlers[pulsarpb.BaseCommand_Type(number)]
		fromBroker := brokers[name] || strings.HasSuffix(name, "_RESPONSE") && name != "AUTH_RESPONSE"
		if handled == fromBroker {
			t.Errorf("%s: handled is %t, said by brokers is %t", name, handled, fromBroker)
		}
	}
}

// A client that asks and does not read the answers is not read any more.
func TestWhoDoesNotReadAnswersIsNotRead(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	ping := protocol.AppendFrame(nil, &pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_PING.Enum(), Ping: &pulsarpb.CommandPing{}})
	const count = 2_000_000
	written := make(chan error, 1)
	go func() {
		pings := bytes.Repeat(ping, 1000)
		for range count / 1000 {
			if _, err := c.nc.Write(pings); err != nil {
				written <- err
				return
			}
		}
		written <- nil
	}()
	server := n.only()
	waitFor(t, "the reader waits", server.paused.Load)
	server.out.mu.Lock()
	replies := server.out.replies
	server.out.mu.Unlock()
	if replies > maxRepliesBytes+1024 {
		t.Errorf("%d bytes of replies wait, the bound is %d", replies, maxRepliesBytes)
	}
	select {
	case err := <-written:
		t.Fatalf("everything was taken without one answer being read: %v", err)
	default:
	}
	for range count {
		if f, err := c.next(); err != nil || f.Command.GetType() != pulsarpb.BaseCommand_PONG {
			t.Fatal(f.Command, err)
		}
	}
	if err := <-written; err != nil {
		t.Error(err)
	}
}

// One that never reads them is not kept for ever, nor is what it holds.
func TestWhoNeverReadsAnswersIsClosed(t *testing.T) {
	n := newNode(t, "keepAliveIntervalSeconds=1")
	c := n.connect()
	server := n.only()
	ping := protocol.AppendFrame(nil, &pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_PING.Enum(), Ping: &pulsarpb.CommandPing{}})
	go func() {
		pings := bytes.Repeat(ping, 1000)
		for {
			if _, err := c.nc.Write(pings); err != nil {
				return
			}
		}
	}()
	select {
	case <-server.done:
	case <-time.After(8 * time.Second):
		t.Errorf("the connection is still there, paused is %t", server.paused.Load())
	}
}

// only returns the broker's side of the only connection.
func (n *node) only() *conn {
	n.t.Helper()
	var found *conn
	waitFor(n.t, "one connection", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		for found = range n.conns {
		}
		return len(n.conns) == 1
	})
	return found
}

func TestCloseIsCleanWithClientsConnected(t *testing.T) {
	n := newNode(t)
	c := n.connect()
	c.produce(topicA, 1)
	c.subscribe(topicA, "s", exclusive, 1)
	c.publish(1, 0, 3)
	idle := n.dial() // not even introduced
	done := make(chan struct{})
	go func() { n.stop(); close(done) }()
	c.expect(pulsarpb.BaseCommand_CLOSE_PRODUCER)
	c.expect(pulsarpb.BaseCommand_CLOSE_CONSUMER)
	c.expectClosed()
	idle.expectClosed()
	<-done
	if _, err := net.Dial("tcp", n.addr); err == nil {
		t.Error("it still listens")
	}
}
