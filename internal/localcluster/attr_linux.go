package localcluster

import "syscall"

// Attributes are those of a detached process: a terminal's Ctrl-C is not meant for
// it. With endWithParent the kernel kills it when the program that started it ends,
// in whatever way, so that a test which is killed leaves nothing behind.
func Attributes(endWithParent bool) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setsid: true}
	if endWithParent {
		// Strictly this follows the thread that forks. The runtime keeps its threads,
		// except those that a goroutine has locked and not given back.
		a.Pdeathsig = syscall.SIGKILL
	}
	return a
}
