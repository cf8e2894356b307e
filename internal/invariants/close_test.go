package invariants

import "testing"

// panics runs f and reports whether it panicked.
func panics(f func()) (did bool) {
	defer func() { did = recover() != nil }()
	f()
	return false
}

func TestCloseChecker(t *testing.T) {
	var c CloseChecker
	if panics(func() { c.AssertOpen("thing") }) {
		t.Error("AssertOpen panicked before Close")
	}
	if panics(func() { c.Close("thing") }) {
		t.Error("the first Close panicked")
	}
	if got := panics(func() { c.AssertOpen("thing") }); got != Enabled {
		t.Errorf("AssertOpen after Close panicked = %v, want %v", got, Enabled)
	}
	if got := panics(func() { c.Close("thing") }); got != Enabled {
		t.Errorf("a second Close panicked = %v, want %v", got, Enabled)
	}
}
