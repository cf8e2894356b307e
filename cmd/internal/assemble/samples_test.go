package assemble

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const configs = "../../../configs"

func TestSamplesAreUpToDate(t *testing.T) {
	for _, s := range Samples() {
		t.Run(s.File, func(t *testing.T) {
			var want strings.Builder
			if err := s.Keys.WriteSample(&want, s.Header); err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(filepath.Join(configs, s.File))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want.String(), string(got)); diff != "" {
				t.Errorf("run go generate ./... (-code +file):\n%s", diff)
			}
		})
	}
}

func TestSamplesAreTheDefaults(t *testing.T) {
	for _, s := range Samples() {
		t.Run(s.File, func(t *testing.T) {
			if err := s.Keys.Load(filepath.Join(configs, s.File), nil); err != nil {
				t.Fatal(err)
			}
			if changed := s.Keys.Changed(); len(changed) > 0 {
				t.Errorf("the sample sets other values than the defaults: %q", changed)
			}
		})
	}
}
