package ownership

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/magnetar-io/magnetar/internal/config"
)

// Config is this room's part of the broker's configuration.
type Config struct {
	// Bundles is how many bundles a namespace gets when it is created, 1 to
	// MaxBundles. It is fixed for that namespace from then on.
	Bundles int

	// SessionTimeoutMillis is the time to live of the broker's lease, in
	// milliseconds. A broker that dies is replaced after it, and one that cannot
	// reach metadata for so long stops serving.
	SessionTimeoutMillis int

	// SoleHolder says that whoever starts this broker has proof that no other
	// process of the same broker id lives, such as the lock of a standalone's data
	// directory. A registration left by a killed process is then revoked at once
	// rather than waited for. It is not a key: only a program can know.
	SoleHolder bool

	// Listens returns an error if another broker is known to be gone. Lookups then
	// wait for its lease to run out rather than send clients there. nil: nobody is
	// ever known to be gone. Programs use [Listens]; it is not a key.
	Listens func(context.Context, BrokerInfo) error

	// Registerer gets this room's metrics; nil makes metrics nobody scrapes.
	Registerer prometheus.Registerer
}

// Bounds of the configuration and of names.
const (
	DefaultBundles = 4
	MaxBundles     = 1024

	defaultSessionMillis = 6000
	minSessionMillis     = 1000
	maxSessionMillis     = 60_000
)

// Register adds this room's keys to s.
func (c *Config) Register(s *config.Set) {
	s.Int(&c.Bundles, "defaultNumberOfNamespaceBundles", DefaultBundles, 1, MaxBundles,
		"How many bundles a new namespace is split into. A bundle is what one broker owns; the number is fixed when the namespace is created.")
	s.Int(&c.SessionTimeoutMillis, "metadataStoreSessionTimeoutMillis", defaultSessionMillis, minSessionMillis, maxSessionMillis,
		"Time to live of this broker's lease, in milliseconds. A dead broker's topics move to another one after it; a broker cut off from metadata for so long stops serving.")
}

// withDefaults fills what a Config made by hand left out.
func (c Config) withDefaults() Config {
	if c.Bundles == 0 {
		c.Bundles = DefaultBundles
	}
	if c.SessionTimeoutMillis == 0 {
		c.SessionTimeoutMillis = defaultSessionMillis
	}
	return c
}

func (c Config) sessionTimeout() time.Duration {
	return time.Duration(c.SessionTimeoutMillis) * time.Millisecond
}
