// Package invariants is the switch for checks that only test builds pay for.
//
// [Enabled] is true under the build tags invariants and race, and a constant,
// so that the compiler removes `if invariants.Enabled { ... }` from every other
// build. Use it for checks that walk a whole structure after each change;
// checks that cost nothing are made always.
//
// A broken invariant is a bug of ours, never bad input: panic with the values.
//
// # Concurrency
//
// [CloseChecker] is safe for concurrent use. The package starts no goroutine.
//
// # Not here
//
// What to check is each room's own business: its main type has a method
// verify() error, which tests call always and test builds after each change.
package invariants
