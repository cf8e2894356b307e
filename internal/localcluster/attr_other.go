//go:build !linux

package localcluster

import "syscall"

// Attributes are those of a detached process: a terminal's Ctrl-C is not meant for
// it. Only Linux can make it end with the program that started it.
func Attributes(bool) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setsid: true}
}
