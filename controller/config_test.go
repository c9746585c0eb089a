package controller

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"xagg/policy"
	"xagg/policy/adapt"
)

var compareConfig = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })

func TestGoodConfig(t *testing.T) {
	service := Service{netip.MustParseAddr("10.77.255.254"), MAC{2, 0x78, 0x61, 0, 0xff, 0xfe}}
	least := DefaultConfig()
	least.Service = service
	full := Config{
		Listen:  "unix:/run/xagg/controller.sock",
		Switch:  Switch{Name: "s1", Address: "unix:/run/xagg/p4rt.sock", DeviceID: 1, CPUPort: 510},
		Service: service,
		Hosts: []Host{
			{"w0", netip.MustParseAddr("10.77.0.1"), MAC{2, 0x78, 0x61, 0, 0, 1}, 1},
			{"w1", netip.MustParseAddr("10.77.0.2"), MAC{2, 0x78, 0x61, 0, 0, 2}, 2},
			{"w2", netip.MustParseAddr("10.77.0.3"), MAC{2, 0x78, 0x61, 0, 0, 3}, 3},
		},
		Adapt:   adapt.Config{Rule: "outlier", Window: 16, Limits: adapt.DefaultLimits()},
		Servers: []Server{{"s0", "10.9.0.2:19861", netip.MustParseAddr("10.77.1.1"), MAC{2, 0x78, 0x61, 0, 1, 1}, 65, 4 << 30}},
		Policy:  policy.Static{Rule: "static", Mode: policy.ModeHybrid, Steer: []int{2}, Servers: []string{"s0"}, Pool: 16},
		Jobs: []JobSpec{
			{Name: "train", Ranks: 3, MaxElems: 1000000, Weight: 3},
			{Name: "eval", Ranks: 2, MaxElems: 256, Policy: &policy.Static{Mode: policy.ModeServer}, Depth: 4,
				Consistency: Consistency{Mode: ModeQuorum, Quorum: 2, Wait: 10 * time.Millisecond, Rounds: 16}},
			{Name: "follows", Ranks: 2, MaxElems: 256, Adapt: &adapt.Config{Rule: "outlier", Window: 4, Limits: adapt.DefaultLimits()}},
		},
		Reserve: 0.5,
	}
	for name, want := range map[string]Config{"least": least, "full": full} {
		got, err := Load("testdata/" + name + ".good.yaml")
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if diff := cmp.Diff(want, got, compareConfig); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", name, diff)
		}
		// What a program writes is read back as it was.
		text, err := yaml.Marshal(got)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse(name, text)
		if err != nil {
			t.Errorf("%s, written and read: %v\n%s", name, err, text)
		} else if diff := cmp.Diff(got, again, compareConfig, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s, written and read: (-want +got)\n%s", name, diff)
		}
	}
}

func TestExample(t *testing.T) {
	cfg, err := Parse("example.yaml", []byte(Example))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(cfg); err != nil {
		t.Error(err)
	}
	if len(cfg.Hosts) != 3 || len(cfg.Servers) != 1 || len(cfg.Jobs) != 2 {
		t.Errorf("got %+v", cfg)
	}
}

// TestBadConfig compares the first lines of errors with the first line of each file, a comment.
func TestBadConfig(t *testing.T) {
	files, err := filepath.Glob("testdata/*.bad.yaml")
	if err != nil || len(files) < 30 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		src, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		first, _, _ := strings.Cut(string(src), "\n")
		want := filepath.Base(file) + strings.TrimPrefix(first, "# ")
		_, err = Parse(filepath.Base(file), src)
		if got, _, _ := strings.Cut(fmt.Sprint(err), "\n"); got != want {
			t.Errorf("\ngot  %v\nwant %s", err, want)
		}
	}
	if _, err := Load("testdata/none.yaml"); err == nil || !os.IsNotExist(err) && !strings.Contains(err.Error(), "none.yaml") {
		t.Errorf("a missing file: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.yaml")
	for _, file := range files {
		src, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(src)
	}
	f.Fuzz(func(t *testing.T, src []byte) {
		cfg, err := Parse("f.yaml", src)
		if err == nil && cfg.Validate() != nil {
			t.Error("a configuration that is not valid was taken")
		}
	})
}
