package assemble

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strconv"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/magnetar-io/magnetar/internal/config"
)

// Common are the keys that every program has.
type Common struct {
	BindAddress       string
	AdvertisedAddress string
	AllowInsecure     bool
	LogLevel          string
	LogFormat         string
	PprofPort         int
}

// Register adds the common keys to s.
func (c *Common) Register(s *config.Set) {
	s.Section("Network")
	s.String(&c.BindAddress, "bindAddress", "127.0.0.1",
		"Address to listen on, for every port of this program. Beyond loopback it needs allowInsecure=true.")
	s.String(&c.AdvertisedAddress, "advertisedAddress", "127.0.0.1",
		"Host name or address under which others reach this program. Beyond loopback it needs allowInsecure=true.")
	s.Bool(&c.AllowInsecure, "allowInsecure", false,
		"Listen beyond loopback although there is no TLS and no authentication: everybody who reaches the ports may read and write everything.")
	s.Section("Logging and debugging")
	s.Choice(&c.LogLevel, "logLevel", "info", []string{"debug", "info", "warn", "error"},
		"The least important log lines that are written to standard error.")
	s.Choice(&c.LogFormat, "logFormat", "text", []string{"text", "json"},
		"How log lines are written.")
	s.Int(&c.PprofPort, "pprofPort", 0, 0, 65535,
		"Port of Go's profiler, on loopback only (http://127.0.0.1:PORT/debug/pprof/). 0 = off.")
}

// Check refuses to listen or advertise beyond loopback unless that was written
// down: there is neither TLS nor authentication yet.
func (c *Common) Check() error {
	if c.AllowInsecure {
		return nil
	}
	var errs []error
	for _, k := range []struct{ key, host string }{{"bindAddress", c.BindAddress}, {"advertisedAddress", c.AdvertisedAddress}} {
		if !isLoopback(k.host) {
			errs = append(errs, fmt.Errorf("%s=%s reaches beyond loopback, where everybody could read and write everything, as there is no TLS and no authentication yet: use 127.0.0.1, or set allowInsecure=true if the network is your own",
				k.key, k.host))
		}
	}
	return errors.Join(errs...)
}

// isLoopback knows loopback by address and by the one name that always means it.
// Another name is not resolved: what it means may change later.
func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// Logger makes the program's logger. It writes to w.
func (c *Common) Logger(w io.Writer) *slog.Logger {
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		panic(fmt.Sprintf("assemble: log level %q passed its key's check: %v", c.LogLevel, err))
	}
	o := &slog.HandlerOptions{Level: level}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

// NewRegistry makes the registry that /metrics shows, with what Go itself and the
// operating system tell about the process.
func NewRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// listen opens the port of a key. Port 0 is any free one.
func (c *Common) listen(key string, port int) (net.Listener, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(c.BindAddress, strconv.Itoa(port))) //nolint:noctx // local, at once
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%s=%d: the port is in use on %s: end what listens there, or choose another with --set %s=PORT", key, port, c.BindAddress, key)
	case err != nil:
		return nil, fmt.Errorf("%s=%d: %w", key, port, err)
	}
	return l, nil
}

// advertised is the address under which others reach the listener l.
func (c *Common) advertised(l net.Listener) string {
	return net.JoinHostPort(c.AdvertisedAddress, strconv.Itoa(portOf(l)))
}

func portOf(l net.Listener) int {
	addr, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		panic(fmt.Sprintf("assemble: listener on %v is not TCP", l.Addr()))
	}
	return addr.Port
}

// Pprof serves Go's profiler if its key says so. The server ends with the process.
func (c *Common) Pprof(log *slog.Logger) error {
	if c.PprofPort == 0 {
		return nil
	}
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(c.PprofPort))) //nolint:noctx // local, at once
	if err != nil {
		return fmt.Errorf("pprofPort=%d: %w", c.PprofPort, err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	log.Info("profiler serves", "address", l.Addr().String())
	go func() {
		server := http.Server{Handler: mux, ReadHeaderTimeout: headerTimeout}
		log.Warn("profiler ended", "err", server.Serve(l))
	}()
	return nil
}

// headerTimeout is how long an HTTP client may take to ask.
const headerTimeout = 10 * time.Second

// What both halves of a standalone must say alike.
const defaultClusterName = "standalone"

func registerClusterName(s *config.Set, p *string) {
	s.String(p, "clusterName", defaultClusterName, "Name of the cluster; the same on every bookie and broker of it.")
}

func registerBookies(s *config.Set, p *[]string) {
	s.Strings(p, "bookies", []string{"127.0.0.1:3181"},
		"Inter-node addresses (host:port) of bookies of the cluster, comma separated. The rest is learned from them, so one that runs is enough.")
}

// closed drops the complaint that somebody else closed a listener already.
func closed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
