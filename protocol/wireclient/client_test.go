package wireclient

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/protocoltest"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testTopic = "persistent://public/default/orders"

// quick makes reconnections fast.
func quick() Options {
	o := Options{BackoffMin: time.Millisecond, BackoffMax: 20 * time.Millisecond}
	if testing.Verbose() {
		o.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return o
}

func testContext(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func dial(t testing.TB, url string, o Options) *Client {
	t.Helper()
	c, err := Dial(testContext(t), url, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func produce(t testing.TB, c *Client, o ProducerOptions) *Producer {
	t.Helper()
	if o.Topic == "" {
		o.Topic = testTopic
	}
	p, err := c.CreateProducer(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func subscribe(t testing.TB, c *Client, o SubscribeOptions) *Consumer {
	t.Helper()
	if o.Topic == "" {
		o.Topic = testTopic
	}
	if o.Subscription == "" {
		o.Subscription = "sub"
	}
	k, err := c.Subscribe(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func receive(t testing.TB, k *Consumer) *Message {
	t.Helper()
	m, err := k.Receive(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// eventually polls until ok, or fails the test.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// hookOn answers commands of one type.
func hookOn(typ pulsarpb.BaseCommand_Type, f func(c *protocoltest.Conn, command *pulsarpb.BaseCommand) bool) protocoltest.Hook {
	return func(c *protocoltest.Conn, fr protocol.Frame) bool {
		return fr.Command.GetType() == typ && f(c, fr.Command)
	}
}

func TestParseServiceURL(t *testing.T) {
	tests := []struct{ name, url, want string }{
		{"one", "pulsar://a:1", "[a:1] false"},
		{"default-port", "pulsar://a", "[a:6650] false"},
		{"several", "pulsar://a:1,b,c:3/", "[a:1 b:6650 c:3] false"},
		{"ipv6", "pulsar://[::1]:7", "[[::1]:7] false"},
		{"tls", "pulsar+ssl://a", "[a:6651] true"},
		{"http", "http://a:8080", "want pulsar://"},
		{"bare", "localhost:6650", "want pulsar://"},
		{"no-host", "pulsar://", `host ""`},
		{"empty-host", "pulsar://a,,b", `host ""`},
		{"path", "pulsar://a/b", `host "a/b"`},
		{"port", "pulsar://a:b", `host "a:b"`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			hosts, secure, err := parseServiceURL(tt.url)
			got := fmt.Sprint(hosts, secure)
			if err != nil {
				got = err.Error()
			}
			if !strings.Contains(got, tt.want) {
				t.Errorf("parseServiceURL(%q) = %s, want %s", tt.url, got, tt.want)
			}
		})
	}
}

func TestDialTriesEveryHost(t *testing.T) {
	b := protocoltest.NewCluster().NewBroker(t)
	dead, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead.Close()
	c := dial(t, "pulsar://"+dead.Addr().String()+","+b.Address(), quick())
	if _, err := produce(t, c, ProducerOptions{}).Send(testContext(t), OutMessage{Payload: []byte("x")}); err != nil {
		t.Error(err)
	}

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, "pulsar://"+dead.Addr().String(), quick()); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "refused") {
		t.Errorf("Dial of a dead host: %v, want the deadline and the cause", err)
	}
}

func TestDialRefused(t *testing.T) {
	b := protocoltest.NewCluster().NewBroker(t)
	b.SetHook(hookOn(pulsarpb.BaseCommand_CONNECT, func(c *protocoltest.Conn, command *pulsarpb.BaseCommand) bool {
		if string(command.GetConnect().GetAuthData()) == "secret" && command.GetConnect().GetAuthMethodName() == "token" {
			return false
		}
		c.Refuse(^uint64(0), pulsarpb.ServerError_AuthenticationError, "who are you")
		return true
	}))
	_, err := Dial(testContext(t), b.URL(), quick())
	var refused *ServerError
	if !errors.As(err, &refused) || refused.Code != pulsarpb.ServerError_AuthenticationError || !strings.Contains(err.Error(), "AuthenticationError: who are you") {
		t.Errorf("Dial without credentials: %v", err)
	}
	o := quick()
	o.AuthMethod, o.AuthData = "token", func() ([]byte, error) { return []byte("secret"), nil }
	dial(t, b.URL(), o)
}

func TestDialSpeaksToSomethingElse(t *testing.T) {
	b := protocoltest.NewCluster().NewBroker(t)
	b.SetHook(func(c *protocoltest.Conn, _ protocol.Frame) bool {
		c.SendRaw([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
		return true
	})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, b.URL(), quick()); err == nil || !strings.Contains(err.Error(), "frame of") {
		t.Errorf("Dial of an HTTP server: %v", err)
	}
}

func TestLookupFollowsRedirects(t *testing.T) {
	k := protocoltest.NewCluster()
	a, b := k.NewBroker(t), k.NewBroker(t)
	k.SetOwner(testTopic, b)
	var asked atomic.Int32
	b.SetHook(hookOn(pulsarpb.BaseCommand_LOOKUP, func(_ *protocoltest.Conn, command *pulsarpb.BaseCommand) bool {
		if command.GetLookupTopic().GetAuthoritative() {
			asked.Add(1)
		}
		return false
	}))
	c := dial(t, a.URL(), quick())
	p := produce(t, c, ProducerOptions{})
	if _, err := p.Send(testContext(t), OutMessage{Payload: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	if len(k.Entries(testTopic)) != 1 || asked.Load() != 1 {
		t.Errorf("%d entries, %d authoritative lookups at the owner", len(k.Entries(testTopic)), asked.Load())
	}
}

func TestLookupFails(t *testing.T) {
	k := protocoltest.NewCluster()
	a := k.NewBroker(t)
	c := dial(t, a.URL(), quick())
	answer := func(f func(r *pulsarpb.CommandLookupTopicResponse)) {
		a.SetHook(hookOn(pulsarpb.BaseCommand_LOOKUP, func(c *protocoltest.Conn, command *pulsarpb.BaseCommand) bool {
			r := &pulsarpb.CommandLookupTopicResponse{RequestId: command.GetLookupTopic().RequestId}
			f(r)
			c.Send(&pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_LOOKUP_RESPONSE.Enum(), LookupTopicResponse: r})
			return true
		}))
	}
	create := func(ctx context.Context) error {
		_, err := c.CreateProducer(ctx, ProducerOptions{Topic: testTopic})
		return err
	}
	answer(func(r *pulsarpb.CommandLookupTopicResponse) {
		r.Response = pulsarpb.CommandLookupTopicResponse_Failed.Enum()
		r.Error, r.Message = pulsarpb.ServerError_TopicNotFound.Enum(), new("no such topic")
	})
	if err := create(testContext(t)); err == nil || !strings.Contains(err.Error(), "TopicNotFound: no such topic") {
		t.Errorf("topic not found: %v", err)
	}
	answer(func(r *pulsarpb.CommandLookupTopicResponse) {
		r.Response = pulsarpb.CommandLookupTopicResponse_Redirect.Enum()
		r.BrokerServiceUrl = new(a.URL())
	})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := create(ctx); err == nil || !strings.Contains(err.Error(), "redirected 20 times") {
		t.Errorf("redirected in a circle: %v", err)
	}
	var failures atomic.Int32
	answer(func(r *pulsarpb.CommandLookupTopicResponse) {
		if failures.Add(1) > 3 {
			r.Response = pulsarpb.CommandLookupTopicResponse_Connect.Enum()
			r.BrokerServiceUrl = new(a.URL())
			return
		}
		r.Response = pulsarpb.CommandLookupTopicResponse_Failed.Enum()
		r.Error, r.Message = pulsarpb.ServerError_ServiceNotReady.Enum(), new("loading")
	})
	if err := create(testContext(t)); err != nil || failures.Load() != 4 {
		t.Errorf("broker that becomes ready: %v after %d lookups", err, failures.Load())
	}
}

// pipeDial connects through memory, so that synctest's clock can move.
func pipeDial(b *protocoltest.Broker) func(context.Context, string) (net.Conn, error) {
	return func(context.Context, string) (net.Conn, error) { return b.Pipe() }
}

func TestKeepAlive(t *testing.T) {
	for name, deaf := range map[string]bool{"answered": false, "silent": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := protocoltest.NewCluster().NewPipeBroker(t, "broker:6650")
				var pings atomic.Int32
				b.SetHook(hookOn(pulsarpb.BaseCommand_PING, func(*protocoltest.Conn, *pulsarpb.BaseCommand) bool {
					pings.Add(1)
					return deaf
				}))
				c, err := Dial(t.Context(), b.URL(), Options{Dial: pipeDial(b)})
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				time.Sleep(5*time.Minute + time.Second)
				synctest.Wait()
				switch {
				case deaf && (b.Connections() != 0 || pings.Load() != 1):
					t.Errorf("a silent broker: %d connections after %d pings, want it given up after one", b.Connections(), pings.Load())
				case !deaf && (b.Connections() != 1 || pings.Load() < 9):
					t.Errorf("a living broker: %d connections after %d pings, want one kept", b.Connections(), pings.Load())
				}
			})
		})
	}
}

func TestCloseFailsWhatWaits(t *testing.T) {
	b := protocoltest.NewCluster().NewBroker(t)
	b.SetHook(hookOn(pulsarpb.BaseCommand_SEND, func(*protocoltest.Conn, *pulsarpb.BaseCommand) bool { return true }))
	c := dial(t, b.URL(), quick())
	p := produce(t, c, ProducerOptions{MaxPending: 1})
	k := subscribe(t, c, SubscribeOptions{})
	results := make(chan error, 3)
	if err := p.SendAsync(t.Context(), OutMessage{}, func(_ MessageID, err error) { results <- err }); err != nil {
		t.Fatal(err)
	}
	go func() { results <- p.SendAsync(t.Context(), OutMessage{}, func(MessageID, error) {}) }()
	go func() { _, err := k.Receive(t.Context()); results <- err }()
	c.Close()
	for range 3 {
		if err := <-results; !errors.Is(err, ErrClosed) {
			t.Errorf("after Close of the client: %v, want ErrClosed", err)
		}
	}
	if _, err := c.CreateProducer(t.Context(), ProducerOptions{Topic: testTopic}); !errors.Is(err, ErrClosed) {
		t.Errorf("CreateProducer after Close: %v, want ErrClosed", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}
