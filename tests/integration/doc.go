// Package integration tests the programs as users meet them: real processes, the
// unmodified Pulsar Go client, SIGKILL. It has no code of its own.
//
// TestMain builds the programs once. The client's own behaviour is tested against
// one standalone that all tests share, each with topics of its own; what kills
// things runs on a cluster of three bookies and two brokers, of package
// internal/localcluster, and package verify judges whether anything acknowledged
// was lost.
package integration
