// Command cluster is the program behind scripts/cluster: it runs three bookies
// and two brokers as processes on the loopback interface. Package
// internal/localcluster does the work; here are its flags.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/magnetar-io/magnetar/internal/localcluster"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := command().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

// open opens the cluster that the flags name. Only `up` may make a new one.
type open func(create bool) (*localcluster.Cluster, error)

func command() *cobra.Command {
	var o localcluster.Options
	root := &cobra.Command{
		Use:   "cluster",
		Short: "Three bookies and two brokers as processes on this machine",
		Long: `Three bookies and two brokers as processes on this machine's loopback interface.

Everything is kept under --dir. Broker i listens on N+10(i-1) and, for HTTP, on
N+1430+10(i-1), where N is --port-base; bookie i on N+5+10(i-1) and N+1435+10(i-1).
Several clusters may run side by side: give each its own --dir, and port bases at
least 30 apart.`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	flags := root.PersistentFlags()
	flags.StringVar(&o.Dir, "dir", filepath.Join("data", "cluster"), "the cluster's directory: data, logs, pid files")
	flags.StringVar(&o.Name, "name", "", `the cluster's name (default for a new one: "local")`)
	flags.IntVar(&o.PortBase, "port-base", 0, fmt.Sprintf("the port that all others follow from (default for a new one: %d)", localcluster.DefaultPortBase))
	flags.StringVar(&o.Bin, "bin", "", "the directory with the programs bookie and broker (default: this program's own)")
	flags.StringArrayVar(&o.BookieSet, "bookie-set", nil, "a further key=value for every bookie, kept for later starts; may be repeated")
	flags.StringArrayVar(&o.BrokerSet, "broker-set", nil, "a further key=value for every broker, kept for later starts; may be repeated")

	var opener open = func(create bool) (*localcluster.Cluster, error) {
		if o.Bin == "" {
			self, err := os.Executable()
			if err != nil {
				return nil, err
			}
			o.Bin = filepath.Dir(self)
		}
		o.ProgressLog = func(line string) { root.PrintErrln(line) }
		return localcluster.Open(o, create)
	}
	root.AddCommand(up(opener), down(opener), status(opener), wipe(opener),
		one(opener, "kill", "End a process with SIGKILL", (*localcluster.Cluster).Kill),
		one(opener, "stop", "End a process with SIGTERM, in order", (*localcluster.Cluster).Stop),
		one(opener, "start", "Start a process that does not run", (*localcluster.Cluster).Start))
	return root
}

func up(open open) *cobra.Command {
	return &cobra.Command{
		Use:   "up",
		Short: "Start whatever does not run, and wait until the cluster can be used",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := open(true)
			if err != nil {
				return err
			}
			if err := c.Up(cmd.Context()); err != nil {
				return err
			}
			first := localcluster.Process{Role: localcluster.Broker, Number: 1}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "cluster %s is up\n  clients: %s\n  HTTP:    %s/metrics\n  logs:    %s\n",
				c.Name(), c.ServiceURL(), c.WebURL(first), filepath.Dir(c.LogFile(first)))
			return err
		},
	}
}

func down(open open) *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Stop everything in order, keep the data",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := open(false)
			if errors.Is(err, localcluster.ErrNoCluster) {
				return nil // nothing to stop
			}
			if err != nil {
				return err
			}
			return c.Down(cmd.Context())
		},
	}
}

func status(open open) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show every process, and who leads each Raft group",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := open(false)
			if err != nil {
				return err
			}
			return printStatus(cmd.OutOrStdout(), c.Status(cmd.Context()), asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "as one JSON object")
	return cmd
}

func printStatus(w io.Writer, s localcluster.Status, asJSON bool) error {
	if !asJSON {
		return s.Print(w)
	}
	out := json.NewEncoder(w)
	out.SetIndent("", "  ")
	return out.Encode(s)
}

func wipe(open open) *cobra.Command {
	return &cobra.Command{
		Use:   "wipe [bookie N]",
		Short: "Delete the stopped cluster, or only the disk of one stopped bookie",
		Args:  cobra.MatchAll(cobra.MaximumNArgs(2), notOneArgument),
		RunE: func(_ *cobra.Command, args []string) error {
			c, err := open(false)
			if errors.Is(err, localcluster.ErrNoCluster) && len(args) == 0 {
				return nil // nothing to delete
			}
			if err != nil {
				return err
			}
			if len(args) == 0 {
				return c.WipeAll()
			}
			p, err := process(args)
			if err != nil {
				return err
			}
			return c.Wipe(p)
		},
	}
}

func notOneArgument(_ *cobra.Command, args []string) error {
	if len(args) == 1 {
		return fmt.Errorf("%q: want a role and a number, such as bookie 2", args[0])
	}
	return nil
}

// one is a command on one process.
func one(open open, verb, short string, do func(*localcluster.Cluster, context.Context, localcluster.Process) error) *cobra.Command {
	return &cobra.Command{
		Use:   verb + " bookie|broker N",
		Short: short,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 2 {
				return fmt.Errorf("want a role and a number, such as %s bookie 2", verb)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := open(false)
			if err != nil {
				return err
			}
			p, err := process(args)
			if err != nil {
				return err
			}
			return do(c, cmd.Context(), p)
		},
	}
}

func process(args []string) (localcluster.Process, error) {
	n, err := strconv.Atoi(args[1])
	if err != nil {
		return localcluster.Process{}, fmt.Errorf("%q: want a number, such as %s 2", args[1], args[0])
	}
	return localcluster.Process{Role: localcluster.Role(args[0]), Number: n}, nil
}
