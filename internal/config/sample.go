package config

import (
	"bufio"
	"fmt"
	"io"
	"strings"
)

// sampleWidth is the column at which the sample's comments wrap.
const sampleWidth = 96

// WriteSample writes the commented properties file with every key at its default:
// the text of configs/*.conf. The header comes first, as a comment.
func (s *Set) WriteSample(w io.Writer, header string) error {
	out := bufio.NewWriter(w)
	comment(out, header)
	section := ""
	for _, k := range s.keys {
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
	return out.Flush()
}

// comment writes text as comment lines, wrapped between words. Line breaks of the
// text stay.
func comment(w io.Writer, text string) {
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
