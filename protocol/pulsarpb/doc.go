// Package pulsarpb holds the messages of Pulsar's binary protocol, generated
// from pulsar.proto.
//
// # Ownership
//
// UnmarshalVT copies every string and bytes field out of the buffer it reads,
// so a decoded command never aliases the connection's read buffer.
//
// # Rules that surprise
//
// The protocol is proto2: a required field that is missing makes UnmarshalVT
// and MarshalVT fail, and an optional field with a default reads right only
// through its getter.
//
// # Concurrency
//
// Messages are plain data: safe to read from many goroutines, not to change.
//
// # Not here
//
// Frames, checksums and topic names are package protocol.
package pulsarpb

//go:generate go run -C ../../tools ./protogen protocol/pulsarpb/pulsar.proto
