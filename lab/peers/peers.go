// Package peers runs the all-reduces of the libraries that people use today, Gloo and Open MPI, as they are: each rank is a
// Python script of this package, which goes through the loop of package lab/loop and writes its lines.
//
// Both libraries are optional. [Library.Available] says what is missing.
package peers

import (
	"context"
	"embed"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Library is a library of collective operations; the value is the name of its mode.
type Library string

// The libraries.
const (
	Gloo Library = "gloo" // through torch.distributed
	MPI  Library = "mpi"  // Open MPI, through mpi4py
)

// python is the distribution's, which its packages are for.
const python = "/usr/bin/python3"

// needs says how to find out whether a library is there, and which packages of Debian's have it.
var needs = map[Library]struct{ program, version, packages string }{
	Gloo: {
		"", "import numpy, torch.distributed as d, torch; d.is_gloo_available() or exit('no Gloo in this torch'); print('torch', torch.__version__)",
		"python3-torch python3-numpy",
	},
	MPI: {
		"mpirun.openmpi", "import numpy; from mpi4py import MPI; print(MPI.Get_library_version().split(',')[0])",
		"openmpi-bin python3-mpi4py python3-numpy",
	},
}

// MissingError says that a library is not installed.
type MissingError struct {
	Library  Library
	Packages string // of Debian's, as apt-get install takes them
	Err      error
}

// Error implements error.
func (e *MissingError) Error() string {
	return fmt.Sprintf("%s is not installed: %v (apt-get install %s)", e.Library, e.Err, e.Packages)
}

// Unwrap returns the cause.
func (e *MissingError) Unwrap() error { return e.Err }

// Available returns the version of the library that is installed, or a [*MissingError]. It loads the library, which takes a
// second or two.
func (l Library) Available(ctx context.Context) (version string, err error) {
	need, ok := needs[l]
	if !ok {
		return "", fmt.Errorf("find library %q: want %s or %s", l, Gloo, MPI)
	}
	missing := func(err error) error { return &MissingError{l, need.packages, err} }
	if need.program != "" {
		if _, err := exec.LookPath(need.program); err != nil {
			return "", missing(err)
		}
	}
	cmd := exec.CommandContext(ctx, python, "-c", need.version)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		lines := strings.Split(strings.TrimSpace(stderr.String()), "\n") // the last one says what a traceback is about
		return "", missing(fmt.Errorf("%w: %s", err, lines[len(lines)-1]))
	}
	return strings.TrimSpace(stdout.String()), nil
}

// Plan is what the ranks of a job do.
type Plan struct {
	Hosts   []Host // by rank
	Buckets []int  // values of each
	// Ready is by rank, round and bucket when the gradient is computed, since the round's begin; it does not fall from bucket to
	// bucket. All ranks have as many rounds.
	Ready [][][]time.Duration
	// Values are by step and rank those of all buckets, one after the other; the steps come again and again.
	Values [][][]float32
}

// Host is where a rank runs. All hosts are in one network, see the same files, and are the process's own to name.
type Host struct {
	Addr      netip.Prefix // IPv4 address and the length of the network's prefix
	Interface string       // that has the address
}

// Command is a process to start. Its standard output, a pipe, gets one line of package lab/loop per round, of which only the
// fields round, begin, ready, done and error are set. It ends by itself when all ranks are through.
type Command struct {
	Args []string // the program first
	Env  []string // beyond what the process inherits
}

// plan is [Plan] as the scripts read it.
type plan struct {
	Ranks     int                 `json:"ranks"`
	Buckets   []int               `json:"buckets"`
	Steps     int                 `json:"steps"`
	Ready     [][][]time.Duration `json:"ready"` // nanoseconds
	Addresses []netip.Addr        `json:"addresses"`
	Network   netip.Prefix        `json:"network"`
}

//go:embed *.py
var scripts embed.FS

// Prepare writes what the ranks of a job need into a new folder, and returns the processes to start, by rank: each on its host,
// all at about the same time. The folder serves once, and may be removed when they have ended. Its path should be short (it
// is part of the names of unix sockets), and have no spaces.
func (l Library) Prepare(dir string, p Plan) ([]Command, error) {
	commands, err := l.prepare(dir, p)
	if err != nil {
		return nil, fmt.Errorf("prepare %s: %w", l, err)
	}
	return commands, nil
}

func (l Library) prepare(dir string, p Plan) ([]Command, error) {
	if _, ok := needs[l]; !ok {
		return nil, fmt.Errorf("want %s or %s", Gloo, MPI)
	}
	if err := p.check(); err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	if err := os.CopyFS(dir, scripts); err != nil {
		return nil, err
	}
	for step, ranks := range p.Values {
		for rank, values := range ranks {
			data, err := binary.Append(nil, binary.LittleEndian, values)
			if err != nil {
				return nil, err
			}
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("values-%d-%d.f32", step, rank)), data, 0o644); err != nil {
				return nil, err
			}
		}
	}
	out := plan{
		Ranks: len(p.Hosts), Buckets: p.Buckets, Steps: len(p.Values), Ready: p.Ready, Network: p.Hosts[0].Addr.Masked(),
	}
	for _, h := range p.Hosts {
		out.Addresses = append(out.Addresses, h.Addr.Addr())
	}
	data, err := json.Marshal(out)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "plan.json"), data, 0o644); err != nil {
		return nil, err
	}
	var commands []Command
	for rank, h := range p.Hosts {
		var c Command
		switch l {
		case Gloo:
			c.Args = []string{python, "-B", filepath.Join(dir, "gloo.py"), dir, strconv.Itoa(rank)}
			c.Env = []string{"GLOO_SOCKET_IFNAME=" + h.Interface}
		case MPI:
			if err := unix.Mkfifo(filepath.Join(dir, "shell-"+h.Addr.Addr().String()), 0o600); err != nil {
				return nil, err
			}
			c.Args = []string{python, "-B", filepath.Join(dir, "mpirun.py"), "start", dir, strconv.Itoa(rank)}
		}
		// Several threads for so little arithmetic would only get into the way of others.
		c.Env = append(c.Env, "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1")
		commands = append(commands, c)
	}
	return commands, nil
}

// check reports what is wrong with the plan.
func (p Plan) check() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if len(p.Hosts) < 2 {
		bad("%d hosts, want at least 2", len(p.Hosts))
	}
	if len(p.Buckets) == 0 || len(p.Values) == 0 {
		bad("%d buckets and %d steps, want at least one", len(p.Buckets), len(p.Values))
	}
	for rank, h := range p.Hosts {
		if !h.Addr.Addr().Is4() || h.Addr.Masked() != p.Hosts[0].Addr.Masked() || h.Interface == "" {
			bad("rank %d: interface %q with address %v: want an IPv4 address of the network of rank 0's, and its interface",
				rank, h.Interface, h.Addr)
		}
	}
	values := 0
	for bucket, n := range p.Buckets {
		if n < 1 {
			bad("bucket %d: %d values, want at least 1", bucket, n)
		}
		values += n
	}
	if len(p.Ready) != len(p.Hosts) {
		bad("computations of %d ranks, want %d", len(p.Ready), len(p.Hosts))
	}
	for rank, rounds := range p.Ready {
		if len(rounds) != len(p.Ready[0]) {
			bad("rank %d: %d rounds, want %d as rank 0", rank, len(rounds), len(p.Ready[0]))
		}
		for round, ready := range rounds {
			if len(ready) != len(p.Buckets) {
				bad("rank %d: round %d: %d buckets, want %d", rank, round, len(ready), len(p.Buckets))
			}
		}
	}
	for step, ranks := range p.Values {
		if len(ranks) != len(p.Hosts) {
			bad("step %d: values of %d ranks, want %d", step, len(ranks), len(p.Hosts))
		}
		for rank, v := range ranks {
			if len(v) != values {
				bad("step %d: rank %d: %d values, want %d", step, rank, len(v), values)
			}
		}
	}
	return errors.Join(errs...)
}
