package assemble

import (
	"context"
	"errors"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/magnetar-io/magnetar/internal/config"
)

// StandaloneConfig are the keys of a bookie and a broker in one process.
type StandaloneConfig struct {
	Bookie BookieConfig
	Broker BrokerConfig
}

// Keys registers the keys and returns their set. The halves share some; what only
// matters between nodes has defaults that fit a lone process.
func (c *StandaloneConfig) Keys() *config.Set {
	s := config.NewSet()
	c.Broker.register(s)
	c.Bookie.registerShared(s)
	s.Default("brokerId", "standalone")
	s.Default("bookieId", "standalone")
	s.Default("bookies", "")
	s.Default("bookiePort", "0")
	s.Default("expectedBookies", "1")
	s.Default("journalDirectory", "data/standalone") // beside data/cluster, not around it
	return s
}

// Standalone is a bookie and a broker that run in one process.
type Standalone struct {
	bookie *Bookie
	broker *Broker
}

// StartStandalone starts the bookie, on an empty directory as a new cluster of one,
// and then the broker on it. The broker's ports are opened before the directory is
// touched.
func StartStandalone(ctx context.Context, c StandaloneConfig, log *slog.Logger, reg *prometheus.Registry) (*Standalone, error) {
	s := &Standalone{}
	var err error
	if s.broker, err = openBroker(ctx, c.Broker, log.With("half", "broker"), reg); err != nil {
		return nil, err
	}
	s.broker.web.wait("starting the bookie")
	c.Bookie.formatEmpty, c.Bookie.noWeb = true, true
	if s.bookie, err = StartBookie(ctx, c.Bookie, log.With("half", "bookie"), reg); err != nil {
		return nil, errors.Join(err, s.broker.Close(ctx))
	}
	c.Broker.Bookies = []string{s.bookie.Address()}
	// The lock of the data directory is proof that no other process is this broker.
	c.Broker.Ownership.SoleHolder = true
	err = s.broker.start(ctx, c.Broker, reg)
	if err == nil {
		err = s.bookie.lead(ctx) // most often it does by now; what is ready must not begin with an election
	}
	if err != nil {
		return nil, errors.Join(interrupted(ctx, err), s.Close(ctx))
	}
	return s, nil
}

// ServiceURL is what clients connect to.
func (s *Standalone) ServiceURL() string { return s.broker.ServiceURL() }

// WebServiceURL is the base of the REST API.
func (s *Standalone) WebServiceURL() string { return s.broker.WebServiceURL() }

// Close ends the broker, then the bookie, although ctx was cancelled.
func (s *Standalone) Close(ctx context.Context) error {
	return errors.Join(s.broker.Close(ctx), s.bookie.Close(ctx))
}
