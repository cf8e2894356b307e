// Package protocol reads and writes Pulsar's binary protocol: frames, the
// payload section that holds a message, and topic names.
//
// A [Frame] is one command and, after Send and Message, a payload section. The
// payload section from its magic number on is what a broker stores as an entry
// and later delivers, byte for byte; see docs/formats/pulsar-frame.md.
//
// # Ownership
//
// [ReadFrame] gives each payload a buffer of exactly its size. It belongs to the
// caller, who may keep it for ever; from then on it is immutable. [ParseMetadata]
// and [Peek] return slices of the buffer they are given and copy nothing.
//
// # Rules that surprise
//
// Every length is checked before memory is asked for, so that a peer can make
// us hold at most maxFrame bytes. After any error of ReadFrame the place in the
// stream is lost: close the connection.
//
// The checksum is not verified by ReadFrame. A broker calls [CheckPayload] on
// what a producer sent, once; a consumer does the same on what it receives.
//
// # Concurrency
//
// All functions are safe for concurrent use on different arguments. The package
// starts no goroutine.
//
// # Not here
//
// What a command means is package broker (serving) and package
// protocol/wireclient (asking).
package protocol
