// Command guest is the first process of the virtual machine that the tests of package kernel boot: it mounts what
// programs expect, loads kernel modules, runs the commands it finds, says how they ended and switches the machine off.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"

	"xagg/tests/kernel/boot"
)

func main() {
	result := boot.Result{}
	if err := prepare(&result); err != nil {
		result.Error = err.Error()
	} else {
		result.Error = run()
	}
	line, err := json.Marshal(result)
	if err != nil {
		line = []byte(err.Error())
	}
	fmt.Printf("\n%s%s\n", boot.Marker, line)
	unix.Sync()
	unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART) // qemu ends instead
}

// prepare makes the machine usable.
func prepare(result *boot.Result) error {
	for _, m := range []struct{ kind, path string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/run"}, {"tmpfs", "/tmp"},
		{"bpf", "/sys/fs/bpf"},
	} {
		if err := os.MkdirAll(m.path, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, m.path, m.kind, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.path, err)
		}
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return err
	}
	result.Release = unix.ByteSliceToString(u.Release[:])
	modules, err := filepath.Glob(boot.ModuleDir + "/*") // sorted, so that their names give the order
	if err != nil {
		return err
	}
	for _, path := range modules {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil {
			return fmt.Errorf("load module %s: %w", path, err)
		}
	}
	return nil
}

// run runs the commands and returns what went wrong.
func run() string {
	data, err := os.ReadFile(boot.CommandFile)
	if err != nil {
		return err.Error()
	}
	var commands [][]string
	if err := json.Unmarshal(data, &commands); err != nil {
		return err.Error()
	}
	for _, args := range commands {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Stdout, cmd.Stderr, cmd.Dir = os.Stdout, os.Stderr, "/tmp"
		cmd.Env = []string{"PATH=/", "HOME=/tmp", "XAGG_REQUIRE=xdp,netns"}
		if err := cmd.Run(); err != nil {
			return fmt.Sprintf("%v: %v", args, err)
		}
	}
	return ""
}
