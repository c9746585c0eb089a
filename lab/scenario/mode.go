package scenario

import (
	"fmt"
	"slices"
	"strings"

	"xagg/controller"
	"xagg/policy"
	"xagg/policy/cost"
)

// Mode is a way of aggregating: "tcp", "ring", "gloo", "mpi", or one of this project's, "switch", "server", "hybrid" or "auto", with a
// slash and "quorum" or "async" behind it where it does not wait for everybody.
type Mode string

// Reducer is what a mode's workers talk to.
type Reducer string

// Kinds of reducers.
const (
	XAgg            Reducer = "xagg" // the switch and the servers of this project
	ParameterServer Reducer = "tcp"  // hosts that sum streams over TCP
	Ring            Reducer = "ring" // each other, in a ring over TCP
	Gloo            Reducer = "gloo" // each other, by the library of that name
	MPI             Reducer = "mpi"  // each other, by an MPI library
)

// modes are all modes, in the order in which reports have them.
var modes = []struct {
	name        Mode
	reducer     Reducer
	policy      policy.Mode // who sums; of XAgg only
	consistency controller.Mode
	rule        string // by which the plan follows what is measured; empty: it stays
}{
	{"tcp", ParameterServer, "", controller.ModeSync, ""},
	{"ring", Ring, "", controller.ModeSync, ""},
	{"gloo", Gloo, "", controller.ModeSync, ""},
	{"mpi", MPI, "", controller.ModeSync, ""},
	{"switch", XAgg, policy.ModeSwitch, controller.ModeSync, ""},
	{"server", XAgg, policy.ModeServer, controller.ModeSync, ""},
	{"hybrid", XAgg, policy.ModeHybrid, controller.ModeSync, ""},
	{"auto", XAgg, policy.ModeSwitch, controller.ModeSync, cost.Name},
	{"server/quorum", XAgg, policy.ModeServer, controller.ModeQuorum, ""},
	{"hybrid/quorum", XAgg, policy.ModeHybrid, controller.ModeQuorum, ""},
	{"auto/quorum", XAgg, policy.ModeServer, controller.ModeQuorum, cost.Name},
	{"server/async", XAgg, policy.ModeServer, controller.ModeAsync, ""},
}

// DefaultModes are the modes that are compared unless others are asked for.
var DefaultModes = []Mode{"tcp", "ring", "switch", "server", "hybrid", "auto", "hybrid/quorum", "auto/quorum"}

// Modes returns all modes.
func Modes() []Mode {
	var names []Mode
	for _, m := range modes {
		names = append(names, m.name)
	}
	return names
}

// ParseMode returns the mode of that name.
func ParseMode(name string) (Mode, error) {
	if mode := Mode(name); slices.Contains(Modes(), mode) {
		return mode, nil
	}
	var names []string
	for _, m := range modes {
		names = append(names, string(m.name))
	}
	last := len(names) - 1
	return "", fmt.Errorf("mode %q: want %s or %s", name, strings.Join(names[:last], ", "), names[last])
}

// row returns the index of the mode in modes. It panics if it is none.
func (m Mode) row() int {
	for i := range modes {
		if modes[i].name == m {
			return i
		}
	}
	panic(fmt.Sprintf("scenario: %q is not a mode", m))
}

// Reducer returns what the mode's workers talk to.
func (m Mode) Reducer() Reducer { return modes[m.row()].reducer }

// Policy returns who sums in a mode of [XAgg]; it is empty in the others.
func (m Mode) Policy() policy.Mode { return modes[m.row()].policy }

// Rule returns the rule by which the plan of a job follows what is measured, empty where it stays. Such a job knows nothing of the
// scenario when it begins: in a quorum job servers sum all ranks first, so that nobody waits for one that is slow.
func (m Mode) Rule() string { return modes[m.row()].rule }

// Consistency returns whom results wait for.
func (m Mode) Consistency() controller.Mode { return modes[m.row()].consistency }

// Skip says why a scenario cannot be run in a mode; empty = it can.
func (s *Scenario) Skip(m Mode) string {
	for _, j := range s.Jobs {
		switch c := m.Consistency(); {
		case c == controller.ModeQuorum && j.Quorum == nil:
			return fmt.Sprintf("job %s has no quorum: it needs the gradients of all ranks", j.Name)
		case c == controller.ModeAsync && j.Async == nil:
			return fmt.Sprintf("job %s is not async: it needs the gradients of all ranks of each round", j.Name)
		case m.Policy() == policy.ModeHybrid && j.Ranks < MinHybrid:
			return fmt.Sprintf("job %s has %d ranks: some for the switch and some for a server are at least %d", j.Name, j.Ranks, MinHybrid)
		}
	}
	return ""
}

// MinHybrid is the number of ranks from which on the hybrid mode makes sense: two for the switch to sum and one for a server.
const MinHybrid = 3
