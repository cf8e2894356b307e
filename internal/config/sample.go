package config

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
)

// sampleWidth is the column at which the sample's comments wrap.
const sampleWidth = 96

// WriteSample writes the commented properties file with every key at its default:
// the text of configs/*.conf. The header comes first, as a comment.
func (s *Set) WriteSample(w io.Writer, header string) error {
	out := new(strings.Builder)
	comment(out, header)
	section := ""
	for _, k := range s.bySection() {
		if k.section != section {
			section = k.section
			fmt.Fprintf(out, "\n# ---- %s ----\n", section)
		}
		fmt.Fprintln(out)
		comment(out, k.doc)
		def := k.def
		if def == "" {
			def = "empty"
		}
		fmt.Fprintf(out, "# Default: %s. Allowed: %s.\n", def, k.want())
		fmt.Fprintf(out, "%s=%s\n", k.name, escape(k.def))
	}
	_, err := io.WriteString(w, out.String())
	return err
}

// bySection returns the keys in order of registration, but those of one section
// together, where its first one was registered.
func (s *Set) bySection() []*key {
	first := map[string]int{}
	for i, k := range s.keys {
		if _, seen := first[k.section]; !seen {
			first[k.section] = i
		}
	}
	keys := slices.Clone(s.keys)
	slices.SortStableFunc(keys, func(a, b *key) int { return cmp.Compare(first[a.section], first[b.section]) })
	return keys
}

// comment writes text as comment lines, wrapped between words. Line breaks of the
// text stay.
func comment(w *strings.Builder, text string) {
	for line := range strings.SplitSeq(strings.TrimSpace(text), "\n") {
		out := "#"
		for word := range strings.FieldsSeq(line) {
			if len(out)+1+len(word) > sampleWidth && out != "#" {
				fmt.Fprintln(w, out)
				out = "#"
			}
			out += " " + word
		}
		fmt.Fprintln(w, out)
	}
}

// escape spells a value so that reading the file gives it back.
func escape(value string) string {
	return strings.NewReplacer(`\`, `\\`, "\n", `\n`, "\r", `\r`, "\t", `\t`).Replace(value)
}
