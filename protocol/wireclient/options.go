package wireclient

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"time"
)

// Options adjust a [Client]. The zero value means the defaults.
type Options struct {
	// Log receives what a person may want to know of connections; nil discards.
	Log *slog.Logger

	// Name is added to the client version that brokers show in statistics.
	Name string

	// ConnectTimeout bounds a dial with its handshake. 0 = 10 s.
	ConnectTimeout time.Duration

	// OperationTimeout bounds one request to a broker. 0 = 30 s.
	OperationTimeout time.Duration

	// KeepAlive is how long a connection may be silent before we ask whether the
	// broker lives; after twice that time it is given up. 0 = 30 s.
	KeepAlive time.Duration

	// BackoffMin and BackoffMax bound the pause between attempts, which doubles.
	// 0 = 100 ms and 5 s.
	BackoffMin, BackoffMax time.Duration

	// ConnectionsPerBroker spreads producers and consumers over several
	// connections. 0 = 1.
	ConnectionsPerBroker int

	// AuthMethod and AuthData go into the handshake; AuthData is asked at every
	// connection. Empty and nil = none.
	AuthMethod string
	AuthData   func() ([]byte, error)

	// TLS is used for pulsar+ssl addresses; nil verifies by the system's roots.
	TLS *tls.Config

	// Dial opens a connection; nil = TCP. Tests put networks of their own here.
	Dial func(ctx context.Context, address string) (net.Conn, error)
}

func (o *Options) setDefaults() {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.ConnectTimeout = cmp.Or(o.ConnectTimeout, 10*time.Second)
	o.OperationTimeout = cmp.Or(o.OperationTimeout, 30*time.Second)
	o.KeepAlive = cmp.Or(o.KeepAlive, 30*time.Second)
	o.BackoffMin = cmp.Or(o.BackoffMin, 100*time.Millisecond)
	o.BackoffMax = max(cmp.Or(o.BackoffMax, 5*time.Second), o.BackoffMin)
	o.ConnectionsPerBroker = max(o.ConnectionsPerBroker, 1)
	if o.Dial == nil {
		o.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", address)
		}
	}
}

const (
	plainScheme = "pulsar"
	tlsScheme   = "pulsar+ssl"
	plainPort   = "6650"
	tlsPort     = "6651"
)

// parseServiceURL reads "pulsar://host1:6650,host2:6650". Ports may be left out.
func parseServiceURL(s string) (hosts []string, secure bool, err error) {
	scheme, rest, ok := strings.Cut(s, "://")
	port := plainPort
	switch {
	case ok && scheme == plainScheme:
	case ok && scheme == tlsScheme:
		secure, port = true, tlsPort
	default:
		return nil, false, fmt.Errorf("service URL %q: want pulsar://host[:port][,host...] or pulsar+ssl://host...[,host...]", s)
	}
	for h := range strings.SplitSeq(strings.TrimSuffix(rest, "/"), ",") {
		host, err := withPort(h, port)
		if err != nil {
			return nil, false, fmt.Errorf("service URL %q: %w", s, err)
		}
		hosts = append(hosts, host)
	}
	return hosts, secure, nil
}

func withPort(h, port string) (string, error) {
	u, err := url.Parse("pulsar://" + h)
	if err != nil || u.Hostname() == "" || u.Path != "" || u.User != nil || u.RawQuery != "" {
		return "", fmt.Errorf("host %q: want host or host:port", h)
	}
	return net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), port)), nil
}

// brokerAddress takes host:port out of a URL that a lookup answered.
func brokerAddress(s string) (string, error) {
	hosts, _, err := parseServiceURL(s)
	if err == nil && len(hosts) != 1 {
		err = errors.New("want one host")
	}
	if err != nil {
		return "", fmt.Errorf("lookup answered broker %q: %w", s, err)
	}
	return hosts[0], nil
}
