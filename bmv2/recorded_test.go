package bmv2_test

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	p4cfg "github.com/p4lang/p4runtime/go/p4/config/v1"

	"xagg/bmv2/dataplane"
)

var record = flag.Bool("update", false, "record the packets of testdata anew from simple_switch_grpc")

// recordings are packets in and out of the real switch, so that the engine is compared with it everywhere.
var recordings = []struct {
	name       string
	json, info string
	setup      func(*testing.T, *rig, *p4cfg.P4Info)
	frames     func() []dataplane.Frame
	mask       func([]byte)
}{
	{"expr", "engine/testdata/expr.json", "engine/testdata/expr.p4info.txtpb", nothing,
		func() []dataplane.Frame { return exprFrames(54) }, func([]byte) {}},
	{"switch", switchJSON, switchInfo, programSwitch, func() []dataplane.Frame {
		r := rand.New(rand.NewPCG(9, 10))
		var in []dataplane.Frame
		for range 400 {
			in = append(in, dataplane.Frame{Port: uint16(pick(r, 0, 1, 1, 2, 2, 3)), Bytes: askFrame(r)})
		}
		return in
	}, func([]byte) {}},
	{"xagg", xaggJSON, xaggInfo, programXAgg, func() []dataplane.Frame { return xaggFrames(300) }, maskTimes},
}

func nothing(*testing.T, *rig, *p4cfg.P4Info) {}

// TestRecordedPackets replays what went into the real switch, and expects of the engine what left the real one.
func TestRecordedPackets(t *testing.T) {
	for _, rec := range recordings {
		t.Run(rec.name, func(t *testing.T) {
			file := filepath.Join("testdata", rec.name+".packets")
			if *record {
				r := realRig(t)
				rec.setup(t, r, r.start(t, rec.json, rec.info))
				in := rec.frames()
				writeRecording(t, file, rec.json, in, r.exchange(t, in), rec.mask)
			}
			in, want := readRecording(t, file)
			r := engineRig(t)
			rec.setup(t, r, r.start(t, rec.json, rec.info))
			left := 0
			for i, got := range r.exchange(t, in) {
				left += len(got)
				sortFrames(got, rec.mask)
				if d := difference(want[i], got); d != "" {
					t.Fatalf("frame %d, port %d:\n%s\n%s\nif the program has changed, record anew where simple_switch_grpc is "+
						"installed: go test ./bmv2 -run Recorded -update", i, in[i].Port, hex.Dump(in[i].Bytes), d)
				}
			}
			if left == 0 {
				t.Error("no frame left the switch")
			}
		})
	}
}

func writeRecording(t *testing.T, file, program string, in []dataplane.Frame, out [][]dataplane.Frame, mask func([]byte)) {
	t.Helper()
	version, err := exec.Command("simple_switch_grpc", "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "# %s on simple_switch_grpc %s: frames in, by port, and what left for each\n",
		program, bytes.TrimSpace(version))
	for i, f := range in {
		fmt.Fprintf(&b, "in %d %x\n", f.Port, f.Bytes)
		sortFrames(out[i], mask)
		for _, f := range out[i] {
			fmt.Fprintf(&b, "out %d %x\n", f.Port, f.Bytes)
		}
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

func readRecording(t *testing.T, file string) (in []dataplane.Frame, out [][]dataplane.Frame) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "#") {
			continue
		}
		var dir, data string
		var frame dataplane.Frame
		if n, err := fmt.Sscan(lines.Text(), &dir, &frame.Port, &data); n < 2 && err != nil {
			t.Fatalf("%s: %q: %v", file, lines.Text(), err)
		}
		if frame.Bytes, err = hex.DecodeString(data); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if dir == "in" {
			in, out = append(in, frame), append(out, nil)
		} else {
			out[len(out)-1] = append(out[len(out)-1], frame)
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	if len(in) == 0 {
		t.Fatalf("%s: no frames", file)
	}
	return in, out
}
