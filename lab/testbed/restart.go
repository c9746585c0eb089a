package testbed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Restart kills processes (kill -9), all of them before it starts each again as it was started: with nothing in its memory.
// Their names are those of PIDs. A name may also be that of a [Program] that runs: it is killed, and whoever runs it may do so
// again. killed is called when all are dead. It returns when they run again, and not when they are
// ready: see Ready. [Config.Restarts] must be set.
func (b *Testbed) Restart(ctx context.Context, killed func(), names ...string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	var again []func() error
	fail := func(name string, err error) error { return fmt.Errorf("restart %s: %w", name, err) }
	for _, name := range names {
		i := slices.IndexFunc(b.daemons, func(d *daemon) bool { return d.name == name })
		switch {
		case i >= 0:
			b.daemons[i].child.Kill()
			again = append(again, func() error { return b.launch(b.daemons[i]) })
		case name == SwitchName && b.target != nil:
			if err := b.killSimpleSwitch(); err != nil {
				return fail(name, err)
			}
			again = append(again, func() error { return b.runSimpleSwitch(ctx) })
		case b.running[name] != nil:
			b.running[name].Kill()
		default:
			return fail(name, errors.New("there is no such process"))
		}
	}
	killed()
	for _, start := range again {
		if err := start(); err != nil {
			return fmt.Errorf("start again: %w", err)
		}
	}
	return nil
}

// killSimpleSwitch kills the real switch, and removes the socket that it leaves and its successor cannot take over.
func (b *Testbed) killSimpleSwitch() error {
	if err := unix.Kill(b.target.PID(), unix.SIGKILL); err != nil {
		return err
	}
	<-b.target.Done()
	if err := os.Remove(strings.TrimPrefix(b.switchAddr, "unix:")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
