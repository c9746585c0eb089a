package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// mountDir holds a file per named namespace, where `ip netns` looks for them too.
const mountDir = "/run/netns"

// prepareMountDir makes the folder of names a shared mount of its own, as the first `ip netns add` of a machine does.
// Left to a later one, it would put a mount over the names of ours, which could not be removed then.
func prepareMountDir() error {
	if err := os.MkdirAll(mountDir, 0o755); err != nil {
		return err
	}
	dir, err := os.Open(mountDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	// ip holds the same lock meanwhile.
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", mountDir, err)
	}
	share := func() error { return unix.Mount("", mountDir, "none", unix.MS_SHARED|unix.MS_REC, "") }
	err = share()
	if err == unix.EINVAL { // it is no mount yet
		if err = unix.Mount(mountDir, mountDir, "none", unix.MS_BIND|unix.MS_REC, ""); err == nil {
			err = share()
		}
	}
	if err != nil {
		return fmt.Errorf("make %s a shared mount: %w", mountDir, err)
	}
	return nil
}

// space is a named network namespace that is kept open.
type space struct {
	name   string // on the machine
	handle netns.NsHandle
	links  *netlink.Handle // netlink sockets in it
}

// sysctls silence a new namespace before its links come up. A file may be missing where the kernel has no IPv6.
var sysctls = []struct{ key, value string }{
	{"net/ipv6/conf/all/disable_ipv6", "1"},
	{"net/ipv6/conf/default/disable_ipv6", "1"},
	{"net/ipv6/conf/lo/disable_ipv6", "1"},
	// Answers come from the service address by whatever path the switch chose; the hosts have one link each.
	{"net/ipv4/conf/all/rp_filter", "0"},
	{"net/ipv4/conf/default/rp_filter", "0"},
}

// newSpace makes a namespace of that name, with lo up. The caller has recorded the name.
func newSpace(name string) (*space, error) {
	s := &space{name: name, handle: netns.None()}
	err := onThread(func() (err error) {
		if s.handle, err = netns.NewNamed(name); err != nil {
			return err
		}
		for _, c := range sysctls {
			path := filepath.Join("/proc/sys", c.key)
			if err := os.WriteFile(path, []byte(c.value), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		return nil
	})
	if err == nil {
		s.links, err = netlink.NewHandleAt(s.handle, unix.NETLINK_ROUTE)
	}
	if err == nil {
		err = s.up("lo")
	}
	if err != nil {
		s.close()
		return nil, fmt.Errorf("make network namespace %s: %w", name, err)
	}
	return s, nil
}

// enter runs f with the current thread in the namespace. It is to be called on a thread that may be left there.
func (s *space) enter(f func() error) error {
	if err := unix.Setns(int(s.handle), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", s.name, err)
	}
	return f()
}

// close lets go of the namespace; its name stays.
func (s *space) close() {
	if s.links != nil {
		s.links.Close()
	}
	if s.handle.IsOpen() {
		s.handle.Close()
	}
}

// removeSpace removes the name of a namespace, and with it the namespace and its links once no process is left in it.
// One that is gone already is no error.
func removeSpace(name string) error {
	path := filepath.Join(mountDir, name)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && err != unix.EINVAL && err != unix.ENOENT {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
