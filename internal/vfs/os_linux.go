package vfs

import (
	"errors"
	"os"
	"syscall"
)

func datasync(f *os.File) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var errSync error
	err = conn.Control(func(fd uintptr) {
		for {
			errSync = syscall.Fdatasync(int(fd))
			if !errors.Is(errSync, syscall.EINTR) {
				return
			}
		}
	})
	if err == nil && errSync != nil {
		err = &os.PathError{Op: "fdatasync", Path: f.Name(), Err: errSync}
	}
	return err
}

// preallocate reserves blocks, and makes do with a longer file where the file
// system cannot.
func preallocate(f *os.File, size int64) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var errAlloc error
	err = conn.Control(func(fd uintptr) {
		for {
			errAlloc = syscall.Fallocate(int(fd), 0, 0, size)
			if !errors.Is(errAlloc, syscall.EINTR) {
				return
			}
		}
	})
	switch {
	case err != nil:
		return err
	case errors.Is(errAlloc, syscall.EOPNOTSUPP), errors.Is(errAlloc, syscall.ENOSYS):
		return extend(f, size)
	case errAlloc != nil:
		return &os.PathError{Op: "fallocate", Path: f.Name(), Err: errAlloc}
	}
	return nil
}
