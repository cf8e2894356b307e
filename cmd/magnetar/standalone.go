package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/magnetar-io/magnetar/cmd/internal/assemble"
)

func standaloneCommand() *cobra.Command {
	var (
		settings assemble.Settings
		dir      string
	)
	cmd := &cobra.Command{
		Use:   "standalone",
		Short: "Run a bookie and a broker in this process, data in one directory",
		Long: `Run a bookie and a broker in this process: one bookie, Raft groups of one member,
otherwise the same code as in a cluster. For trying things and for development.

An empty directory becomes a new cluster; one that was used before continues where
it was.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir != "" {
				settings.Overrides = append(settings.Overrides, "journalDirectory="+dir)
			}
			return standalone(cmd.Context(), cmd.OutOrStdout(), settings)
		},
	}
	settings.AddTo(cmd)
	cmd.Flags().StringVar(&dir, "dir", "", `where the data is kept: the key journalDirectory (default "data/standalone")`)
	return cmd
}

func standalone(ctx context.Context, out io.Writer, settings assemble.Settings) error {
	var c assemble.StandaloneConfig
	keys := c.Keys()
	if err := settings.Load(keys); err != nil {
		return err
	}
	log := c.Broker.Logger(os.Stderr)
	log.Info("standalone starts", "version", assemble.Version(), "changed", keys.Changed())
	if err := c.Broker.Pprof(log); err != nil {
		return err
	}
	s, err := assemble.StartStandalone(ctx, c, log, assemble.NewRegistry())
	if err != nil {
		return err
	}
	if err := welcome(out, s, c.Bookie.Directory()); err != nil {
		log.Warn("nobody reads the standard output", "err", err)
	}
	<-ctx.Done()
	log.Info("standalone ends")
	return s.Close(ctx)
}

// welcome says where to connect and what to try next.
func welcome(out io.Writer, s *assemble.Standalone, dir string) error {
	url := ""
	if s.ServiceURL() != "pulsar://127.0.0.1:6650" { // else it is what the commands assume
		url = " --url " + s.ServiceURL()
	}
	_, err := fmt.Fprintf(out, `
Magnetar is ready. Ctrl-C stops it in order; the next start continues.
  Pulsar clients  %s
  HTTP            %s  (/metrics, /health, /admin/v2/...)
  data            %s
Try in another terminal (from a checkout "go run ./cmd/magnetar" for "magnetar"):
  magnetar produce my-topic -m "hello"%s
  magnetar consume my-topic -s my-subscription -n 1 --earliest%s
`, s.ServiceURL(), s.WebServiceURL(), dir, url, url)
	return err
}
