// Command bookie runs one storage node of a Magnetar cluster.
//
//	bookie format --config bookie.conf   once, on one bookie: makes the cluster
//	bookie --config bookie.conf          runs a bookie
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/magnetar-io/magnetar/cmd/internal/assemble"
)

func main() { assemble.Main(command()) }

func command() *cobra.Command {
	root := runCommand("bookie", "Run one storage node of a cluster")
	root.Long = `Run one storage node of a cluster: it keeps its share of the Raft groups that
hold ledgers and metadata.

A cluster is made once, by "bookie format" on one empty directory. Every other
bookie is started on an empty directory and joins through the addresses in the key
bookies; so does a bookie whose disk was replaced.`
	root.AddCommand(runCommand("run", "Run one storage node of a cluster (what bookie does without a command)"), formatCommand())
	root.CompletionOptions.DisableDefaultCmd = true
	return root
}

func runCommand(use, short string) *cobra.Command {
	var settings assemble.Settings
	cmd := &cobra.Command{
		Use:   use,
		Short: short,
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), settings) },
	}
	settings.AddTo(cmd)
	return cmd
}

func run(ctx context.Context, settings assemble.Settings) error {
	var c assemble.BookieConfig
	keys := c.Keys()
	if err := settings.Load(keys); err != nil {
		return err
	}
	log := c.Logger(os.Stderr)
	log.Info("bookie starts", "version", assemble.Version(), "changed", keys.Changed())
	if err := c.Pprof(log); err != nil {
		return err
	}
	b, err := assemble.StartBookie(ctx, c, log, assemble.NewRegistry())
	if err != nil {
		return err
	}
	log.Info("bookie is ready", "node", b.Node(), "address", b.Address(), "http", b.WebAddress())
	<-ctx.Done()
	log.Info("bookie ends")
	return b.Close(ctx)
}

func formatCommand() *cobra.Command {
	var settings assemble.Settings
	cmd := &cobra.Command{
		Use:   "format",
		Short: "Make a new cluster on this bookie's empty directory, once in the cluster's life",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var c assemble.BookieConfig
			if err := settings.Load(c.Keys()); err != nil {
				return err
			}
			identity, err := assemble.Format(c)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s now holds the new cluster %s (id %s, %d ledger groups) with the one member %s.\nStart it with `bookie`, and the others on empty directories.\n",
				c.Directory(), identity.Cluster, identity.ClusterID, identity.Groups, identity.Node())
			return err
		},
	}
	settings.AddTo(cmd)
	return cmd
}
