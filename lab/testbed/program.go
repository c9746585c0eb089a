package testbed

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"xagg/lab/netns"
)

// Program is a program that runs on a host for a while.
type Program struct {
	Name string   // of its log; unique among those that run at the same time
	Host string   // that it runs on
	Args []string // of this program's command line
	// Cmd is another command to run, with what it needs of environment and folder; Args are then not used. Its output is Run's.
	Cmd *exec.Cmd
	// Started, if set, is called with the process's number when it has started.
	Started func(pid int)
	// Ended, if set, is called with the CPU time that it has used when it has ended.
	Ended func(used time.Duration)
}

// maxLine bounds a line of a program's output. The longest are those of a demo's worker with a quorum: the contributors of up to a
// million chunks.
const maxLine = 32 << 20

// Run runs a program until it ends, and calls line with every line that it writes to its standard output. When line returns an error, or
// ctx ends, the program is stopped. The error of a program that fails by itself has the end of its log.
func (b *Testbed) Run(ctx context.Context, p Program, line func([]byte) error) error {
	log, err := os.Create(filepath.Join(b.hosts.Dir(), p.Name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := p.Cmd
	if cmd == nil {
		cmd = exec.Command(b.xagg, p.Args...)
	}
	cmd.Stderr = log
	out, stdout, err := os.Pipe()
	if err != nil {
		return err
	}
	defer out.Close()
	cmd.Stdout = stdout
	child, err := b.hosts.Start(p.Host, cmd)
	stdout.Close()
	if err != nil {
		return err
	}
	defer child.Stop()
	b.runs(p.Name, child)
	defer b.runs(p.Name, nil)
	defer context.AfterFunc(ctx, child.Stop)()
	if p.Started != nil {
		p.Started(child.PID())
	}
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, maxLine)
	var taken error
	for taken == nil && lines.Scan() {
		taken = line(lines.Bytes())
	}
	if taken == nil {
		taken = lines.Err()
	}
	if taken != nil {
		child.Stop()
	}
	ended := child.Wait()
	if p.Ended != nil {
		p.Ended(child.CPUTime())
	}
	if err := ended; err != nil && taken == nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("%w:\n%s", err, tail(log.Name()))
	}
	return taken
}

// runs notes that a program runs, or with a nil child that it does not any more.
func (b *Testbed) runs(name string, child *netns.Child) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if child == nil {
		delete(b.running, name)
		return
	}
	b.running[name] = child
}

// tail returns the last lines of a log file.
func tail(file string) string {
	data, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.Join(lines[max(0, len(lines)-10):], "\n")
}
