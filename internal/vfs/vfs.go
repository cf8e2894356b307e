package vfs

import "io"

// FS is the set of file operations that a segment store needs.
type FS interface {
	// MkdirAll makes dir and its missing parents.
	MkdirAll(dir string) error

	// Create makes a new file for reading and writing. It fails with an error
	// that wraps fs.ErrExist when the name is taken.
	Create(name string) (File, error)

	// Open opens an existing file for reading. The error wraps fs.ErrNotExist
	// when there is none.
	Open(name string) (File, error)

	// OpenWrite opens an existing file for reading and writing, otherwise as Open.
	OpenWrite(name string) (File, error)

	// Rename gives a file another name in the same folder, which must not be
	// taken. A crash before SyncDir leaves one of the two names.
	Rename(from, to string) error

	// Remove deletes a file. Handles that are open stay readable.
	Remove(name string) error

	// List returns the names (not paths) in dir, sorted.
	List(dir string) ([]string, error)

	// SyncDir makes the creations and removals in dir durable.
	SyncDir(dir string) error

	// Free returns the bytes that an unprivileged process may still write to
	// the disk that holds dir.
	Free(dir string) (int64, error)
}

// File is one open file. Positions are explicit, so one handle serves any
// number of readers beside one writer.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer

	// Sync makes everything written so far durable, including the file's size.
	Sync() error

	// Preallocate makes the file at least size bytes long and reserves the space,
	// where the system can. What was not written before reads as zeros. An error
	// that wraps syscall.ENOSPC changes nothing.
	Preallocate(size int64) error

	// Size returns the length in bytes.
	Size() (int64, error)
}
