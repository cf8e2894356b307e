// Command magnetar is the one program to begin with: a standalone to try things on,
// and a producer and a consumer for the command line.
package main

import (
	"github.com/spf13/cobra"

	"github.com/magnetar-io/magnetar/cmd/internal/assemble"
)

func main() { assemble.Main(command()) }

func command() *cobra.Command {
	root := &cobra.Command{
		Use:     "magnetar",
		Short:   "Message streams over the Pulsar protocol, stored by Raft",
		Version: assemble.Version(),
	}
	root.AddCommand(standaloneCommand(), produceCommand(), consumeCommand())
	return root
}
