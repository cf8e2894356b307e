// Command samples writes configs/*.conf from the keys that the programs register.
// Run it through go generate.
package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"

	"github.com/magnetar-io/magnetar/cmd/internal/assemble"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: samples DIRECTORY")
		os.Exit(2)
	}
	for _, s := range assemble.Samples() {
		var text bytes.Buffer
		err := s.Keys.WriteSample(&text, s.Header)
		if err == nil {
			err = os.WriteFile(filepath.Join(os.Args[1], s.File), text.Bytes(), 0o644) //nolint:gosec // a file of the repository
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "samples: %s: %v\n", s.File, err)
			os.Exit(1)
		}
	}
}
