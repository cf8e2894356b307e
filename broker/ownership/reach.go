package ownership

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"sync"
	"syscall"
	"time"
)

const (
	// reachTimeout bounds one look whether a broker is there.
	reachTimeout = 500 * time.Millisecond

	// reachBelieved is how long the answer is believed.
	reachBelieved = time.Second
)

// Listens is the [Config].Listens of programs: it returns an error if the other
// broker's machine answers that nobody listens on the broker's HTTP port. That is
// proof that the process is gone. Silence is not: the network between the two may
// be cut while clients still reach it.
func Listens(ctx context.Context, b BrokerInfo) error {
	u, err := url.Parse(b.WebServiceURL)
	if err != nil {
		return nil // a broker that cannot be asked is not known to be gone
	}
	ctx, cancel := context.WithTimeout(ctx, reachTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", u.Host)
	if err != nil {
		if errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
		return nil // see above
	}
	_ = conn.Close() // nothing was said
	return nil
}

// reach remembers for a moment which brokers are there, so that a client's many
// lookups cost one look.
type reach struct {
	listens func(context.Context, BrokerInfo) error // nil: everybody is there

	mu    sync.Mutex // guards looks; never held over a look
	looks map[BrokerInfo]look
}

type look struct {
	at  time.Time
	err error
}

// check returns ErrNotReady if b is gone: its lease, which still says that it is
// there, will run out within its session timeout.
func (r *reach) check(ctx context.Context, b BrokerInfo) error {
	if r.listens == nil {
		return nil
	}
	r.mu.Lock()
	l, known := r.looks[b]
	r.mu.Unlock()
	if !known || time.Since(l.at) > reachBelieved {
		l = look{at: time.Now(), err: r.listens(ctx, b)}
		r.keep(b, l)
	}
	if l.err != nil {
		return fmt.Errorf("%w: broker %s at %s is gone and its lease has yet to run out: %w", ErrNotReady, b.ID, b.ServiceURL, l.err)
	}
	return nil
}

// keep remembers a look and forgets the old ones.
func (r *reach) keep(b BrokerInfo, l look) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for other, o := range r.looks {
		if l.at.Sub(o.at) > reachBelieved {
			delete(r.looks, other)
		}
	}
	if r.looks == nil {
		r.looks = map[BrokerInfo]look{}
	}
	r.looks[b] = l
}
