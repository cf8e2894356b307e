// Package config is the registry of the keys of one program: each room adds its
// keys with default, allowed range and a sentence of documentation, and the
// program loads them from a properties file and from --set flags.
//
// A [Set] knows everything about its keys, so the three things an operator
// meets come from one place: the values the rooms run with, the errors that name
// key, value and range, and the commented sample files in configs/.
//
// # The file
//
// Files are Java properties ("key=value", '#' begins a comment line, '\' at the
// end continues a line), because that is what Pulsar's broker.conf is. A value is
// taken as it stands: "${...}" is not expanded, from keys or from the
// environment, so that no value depends on something outside the file.
// When a key is written twice the last one counts, as in Pulsar.
//
// An unknown key stops the start. A misspelt key that is silently ignored is how
// limits turn out not to be set on the day they are needed.
//
// # Ownership
//
// The pointers handed to a Set stay the room's own. They hold the default right
// after registration and the configured value after [Set.Load]; the Set never
// writes to them after that.
//
// # Concurrency
//
// A Set is used by one goroutine, at start-up.
//
// # Not here
//
// Rules between keys (this needs that) are the rooms' own checks, made when they
// are built. Reading flags and ending the process belongs to cmd/.
package config
