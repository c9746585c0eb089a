package netns

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// existing describes a lab as one that somebody else has made.
func existing(lab *Lab, dir string) AdoptSpec {
	spec := AdoptSpec{RunDir: dir, Switch: lab.Path(Switch), Wires: []string{lab.Path("s0-br")}}
	for _, h := range lab.Hosts() {
		spec.Hosts = append(spec.Hosts, ExistingHost{h, lab.Path(h.Name), HostInterface, PortName(h.Port)})
	}
	return spec
}

// Processes run in hosts that exist, and end with the lab that adopted these; the hosts do not.
func TestAdopt(t *testing.T) {
	lab := newLab(t, star(t.TempDir(), 2, 1, 1_000_000))
	dir := t.TempDir()
	adopted, err := Adopt(existing(lab, dir))
	if err != nil {
		t.Fatal(err)
	}
	defer adopted.Close()
	if adopted.Interface("w1") != "eth0" || adopted.PortInterface(2) != "p2" || adopted.Path("w1") != lab.Path("w1") ||
		len(adopted.Hosts()) != 3 || adopted.Hosts()[1].MAC.String() != lab.Hosts()[1].MAC.String() {
		t.Errorf("adopted as %+v", adopted)
	}
	for _, host := range []string{"w0", "w1", Switch, "s0-br"} {
		var want, have string
		namespace := func(to *string) func() error {
			return func() (err error) {
				*to, err = os.Readlink("/proc/thread-self/ns/net")
				return err
			}
		}
		if err := lab.Do(host, namespace(&want)); err != nil {
			t.Fatal(err)
		}
		if host == "s0-br" {
			host = adopted.Wires()[0]
		}
		if err := adopted.Do(host, namespace(&have)); err != nil || have != want {
			t.Errorf("%s is in %s, %v, want %s", host, have, err, want)
		}
	}
	child, err := adopted.Start("w1", exec.Command("sleep", "600"))
	if err != nil {
		t.Fatal(err)
	}
	if err := adopted.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-child.Done():
	default:
		t.Error("a process outlives the lab")
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if _, err := os.Stat(lab.Path("w1")); err != nil {
		t.Errorf("the hosts are gone: %v", err)
	}
}

// What does not exist cannot be adopted, and nothing stays of the attempt.
func TestAdoptBad(t *testing.T) {
	lab := newLab(t, star(t.TempDir(), 1, 1, 0))
	for _, c := range []struct {
		name   string
		change func(*AdoptSpec)
		want   string
	}{
		{"no namespace", func(s *AdoptSpec) { s.Hosts[0].Path = "/run/netns/xagg-none" }, "open the network namespace of w0"},
		{"no switch", func(s *AdoptSpec) { s.Switch = "" }, "open the network namespace of switch"},
		{"something else", func(s *AdoptSpec) { s.Hosts[0].Path = "/dev/null" }, "enter the network namespace of w0"},
		{"no interface", func(s *AdoptSpec) { s.Hosts[0].Interface = "eth7" }, `find interface "eth7" of the link of w0`},
		{"no port", func(s *AdoptSpec) { s.Hosts[0].PortInterface = "" }, `find interface "" of the link of w0`},
		{"bad host", func(s *AdoptSpec) { s.Hosts[0].Port = 0 }, "port 0: want 1 to 509"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			spec := existing(lab, dir)
			c.change(&spec)
			a, err := Adopt(spec)
			if err == nil {
				a.Close()
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
			if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) != 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}
