package bench

import (
	"os"
	"testing"
	"time"

	"xagg/lab"
	"xagg/lab/netns"
	"xagg/lab/testbed"
	"xagg/tests/require"
	"xagg/xdp"
)

// TestMeterFinds: the threads that poll interfaces, where they are polled, and the programs that a process holds.
func TestMeterFinds(t *testing.T) {
	require.Have(t, require.Netns, require.XDP)
	topology, err := lab.Star(1, 1)
	if err != nil {
		t.Fatal(err)
	}
	spec := testbed.Spec(topology, nil)
	spec.RunDir = t.TempDir()
	hosts, err := netns.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer hosts.Close()
	// The wire to the server has an XDP program, which this process holds, the worker has none.
	programs, err := programsOf(os.Getpid())
	if err != nil || len(programs) == 0 {
		t.Errorf("%d BPF programs, %v; want that of the wire", len(programs), err)
	}
	for _, p := range programs {
		p.Close()
	}
	if wires := hosts.Wires(); len(wires) != 1 {
		t.Fatalf("wires %q, want the server's", wires)
	}
	for name, want := range map[string]bool{hosts.Wires()[0]: true, "w0": false} {
		threads, err := threadNAPI(hosts, name)
		if err != nil || len(threads) > 0 != want {
			t.Errorf("%s: threads %v, %v; want some: %v", name, threads, err, want)
		}
		for _, pid := range threads {
			if _, err := cpuTree(pid); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestSamplePeriod(t *testing.T) {
	for slots, want := range map[uint64]time.Duration{0: sampleEvery, 64: sampleEvery, 4096: 4096 * time.Millisecond} {
		if got := samplePeriod([]lease{{memory: slots * xdp.SlotSize}}); got != want {
			t.Errorf("%d slots: every %v, want %v", slots, got, want)
		}
	}
}
