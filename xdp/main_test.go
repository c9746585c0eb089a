package xdp

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

// TestMain runs the tests. As process 1 this test binary is the whole user space of a virtual machine, in which xdp/qemu
// tries other kernels: then it prepares the machine and runs itself once more. (Within one process some of what packages
// look up when they are initialized would be from before.)
func TestMain(m *testing.M) {
	if os.Getpid() != 1 {
		os.Exit(m.Run())
	}
	err := bringUp()
	if err == nil {
		cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		err = cmd.Run()
	}
	fmt.Printf("xagg: tests ended: %v\n", err) // what xdp/qemu looks for
	// The machine does not reboot, qemu ends instead.
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART); err != nil {
		fmt.Printf("xagg: reboot: %v\n", err)
	}
	select {}
}

// bringUp makes a machine that has just booted ready for the tests.
func bringUp() error {
	for _, fs := range []struct{ kind, at string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/tmp"}, {"bpf", "/sys/fs/bpf"},
	} {
		if err := unix.Mount(fs.kind, fs.at, fs.kind, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", fs.at, err)
		}
	}
	module, err := os.Open("/veth.ko")
	if err != nil {
		return err
	}
	defer module.Close()
	if err := unix.FinitModule(int(module.Fd()), "", 0); err != nil {
		return fmt.Errorf("load veth.ko: %w", err)
	}
	return nil
}
