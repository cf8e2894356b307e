package vfs

import (
	"os"
)

// OS is the operating system's file system.
var OS FS = osFS{}

// dirMode and fileMode keep a store's data to the user that runs the program.
const (
	dirMode  = 0o750
	fileMode = 0o640
)

type osFS struct{}

func (osFS) MkdirAll(dir string) error { return os.MkdirAll(dir, dirMode) }

func (osFS) Create(name string) (File, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, fileMode)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (osFS) Open(name string) (File, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (osFS) OpenWrite(name string) (File, error) {
	f, err := os.OpenFile(name, os.O_RDWR, fileMode)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (osFS) Rename(from, to string) error {
	if _, err := os.Lstat(to); err == nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: os.ErrExist}
	}
	return os.Rename(from, to)
}

func (osFS) Remove(name string) error { return os.Remove(name) }

func (osFS) List(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir) // sorted by name
	if err != nil {
		return nil, err
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, nil
}

func (osFS) SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if errClose := d.Close(); err == nil {
		err = errClose
	}
	return err
}

func (osFS) Free(dir string) (int64, error) { return free(dir) }

type osFile struct{ *os.File }

// Sync flushes data and size, and leaves out what recovery does not read, such
// as the time of the last change.
func (f osFile) Sync() error { return datasync(f.File) }

func (f osFile) Preallocate(size int64) error { return preallocate(f.File, size) }

func (f osFile) Size() (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// extend makes f at least size bytes long, without space behind it.
func extend(f *os.File, size int64) error {
	info, err := f.Stat()
	if err != nil || info.Size() >= size {
		return err
	}
	return f.Truncate(size)
}
