package peers_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"xagg/lab/loop"
	"xagg/lab/netns"
	"xagg/lab/peers"
	"xagg/tests/require"
)

// newLab makes a lab of workers whose switch is a bridge.
func newLab(t *testing.T, workers int) *netns.Lab {
	t.Helper()
	spec := netns.Spec{RunDir: t.TempDir()}
	for r := range workers {
		spec.Hosts = append(spec.Hosts, netns.Host{
			Name: fmt.Sprintf("w%d", r), Port: r + 1,
			Addr: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 77, 0, byte(r + 1)}), 16),
			MAC:  net.HardwareAddr{0x02, 0x78, 0x61, 0, 0, byte(r + 1)},
		})
	}
	lab, err := netns.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lab.Close(); err != nil {
			t.Error(err)
		}
	})
	err = lab.Do(netns.Switch, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "br0"
		bridge := &netlink.Bridge{LinkAttrs: attrs}
		if err := netlink.LinkAdd(bridge); err != nil {
			return err
		}
		for _, h := range spec.Hosts {
			port, err := netlink.LinkByName(netns.PortName(h.Port))
			if err != nil {
				return err
			}
			if err := netlink.LinkSetMaster(port, bridge); err != nil {
				return err
			}
		}
		return netlink.LinkSetUp(bridge)
	})
	if err != nil {
		t.Fatal(err)
	}
	return lab
}

// carried returns the bytes that came to the switch from each host.
func carried(t *testing.T, lab *netns.Lab) []uint64 {
	t.Helper()
	var bytes []uint64
	err := lab.Do(netns.Switch, func() error {
		for _, h := range lab.Hosts() {
			port, err := netlink.LinkByName(netns.PortName(h.Port))
			if err != nil {
				return err
			}
			bytes = append(bytes, port.Attrs().Statistics.RxBytes)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}

// testPlan is of two rounds on the lab's hosts.
func testPlan(lab *netns.Lab) peers.Plan {
	random := rand.New(rand.NewPCG(1, 2))
	p := peers.Plan{Buckets: []int{30000, 1, 5000}}
	for range lab.Hosts() {
		var rounds [][]time.Duration
		for range 2 {
			rounds = append(rounds, []time.Duration{5 * time.Millisecond, 6 * time.Millisecond, 20 * time.Millisecond})
		}
		p.Ready = append(p.Ready, rounds)
	}
	for range 2 {
		var ranks [][]float32
		for range lab.Hosts() {
			values := make([]float32, 35001)
			for i := range values {
				values[i] = float32(random.NormFloat64())
			}
			ranks = append(ranks, values)
		}
		p.Values = append(p.Values, ranks)
	}
	for _, h := range lab.Hosts() {
		p.Hosts = append(p.Hosts, peers.Host{Addr: h.Addr, Interface: netns.HostInterface})
	}
	return p
}

var libraries = []struct {
	library peers.Library
	feature require.Feature
}{{peers.Gloo, require.Gloo}, {peers.MPI, require.MPI}}

// Ranks in namespaces of their own sum exactly what the plan says, when it says, and all of it goes through the switch.
func TestLibraries(t *testing.T) {
	for _, c := range libraries {
		t.Run(string(c.library), func(t *testing.T) {
			require.Have(t, c.feature, require.Netns)
			t.Parallel()
			const ranks = 3
			lab := newLab(t, ranks)
			plan := testPlan(lab)
			commands, err := c.library.Prepare(filepath.Join(lab.Dir(), "job"), plan)
			if err != nil {
				t.Fatal(err)
			}
			before := carried(t, lab)
			lines := run(t, lab, commands)
			for rank := range ranks {
				for round := range 2 {
					var r loop.Round
					line, ok := <-lines[rank]
					if err := json.Unmarshal([]byte(line), &r); !ok || err != nil {
						t.Fatalf("rank %d, round %d: line %q: %v", rank, round, line, err)
					}
					if r.Round != round || r.Begin <= 0 || len(r.Ready) != 3 || len(r.Done) != 3 {
						t.Errorf("rank %d, round %d: %+v", rank, round, r)
						continue
					}
					if r.Error > 1e-6 {
						t.Errorf("rank %d, round %d: error %g", rank, round, r.Error)
					}
					for bucket, want := range plan.Ready[rank][round] {
						if r.Ready[bucket] < int64(want) || r.Done[bucket] < r.Ready[bucket] {
							t.Errorf("rank %d, round %d: bucket %d ready after %d ns and done after %d, want ready after %d",
								rank, round, bucket, r.Ready[bucket], r.Done[bucket], want)
						}
					}
				}
				if line, more := <-lines[rank]; more {
					t.Errorf("rank %d: a line too many: %q", rank, line)
				}
			}
			// The least that each rank has to send of two rounds, whatever the algorithm: its own share to one other.
			for rank, bytes := range carried(t, lab) {
				if sent, least := bytes-before[rank], uint64(2*4*35001); sent < least {
					t.Errorf("rank %d sent %d bytes through the switch, want at least %d", rank, sent, least)
				}
			}
		})
	}
}

// start starts a rank and returns what it writes.
func start(t *testing.T, lab *netns.Lab, commands []peers.Command, rank int, stderr io.Writer) (*netns.Child, io.ReadCloser) {
	t.Helper()
	c := commands[rank]
	cmd := exec.Command(c.Args[0], c.Args[1:]...)
	cmd.Env = append(os.Environ(), c.Env...)
	out, stdout, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdout.Close()
	cmd.Stdout, cmd.Stderr = stdout, stderr
	child, err := lab.Start(lab.Hosts()[rank].Name, cmd)
	if err != nil {
		t.Fatal(err)
	}
	return child, out
}

// run runs all ranks of a job and returns the lines of each.
func run(t *testing.T, lab *netns.Lab, commands []peers.Command) []<-chan string {
	t.Helper()
	var all []<-chan string
	for rank := range commands {
		var stderr strings.Builder
		child, out := start(t, lab, commands, rank, &stderr)
		lines := make(chan string, 16)
		all = append(all, lines)
		go func() {
			defer close(lines)
			defer out.Close()
			for scanner := bufio.NewScanner(out); scanner.Scan(); {
				lines <- scanner.Text()
			}
			if err := child.Wait(); err != nil {
				t.Errorf("rank %d: %v\n%s", rank, err, stderr.String())
			}
		}()
	}
	return all
}

// Ranks that are stopped in the middle leave no process behind, whatever they have started.
func TestStop(t *testing.T) {
	for _, c := range libraries {
		t.Run(string(c.library), func(t *testing.T) {
			require.Have(t, c.feature, require.Netns)
			t.Parallel()
			lab := newLab(t, 2)
			plan := testPlan(lab)
			for rank := range plan.Ready {
				for range 1000 {
					plan.Ready[rank] = append(plan.Ready[rank], []time.Duration{time.Second, time.Second, time.Second})
				}
			}
			dir := filepath.Join(lab.Dir(), "job")
			commands, err := c.library.Prepare(dir, plan)
			if err != nil {
				t.Fatal(err)
			}
			var children []*netns.Child
			var first *bufio.Scanner
			for rank := range commands {
				child, out := start(t, lab, commands, rank, io.Discard)
				defer out.Close()
				children = append(children, child)
				if rank == 0 {
					first = bufio.NewScanner(out)
				}
			}
			if !first.Scan() {
				t.Fatalf("no round: %v", first.Err())
			}
			if n := len(mentioning(t, dir)); n < len(commands) {
				t.Errorf("%d processes of %d ranks", n, len(commands))
			}
			for _, child := range children {
				child.Stop()
			}
			for deadline := time.Now().Add(10 * time.Second); len(mentioning(t, dir)) > 0; time.Sleep(10 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("processes that stay: %v", mentioning(t, dir))
				}
			}
		})
	}
}

// mentioning returns the command lines of processes that name a folder.
func mentioning(t *testing.T, dir string) (found []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if line, err := os.ReadFile(file); err == nil && strings.Contains(string(line), dir) {
			found = append(found, file+" "+strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return found
}

// A plan that cannot be followed is refused before anything is written.
func TestBadPlans(t *testing.T) {
	good := func() peers.Plan {
		host := func(i byte) peers.Host {
			return peers.Host{Addr: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 77, 0, i}), 16), Interface: "eth0"}
		}
		return peers.Plan{
			Hosts: []peers.Host{host(1), host(2)}, Buckets: []int{2, 1},
			Ready:  [][][]time.Duration{{{1, 2}}, {{1, 1}}},
			Values: [][][]float32{{{1, 2, 3}, {4, 5, 6}}},
		}
	}
	dir := t.TempDir()
	if _, err := peers.MPI.Prepare(filepath.Join(dir, "good"), good()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		change func(*peers.Plan)
		want   string
	}{
		{"one host", func(p *peers.Plan) { p.Hosts = p.Hosts[:1] }, "1 hosts, want at least 2"},
		{"no buckets", func(p *peers.Plan) { p.Buckets = nil }, "0 buckets"},
		{"no steps", func(p *peers.Plan) { p.Values = nil }, "0 steps"},
		{"an empty bucket", func(p *peers.Plan) { p.Buckets[1] = 0 }, "bucket 1: 0 values"},
		{"another network", func(p *peers.Plan) { p.Hosts[1].Addr = netip.MustParsePrefix("10.78.0.2/16") }, "rank 1: interface"},
		{"no interface", func(p *peers.Plan) { p.Hosts[1].Interface = "" }, "rank 1: interface"},
		{"a rank that never computes", func(p *peers.Plan) { p.Ready = p.Ready[:1] }, "computations of 1 ranks"},
		{"a rank with more rounds", func(p *peers.Plan) { p.Ready[1] = append(p.Ready[1], []time.Duration{1, 1}) }, "rank 1: 2 rounds"},
		{"a bucket that is never ready", func(p *peers.Plan) { p.Ready[1][0] = p.Ready[1][0][:1] }, "rank 1: round 0: 1 buckets"},
		{"a rank without values", func(p *peers.Plan) { p.Values[0] = p.Values[0][:1] }, "step 0: values of 1 ranks"},
		{"a value too few", func(p *peers.Plan) { p.Values[0][1] = p.Values[0][1][:2] }, "step 0: rank 1: 2 values"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := good()
			c.change(&p)
			folder := filepath.Join(dir, "bad")
			_, err := peers.Gloo.Prepare(folder, p)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
			if _, err := os.Stat(folder); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the folder exists: %v", err)
			}
		})
	}
	if _, err := peers.Library("smoke").Prepare(filepath.Join(dir, "bad"), good()); err == nil {
		t.Error("an unknown library was accepted")
	}
	if _, err := peers.Gloo.Prepare(filepath.Join(dir, "good"), good()); !errors.Is(err, os.ErrExist) {
		t.Errorf("a folder was used twice: %v", err)
	}
}

// What is missing is named, with what to install.
func TestMissing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := peers.MPI.Available(t.Context())
	var missing *peers.MissingError
	if !errors.As(err, &missing) || !strings.Contains(err.Error(), "apt-get install openmpi-bin") {
		t.Errorf("without mpirun: %v", err)
	}
}
