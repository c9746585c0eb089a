package netns

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// grace is how long a process may take to end after it was asked to.
const grace = 3 * time.Second

// Child is a process in one of a lab's hosts.
type Child struct {
	Host string
	cmd  *exec.Cmd
	done chan struct{}
	err  error // after done

	stopOnce sync.Once
}

// Start runs a command in a host, or in the switch's namespace, which [Switch] names. The command shares everything but
// the network with this process, so that unix sockets and bpffs are the same for all hosts. It gets a process group
// of its own: a Ctrl-C at the terminal reaches this process only, which then stops the hosts in the order it likes.
// It is killed when this process dies, and stopped by [Lab.Close].
//
// cmd must not have been started; its SysProcAttr is set here.
func (l *Lab) Start(host string, cmd *exec.Cmd) (*Child, error) {
	s, err := l.space(host)
	if err != nil {
		return nil, err
	}
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, fmt.Errorf("start %s in %s: %w", cmd.Path, host, os.ErrClosed)
	}
	if err := l.launcher.in(s, cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s in %s: %w", cmd.Path, host, err)
	}
	c := &Child{Host: host, cmd: cmd, done: make(chan struct{})}
	l.children = append(l.children, c)
	// Nobody has waited for the child yet, so that its entry in /proc is there even if it has ended.
	p, err := startOf(cmd.Process.Pid)
	if err == nil {
		err = l.journal.add(entry{Process: &p})
	}
	go c.wait()
	if err != nil {
		c.Stop()
		return nil, fmt.Errorf("start %s in %s: %w", cmd.Path, host, err)
	}
	return c, nil
}

// wait reaps the child. What its process group still holds dies with it; the signal is sent before the child is
// reaped, since its number is the group's and free for others afterwards.
func (c *Child) wait() {
	pid := c.cmd.Process.Pid
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if err != unix.EINTR {
			break
		}
	}
	unix.Kill(-pid, unix.SIGKILL)
	c.err = c.cmd.Wait()
	close(c.done)
}

// PID returns the process's number.
func (c *Child) PID() int { return c.cmd.Process.Pid }

// Done returns a channel that is closed when the process has ended.
func (c *Child) Done() <-chan struct{} { return c.done }

// Wait waits for the process's end and returns its error as [exec.Cmd.Wait] does.
func (c *Child) Wait() error {
	<-c.done
	return c.err
}

// CPUTime returns the CPU time that the process has used, and those that it has waited for. It waits for its end.
func (c *Child) CPUTime() time.Duration {
	<-c.done
	return c.cmd.ProcessState.UserTime() + c.cmd.ProcessState.SystemTime()
}

// Kill kills the process (SIGKILL) and waits for its end. One that has ended is no error.
func (c *Child) Kill() {
	c.cmd.Process.Kill()
	<-c.done
}

// Stop asks the process to end (SIGTERM), kills its group when it has not within 3 seconds, and waits for its end.
func (c *Child) Stop() {
	c.stopOnce.Do(func() {
		select {
		case <-c.done:
			return
		default:
		}
		c.cmd.Process.Signal(unix.SIGTERM)
		timer := time.AfterFunc(grace, func() { c.cmd.Process.Kill() })
		defer timer.Stop()
		<-c.done
	})
	<-c.done
}

// startOf returns the identity of a process that exists.
func startOf(pid int) (Process, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Process{}, err
	}
	// The second field is the program's name in parentheses, which may hold anything; the start is the 22nd.
	_, rest, ok := bytes.Cut(stat[max(bytes.LastIndexByte(stat, ')'), 0):], []byte(") "))
	fields := bytes.Fields(rest)
	if !ok || len(fields) < 20 {
		return Process{}, fmt.Errorf("read /proc/%d/stat: unexpected form", pid)
	}
	start, err := strconv.ParseUint(string(fields[19]), 10, 64)
	if err != nil {
		return Process{}, fmt.Errorf("read /proc/%d/stat: start: %w", pid, err)
	}
	return Process{pid, start}, nil
}

// alive reports whether exactly this process exists.
func (p Process) alive() bool {
	now, err := startOf(p.PID)
	return err == nil && now == p
}

// kill kills exactly this process; one that is gone is no error. The number cannot pass to another process between the
// look and the signal, because the descriptor stands for the process that had it when it was opened.
func (p Process) kill() error {
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find process %d: %w", p.PID, err)
	}
	defer unix.Close(fd)
	if !p.alive() {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", p.PID, err)
	}
	return nil
}
