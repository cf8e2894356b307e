// Command broker runs one broker of a Magnetar cluster. It keeps nothing on disk:
// topics are ledgers on the bookies, and who owns what is metadata there.
package main

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/magnetar-io/magnetar/cmd/internal/assemble"
)

func main() { assemble.Main(command()) }

func command() *cobra.Command {
	var settings assemble.Settings
	root := &cobra.Command{
		Use:   "broker",
		Short: "Run one broker of a cluster: the Pulsar protocol and HTTP in front of the bookies",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), settings) },
	}
	settings.AddTo(root)
	return root
}

func run(ctx context.Context, settings assemble.Settings) error {
	var c assemble.BrokerConfig
	keys := c.Keys()
	if err := settings.Load(keys); err != nil {
		return err
	}
	log := c.Logger(os.Stderr)
	log.Info("broker starts", "version", assemble.Version(), "changed", keys.Changed())
	if err := c.Pprof(log); err != nil {
		return err
	}
	b, err := assemble.StartBroker(ctx, c, log, assemble.NewRegistry())
	if err != nil {
		return err
	}
	log.Info("broker is ready", "serviceUrl", b.ServiceURL(), "webServiceUrl", b.WebServiceURL())
	<-ctx.Done()
	log.Info("broker ends")
	return b.Close(ctx)
}
