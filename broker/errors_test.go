package broker

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"strings"
	"testing"

	"github.com/magnetar-io/magnetar/broker/ownership"
	"github.com/magnetar-io/magnetar/ledger"
	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// TestEverySentinelIsTold reads the rooms whose errors can reach a client and
// checks that each exported sentinel has its line in serverErrors.
func TestEverySentinelIsTold(t *testing.T) {
	inTable := map[string]bool{}
	file, err := parser.ParseFile(token.NewFileSet(), "errors.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if kv, ok := n.(*ast.CompositeLit); ok && len(kv.Elts) == 2 {
			switch e := kv.Elts[0].(type) {
			case *ast.Ident:
				inTable["broker."+e.Name] = true
			case *ast.SelectorExpr:
				inTable[e.X.(*ast.Ident).Name+"."+e.Sel.Name] = true
			}
		}
		return true
	})
	rooms := map[string]string{
		".": "broker", "ownership": "ownership", "../ledger": "ledger", "../managedledger": "managedledger",
		"../metadata": "metadata", "../protocol": "protocol",
	}
	// Other names of sentinels that are in the table under their own.
	aliases := map[string]bool{"metadata.ErrUnknownOutcome": true, "metadata.ErrUnavailable": true}
	for dir, room := range rooms {
		for _, name := range sentinels(t, dir) {
			if full := room + "." + name; !inTable[full] && !aliases[full] {
				t.Errorf("%s is not in serverErrors: decide what a client is told", full)
			}
		}
	}
}

// sentinels returns the names of a package's exported Err variables.
func sentinels(t *testing.T, dir string) (names []string) {
	t.Helper()
	files, err := fs.Glob(os.DirFS(dir), "*.go")
	if err != nil || len(files) == 0 {
		t.Fatal(dir, err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path.Join(dir, name), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.VAR {
				continue
			}
			for _, s := range g.Specs {
				for _, id := range s.(*ast.ValueSpec).Names {
					if strings.HasPrefix(id.Name, "Err") {
						names = append(names, id.Name)
					}
				}
			}
		}
	}
	return names
}

func TestServerError(t *testing.T) {
	tests := []struct {
		err          error
		want, lookup pulsarpb.ServerError
	}{
		{ledger.ErrFenced, pulsarpb.ServerError_ServiceNotReady, pulsarpb.ServerError_MetadataError},
		{&ownership.NotOwnerError{}, pulsarpb.ServerError_ServiceNotReady, pulsarpb.ServerError_MetadataError},
		{protocol.ErrChecksum, pulsarpb.ServerError_ChecksumError, pulsarpb.ServerError_ChecksumError},
		{ErrProducerBusy, pulsarpb.ServerError_ProducerBusy, pulsarpb.ServerError_ProducerBusy},
		{&busyError{kind: ErrConsumerBusy}, pulsarpb.ServerError_ConsumerBusy, pulsarpb.ServerError_ConsumerBusy},
		{context.DeadlineExceeded, pulsarpb.ServerError_MetadataError, pulsarpb.ServerError_MetadataError},
		{errors.New("new"), pulsarpb.ServerError_UnknownError, pulsarpb.ServerError_UnknownError},
	}
	for _, tt := range tests {
		wrapped := fmt.Errorf("somewhere: %w", tt.err)
		if got := serverError(wrapped); got != tt.want {
			t.Errorf("serverError(%v) = %v, want %v", tt.err, got, tt.want)
		}
		if got := lookupError(wrapped); got != tt.lookup {
			t.Errorf("lookupError(%v) = %v, want %v", tt.err, got, tt.lookup)
		}
	}
}
