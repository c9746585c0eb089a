package conformance

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"xagg/p4"
)

var update = flag.Bool("update", false, "record testdata anew, with the real switch")

// What is recorded: every scenario once.
const (
	recordedSeed  = 20
	recordedSteps = 400
)

// A recording is what a real switch did with a trace, normal outputs only. It is kept as compressed text: lines
// "key value" up to an empty one, then "> PORT FRAME" for an input, "> PORT:EGRESS FRAME" for a packet-out,
// "! OP PLAN NEXT" for a change of the plans, and "< PORT FRAME" for each output of the input before.
type recording struct {
	version string // of the switch
	program string // SHA-256 of the compiled program that it ran
	inputs  []input
	outputs [][]output
}

func recordingPath(s *scenario) string {
	return filepath.Join("testdata", strings.NewReplacer(",", "", " ", "_").Replace(s.name)+".txt.gz")
}

func programHash() string { return fmt.Sprintf("%x", sha256.Sum256(p4.JSON)) }

func (r *recording) encode() []byte {
	var b bytes.Buffer
	z, _ := gzip.NewWriterLevel(&b, gzip.BestCompression) // the level exists
	w := bufio.NewWriter(z)
	fmt.Fprintf(w, "switch %s\nprogram %s\n\n", r.version, r.program)
	for i, in := range r.inputs {
		switch {
		case in.change != nil:
			fmt.Fprintf(w, "! %s %d %d\n", in.change.op, in.change.plan, in.change.next)
		case in.port == cpuPort:
			fmt.Fprintf(w, "> %d:%d %x\n", in.port, in.egress, in.frame)
		default:
			fmt.Fprintf(w, "> %d %x\n", in.port, in.frame)
		}
		for _, o := range r.outputs[i] {
			fmt.Fprintf(w, "< %d %x\n", o.port, o.frame)
		}
	}
	w.Flush() // into memory
	z.Close()
	return b.Bytes()
}

func decodeRecording(f io.Reader) (*recording, error) {
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(z)
	if err != nil {
		return nil, err
	}
	head, body, ok := strings.Cut(string(text), "\n\n")
	if !ok {
		return nil, errors.New("no header")
	}
	r := new(recording)
	for line := range strings.Lines(head + "\n") {
		switch key, value, _ := strings.Cut(strings.TrimSpace(line), " "); key {
		case "switch":
			r.version = value
		case "program":
			r.program = value
		default:
			return nil, fmt.Errorf("header %q: no such key", line)
		}
	}
	for line := range strings.Lines(body) {
		c := new(change)
		if n, _ := fmt.Sscanf(line, "! %s %d %d", &c.op, &c.plan, &c.next); n == 3 {
			r.inputs = append(r.inputs, input{change: c})
			r.outputs = append(r.outputs, nil)
			continue
		}
		var port, egress uint16
		fields := strings.Fields(line)
		if len(fields) != 3 {
			return nil, fmt.Errorf("line %q: want three fields", line)
		}
		if n, _ := fmt.Sscanf(fields[1], "%d:%d", &port, &egress); n == 0 {
			return nil, fmt.Errorf("line %q: no port", line)
		}
		frame, err := hex.DecodeString(fields[2])
		if err != nil {
			return nil, fmt.Errorf("line %q: %w", line, err)
		}
		switch n := len(r.inputs); {
		case fields[0] == ">":
			r.inputs = append(r.inputs, input{port: port, egress: egress, frame: frame})
			r.outputs = append(r.outputs, nil)
		case fields[0] == "<" && n > 0:
			r.outputs[n-1] = append(r.outputs[n-1], output{port, frame})
		default:
			return nil, fmt.Errorf("line %q: neither an input nor the output of one", line)
		}
	}
	return r, nil
}

// TestRecord has the real switch do the recorded traces once more: what it sends must be what is recorded. With
// -update it is recorded.
func TestRecord(t *testing.T) {
	for _, sc := range untimed() {
		t.Run(sc.name, func(t *testing.T) {
			real := startReal(t, &sc)
			if !*update {
				replay(t, read(t, &sc), real)
				return
			}
			version, err := realVersion()
			if err != nil {
				t.Fatal(err)
			}
			r := &recording{version: version, program: programHash(), inputs: sc.trace(recordedSeed, recordedSteps)}
			for i, in := range r.inputs {
				outs, err := real.send(in)
				if err == nil {
					err = check(in, outs)
				}
				if err != nil {
					t.Fatalf("input %d: %v", i, err)
				}
				r.outputs = append(r.outputs, normal(in, outs, false))
			}
			if err := os.WriteFile(recordingPath(&sc), r.encode(), 0o644); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestRecorded replays to the engine and to the model what was recorded of the real switch: the same inputs must bring
// the same outputs.
func TestRecorded(t *testing.T) {
	for _, sc := range untimed() {
		t.Run(sc.name, func(t *testing.T) {
			e, m := programmed(t, &sc)
			r := read(t, &sc)
			s := startServed(t, &sc)
			replay(t, r, e)
			replay(t, r, s)
			replay(t, r, m)
			sameCounters(t, e, s)
		})
	}
}

// read returns the recording of a scenario.
func read(t *testing.T, sc *scenario) *recording {
	t.Helper()
	f, err := os.Open(recordingPath(sc))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := decodeRecording(f)
	if err != nil {
		t.Fatalf("read %s: %v", f.Name(), err)
	}
	if len(r.inputs) == 0 {
		t.Fatalf("%s is empty", f.Name())
	}
	return r
}

// replay gives the recording's inputs to a target and compares what it sends.
func replay(t *testing.T, r *recording, tg target) {
	t.Helper()
	for i, in := range r.inputs {
		outs, err := tg.send(in)
		if err != nil {
			t.Fatalf("input %d: %v", i, err)
		}
		if diff := compare(r.version, r.outputs[i], tg.name(), normal(in, outs, false)); diff != "" {
			if r.program != programHash() {
				t.Error("the recording was made with another xagg.json than today's: record again if the rules changed")
			}
			t.Fatalf("input %d: %s\n%s%s", i, in, dump(in.frame), diff)
		}
	}
}
