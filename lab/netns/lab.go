package netns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"xagg/bmv2/fault"
)

// ErrNotPermitted says that the process may not make network namespaces.
var ErrNotPermitted = errors.New("network namespaces need root (CAP_SYS_ADMIN and CAP_NET_ADMIN)")

// Available returns nil where this process may make labs, [ErrNotPermitted] where it may not, and another error where
// the kernel has no network namespaces.
func Available() error {
	err := onThread(func() error { return unix.Unshare(unix.CLONE_NEWNET) })
	switch {
	case errors.Is(err, unix.EPERM):
		return ErrNotPermitted
	case err != nil:
		return fmt.Errorf("make a network namespace: %w", err)
	}
	return nil
}

// Lab is a lab that exists. Its methods may be called from several goroutines.
type Lab struct {
	id       string
	dir      string
	spec     Spec
	spaces   map[string]*space // by the name in the lab
	ends     []end             // of all links
	closers  []io.Closer       // XDP programs and relays
	injector *fault.Injector
	launcher *launcher

	mu       sync.Mutex
	journal  *journal
	children []*Child // in the order of their start
	closed   bool
}

// Create makes a lab. First it removes what dead labs left in the same folder, unless [Spec.KeepDead] is set. When it fails, or ctx ends, nothing of
// the new lab remains.
func Create(ctx context.Context, spec Spec) (*Lab, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	if err := Available(); err != nil {
		return nil, fmt.Errorf("create lab: %w", err)
	}
	if spec.RunDir == "" {
		spec.RunDir = RunDir
	}
	if !spec.KeepDead {
		if _, err := Sweep(spec.RunDir); err != nil {
			return nil, fmt.Errorf("create lab: %w", err)
		}
	}
	journal, id, err := newJournal(spec.RunDir, spec.ID)
	if err != nil {
		return nil, fmt.Errorf("create lab: %w", err)
	}
	l := &Lab{
		id:       id,
		dir:      filepath.Join(spec.RunDir, id),
		spec:     spec,
		spaces:   map[string]*space{},
		injector: fault.NewInjector(spec.Faults),
		launcher: newLauncher(),
		journal:  journal,
	}
	if err := l.build(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("create lab %s: %w", id, err), l.Close())
	}
	return l, nil
}

// build makes what the spec describes.
func (l *Lab) build(ctx context.Context) error {
	names := l.spec.spaces()
	// Whatever has one of our names already is somebody else's: it must not get into the record.
	if _, err := os.Lstat(l.dir); !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s exists and no record says whose it is (choose another id, or remove it)", l.dir)
	}
	for _, name := range names {
		path := filepath.Join(mountDir, l.Namespace(name))
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("network namespace %s exists and no record says whose it is (choose another id, "+
				"or if nobody uses it: ip netns delete %[1]s)", l.Namespace(name))
		}
	}
	if err := prepareMountDir(); err != nil {
		return err
	}
	for _, name := range names {
		if err := l.journal.add(entry{Netns: l.Namespace(name)}); err != nil {
			return err
		}
	}
	if err := l.journal.add(entry{Path: l.dir}); err != nil {
		return err
	}
	if err := os.Mkdir(l.dir, 0o755); err != nil {
		return err
	}
	for _, name := range names {
		if err := ctx.Err(); err != nil {
			return err
		}
		s, err := newSpace(l.Namespace(name))
		if err != nil {
			return err
		}
		l.spaces[name] = s
	}
	for _, h := range l.spec.Hosts {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := l.connect(h); err != nil {
			return fmt.Errorf("connect host %s: %w", h.Name, err)
		}
	}
	for _, e := range l.ends {
		if err := e.waitUp(ctx); err != nil {
			return err
		}
	}
	return nil
}

// ID returns what makes the lab's names unique.
func (l *Lab) ID() string { return l.id }

// Dir returns a folder of the lab's own for sockets and other files. It is removed with the lab.
func (l *Lab) Dir() string { return l.dir }

// Namespace returns the name that the network namespace of a host, or of [Switch], has on the machine.
func (l *Lab) Namespace(host string) string { return "xagg-" + l.id + "-" + host }

// Path returns the file through which a host's network namespace, or that of [Switch], can be entered.
func (l *Lab) Path(host string) string { return filepath.Join(mountDir, l.Namespace(host)) }

// Interface returns the name of a host's interface, which is the same for all.
func (l *Lab) Interface(string) string { return HostInterface }

// PortInterface returns the name of the interface of a switch port.
func (l *Lab) PortInterface(port int) string { return PortName(port) }

// Wires returns the namespaces in the middle of links, by names that [Lab.Do] takes.
func (l *Lab) Wires() (names []string) {
	for _, h := range l.spec.Hosts {
		if l.spaces[h.middle()] != nil {
			names = append(names, h.middle())
		}
	}
	return names
}

// Hosts returns the lab's hosts.
func (l *Lab) Hosts() []Host { return l.spec.Hosts }

// Do runs f in a host's network namespace, or in the switch's. f has its thread for itself; goroutines that it starts
// are not in the namespace, sockets that it opens are.
func (l *Lab) Do(host string, f func() error) error {
	s, err := l.space(host)
	if err != nil {
		return err
	}
	return onThread(func() error { return s.enter(f) })
}

func (l *Lab) space(host string) (*space, error) {
	s, ok := l.spaces[host]
	if !ok {
		return nil, fmt.Errorf("find host %q: lab %s has no such host", host, l.id)
	}
	return s, nil
}

// Record adds a file or folder to what is removed with the lab, also after a crash. It is to be called before the file
// is made; what exists already is refused.
func (l *Lab) Record(path string) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	if _, err := os.Lstat(path); err == nil {
		return fmt.Errorf("record %s: %w", path, fs.ErrExist)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return fmt.Errorf("record %s: %w", path, os.ErrClosed)
	}
	return l.journal.add(entry{Path: path})
}

// Close stops the processes of the lab, the last started first, and removes everything that the lab has made. Calls
// after the first do nothing.
func (l *Lab) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	for i := len(l.children) - 1; i >= 0; i-- {
		l.children[i].Stop()
	}
	l.launcher.close()
	l.injector.Close()
	var errs []error
	for _, c := range l.closers {
		errs = append(errs, c.Close())
	}
	for _, s := range l.spaces {
		s.close()
	}
	return errors.Join(append(errs, l.journal.undo())...)
}
