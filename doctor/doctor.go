// Package doctor finds out what a machine has of what XAgg can use, and says how to get the rest. [Examine] looks, and
// a [Report] is plain data that knows how it is written; neither changes anything, [Fix] does.
package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// Status is the outcome of a check.
type Status string

// The outcomes.
const (
	OK   Status = "ok"
	Warn Status = "warn" // something optional is missing; the cure says what it is for
	Fail Status = "fail" // something that aggregation on this machine needs is missing
)

// Check is one thing that was looked at.
type Check struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	Detail string `json:"detail"`         // what was found, one line
	Cure   string `json:"cure,omitempty"` // what to do; empty where all is well
}

// SchemaVersion is the version of a report's JSON form.
const SchemaVersion = 1

// Report is everything that was looked at, in the order in which it was.
type Report struct {
	Checks []Check
}

// OK reports whether nothing that is required is missing.
func (r Report) OK() bool {
	_, _, fail := r.count()
	return fail == 0
}

func (r Report) count() (ok, warn, fail int) {
	for _, c := range r.Checks {
		switch c.Status {
		case OK:
			ok++
		case Warn:
			warn++
		default:
			fail++
		}
	}
	return ok, warn, fail
}

// WriteText writes the report for people: a line for each check, the cure indented below, and a line that sums up.
func (r Report) WriteText(w io.Writer) error {
	width := 0
	for _, c := range r.Checks {
		width = max(width, len(c.Name))
	}
	var b strings.Builder
	for _, c := range r.Checks {
		fmt.Fprintf(&b, "%-4s  %-*s  %s\n", c.Status, width, c.Name, oneLine(c.Detail))
		if c.Cure != "" {
			fmt.Fprintf(&b, "      %s\n", strings.ReplaceAll(c.Cure, "\n", "\n      "))
		}
	}
	ok, warn, fail := r.count()
	verdict := "xagg runs on this machine"
	if fail > 0 {
		verdict = "xagg lacks something on this machine; 'xagg demo --lab memory' needs none of it"
	}
	fmt.Fprintf(&b, "\n%d ok, %d warn, %d fail: %s\n", ok, warn, fail, verdict)
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteJSON writes the report as one JSON object with schema_version, ok and checks.
func (r Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(struct {
		SchemaVersion int     `json:"schema_version"`
		OK            bool    `json:"ok"`
		Checks        []Check `json:"checks"`
	}{SchemaVersion, r.OK(), r.Checks})
}

// oneLine puts a message of several lines, as some errors are, into one.
func oneLine(s string) string {
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}

// Examine looks at everything. It takes a few seconds where programs have to be asked. It fails only when ctx ends: what a
// check says that was interrupted says nothing about the machine.
func Examine(ctx context.Context, m Machine) (Report, error) {
	var r Report
	for _, check := range checks {
		c := check.look(ctx, m)
		if err := ctx.Err(); err != nil {
			return Report{}, fmt.Errorf("look at %s: %w", check.name, err)
		}
		c.Name = check.name
		r.Checks = append(r.Checks, c)
	}
	return r, nil
}

// checks are the checks in the order in which they are shown: what everything needs, then what some things need.
var checks = []struct {
	name string
	look func(context.Context, Machine) Check
}{
	{"kernel", kernel},
	{"privileges", privileges},
	{"namespaces", namespaces},
	{"XDP native", xdpNative},
	{"XDP generic", xdpGeneric},
	{"BTF", btf},
	{"bpffs", bpffs},
	{"tbf", tbf},
	{"memory", memory},
	{"leftovers", leftovers},
	{"pinned servers", pinned},
	{"clang", clang},
	{"p4c", p4c},
	{"simple_switch_grpc", simpleSwitch},
	{"Mininet", mininet},
	{"Gloo", gloo},
	{"Open MPI", mpi},
	{"qemu", qemu},
}

func ok(format string, args ...any) Check {
	return Check{Status: OK, Detail: fmt.Sprintf(format, args...)}
}

func warn(cure, format string, args ...any) Check {
	return Check{Status: Warn, Detail: fmt.Sprintf(format, args...), Cure: cure}
}

func fail(cure, format string, args ...any) Check {
	return Check{Status: Fail, Detail: fmt.Sprintf(format, args...), Cure: cure}
}
