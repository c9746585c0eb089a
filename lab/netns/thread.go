package netns

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// onThread runs f on an operating system thread of its own, whose network namespace f may change. The thread goes
// back to the process's namespace afterwards; one that cannot is not used again.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		// Not unlocked where the way back fails: a goroutine that ends while locked takes its thread along.
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			done <- fmt.Errorf("open the thread's network namespace: %w", err)
			return
		}
		defer home.Close()
		err = f()
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// launcher is one thread from which processes are started. A process that asks for a signal at its parent's death
// gets it when the thread that started it ends, so that this one stays until the lab is closed.
type launcher struct{ calls chan func() }

func newLauncher() *launcher {
	l := &launcher{calls: make(chan func())}
	go onThread(func() error {
		for call := range l.calls {
			call()
		}
		return nil
	})
	return l
}

// in runs f on the launcher's thread in the namespace.
func (l *launcher) in(ns *space, f func() error) error {
	done := make(chan error, 1)
	l.calls <- func() { done <- ns.enter(f) }
	return <-done
}

func (l *launcher) close() { close(l.calls) }
