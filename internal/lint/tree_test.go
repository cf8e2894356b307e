package lint

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
)

// root is the repository. Paths in this package are relative to it.
var root = os.DirFS("../..")

// read returns the bytes of one file of the repository.
func read(t *testing.T, file string) []byte {
	t.Helper()
	b, err := fs.ReadFile(root, file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// goFiles lists the Go files of this module. Modules nested in the tree, such
// as tools, are their own.
func goFiles(t *testing.T) []string {
	t.Helper()
	var files []string
	for _, file := range allFiles(t) {
		if path.Ext(file) == ".go" && !strings.HasPrefix(file, "tools/") && !strings.Contains(file, "testdata/") {
			files = append(files, file)
		}
	}
	if len(files) < 10 {
		t.Fatalf("found %d Go files, so the walk is broken", len(files))
	}
	return files
}

// allFiles lists the regular files that .gitignore does not exclude: what is
// tracked, and what is about to be.
func allFiles(t *testing.T) []string {
	t.Helper()
	ignored := append(ignorePatterns(t), ".git")
	var files []string
	err := fs.WalkDir(root, ".", func(file string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed while we walk: a test of another package cleans up
		}
		if err != nil {
			return err
		}
		skip := slices.ContainsFunc(ignored, func(p string) bool {
			if anchored, ok := strings.CutPrefix(p, "/"); ok {
				return anchored == file
			}
			matched, _ := path.Match(p, path.Base(file))
			return matched
		})
		switch {
		case skip && d.IsDir():
			return fs.SkipDir
		case !skip && d.Type().IsRegular():
			files = append(files, file)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// ignorePatterns reads .gitignore. It understands what ours uses: a name or a
// glob, anchored by a leading slash or not, a trailing slash, comments.
func ignorePatterns(t *testing.T) []string {
	t.Helper()
	var patterns []string
	for line := range strings.SplitSeq(string(read(t, ".gitignore")), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if strings.ContainsAny(line, "!") || strings.Contains(strings.Trim(line, "/"), "**") {
			t.Fatalf(".gitignore: this test does not understand %q; teach it or write it plainer", line)
		}
		patterns = append(patterns, strings.TrimSuffix(line, "/"))
	}
	return patterns
}
