package lint

import (
	"go/parser"
	"go/token"
	"path"
	"strings"
	"testing"
)

// TestOnePackageComment demands that each package introduces itself exactly
// once, where a reader looks first: doc.go, or main.go of a program.
func TestOnePackageComment(t *testing.T) {
	type pkg struct {
		name      string
		commented []string // files with a package comment
		testsOnly bool
	}
	packages := map[string]*pkg{}
	for _, file := range goFiles(t) {
		f, err := parser.ParseFile(token.NewFileSet(), file, read(t, file), parser.PackageClauseOnly|parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		dir := path.Dir(file)
		p := packages[dir]
		if p == nil {
			p = &pkg{testsOnly: true}
			packages[dir] = p
		}
		if !strings.HasSuffix(file, "_test.go") {
			p.testsOnly = false
			p.name = f.Name.Name
		}
		if f.Doc != nil && strings.TrimSpace(f.Doc.Text()) != "" {
			p.commented = append(p.commented, file)
		}
	}
	for dir, p := range packages {
		if p.testsOnly && len(p.commented) <= 1 {
			continue
		}
		want := path.Join(dir, "doc.go")
		if p.name == "main" {
			want = path.Join(dir, "main.go")
		}
		if len(p.commented) != 1 || p.commented[0] != want {
			t.Errorf("package %s: package comments in %v, want exactly one, in %s", dir, p.commented, want)
		}
	}
}
