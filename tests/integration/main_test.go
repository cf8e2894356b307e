package integration

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// programs is the directory with the programs under test, built by TestMain.
var programs string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if err := readSources(); err != nil {
		fmt.Fprintln(os.Stderr, "read the sources:", err)
		return 1
	}
	dir, err := os.MkdirTemp("", "magnetar-programs-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	build := exec.Command("go", "build", "-o", dir+"/", "./cmd/bookie", "./cmd/broker", "./cmd/magnetar")
	build.Dir = repository
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the programs: %v\n%s", err, out)
		return 1
	}
	programs = dir
	code := m.Run()
	if err := shared.close(); err != nil {
		fmt.Fprintln(os.Stderr, "stop the shared standalone:", err)
		return 1
	}
	return code
}

const repository = "../.."

// readSources reads every source file of the module. The test cache remembers which
// files a test opened and what was in them; it cannot see what `go build` opened,
// and would report an old pass after a change of the programs.
func readSources() error {
	return filepath.WalkDir(repository, func(file string, entry fs.DirEntry, err error) error {
		switch name := entry.Name(); {
		case err != nil:
			return err
		case entry.IsDir():
			if file != repository && (strings.HasPrefix(name, ".") || name == "data" || name == "docs") {
				return filepath.SkipDir
			}
			return nil
		case filepath.Ext(name) != ".go" && name != "go.mod":
			return nil
		}
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(io.Discard, f)
		return err
	})
}
