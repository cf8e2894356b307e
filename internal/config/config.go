package config

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/magiconair/properties"
)

// Set is the registry of the keys of one program. The zero value is not usable;
// call [NewSet].
type Set struct {
	keys    []*key // in order of registration, which is the order of the sample
	byName  map[string]*key
	section string // heading of the keys registered next
}

// key is one key. Several rooms of one program may register the same key (a
// standalone's bookie and broker share clusterName); each has its own target.
type key struct {
	name    string
	kind    string // what a value looks like, such as "a whole number"
	allowed string // the range in words; "" when every value of the kind is allowed
	doc     string
	section string
	def     string
	value   string // what was loaded, in canonical form
	targets []func(value string) error
}

// NewSet returns a Set without keys.
func NewSet() *Set {
	return &Set{byName: map[string]*key{}}
}

// Section puts a heading over the keys registered from now on. It shows in the
// sample file only.
func (s *Set) Section(title string) { s.section = title }

// String registers a key whose value is any text, possibly none.
func (s *Set) String(p *string, key, def, doc string) {
	s.add(key, "text", "", def, doc, func(v string) error {
		*p = v
		return nil
	})
}

// Choice registers a key whose value is one of allowed.
func (s *Set) Choice(p *string, key, def string, allowed []string, doc string) {
	s.add(key, "one of", strings.Join(allowed, ", "), def, doc, func(v string) error {
		if !slices.Contains(allowed, v) {
			return errNotAllowed
		}
		*p = v
		return nil
	})
}

// Int registers a whole number from low to high, both allowed. Its unit is in the
// key's name and in doc.
func (s *Set) Int(p *int, key string, def, low, high int, doc string) {
	s.add(key, "a whole number", span(low, high), strconv.Itoa(def), doc, func(v string) error {
		n, err := strconv.Atoi(v)
		if err != nil || n < low || n > high {
			return errNotAllowed
		}
		*p = n
		return nil
	})
}

// Int64 is like [Set.Int].
func (s *Set) Int64(p *int64, key string, def, low, high int64, doc string) {
	s.add(key, "a whole number", span(low, high), strconv.FormatInt(def, 10), doc, func(v string) error {
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil || n < low || n > high {
			return errNotAllowed
		}
		*p = n
		return nil
	})
}

// Float registers a number from low to high, both allowed. NaN never is.
func (s *Set) Float(p *float64, key string, def, low, high float64, doc string) {
	format := func(f float64) string { return strconv.FormatFloat(f, 'g', -1, 64) }
	s.add(key, "a number", format(low)+" to "+format(high), format(def), doc, func(v string) error {
		n, err := strconv.ParseFloat(v, 64)
		if err != nil || !(n >= low && n <= high) {
			return errNotAllowed
		}
		*p = n
		return nil
	})
}

// Bool registers a key that is true or false, spelt just so.
func (s *Set) Bool(p *bool, key string, def bool, doc string) {
	s.add(key, "one of", "true, false", strconv.FormatBool(def), doc, func(v string) error {
		if v != "true" && v != "false" {
			return errNotAllowed
		}
		*p = v == "true"
		return nil
	})
}

// Strings registers a comma-separated list. Blanks around an element and empty
// elements are dropped; an empty value is an empty list.
func (s *Set) Strings(p *[]string, key string, def []string, doc string) {
	s.add(key, "a comma-separated list", "", strings.Join(def, ","), doc, func(v string) error {
		var list []string
		for element := range strings.SplitSeq(v, ",") {
			if element = strings.TrimSpace(element); element != "" {
				list = append(list, element)
			}
		}
		*p = list
		return nil
	})
}

// Default gives a key another default in this program, after its room has
// registered it. It panics on a key that is not there or a value that the key
// does not allow: both are mistakes in the program.
func (s *Set) Default(key, value string) {
	k := s.byName[key]
	if k == nil {
		panic(fmt.Sprintf("config: Default of the unregistered key %q", key))
	}
	k.def = value
	if err := k.set(value); err != nil {
		panic(fmt.Sprintf("config: default of %v", err))
	}
}

// Load reads the file, unless its name is empty, and then the overrides, each
// "key=value"; later ones win. It returns one error that lists every bad key with
// its value and what is allowed, so that a file is mended in one go. After an error
// the registered variables hold a mixture and must not be used.
func (s *Set) Load(file string, overrides []string) error {
	var bad []error
	if file != "" {
		bad = append(bad, s.loadFile(file)...)
	}
	for _, o := range overrides {
		name, value, ok := strings.Cut(o, "=")
		if !ok {
			bad = append(bad, fmt.Errorf(`--set %s: want key=value, such as --set logLevel=debug`, o))
			continue
		}
		if err := s.assign(strings.TrimSpace(name), value); err != nil {
			bad = append(bad, fmt.Errorf("--set: %w", err))
		}
	}
	return errors.Join(bad...)
}

func (s *Set) loadFile(file string) []error {
	loader := properties.Loader{Encoding: properties.UTF8, DisableExpansion: true}
	values, err := loader.LoadFile(file)
	if err != nil {
		return []error{fmt.Errorf("configuration file %s: %w", file, err)}
	}
	var bad []error
	for _, name := range values.Keys() {
		value, _ := values.Get(name)
		if err := s.assign(name, value); err != nil {
			bad = append(bad, fmt.Errorf("%s: %w", file, err))
		}
	}
	return bad
}

// Changed lists the keys whose value is not the default, as "key=value", in order
// of registration: what an operator wants to see in the first line of a log.
func (s *Set) Changed() []string {
	var changed []string
	for _, k := range s.keys {
		if k.value != k.def {
			changed = append(changed, k.name+"="+k.value)
		}
	}
	return changed
}

func (s *Set) assign(name, value string) error {
	if k := s.byName[name]; k != nil {
		return k.set(strings.TrimSpace(value))
	}
	if near := s.nearest(name); near != "" {
		return fmt.Errorf("unknown key %s=%s: did you mean %s?", name, value, near)
	}
	return fmt.Errorf("unknown key %s=%s: configs/ lists the keys of this program", name, value)
}

// add registers one target of a key. It panics when two rooms disagree about the
// key or a default is out of range: both are mistakes in the program.
func (s *Set) add(name, kind, allowed, def, doc string, target func(string) error) {
	k := s.byName[name]
	if k == nil {
		k = &key{name: name, kind: kind, allowed: allowed, def: def, doc: doc, section: s.section}
		s.keys = append(s.keys, k)
		s.byName[name] = k
	}
	if k.kind != kind || k.allowed != allowed || k.def != def {
		panic(fmt.Sprintf("config: %s registered twice and differently: %s default %q, then %s default %q",
			name, k.want(), k.def, join(kind, allowed), def))
	}
	k.targets = append(k.targets, target)
	if err := k.set(def); err != nil {
		panic(fmt.Sprintf("config: default of %v", err))
	}
}

// errNotAllowed is what a target answers; [key.set] knows how to say it.
var errNotAllowed = errors.New("not allowed")

func (k *key) set(value string) error {
	for _, target := range k.targets {
		if err := target(value); err != nil {
			return fmt.Errorf("%s=%s: want %s", k.name, value, k.want())
		}
	}
	k.value = value
	return nil
}

func (k *key) want() string { return join(k.kind, k.allowed) }

func join(kind, allowed string) string {
	switch {
	case allowed == "":
		return kind
	case kind == "one of":
		return kind + " " + allowed
	default:
		return kind + ", " + allowed
	}
}

func span[T int | int64](low, high T) string { return fmt.Sprintf("%d to %d", low, high) }

// nearest returns the registered key most like name, or "" when none is alike
// enough to be what was meant.
func (s *Set) nearest(name string) string {
	const alike = 3 // a key is a suggestion if at most a third of it is different
	best, bestDistance := "", len(name)/alike+1
	for _, k := range s.keys {
		if d := distance(strings.ToLower(name), strings.ToLower(k.name)); d < bestDistance {
			best, bestDistance = k.name, d
		}
	}
	return best
}

// distance is the number of bytes to insert, delete or replace to make b of a.
func distance(a, b string) int {
	row := make([]int, len(b)+1) // row[j]: distance of the part of a seen so far to b[:j]
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
