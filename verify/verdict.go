package verify

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Violation is one kind of broken promise.
type Violation string

// The kinds, spelled as a verdict prints them.
const (
	Lost       Violation = "lost"
	Invented   Violation = "invented"
	Corrupt    Violation = "corrupt"
	OutOfOrder Violation = "out of order"
	Duplicate  Violation = "duplicate"
)

// ErrViolated is in the chain of every error that [Verdict.Err] returns.
var ErrViolated = errors.New("promises broken")

// Options say which promises were made.
type Options struct {
	// AnyOrder accepts reordering, as on a Shared subscription.
	AnyOrder bool

	// ExactlyOnce makes a duplicate a violation, as with deduplication on, or
	// where nothing failed.
	ExactlyOnce bool
}

// Verdict is the outcome of a history. Counts of deliveries are summed over the
// subscriptions.
type Verdict struct {
	Published    int64 // messages handed to clients
	Acknowledged int64 // of these
	Failed       int64 // of these: given up by the client
	Delivered    int64 // messages delivered at least once
	Duplicates   int64 // deliveries beyond the first of each message

	Lost, Invented, Corrupt, OutOfOrder int64

	// Examples spells out up to 10 cases of each violation.
	Examples map[Violation][]string

	options Options
}

// Judge counts what was kept and what was broken. It may be called again as the
// history grows.
func (h *History) Judge(options Options) Verdict {
	subscriptions, producers := h.snapshot()
	h.mu.Lock()
	v := Verdict{Invented: h.invented, Corrupt: h.corrupt, Examples: map[Violation][]string{}, options: options}
	for kind, examples := range h.examples {
		v.Examples[kind] = slices.Clone(examples)
	}
	h.mu.Unlock()
	for _, p := range producers {
		p.judge(&v, subscriptions)
	}
	return v
}

func (p *producer) judge(v *Verdict, subscriptions []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	v.Published += p.published
	v.Acknowledged += p.acked
	v.Failed += p.failed
	for _, name := range subscriptions {
		r := p.readings[name]
		if r == nil {
			r = &reading{}
		}
		v.Delivered += r.first
		v.Duplicates += r.again
		v.OutOfOrder += r.disordered
		lost := p.acked - r.ackedFirst
		v.Lost += lost
		if lost > 0 {
			p.lostExamples(v, name, r)
		}
	}
}

func (p *producer) lostExamples(v *Verdict, subscription string, r *reading) {
	for _, n := range slices.Sorted(maps.Keys(p.pages)) {
		for i, state := range p.pages[n].state {
			if len(v.Examples[Lost]) >= maxExamples {
				return
			}
			sequence := n*pageSize + int64(i)
			if state&stateAcked == 0 || r.has(sequence) {
				continue
			}
			text := fmt.Sprintf("%s/%d", p.name, sequence)
			if id, ok := p.openIDs[sequence]; ok {
				text += fmt.Sprintf(" acknowledged at %v", id)
			}
			if subscription != DefaultSubscription {
				text += " missing in " + subscription
			}
			v.Examples[Lost] = append(v.Examples[Lost], text)
		}
	}
}

// Err returns nil if every promise was kept, or else an error with the whole
// verdict, which wraps [ErrViolated].
func (v Verdict) Err() error {
	if len(v.broken()) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %v", ErrViolated, v)
}

type finding struct {
	kind  Violation
	count int64
}

func (v Verdict) broken() []finding {
	all := []finding{{Lost, v.Lost}, {Invented, v.Invented}, {Corrupt, v.Corrupt}}
	if !v.options.AnyOrder {
		all = append(all, finding{OutOfOrder, v.OutOfOrder})
	}
	if v.options.ExactlyOnce {
		all = append(all, finding{Duplicate, v.Duplicates})
	}
	return slices.DeleteFunc(all, func(f finding) bool { return f.count == 0 })
}

// String returns the counts on one line, then a line for each example of what
// was broken.
func (v Verdict) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d published, %d acknowledged, %d failed, %d delivered, %d duplicates; %d lost, %d invented, %d corrupt, %d out of order",
		v.Published, v.Acknowledged, v.Failed, v.Delivered, v.Duplicates, v.Lost, v.Invented, v.Corrupt, v.OutOfOrder)
	for _, f := range v.broken() {
		examples := v.Examples[f.kind]
		for _, e := range examples {
			fmt.Fprintf(&b, "\n  %s: %s", f.kind, e)
		}
		if more := f.count - int64(len(examples)); more > 0 {
			fmt.Fprintf(&b, "\n  %s: and %d more", f.kind, more)
		}
	}
	return b.String()
}
