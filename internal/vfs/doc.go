// Package vfs is the seam between storage code and the file system: the few
// operations that a store of append-only files needs, so that a test can drop
// what was never synced, fail the n-th sync and fill the disk.
//
// [OS] is the real thing. [Mem] keeps files in memory and knows, for every
// byte and every name, whether it would survive a power cut; [Mem.Crash] gives
// the file system that a restarted process would find.
//
// # Durability
//
// Two promises, as on a real disk and no more: the bytes of a file survive
// once [File.Sync] returned, its name survives once [FS.SyncDir] of its folder
// returned. A failed sync says nothing about what reached the disk; the caller
// must not try again on that file.
//
// # Concurrency
//
// All methods are safe for concurrent use. No goroutine is started.
//
// # Not here
//
// The index database brings its own file system type with the same idea;
// nothing here adapts one to the other.
package vfs
