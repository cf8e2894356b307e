package assemble

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/magnetar-io/magnetar/internal/config"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.DiscardHandler)

func common(t *testing.T, overrides ...string) *Common {
	t.Helper()
	var c Common
	s := config.NewSet()
	c.Register(s)
	if err := s.Load("", overrides); err != nil {
		t.Fatal(err)
	}
	return &c
}

func TestOnlyLoopbackWithoutLeave(t *testing.T) {
	tests := []struct {
		name      string
		overrides []string
		refused   string // the key that is named; "" if all is well
	}{
		{"default", nil, ""},
		{"ipv6-loopback", []string{"bindAddress=::1"}, ""},
		{"loopback-net", []string{"bindAddress=127.0.0.7"}, ""},
		{"localhost", []string{"advertisedAddress=localhost"}, ""},
		{"all-interfaces", []string{"bindAddress=0.0.0.0"}, "bindAddress=0.0.0.0"},
		{"empty-is-all-interfaces", []string{"bindAddress="}, "bindAddress="},
		{"ipv6-all", []string{"bindAddress=::"}, "bindAddress=::"},
		{"private-is-beyond", []string{"bindAddress=10.0.0.1"}, "bindAddress=10.0.0.1"},
		{"name-is-beyond", []string{"advertisedAddress=broker.example"}, "advertisedAddress=broker.example"},
		{"leave-given", []string{"bindAddress=0.0.0.0", "advertisedAddress=10.0.0.1", "allowInsecure=true"}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := common(t, tt.overrides...).Check()
			if tt.refused == "" {
				if err != nil {
					t.Errorf("Check() = %v, want nil", err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.refused) || !strings.Contains(err.Error(), "allowInsecure=true") {
				t.Errorf("Check() = %v, want a refusal of %s that tells of allowInsecure=true", err, tt.refused)
			}
		})
	}
}

func TestPortInUseNamesKeyAndPort(t *testing.T) {
	c := common(t)
	l, err := c.listen("webServicePort", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if want := "127.0.0.1:" + strconv.Itoa(portOf(l)); c.advertised(l) != want {
		t.Errorf("advertised %q, want %q", c.advertised(l), want)
	}
	_, err = c.listen("webServicePort", portOf(l))
	if want := "webServicePort=" + strconv.Itoa(portOf(l)); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "in use") {
		t.Errorf("second listen: %v, want %q in use", err, want)
	}
}

func TestWebAnswersWhileStarting(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := newWeb(l, NewRegistry(), quiet)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	get := func(path string) (int, string) {
		t.Helper()
		r, err := client.Get("http://" + l.Addr().String() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r.StatusCode, string(body)
	}
	w.wait("waiting for a friend")
	for _, path := range []string{"/health", "/admin/v2/clusters"} {
		if code, body := get(path); code != http.StatusServiceUnavailable || !strings.Contains(body, "waiting for a friend") {
			t.Errorf("GET %s = %d %s, want 503 and what the start waits for", path, code, body)
		}
	}
	if code, body := get("/metrics"); code != http.StatusOK || !strings.Contains(body, "go_goroutines") {
		t.Errorf("GET /metrics = %d %s", code, body)
	}
	w.ready(http.NotFoundHandler())
	if code, _ := get("/health"); code != http.StatusNotFound {
		t.Errorf("GET /health = %d after ready, want the handler's 404", code)
	}
	if err := w.close(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestCloserGoesBackwardsAndOn(t *testing.T) {
	var c closer
	var order []string
	broken := errors.New("broken")
	for _, name := range []string{"first", "second", "third"} {
		c.add(name, func(ctx context.Context) error {
			if _, bounded := ctx.Deadline(); !bounded || ctx.Err() != nil {
				t.Errorf("closing %s has no deadline, or no time: %v", name, ctx.Err())
			}
			order = append(order, name)
			if name == "second" {
				return broken
			}
			return nil
		})
	}
	ended, cancel := context.WithCancel(t.Context()) // as it is when a program is told to end
	cancel()
	err := c.close(ended, quiet)
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), "close second") {
		t.Errorf("close = %v, want the second's error, named", err)
	}
	if want := []string{"third", "second", "first"}; !slices.Equal(order, want) {
		t.Errorf("closed %v, want %v", order, want)
	}
	if err := c.close(ended, quiet); err != nil || len(order) != 3 {
		t.Errorf("a second close = %v and did something: %v", err, order)
	}
}

func TestLogFormats(t *testing.T) {
	tests := []struct{ name, format, level, want string }{
		{"text", "text", "info", "msg=hello"},
		{"json", "json", "info", `"msg":"hello"`},
		{"level", "text", "warn", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out strings.Builder
			common(t, "logFormat="+tt.format, "logLevel="+tt.level).Logger(&out).Info("hello")
			if got := out.String(); !strings.Contains(got, tt.want) || (got == "") != (tt.want == "") {
				t.Errorf("logged %q, want %q", got, tt.want)
			}
		})
	}
}
