package lint

import (
	"bytes"
	"regexp"
	"testing"
)

// machinePaths matches absolute paths that exist on one machine only: below the
// folders where people keep their checkouts.
var machinePaths = regexp.MustCompile(`(^|[^\w.\-/@])/(work|root|home|Users)/\w`)

func TestNoMachinePaths(t *testing.T) {
	for _, file := range allFiles(t) {
		content := read(t, file)
		if bytes.IndexByte(content, 0) >= 0 {
			continue // not text
		}
		for number, line := range bytes.Split(content, []byte("\n")) {
			if m := machinePaths.Find(line); m != nil {
				t.Errorf("%s:%d names a path of one machine: %q", file, number+1, bytes.TrimSpace(m))
			}
		}
	}
}

func TestMachinePathsPattern(t *testing.T) {
	slash := "/" // keeps the bad examples from being found in this file
	tests := []struct {
		line string
		want bool
	}{
		{"see " + slash + "work/main/x", true},
		{"\"" + slash + "root/go\"", true},
		{"dir=" + slash + "home/someone", true},
		{"a net" + slash + "work" + slash + "thing", false},
		{"https://example.org/home/page", false},
		{"a worker reads /data/x", false},
	}
	for _, tt := range tests {
		if got := machinePaths.MatchString(tt.line); got != tt.want {
			t.Errorf("%q matches = %v, want %v", tt.line, got, tt.want)
		}
	}
}
