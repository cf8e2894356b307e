package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// values has one variable of each kind of key.
type values struct {
	name    string
	level   string
	port    int
	bytes   int64
	ratio   float64
	inline  bool
	bookies []string
}

func (v *values) register(s *Set) {
	s.Section("Names")
	s.String(&v.name, "clusterName", "standalone", "The name of the cluster.")
	s.Choice(&v.level, "logLevel", "info", []string{"debug", "info"}, "What is logged.")
	s.Section("Limits")
	s.Int(&v.port, "brokerServicePort", 6650, 0, 65535, "The port that clients connect to. 0 is any free port.")
	s.Int64(&v.bytes, "maxBytes", 1<<40, 1, 1<<50, "Bytes.")
	s.Float(&v.ratio, "ratio", 0.5, 0, 1, "A share.")
	s.Bool(&v.inline, "inline", true, "Whether to run here.")
	s.Strings(&v.bookies, "bookies", []string{"a:1", "b:2"}, "Addresses.")
}

var defaults = values{"standalone", "info", 6650, 1 << 40, 0.5, true, []string{"a:1", "b:2"}}

func newValues(t *testing.T) (*values, *Set) {
	t.Helper()
	v, s := new(values), NewSet()
	v.register(s)
	return v, s
}

func writeFile(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "test.conf")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func check(t *testing.T, got *values, want values) {
	t.Helper()
	if diff := cmp.Diff(want, *got, cmp.AllowUnexported(values{})); diff != "" {
		t.Errorf("values differ (-want +got):\n%s", diff)
	}
}

func TestDefaultsStandWithoutFile(t *testing.T) {
	v, s := newValues(t)
	if err := s.Load("", nil); err != nil {
		t.Fatal(err)
	}
	check(t, v, defaults)
	if changed := s.Changed(); len(changed) != 0 {
		t.Errorf("Changed() = %q, want nothing", changed)
	}
}

func TestOverridesBeatFileBeatsDefault(t *testing.T) {
	v, s := newValues(t)
	s.Default("maxBytes", "7")
	file := writeFile(t, "# comment\nclusterName = east\nratio=0.25\nbookies = x:1 , y:2,\\\n  z:3\ninline=false\n")
	if err := s.Load(file, []string{"ratio=1", "ratio=0.75", "logLevel=debug", "brokerServicePort=0"}); err != nil {
		t.Fatal(err)
	}
	check(t, v, values{"east", "debug", 0, 7, 0.75, false, []string{"x:1", "y:2", "z:3"}})
	want := []string{"clusterName=east", "logLevel=debug", "brokerServicePort=0", "ratio=0.75", "inline=false", "bookies=x:1 , y:2,z:3"}
	if diff := cmp.Diff(want, s.Changed()); diff != "" {
		t.Errorf("Changed differs (-want +got):\n%s", diff)
	}
}

func TestValueIsTakenAsItStands(t *testing.T) {
	t.Setenv("HOME", "/somewhere")
	v, s := newValues(t)
	if err := s.Load(writeFile(t, "clusterName=${HOME}-${clusterName}-100%\n"), nil); err != nil {
		t.Fatal(err)
	}
	if want := "${HOME}-${clusterName}-100%"; v.name != want {
		t.Errorf("clusterName = %q, want %q", v.name, want)
	}
}

func TestLoadRefuses(t *testing.T) {
	tests := []struct{ name, file, override, want string }{
		{"not-a-number", "brokerServicePort=http", "", "brokerServicePort=http: want a whole number, 0 to 65535"},
		{"below-range", "brokerServicePort=-1", "", "brokerServicePort=-1: want a whole number, 0 to 65535"},
		{"above-range", "", "brokerServicePort=65536", "--set: brokerServicePort=65536: want a whole number, 0 to 65535"},
		{"int64-range", "maxBytes=0", "", "maxBytes=0: want a whole number, 1 to 1125899906842624"},
		{"float-range", "ratio=1.5", "", "ratio=1.5: want a number, 0 to 1"},
		{"float-nan", "ratio=NaN", "", "ratio=NaN: want a number, 0 to 1"},
		{"bool-spelling", "inline=yes", "", "inline=yes: want one of true, false"},
		{"choice", "logLevel=loud", "", "logLevel=loud: want one of debug, info"},
		{"empty-number", "brokerServicePort=", "", "brokerServicePort=: want a whole number, 0 to 65535"},
		{"unknown-near", "brokerServicePrt=1", "", "unknown key brokerServicePrt=1: did you mean brokerServicePort?"},
		{"unknown-case", "", "CLUSTERNAME=x", "unknown key CLUSTERNAME=x: did you mean clusterName?"},
		{"unknown-far", "zooKeeperServers=zk:2181", "", "unknown key zooKeeperServers=zk:2181: configs/ lists the keys"},
		{"override-shape", "", "ratio", "--set ratio: want key=value"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, s := newValues(t)
			var overrides []string
			if tt.override != "" {
				overrides = []string{tt.override}
			}
			err := s.Load(writeFile(t, tt.file), overrides)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Load(%q, %q) = %v, want %q", tt.file, tt.override, err, tt.want)
			}
		})
	}
}

func TestLoadListsEveryBadKey(t *testing.T) {
	_, s := newValues(t)
	err := s.Load(writeFile(t, "ratio=2\nclusterNam=x\nmaxBytes=5\n"), []string{"inline=1"})
	if err == nil {
		t.Fatal("Load accepted three bad keys")
	}
	if got := len(strings.Split(err.Error(), "\n")); got != 3 {
		t.Errorf("%d lines, want 3:\n%v", got, err)
	}
	for _, want := range []string{"ratio=2", "clusterNam=x", "inline=1"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in:\n%v", want, err)
		}
	}
}

func TestLoadNamesMissingFile(t *testing.T) {
	_, s := newValues(t)
	err := s.Load("/nowhere/broker.conf", nil)
	if err == nil || !strings.Contains(err.Error(), "/nowhere/broker.conf") {
		t.Errorf("Load = %v, want an error that names the file", err)
	}
}

func TestSameKeyFillsBothTargets(t *testing.T) {
	var a, b string
	s := NewSet()
	s.String(&a, "clusterName", "x", "doc")
	s.String(&b, "clusterName", "x", "doc")
	if err := s.Load("", []string{"clusterName=east"}); err != nil {
		t.Fatal(err)
	}
	if a != "east" || b != "east" {
		t.Errorf("targets are %q and %q, want east twice", a, b)
	}
}

func TestProgrammingMistakesPanic(t *testing.T) {
	var n int
	var text string
	tests := []struct {
		name string
		do   func(s *Set)
	}{
		{"default-out-of-range", func(s *Set) { s.Int(&n, "a", 0, 1, 2, "doc") }},
		{"other-default", func(s *Set) { s.Int(&n, "a", 1, 1, 2, "doc"); s.Int(&n, "a", 2, 1, 2, "doc") }},
		{"other-kind", func(s *Set) { s.Int(&n, "a", 1, 1, 2, "doc"); s.String(&text, "a", "1", "doc") }},
		{"default-of-unknown", func(s *Set) { s.Default("a", "1") }},
		{"bad-new-default", func(s *Set) { s.Int(&n, "a", 1, 1, 2, "doc"); s.Default("a", "3") }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			tt.do(NewSet())
		})
	}
}

func TestSampleKeepsSectionsTogether(t *testing.T) {
	var a, b, c, d string
	s := NewSet()
	for _, k := range []struct {
		p             *string
		section, name string
	}{{&a, "One", "a"}, {&b, "Two", "b"}, {&c, "One", "c"}, {&d, "Two", "d"}} {
		s.Section(k.section)
		s.String(k.p, k.name, "", "doc")
	}
	var sample strings.Builder
	if err := s.WriteSample(&sample, "header"); err != nil {
		t.Fatal(err)
	}
	var order []string
	for line := range strings.Lines(sample.String()) {
		if strings.Contains(line, "----") || strings.Contains(line, "=") {
			order = append(order, strings.Trim(line, "#- =\n"))
		}
	}
	if diff := cmp.Diff([]string{"One", "a", "c", "Two", "b", "d"}, order); diff != "" {
		t.Errorf("order of the sample (-want +got):\n%s", diff)
	}
}

func TestSampleLoadsToDefaults(t *testing.T) {
	_, s := newValues(t)
	s.Default("clusterName", `back\slash`)
	var sample strings.Builder
	if err := s.WriteSample(&sample, "A header that is "+strings.Repeat("rather long ", 20)+"\n\nand has a second paragraph."); err != nil {
		t.Fatal(err)
	}
	v, again := newValues(t)
	again.Default("clusterName", "other")
	if err := again.Load(writeFile(t, sample.String()), nil); err != nil {
		t.Fatal(err)
	}
	want := defaults
	want.name = `back\slash`
	check(t, v, want)
	for _, line := range []string{
		"# ---- Limits ----",
		"# The port that clients connect to. 0 is any free port.",
		"# Default: 6650. Allowed: a whole number, 0 to 65535.",
		"brokerServicePort=6650",
	} {
		if !strings.Contains(sample.String(), line+"\n") {
			t.Errorf("the sample lacks the line %q:\n%s", line, sample.String())
		}
	}
	for line := range strings.Lines(sample.String()) {
		if len(line) > sampleWidth+1 {
			t.Errorf("line longer than %d: %q", sampleWidth, line)
		}
	}
}
