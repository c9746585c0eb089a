package netns

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"testing"

	"go.uber.org/goleak"
)

const (
	// ownerDir, when set, makes the test binary the owner of a lab in that folder, for the tests that end one.
	ownerDir = "XAGG_TEST_LAB_OWNER"
	// useIP, when set, is the name of a namespace that the owner adds and deletes by ip instead of waiting.
	useIP = "XAGG_TEST_USE_IP"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(ownerDir); dir != "" {
		if err := own(dir); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// own makes a lab with a process in it, says so, and keeps it until it is interrupted.
func own(dir string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	lab, err := Create(ctx, star(dir, 1, 1, 0))
	if err != nil {
		return err
	}
	defer lab.Close()
	child, err := lab.Start("w0", exec.Command("sleep", "600"))
	if err != nil {
		return err
	}
	if name := os.Getenv(useIP); name != "" {
		for _, verb := range []string{"add", "delete"} {
			if out, err := exec.Command("ip", "netns", verb, name).CombinedOutput(); err != nil {
				return fmt.Errorf("ip netns %s: %w: %s", verb, err, out)
			}
		}
		return lab.Close()
	}
	fmt.Println("ready", lab.ID(), child.PID())
	<-ctx.Done()
	return lab.Close()
}

// star returns a lab of workers and servers with the addresses that the project's labs use.
func star(dir string, workers, servers int, rate uint64) Spec {
	spec := Spec{RunDir: dir}
	for r := range workers {
		spec.Hosts = append(spec.Hosts, Host{
			Name: fmt.Sprintf("w%d", r),
			Addr: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 77, 0, byte(r + 1)}), 16),
			MAC:  net.HardwareAddr{0x02, 0x78, 0x61, 0, 0, byte(r + 1)},
			Port: r + 1,
			Rate: rate,
		})
	}
	for s := range servers {
		spec.Hosts = append(spec.Hosts, Host{
			Name:   fmt.Sprintf("s%d", s),
			Addr:   netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 77, 1, byte(s + 1)}), 16),
			MAC:    net.HardwareAddr{0x02, 0x78, 0x61, 0, 1, byte(s + 1)},
			Port:   65 + s,
			Rate:   rate,
			Bridge: true,
		})
	}
	return spec
}
