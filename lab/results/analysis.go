package results

import (
	"fmt"
	"slices"
	"strings"

	"xagg/internal/stats"
)

// Base is the mode that others are compared with: everything in the switch, as in earlier systems.
const Base = "switch"

// Consistency returns what a mode's results wait for: "sync", "quorum" or "async".
func Consistency(mode string) string {
	if _, consistency, found := strings.Cut(mode, "/"); found {
		return consistency
	}
	return "sync"
}

// Analysis is what results say.
type Analysis struct {
	Sessions  []Header
	Modes     []string // those of which there is at least one run, skipped ones too, in the order of the headers
	Scenarios []ScenarioResult
	Gaps      []Gap
	// Finished is the number of runs with measurements, Limited those of them that were limited by the machine's cores.
	Finished, Limited int
	Repetitions       int     // the most of a scenario and mode
	Limit             float64 // above which intervals are too wide
}

// Gap is a run without measurements. Those with the same reason are one gap.
type Gap struct {
	Scenario, Mode string
	Runs           int
	Skipped        bool // else it failed
	Reason         string
}

// ScenarioResult is what a scenario came to in a lab.
type ScenarioResult struct {
	Scenario
	Lab   string   // such as "netns, engine, native XDP"
	Seeds []uint64 // of the repetitions
	Jobs  []JobResult
	Costs []Cost // by mode, as in Analysis.Modes
}

// JobResult is what one job of a scenario came to.
type JobResult struct {
	Name                           string
	Ranks, Rounds, Buckets, Values int
	Cells                          []Cell // by mode, as in Analysis.Modes
	// Best are the modes with the shortest communication time, of those whose ratio to the base is resolved: the first, which is shorter than
	// each other one in the pairs that the two have in common, and those whose ratio to it is resolved and does not show them to be slower. Empty
	// if no mode is, or if one has less than two pairs in common with it.
	Best    []int
	Regrets []Regret // of the modes whose plan follows what is measured
}

// Cell is what a job came to in a mode. Times are seconds. All repetitions are in it, but those that the machine limited only if
// fewer than two others are there.
type Cell struct {
	Runs    int // that are in it; 0 = there are none
	Limited bool
	Comm    Distribution // of all ranks and rounds
	Floor   Distribution
	Round   Distribution
	Exposed float64 // mean of round time less the slowest computation of the round
	// OfBase is Comm in multiples of the base's, OfFloor in multiples of the floor's, Span the time of all rounds in multiples of that
	// at the floor.
	OfBase, OfFloor, Span Estimate
	Goodput               float64 // bits of sums that a rank receives per second of communication time
	Rate                  float64 // rounds per second
	Packets               float64 // that the workers send per round
	Resends, Late         float64 // shares of packets, and of chunks
	Skipped               float64 // share of rounds that ranks went through without computing; in no times
	Error                 float64 // the largest
	Slots                 int
	Memory                uint64
	Open                  []Sample  // of the first run in it
	Decided               []Decided // by run of those in it in which a policy decided
}

// Decided is what the policy decided in a run.
type Decided struct {
	Repetition int // from 0
	Moves      []Move
	Quorums    []Quorum
}

// Cost is what a scenario's runs in a mode took from the machine.
type Cost struct {
	Runs     int
	Limited  int                // of Runs
	PerGB    map[string]float64 // CPU seconds by role per 1e9 bytes of gradients that ranks have given
	BPF      float64            // of XDP programs, likewise; part of PerGB
	Partials float64            // that the switch sent to servers, per round
	Busiest  float64            // the largest
	Stolen   float64            // the largest
}

// Total returns the CPU seconds per GB of all roles.
func (c Cost) Total() float64 {
	sum := 0.0
	for _, role := range Roles {
		sum += c.PerGB[role]
	}
	return sum
}

// Roles are those that CPU time is accounted to.
var Roles = []string{"switch", "server", "workers", "controller", "kernel"}

// trial is a finished run and where it belongs.
type trial struct {
	session int
	*Run
}

// Analyze says what files have in common: scenarios of the same name and text in the same kind of lab are the same, whichever
// file they are in; two runs make a pair if they are of the same session and repetition.
//
// limit is that of [Estimate.Resolved].
func Analyze(limit float64, files ...*File) (*Analysis, error) {
	a := &Analysis{Limit: limit}
	trials := map[string][]trial{} // by key of lab, scenario and mode
	at := map[string]int{}         // index of a scenario by lab and name
	tried := map[string]bool{}
	for _, f := range files {
		for _, s := range f.Sessions {
			session := len(a.Sessions)
			a.Sessions = append(a.Sessions, s.Header)
			lab := s.Header.Where()
			for _, sc := range s.Header.Scenarios {
				key := lab + "\x00" + sc.Name
				i, found := at[key]
				if !found {
					at[key] = len(a.Scenarios)
					a.Scenarios = append(a.Scenarios, ScenarioResult{Scenario: sc, Lab: lab})
				} else if a.Scenarios[i].YAML != sc.YAML {
					return nil, fmt.Errorf("%s: scenario %s is not the one that another header has under this name: report them one by one", f.Name, sc.Name)
				}
			}
			for _, mode := range s.Header.Modes {
				a.mode(mode)
			}
			for i := range s.Runs {
				r := &s.Runs[i]
				a.mode(r.Mode)
				tried[r.Mode] = true
				if !r.Finished() {
					a.gap(r)
					continue
				}
				a.Finished++
				if r.Usage.Limited() {
					a.Limited++
				}
				key := lab + "\x00" + r.Scenario
				trials[key+"\x00"+r.Mode] = append(trials[key+"\x00"+r.Mode], trial{session, r})
				sc := &a.Scenarios[at[key]]
				if !slices.Contains(sc.Seeds, r.Seed) {
					sc.Seeds = append(sc.Seeds, r.Seed)
				}
			}
		}
	}
	a.Modes = slices.DeleteFunc(a.Modes, func(mode string) bool { return !tried[mode] })
	for i := range a.Scenarios {
		sc := &a.Scenarios[i]
		all := make([][]trial, len(a.Modes))
		for m, mode := range a.Modes {
			all[m] = trials[sc.Lab+"\x00"+sc.Name+"\x00"+mode]
			a.Repetitions = max(a.Repetitions, len(all[m]))
			sc.Costs = append(sc.Costs, cost(all[m]))
		}
		if err := sc.jobs(a.Modes, all, limit); err != nil {
			return nil, err
		}
	}
	a.Scenarios = slices.DeleteFunc(a.Scenarios, func(sc ScenarioResult) bool { return len(sc.Jobs) == 0 })
	return a, nil
}

// Where names what has to be equal for times to be compared.
func (h *Header) Where() string {
	name := h.Lab + ", " + h.Switch
	if h.XDPMode != "" {
		name += ", " + h.XDPMode + " XDP"
	}
	return name
}

// mode notes a mode.
func (a *Analysis) mode(mode string) {
	if !slices.Contains(a.Modes, mode) {
		a.Modes = append(a.Modes, mode)
	}
}

// gap notes a run without measurements.
func (a *Analysis) gap(r *Run) {
	g := Gap{Scenario: r.Scenario, Mode: r.Mode, Skipped: r.Skipped != "", Reason: r.Skipped + r.Failed}
	for i := range a.Gaps {
		if o := a.Gaps[i]; o.Scenario == g.Scenario && o.Mode == g.Mode && o.Skipped == g.Skipped && o.Reason == g.Reason {
			a.Gaps[i].Runs++
			return
		}
	}
	g.Runs = 1
	a.Gaps = append(a.Gaps, g)
}

// used returns the runs that are reported: those that the machine did not limit, or all if fewer than two are left.
func used(trials []trial) (use []trial, limited bool) {
	for _, t := range trials {
		if !t.Usage.Limited() {
			use = append(use, t)
		}
	}
	if len(use) >= 2 || len(use) == len(trials) {
		return use, false
	}
	return trials, true
}

// cost returns what runs took from the machine.
func cost(trials []trial) Cost {
	c := Cost{PerGB: map[string]float64{}}
	use, _ := used(trials)
	bytes, rounds := 0.0, 0
	for _, t := range use {
		bytes += float64(t.Usage.Bytes)
		rounds += len(t.Jobs[0].Comm[0])
		for role, seconds := range t.Usage.CPU {
			c.PerGB[role] += seconds
		}
		c.BPF += t.Usage.BPF
		c.Partials += float64(t.Usage.Partials)
	}
	for _, t := range trials {
		c.Runs++
		if t.Usage.Limited() {
			c.Limited++
		}
		c.Busiest, c.Stolen = max(c.Busiest, t.Usage.Busiest), max(c.Stolen, t.Usage.Stolen)
	}
	if len(use) > 0 {
		if bytes > 0 {
			for role := range c.PerGB {
				c.PerGB[role] /= bytes / 1e9
			}
			c.BPF /= bytes / 1e9
		} else { // nobody knows what the time was for
			clear(c.PerGB)
			c.BPF = 0
		}
		c.Partials /= float64(rounds)
	}
	return c
}

// jobs computes the results of the scenario's jobs from its runs by mode.
func (sc *ScenarioResult) jobs(modes []string, all [][]trial, limit float64) error {
	count := 0
	for _, trials := range all {
		for _, t := range trials {
			if count == 0 {
				count = len(t.Jobs)
			} else if count != len(t.Jobs) {
				return fmt.Errorf("scenario %s has %d jobs in one run, %d in another", sc.Name, count, len(t.Jobs))
			}
			for i, j := range t.Jobs {
				if i == len(sc.Jobs) {
					sc.Jobs = append(sc.Jobs, JobResult{
						Name: j.Name, Ranks: len(j.Comm), Rounds: len(j.Comm[0]), Buckets: j.Buckets, Values: j.Values, Cells: make([]Cell, len(modes)),
					})
				}
				if was := sc.Jobs[i]; was.Name != j.Name || was.Ranks != len(j.Comm) || was.Values != j.Values {
					return fmt.Errorf("scenario %s: job %d is %q with %d ranks and %d values in one run, %q with %d and %d in another", sc.Name, i,
						was.Name, was.Ranks, was.Values, j.Name, len(j.Comm), j.Values)
				}
			}
		}
	}
	base := slices.Index(modes, Base)
	for i := range sc.Jobs {
		job := &sc.Jobs[i]
		for m := range modes {
			use, limited := used(all[m])
			if len(use) > 0 {
				job.Cells[m] = cell(i, use)
				job.Cells[m].Limited = limited
				job.Cells[m].OfFloor.Limited, job.Cells[m].Span.Limited = limited, limited
			}
			if base >= 0 {
				job.Cells[m].OfBase = compare(all[m], all[base], commOf(i))
			}
		}
		job.best(i, all, limit)
		job.regrets(i, modes, all)
	}
	return nil
}

// cell describes job i in runs, of which there is at least one.
func cell(i int, trials []trial) Cell {
	first := trials[0].Jobs[i]
	c := Cell{Runs: len(trials), Slots: first.Slots, Memory: first.Memory, Open: first.Open}
	var comm, floor, round, exposed, ofFloor, span []float64
	var packets, resends, chunks, late uint64
	seconds, rounds, all := 0.0, 0, 0
	for _, t := range trials {
		j := &t.Jobs[i]
		comm, floor, round = append(comm, j.take(j.Comm)...), append(floor, j.take(j.Floor)...), append(round, j.take(j.Round)...)
		for rank := range j.Round {
			for n, took := range j.Round[rank] {
				if !j.skipped(rank, n) {
					exposed = append(exposed, took-j.slowest(n))
				}
			}
			all += len(j.Round[rank])
		}
		packets, resends, chunks, late = packets+j.Packets, resends+j.Resends, chunks+j.Chunks, late+j.Late
		seconds += j.Span
		rounds += len(j.Comm[0])
		c.Error = max(c.Error, j.Error)
		if j.Moves != nil {
			c.Decided = append(c.Decided, Decided{t.Repetition, j.Moves, j.Quorums})
		}
		if f := stats.Mean(j.take(j.Floor)); f > 0 {
			ofFloor = append(ofFloor, j.comm()/f)
		}
		if j.IdealSpan > 0 {
			span = append(span, j.Span/j.IdealSpan)
		}
	}
	c.Comm, c.Floor, c.Round, c.Exposed = Describe(comm), Describe(floor), Describe(round), stats.Mean(exposed)
	c.Skipped = 1 - float64(len(comm))/float64(all)
	c.OfFloor, c.Span = Ratios(ofFloor), Ratios(span)
	c.Goodput = 32 * float64(first.Values) / c.Comm.Mean
	c.Rate = float64(rounds) / seconds
	c.Packets = float64(packets) / float64(rounds)
	if packets > 0 {
		c.Resends = float64(resends) / float64(packets)
	}
	if chunks > 0 {
		c.Late = float64(late) / float64(chunks)
	}
	return c
}

// slowest returns the slowest computation of a round.
func (j *Job) slowest(round int) float64 {
	slowest := 0.0
	for rank := range j.Compute {
		if !j.skipped(rank, round) {
			slowest = max(slowest, j.Compute[rank][round])
		}
	}
	return slowest
}

// comm returns the mean communication time.
func (j *Job) comm() float64 { return stats.Mean(j.take(j.Comm)) }

// commOf returns the function that takes the mean communication time of job i of a run.
func commOf(i int) func(*Run) float64 { return func(r *Run) float64 { return r.Jobs[i].comm() } }

// compare returns a time of runs in multiples of the base's.
func compare(trials, base []trial, time func(*Run) float64) Estimate {
	use, limited := used(trials)
	ofUse, ofLimited := used(base)
	var pairs []float64
	for _, t := range use {
		for _, b := range ofUse {
			if t.session == b.session && t.Repetition == b.Repetition {
				if took, of := time(t.Run), time(b.Run); took > 0 && of > 0 {
					pairs = append(pairs, took/of)
				}
			}
		}
	}
	e := Ratios(pairs)
	e.Limited = limited || ofLimited
	return e
}

// best finds the modes with the shortest communication time of job i, as far as pairs tell. The ratios to the base say of which modes something
// can be said, but not which of them is the first: two of these ratios may be of other sessions or repetitions.
func (j *JobResult) best(i int, all [][]trial, limit float64) {
	var modes []int
	for m, c := range j.Cells {
		if c.OfBase.Resolved(limit) && !c.OfBase.Limited {
			modes = append(modes, m)
		}
	}
	for _, first := range modes {
		best, shortest := []int{first}, true
		for _, m := range modes {
			if m == first {
				continue
			}
			e := compare(all[m], all[first], commOf(i))
			if e.Pairs < 2 || e.Ratio < 1 || e.Ratio == 1 && m < first {
				shortest = false
				break
			}
			if e.Resolved(limit) && e.AtMost(1) != No {
				best = append(best, m)
			}
		}
		if shortest {
			j.Best = best
			return
		}
	}
}
