package xdp

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// bpffs is where the BPF file system is by convention.
const bpffs = "/sys/fs/bpf"

// mountBPFFS mounts a BPF file system at its place where there is none. One that is there stays: it is the machine's,
// whoever mounted it.
func mountBPFFS() error {
	onBPFFS, err := isBPFFS(bpffs)
	if err != nil {
		return fmt.Errorf("find a BPF file system: %w", err)
	}
	if onBPFFS {
		return nil
	}
	// Two processes that mount at a time would put one mount over the other. Both lock the directory below.
	below, err := os.Open(bpffs)
	if err != nil {
		return fmt.Errorf("find a BPF file system: %w", err)
	}
	defer below.Close()
	if err := unix.Flock(int(below.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", bpffs, err)
	}
	if onBPFFS, err := isBPFFS(bpffs); err != nil || onBPFFS {
		return err
	}
	if err := unix.Mount("bpf", bpffs, "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("no BPF file system is mounted at %s, and this process cannot mount one: %w; 'mount -t bpf bpf %[1]s'",
			bpffs, explain(err))
	}
	return nil
}

// isBPFFS reports whether a path, or what exists of it, is on a BPF file system.
func isBPFFS(path string) (bool, error) {
	for {
		var s unix.Statfs_t
		err := unix.Statfs(path, &s)
		switch {
		case err == nil:
			return s.Type == unix.BPF_FS_MAGIC, nil
		case errors.Is(err, fs.ErrNotExist) && filepath.Dir(path) != path:
			path = filepath.Dir(path)
		default:
			return false, &fs.PathError{Op: "statfs", Path: path, Err: err}
		}
	}
}

// defaultPins returns the directory of an interface's pins. Interfaces of the network namespace that process 1 is in
// have their names there, those of others the namespace's number with it.
func defaultPins(iface string) (string, error) {
	// The kernel takes no dots in names on a BPF file system, and no colons in names of interfaces.
	name := strings.ReplaceAll(iface, ".", ":")
	own, err := namespaceNumber("/proc/thread-self/ns/net")
	if err != nil {
		return "", fmt.Errorf("find the network namespace of %s: %w", iface, err)
	}
	if first, err := namespaceNumber("/proc/1/ns/net"); err != nil || first != own {
		name = fmt.Sprintf("%s@%d", name, own)
	}
	return filepath.Join(bpffs, "xagg", name), nil
}

func namespaceNumber(path string) (uint64, error) {
	var s unix.Stat_t
	if err := unix.Stat(path, &s); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return s.Ino, nil
}

// interfaceByName finds an interface of this network namespace.
func interfaceByName(name string) (*net.Interface, error) {
	iface, err := net.InterfaceByName(name)
	if err != nil {
		return nil, &NoInterfaceError{name, err}
	}
	return iface, nil
}
