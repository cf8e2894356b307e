package ownership

import (
	"sync"
	"sync/atomic"

	"github.com/magnetar-io/magnetar/metadata"
)

// Claim is the right to serve one bundle's topics, for as long as it is valid.
// It is safe for concurrent use.
type Claim struct {
	bundle  string
	session *metadata.Session
	version metadata.Version // of the owner key that we wrote

	gone atomic.Bool // set once, when the claim ends before its session does
	lost chan struct{}
	once sync.Once // closes lost
}

// Valid reports whether this broker still owns the bundle. Ask before every
// batch sent, acknowledgement stored and receipt written: the answer turns false
// by the clock alone. It costs an atomic load and a look at the clock.
func (c *Claim) Valid() bool { return !c.gone.Load() && c.session.Valid() }

// Lost returns a channel that is closed once the claim's end was noticed. A
// claim may be invalid before.
func (c *Claim) Lost() <-chan struct{} { return c.lost }

// Bundle returns the bundle's full name, "tenant/namespace/0x00000000_0x40000000".
func (c *Claim) Bundle() string { return c.bundle }

func (c *Claim) end() {
	c.gone.Store(true)
	c.once.Do(func() { close(c.lost) })
}
