package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"xagg/lab/netns"
	"xagg/xdp"
)

// Machine is how the checks see a machine.
type Machine struct {
	// Uname returns the kernel's release, as in uname -r.
	Uname func() (string, error)
	// ReadFile reads a file of /proc or /sys.
	ReadFile func(path string) ([]byte, error)
	// FSType returns the type of the file system at a path (statfs(2)'s f_type).
	FSType func(path string) (int64, error)
	// Output runs a program, which it finds on PATH unless name is a path, and returns what it says on stdout and
	// stderr. A program that is not there is an error that wraps [exec.ErrNotFound] or [io/fs.ErrNotExist].
	Output func(ctx context.Context, name string, args ...string) (string, error)
	// Namespaces reports whether network namespaces can be made.
	Namespaces func() error
	// Bounce sends a frame to an XDP program over the link of a lab that it makes, and waits for the frame to come
	// back.
	Bounce func(ctx context.Context, mode xdp.Mode) error
	// Rate puts a token bucket on such a link.
	Rate func(ctx context.Context) error
	// Records returns the records of labs.
	Records func() ([]netns.Record, error)
	// Pinned returns the servers that are pinned.
	Pinned func() ([]xdp.PinnedServer, error)
}

// patience is how long a program may take to answer.
const patience = 20 * time.Second

// Local is this machine.
func Local() Machine {
	return Machine{
		Uname: func() (string, error) {
			var u unix.Utsname
			if err := unix.Uname(&u); err != nil {
				return "", err
			}
			return unix.ByteSliceToString(u.Release[:]), nil
		},
		ReadFile: os.ReadFile,
		FSType: func(path string) (int64, error) {
			var s unix.Statfs_t
			err := unix.Statfs(path, &s)
			return int64(s.Type), err
		},
		Output:     output,
		Namespaces: netns.Available,
		Bounce:     bounce,
		Rate:       rate,
		Records:    func() ([]netns.Record, error) { return netns.Records(netns.RunDir) },
		Pinned:     xdp.PinnedServers,
	}
}

func output(ctx context.Context, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("no answer within %v", patience)
	}
	return strings.TrimSpace(out.String()), err
}

// Removed is what [Fix] has removed.
type Removed struct {
	Labs []string // by id
	Pins []string // directories
}

// Fix removes what labs left behind whose owner has died, and what is pinned for interfaces that are gone. A program that
// still runs it leaves alone, whether it has an agent or not.
func Fix() (r Removed, err error) {
	r.Labs, err = netns.Sweep(netns.RunDir)
	servers, pinErr := xdp.PinnedServers()
	errs := []error{err, pinErr}
	for _, s := range servers {
		if s.Agent || s.Attached {
			continue
		}
		if err := xdp.RemovePins(s.Dir); err != nil {
			errs = append(errs, err)
			continue
		}
		r.Pins = append(r.Pins, s.Dir)
	}
	return r, errors.Join(errs...)
}
