package lint

import (
	"go/parser"
	"go/token"
	"path"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/magnetar-io/magnetar/"

// layers names every room, lowest first. A room may import rooms of lower lines
// only. Adding a room means choosing its line, so the design decision is a diff.
var layers = []string{
	"internal/invariants internal/deps",
	"ledger internal/config internal/vfs",
	"internal/handshake executor protocol/pulsarpb managedledger/managedledgerpb",
	"internal/rpc protocol",
	"bookie/bookiepb metadata/metadatapb raftlog/journal protocol/protocoltest",
	"metadata raftlog protocol/wireclient verify",
	"metadata/server bookie/client entrycache cursor",
	"metadata/metadatatest bookie managedledger",
	"broker/ownership",
	"broker",
	"admin",
	"cmd/internal/assemble",
	"internal/localcluster",
	"cmd/bookie cmd/broker cmd/magnetar cmd/internal/cluster cmd/internal/samples tests/integration",
}

// walls are imports that would point down and are wrong all the same. A room
// named with a trailing slash stands for everything below it.
var walls = []struct {
	rooms, never []string
	why          string
}{
	{
		rooms: []string{"bookie", "bookie/bookiepb", "metadata/server", "raftlog"},
		never: []string{"protocol", "protocol/", "cursor", "entrycache", "managedledger", "broker/", "bookie/client"},
		why:   "a bookie never hears of topics, cursors or Pulsar",
	},
	{
		rooms: []string{"entrycache", "cursor", "managedledger", "broker", "broker/ownership", "admin", "protocol", "protocol/wireclient"},
		never: []string{"bookie", "bookie/bookiepb", "raftlog", "raftlog/", "metadata/server"},
		why:   "the broker side sees storage only through bookie/client",
	},
	{
		rooms: []string{"cursor", "entrycache"},
		never: []string{"bookie/client", "protocol", "protocol/"},
		why:   "it knows positions, never bookies and never Pulsar",
	},
	{
		rooms: []string{"metadata", "internal/rpc"},
		never: []string{"protocol", "protocol/"},
		why:   "metadata and transport do not know Pulsar",
	},
}

// notAModule are imports that product code must not have at all.
var notAModule = map[string]string{
	"github.com/apache/pulsar-client-go": "the unmodified client belongs to tests under tests/",
	"github.com/pkg/errors":              "use errors and fmt.Errorf",
}

func TestImportsPointDown(t *testing.T) {
	level := map[string]int{"internal/lint": len(layers)}
	for i, rooms := range layers {
		for room := range strings.FieldsSeq(rooms) {
			if _, twice := level[room]; twice {
				t.Errorf("layers lists %s twice", room)
			}
			level[room] = i
		}
	}
	for _, file := range goFiles(t) {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		from := path.Dir(file)
		if _, ok := level[from]; !ok {
			t.Errorf("%s is on no layer; add it to layers", from)
		}
		for _, imported := range imports(t, file) {
			to, ours := strings.CutPrefix(imported, module)
			if !ours {
				for prefix, why := range notAModule {
					if strings.HasPrefix(imported, prefix) && from != "internal/deps" {
						t.Errorf("%s imports %s: %s", file, imported, why)
					}
				}
				continue
			}
			switch l, known := level[to]; {
			case !known:
				t.Errorf("%s imports %s, which is on no layer; add it to layers", file, to)
			case l >= level[from]:
				t.Errorf("%s imports %s, which is not below it", file, to)
			}
			for _, w := range walls {
				if covers(w.rooms, from) && covers(w.never, to) {
					t.Errorf("%s imports %s: %s", file, to, w.why)
				}
			}
		}
	}
}

// covers reports whether one of patterns names room.
func covers(patterns []string, room string) bool {
	for _, p := range patterns {
		if p == room || (strings.HasSuffix(p, "/") && strings.HasPrefix(room, p)) {
			return true
		}
	}
	return false
}

func imports(t *testing.T, file string) []string {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), file, read(t, file), parser.ImportsOnly)
	if err != nil {
		t.Fatal(err)
	}
	paths := make([]string, 0, len(f.Imports))
	for _, spec := range f.Imports {
		p, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			t.Fatalf("%s: import %s: %v", file, spec.Path.Value, err)
		}
		paths = append(paths, p)
	}
	return paths
}
