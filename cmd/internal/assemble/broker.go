package assemble

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/magnetar-io/magnetar/admin"
	"github.com/magnetar-io/magnetar/bookie/client"
	"github.com/magnetar-io/magnetar/broker"
	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/internal/config"
	"github.com/magnetar-io/magnetar/internal/handshake"
	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/managedledger"
	"github.com/magnetar-io/magnetar/metadata"
)

// BrokerConfig are the keys of a broker.
type BrokerConfig struct {
	Common

	ClusterName string
	BrokerID    string
	Bookies     []string
	ServicePort int
	WebPort     int

	Broker        broker.Config
	Ownership     ownership.Config
	ManagedLedger managedledger.Config
	Admin         admin.Config
}

// Keys registers the keys and returns their set. It gives every field its default.
func (c *BrokerConfig) Keys() *config.Set {
	s := config.NewSet()
	c.register(s)
	return s
}

func (c *BrokerConfig) register(s *config.Set) {
	s.Section("Cluster")
	registerClusterName(s, &c.ClusterName)
	s.String(&c.BrokerID, "brokerId", "",
		"Name of this broker, unique in the cluster and the same after a restart. Empty = advertisedAddress:webServicePort.")
	registerBookies(s, &c.Bookies)
	s.Section("Network")
	s.Int(&c.ServicePort, "brokerServicePort", 6650, 0, 65535,
		"Port of the Pulsar protocol. 0 = any free port.")
	s.Int(&c.WebPort, "webServicePort", 8080, 0, 65535,
		"Port of the REST API, /metrics and /health. 0 = any free port.")
	c.Register(s)
	s.Section("Ownership")
	c.Ownership.Register(s)
	s.Section("Topics and clients")
	c.Broker.Register(s)
	s.Section("Managed ledgers")
	c.ManagedLedger.Register(s)
	s.Section("HTTP")
	c.Admin.Register(s)
}

// Broker is a broker that runs.
type Broker struct {
	log      *slog.Logger
	info     ownership.BrokerInfo
	web      *web
	listener net.Listener
	closing  closer
	serving  sync.WaitGroup // the Pulsar port's accept loop
}

// openingTime bounds one attempt to register at metadata. Attempts are repeated
// until the program is told to end, so this is only how often it says that it waits.
const openingTime = 10 * time.Second

// StartBroker starts a broker and returns once it serves clients. It waits for the
// bookies as long as ctx allows; when ctx ends, it gives up.
func StartBroker(ctx context.Context, c BrokerConfig, log *slog.Logger, reg *prometheus.Registry) (*Broker, error) {
	b, err := openBroker(ctx, c, log, reg)
	if err != nil {
		return nil, err
	}
	if err := b.start(ctx, c, reg); err != nil {
		return nil, errors.Join(interrupted(ctx, err), b.closing.close(ctx, log))
	}
	return b, nil
}

// openBroker opens the broker's ports. Only HTTP answers before start.
func openBroker(ctx context.Context, c BrokerConfig, log *slog.Logger, reg *prometheus.Registry) (*Broker, error) {
	if err := c.Check(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUsage, err)
	}
	b := &Broker{log: log}
	httpListener, err := c.listen("webServicePort", c.WebPort)
	if err != nil {
		return nil, err
	}
	b.web = newWeb(httpListener, reg, log)
	b.closing.add("the HTTP server", b.web.close)
	b.listener, err = c.listen("brokerServicePort", c.ServicePort)
	if err != nil {
		return nil, errors.Join(err, b.closing.close(ctx, log))
	}
	b.closing.add("the Pulsar port", func(context.Context) error { return closed(b.listener.Close()) })
	b.info = ownership.BrokerInfo{
		ID:            c.BrokerID,
		ServiceURL:    "pulsar://" + c.advertised(b.listener),
		WebServiceURL: "http://" + c.advertised(httpListener),
	}
	if b.info.ID == "" {
		b.info.ID = c.advertised(httpListener)
	}
	return b, nil
}

// start builds the broker up to serving clients.
func (b *Broker) start(ctx context.Context, c BrokerConfig, reg *prometheus.Registry) error {
	pool := rpc.NewPool(handshake.Self{Cluster: c.ClusterName, Node: b.info.ID}, c.Bookies, b.log)
	b.closing.add("the connections to bookies", func(context.Context) error { return pool.Close() })
	meta := metadata.NewClient(pool)
	namespaces := ownership.NewNamespaces(c.Ownership, meta, b.log)
	c.Ownership.Registerer, c.Ownership.Listens = reg, ownership.Listens
	owners := ownership.New(c.Ownership, meta, b.info, b.log)

	storage := client.New(pool, meta, b.log, reg)
	b.closing.add("the ledgers", func(context.Context) error { return storage.Close() })
	factory := managedledger.NewFactory(managedledger.NewStorage(storage), meta, c.ManagedLedger, b.log, reg)
	b.closing.add("the managed ledgers", factory.Close)
	// The registration goes after the topics: a bundle's key must outlive them.
	b.closing.add("the registration", owners.Close)
	topics := broker.New(c.Broker, broker.Deps{
		Factory: factory, Ownership: owners, Namespaces: namespaces, Log: b.log, Registerer: reg,
	})
	b.closing.add("the topics", topics.Close)

	if err := b.register(ctx, namespaces, owners); err != nil {
		return err
	}
	rest := admin.New(c.Admin, admin.Deps{
		Broker: topics, Ownership: owners, Namespaces: namespaces, Gatherer: reg,
	}, b.log)
	b.closing.add("the HTTP connections to brokers", func(context.Context) error { rest.Close(); return nil })
	b.serving.Go(func() {
		if err := topics.Serve(b.listener); err != nil {
			b.log.Error("no new clients are accepted any more; restart the broker", "err", err)
		}
	})
	b.web.ready(rest)
	return nil
}

// register makes this broker known in metadata. It tries until ctx ends, saying what
// it waits for.
func (b *Broker) register(ctx context.Context, namespaces *ownership.Namespaces, owners *ownership.Service) error {
	b.web.wait("waiting for a bookie that leads the metadata group")
	for {
		err := within(ctx, openingTime, namespaces.Bootstrap)
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			return fmt.Errorf("wait for metadata: %w", err)
		}
		b.web.wait("waiting for metadata: " + err.Error())
		b.log.Warn("metadata cannot be reached; will try again", "err", err)
	}
	b.web.wait("registering")
	if err := owners.Start(ctx); err != nil {
		return fmt.Errorf("register broker %s: %w", b.info.ID, err)
	}
	return nil
}

func within(ctx context.Context, limit time.Duration, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return do(ctx)
}

// ServiceURL is what clients connect to.
func (b *Broker) ServiceURL() string { return b.info.ServiceURL }

// WebServiceURL is the base of the REST API.
func (b *Broker) WebServiceURL() string { return b.info.WebServiceURL }

// Close ends the broker in order: clients are sent away, cursors flushed, topics
// closed and given up, so that another broker can take them at once. It does so
// although ctx was cancelled.
func (b *Broker) Close(ctx context.Context) error {
	err := b.closing.close(ctx, b.log)
	b.serving.Wait()
	return err
}
