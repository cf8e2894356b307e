package invariants

import (
	"fmt"
	"sync/atomic"
)

// CloseChecker catches use after Close and, where Close must run once, a second
// Close. Embed it by value; the zero value is open. It does nothing, and costs
// one word, unless [Enabled].
type CloseChecker struct {
	closed atomic.Bool
}

// Close marks the owner closed and panics if it already was. Call it only from
// a Close that may not be called twice.
func (c *CloseChecker) Close(what string) {
	if Enabled && c.closed.Swap(true) {
		panic(fmt.Sprintf("invariants: %s closed twice", what))
	}
}

// AssertOpen panics if the owner was closed.
func (c *CloseChecker) AssertOpen(what string) {
	if Enabled && c.closed.Load() {
		panic(fmt.Sprintf("invariants: %s used after Close", what))
	}
}
