// Package trace writes and reads what a policy was told and what it decided, as JSON lines, and lets any policy decide again.
// The format is versioned:
//
//	{"kind":"job","schema_version":1,"job":"train","ranks":4,"policy":"rule: outlier\n..."}   first, and where the policy changes
//	{"kind":"snapshot","snapshot":{...}}      what was known, a [telemetry.Snapshot]
//	{"kind":"decision","decision":{...}}      what was decided from the snapshot before, an [adapt.Decision]
package trace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"xagg/policy/adapt"
	"xagg/policy/telemetry"
)

// SchemaVersion is the format's.
const SchemaVersion = 1

// Job begins a trace.
type Job struct {
	SchemaVersion int    `json:"schema_version"`
	Job           string `json:"job"`
	Ranks         int    `json:"ranks"`
	Policy        string `json:"policy"` // YAML
	// State is what the policy's engine knew when the trace began; nil: nothing yet.
	State *adapt.State `json:"state,omitempty"`
}

// Step is a snapshot, and what was decided from it.
type Step struct {
	Snapshot telemetry.Snapshot
	Decision *adapt.Decision // nil where nothing was recorded
}

// Trace is a trace of one job under one policy.
type Trace struct {
	Job
	Steps []Step
	// Cut says that the last line was cut off, as by a crash of who wrote it.
	Cut bool
}

// line is a line of the file.
type line struct {
	Kind string `json:"kind"`
	*Job `json:",omitempty"`
	// Snapshot and Decision are those of lines of these kinds.
	Snapshot *telemetry.Snapshot `json:"snapshot,omitempty"`
	Decision *adapt.Decision     `json:"decision,omitempty"`
}

// Writer writes a trace. Its methods return the first error of its file, again and again.
type Writer struct {
	enc *json.Encoder
	err error
}

// NewWriter begins a trace. state is what the policy's engine knows already; nil: nothing.
func NewWriter(w io.Writer, job string, ranks int, policy adapt.Config, state *adapt.State) *Writer {
	t := &Writer{enc: json.NewEncoder(w)}
	t.write(line{Kind: "job", Job: &Job{SchemaVersion, job, ranks, policy.YAML(), state}})
	return t
}

// Continue returns a writer of more steps of a trace that has begun.
func Continue(w io.Writer) *Writer { return &Writer{enc: json.NewEncoder(w)} }

// Step writes a snapshot and what was decided from it.
func (t *Writer) Step(s *telemetry.Snapshot, d *adapt.Decision) error {
	t.write(line{Kind: "snapshot", Snapshot: s})
	if d != nil {
		t.write(line{Kind: "decision", Decision: d})
	}
	return t.err
}

func (t *Writer) write(l line) {
	if t.err == nil {
		t.err = t.enc.Encode(l)
	}
}

// maxLine bounds a line: a snapshot of 64 ranks has about 70 KiB.
const maxLine = 8 << 20

// Read reads the traces of a file, one for each time that a job or its policy began. name is the file's, for errors.
func Read(name string, r io.Reader) ([]*Trace, error) {
	var traces []*Trace
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	lines.Split(scanLines)
	for n := 1; lines.Scan(); n++ {
		fail := func(format string, args ...any) error {
			return fmt.Errorf("%s:%d: %w", name, n, fmt.Errorf(format, args...))
		}
		text := lines.Bytes()
		var l line
		if err := json.Unmarshal(text, &l); err != nil {
			if !bytes.HasSuffix(text, []byte("\n")) && len(traces) > 0 { // the last one
				traces[len(traces)-1].Cut = true
				return traces, nil
			}
			return nil, fail("read line: %w", err)
		}
		if l.Kind != "job" && len(traces) == 0 {
			return nil, fail("a trace begins with a line of kind \"job\", this is %q", l.Kind)
		}
		switch l.Kind {
		case "job":
			switch {
			case l.Job == nil || l.SchemaVersion == 0:
				return nil, fail("a line of kind \"job\" without its schema_version")
			case l.SchemaVersion > SchemaVersion:
				return nil, fail("schema version %d, this program reads up to %d; use a newer one", l.SchemaVersion, SchemaVersion)
			case l.Ranks < 1 || l.Ranks > 64:
				return nil, fail("%d ranks, want 1 to 64", l.Ranks)
			}
			traces = append(traces, &Trace{Job: *l.Job})
		case "snapshot":
			t := traces[len(traces)-1]
			if l.Snapshot == nil {
				return nil, fail("a line of kind \"snapshot\" without one")
			}
			t.Steps = append(t.Steps, Step{Snapshot: *l.Snapshot})
		case "decision":
			t := traces[len(traces)-1]
			if l.Decision == nil || len(t.Steps) == 0 || t.Steps[len(t.Steps)-1].Decision != nil {
				return nil, fail("a decision without a snapshot before it")
			}
			t.Steps[len(t.Steps)-1].Decision = l.Decision
		default:
			return nil, fail("kind %q: want job, snapshot or decision", l.Kind)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if len(traces) == 0 {
		return nil, fmt.Errorf("read %s: it is empty", name)
	}
	return traces, nil
}

// scanLines is bufio.ScanLines that keeps the line's end.
func scanLines(data []byte, atEOF bool) (int, []byte, error) {
	if i := bytes.IndexByte(data, '\n'); i >= 0 {
		return i + 1, data[:i+1], nil
	}
	if atEOF && len(data) > 0 {
		return len(data), data, nil
	}
	return 0, nil, nil
}

// Replay lets a policy decide from the snapshots of a trace. Where its decisions differ from those that were carried out, ranks are
// where it has put them, while the numbers stay those that were measured: what they would have been nobody knows.
func (t *Trace) Replay(c adapt.Config) ([]adapt.Decision, error) {
	engine, err := c.New(t.Ranks)
	if err != nil {
		return nil, err
	}
	if t.State != nil {
		engine.Restore(*t.State)
	}
	var decisions []adapt.Decision
	var steered uint64
	for i := range t.Steps {
		s := t.Steps[i].Snapshot
		s.Ranks = append([]telemetry.Rank(nil), s.Ranks...)
		n := 0
		for r := range s.Ranks {
			if i > 0 && r < 64 {
				s.Ranks[r].Steered = steered>>r&1 != 0
			}
			if s.Ranks[r].Steered {
				n++
			}
		}
		s.Job.Steered, s.Job.Cohort = float64(n), float64(len(s.Ranks)-n)
		d := engine.Step(&s)
		steered = d.Steered
		decisions = append(decisions, d)
	}
	return decisions, nil
}

// errDiffers is wrapped by what Verify finds.
var errDiffers = errors.New("a decision differs from the one that was recorded")

// Verify lets the trace's own policy decide again and compares every decision with the recorded one, byte for byte.
func (t *Trace) Verify() error {
	c, err := adapt.Parse("policy of the trace", []byte(t.Policy))
	if err != nil {
		return err
	}
	engine, err := c.New(t.Ranks)
	if err != nil {
		return err
	}
	if t.State != nil {
		engine.Restore(*t.State)
	}
	for i := range t.Steps {
		got := engine.Step(&t.Steps[i].Snapshot)
		if t.Steps[i].Decision == nil {
			continue
		}
		a, aerr := json.Marshal(got)
		b, berr := json.Marshal(t.Steps[i].Decision)
		if err := errors.Join(aerr, berr); err != nil {
			return err
		}
		if !bytes.Equal(a, b) {
			return fmt.Errorf("%w: step %d, round %v:\n- %s\n+ %s", errDiffers, i, got.Round, b, a)
		}
	}
	return nil
}
