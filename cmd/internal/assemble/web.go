package assemble

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// web is a program's HTTP server. It answers from the moment it is made: /metrics
// and, until [web.ready] hands the requests to the program's own handler, /health
// with what the program is waiting for.
type web struct {
	server  http.Server
	waiting atomic.Pointer[string]       // what the start waits for
	handler atomic.Pointer[http.Handler] // nil until ready
	metrics http.Handler
	serving sync.WaitGroup
}

// webCloseTimeout is how long requests under way get when the program ends.
const webCloseTimeout = 2 * time.Second

// newWeb serves on l at once.
func newWeb(l net.Listener, gatherer prometheus.Gatherer, log *slog.Logger) *web {
	w := &web{metrics: promhttp.HandlerFor(gatherer, promhttp.HandlerOpts{})}
	w.wait("starting")
	w.server.Handler = w
	w.server.ReadHeaderTimeout = headerTimeout
	w.server.IdleTimeout = 2 * time.Minute
	w.server.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug) // clients that hang up are no news
	w.serving.Go(func() {
		if err := w.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("HTTP server ended", "address", l.Addr().String(), "err", err)
		}
	})
	return w
}

// wait says what the start is waiting for.
func (w *web) wait(what string) { w.waiting.Store(&what) }

// ready hands all further requests to h.
func (w *web) ready(h http.Handler) { w.handler.Store(&h) }

// ServeHTTP makes web an http.Handler.
func (w *web) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	if h := w.handler.Load(); h != nil {
		(*h).ServeHTTP(out, r)
		return
	}
	if r.URL.Path == "/metrics" {
		w.metrics.ServeHTTP(out, r)
		return
	}
	answer(out, http.StatusServiceUnavailable, health{State: *w.waiting.Load()})
}

// close ends the server; requests under way get a moment.
func (w *web) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, webCloseTimeout)
	defer cancel()
	err := w.server.Shutdown(ctx)
	if err != nil {
		err = w.server.Close()
	}
	w.serving.Wait()
	return err
}

func answer(out http.ResponseWriter, code int, body any) {
	out.Header().Set("Content-Type", "application/json")
	out.WriteHeader(code)
	_ = json.NewEncoder(out).Encode(body) // an error is a client that went away
}

// health is the answer of /health; internal/localcluster reads it.
type health struct {
	State  string        `json:"state"` // "ready", or why not
	Node   string        `json:"node,omitempty"`
	Groups []groupHealth `json:"groups,omitempty"`
}

type groupHealth struct {
	ID      uint32         `json:"group"`
	State   string         `json:"state"`
	Leader  string         `json:"leader"`
	Term    uint64         `json:"term"`
	Commit  uint64         `json:"commit"`
	Applied uint64         `json:"applied"`
	LastLog uint64         `json:"lastLog"`
	Members []memberHealth `json:"members"`
}

type memberHealth struct {
	Node  string `json:"node"`
	Addr  string `json:"address"`
	Voter bool   `json:"voter"`
}
