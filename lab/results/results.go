// Package results holds what experiments measured, as JSON lines: a [Header], then a [Run] for every scenario, mode and
// repetition; and computes what reports say of it. It is pure.
package results

import (
	"time"
)

// SchemaVersion is that of the lines. It rises when a field changes its meaning or goes.
const SchemaVersion = 1

// Header says where and how measurements were made. It is the first line, and comes again where a file is continued.
type Header struct {
	Kind          string            `json:"kind"` // "header"
	SchemaVersion int               `json:"schema_version"`
	Time          time.Time         `json:"time"`
	Command       []string          `json:"command"`
	Revision      string            `json:"revision"` // of git, with "+dirty" where files were changed; "" = unknown
	CPU           string            `json:"cpu"`
	Cores         int               `json:"cores"`
	Memory        uint64            `json:"memory"` // bytes
	Kernel        string            `json:"kernel"`
	Lab           string            `json:"lab"`      // "netns" or "mininet"
	Switch        string            `json:"switch"`   // "engine" or "simple_switch_grpc"
	XDPMode       string            `json:"xdp_mode"` // "native" or "generic"
	Versions      map[string]string `json:"versions"` // of xagg, go, and of what else took part
	Repeat        int               `json:"repeat"`
	Emulated      []string          `json:"emulated"` // sentences: what is emulated, and what that means for the numbers
	Scenarios     []Scenario        `json:"scenarios"`
	Modes         []string          `json:"modes"`
}

// Scenario is what a report says of a scenario.
type Scenario struct {
	Name  string `json:"name"`
	About string `json:"about"`
	YAML  string `json:"yaml"` // the whole of it
	// Heterogeneous says that some rank's computation, link or losses differ from the others'.
	Heterogeneous bool `json:"heterogeneous"`
}

// Run is one run of a scenario in a mode.
type Run struct {
	Kind       string        `json:"kind"` // "run"
	Scenario   string        `json:"scenario"`
	Mode       string        `json:"mode"`
	Repetition int           `json:"repetition"` // from 0
	Seed       uint64        `json:"seed"`
	Began      time.Time     `json:"began"`
	Took       time.Duration `json:"took_ns"`
	// Skipped says why there is nothing, with what to install where that helps; Failed what went wrong.
	Skipped string `json:"skipped,omitempty"`
	Failed  string `json:"failed,omitempty"`
	Jobs    []Job  `json:"jobs,omitempty"`
	Usage   Usage  `json:"usage"`
}

// Job is what a job of a scenario came to, warm-up rounds left out. Times are seconds, by rank and round.
type Job struct {
	Name    string `json:"name"`
	Buckets int    `json:"buckets"`
	Values  int    `json:"values"` // of all buckets of a round
	// Comm is the communication time: how long at least one gradient of the rank was ready whose result was not usable.
	Comm [][]float64 `json:"comm"`
	// Round is the time from the beginning of the rank's computation to its last result.
	Round [][]float64 `json:"round"`
	// Compute is the rank's computation.
	Compute [][]float64 `json:"compute"`
	// Floor is the communication time with an ideal aggregator in the network under the consistency of the mode, one that takes no time: what
	// others compute longer, and the bytes of the gradients through the slowest link. Nothing else bounds it: see scenario.Ideal.
	Floor [][]float64 `json:"floor"`
	// Skipped are, by rank, the rounds of the above, ascending from 0, that a rank went through without computing anything, because
	// it was behind: their times are none of a round, and left out of what is said of them. Empty if there are none.
	Skipped [][]int `json:"skipped,omitempty"`
	// Span is the time from the first rank's begin of the first measured round to the last rank's end of the last one; IdealSpan
	// what it would be at the floor.
	Span      float64 `json:"span"`
	IdealSpan float64 `json:"ideal_span"`
	Packets   uint64  `json:"packets"`
	Resends   uint64  `json:"resends"`
	Chunks    uint64  `json:"chunks"` // that ranks had results of, all ranks together
	Late      uint64  `json:"late"`   // those without the rank's own contribution
	Error     float64 `json:"error"`  // the largest loop.Round.Error of measured rounds; of the last round where it accumulates
	// Slots and Memory are what the job's plan held: switch slots (both versions), and bytes on servers; Open the slots of servers that were
	// open when they were looked at; the switch is not asked, which would cost packets between the job\'s.
	Slots  int      `json:"slots"`
	Memory uint64   `json:"memory"`
	Open   []Sample `json:"open,omitempty"`
	// Moves are the ranks that the policy of a mode whose plan follows what is measured has moved, in the order of time, warm-up included; nil in
	// other modes.
	Moves []Move `json:"moves,omitzero"`
	// Quorums are what such a policy has made of a quorum job's, likewise.
	Quorums []Quorum `json:"quorums,omitempty"`
}

// Move is a rank that is summed elsewhere from then on.
type Move struct {
	Round int    `json:"round"` // of the rank, from 0, that was under way; negative ones are warm-up
	Rank  int    `json:"rank"`
	To    string `json:"to"`  // "switch" or "server"
	Why   string `json:"why"` // what the rule says
}

// Quorum is how many ranks are enough for a result from then on, and how long chunks wait for more.
type Quorum struct {
	Round int     `json:"round"` // of rank 0, as [Move.Round]
	Ranks int     `json:"ranks"`
	Wait  float64 `json:"wait"` // s
}

// Sample is a look at what a job holds on servers.
type Sample struct {
	Time   float64 `json:"time"`   // seconds since the run began
	Server int     `json:"server"` // slots that are open, of all servers
}

// Usage is what a run cost, over its measured rounds.
type Usage struct {
	Seconds float64 `json:"seconds"` // of wall-clock time that the rest is about
	Bytes   uint64  `json:"bytes"`   // of gradients that ranks had summed meanwhile, of all jobs
	// CPU are seconds by role: "switch", "server", "workers", "controller", and "kernel" for what the machine was busy with beyond
	// these processes and their NAPI threads.
	CPU map[string]float64 `json:"cpu"`
	BPF float64            `json:"bpf"` // seconds that XDP programs ran, by the kernel's statistics; part of the others
	// Busiest is the share of time that the busiest core was busy, Stolen that which the hypervisor took from all of them.
	Busiest  float64           `json:"busiest"`
	Stolen   float64           `json:"stolen"`
	Frames   map[string]uint64 `json:"frames"` // through the switch's ports, by the host at the other end: in and out
	Partials uint64            `json:"partials"`
	// Reasons are packets by what the switch, and each server by its name, has done with them.
	Reasons map[string]map[string]uint64 `json:"reasons,omitempty"`
}

// MaxBusy is the share of time that a core may be busy before a run counts as limited by the machine instead of the
// network.
const MaxBusy = 0.8

// MaxStolen is the share of time that the hypervisor may take from all cores together, likewise.
const MaxStolen = 0.05

// Limited reports whether the run was limited by the machine's cores, so that it carries no claim.
func (u Usage) Limited() bool { return u.Busiest > MaxBusy || u.Stolen > MaxStolen }
