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
