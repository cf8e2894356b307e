// Package metadatatest holds what tests need of package metadata: a store in this
// process ([NewMemory]) and the suite that every store must pass ([Run]).
//
// # Concurrency
//
// A [Memory] is safe for concurrent use. Its goroutines end with the test that
// made it.
package metadatatest
