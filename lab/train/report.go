package train

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"xagg/internal/stats"
	"xagg/lab/bench"
	"xagg/lab/results"
	"xagg/lab/scenario"
)

// SchemaVersion is the version of a Report's JSON form. It changes when a field changes its meaning or goes away.
const SchemaVersion = 1

// Report is what [Run] found out.
type Report struct {
	SchemaVersion int            `json:"schema_version"`
	Kind          string         `json:"kind"`     // "train"
	Complete      bool           `json:"complete"` // all runs were made
	Header        results.Header `json:"header"`   // machine, versions and command; what is emulated
	Settings      Settings       `json:"settings"`
	Task          TaskInfo       `json:"task"`
	Modes         []Summary      `json:"modes"` // over all seeds, in the order of the runs' modes, the single process first
	Runs          []Result       `json:"runs"`  // in their order, before those of a seed the single process
}

// Settings are what is the same in all runs.
type Settings struct {
	Plan
	Seeds         int     `json:"seeds"` // from Plan.Seed on
	Quorum        int     `json:"quorum"`
	WaitSeconds   float64 `json:"wait_seconds"`
	Target        float64 `json:"target"` // 0: see Result.Target
	Steer         []int   `json:"steer"`
	Lab           string  `json:"lab"`
	OptimizerName string  `json:"optimizer"`
}

// TaskInfo describes task and network.
type TaskInfo struct {
	About      string `json:"about"`
	Inputs     int    `json:"inputs"`
	Classes    int    `json:"classes"`
	Train      int    `json:"train"` // samples
	HeldOut    int    `json:"held_out"`
	Layers     []int  `json:"layers"`
	Parameters int    `json:"parameters"`
}

// Result is what one run came to.
type Result struct {
	Mode      scenario.Mode `json:"mode"` // "single" is the single process
	Name      string        `json:"name"` // mode and staleness
	Staleness int           `json:"staleness,omitempty"`
	Seed      uint64        `json:"seed"`
	Failed    string        `json:"failed,omitempty"` // why there is no more than this
	// Seconds is the time from the first rank's first computation until the parameters after all steps were there; that of the single
	// process is the sum of the slowest rank's computations.
	Seconds float64 `json:"seconds"`
	// Loss, TrainLoss and Accuracy are those of Point in the end, as a mean of the last five.
	Loss      float64 `json:"loss"`
	TrainLoss float64 `json:"train_loss"`
	Accuracy  float64 `json:"accuracy"`
	// Target is a loss on held-out samples, Reached the first point whose mean with the four before it is not above; nil: none is.
	Target    float64 `json:"target"`
	Reached   *Point  `json:"reached,omitempty"`
	Gradients int     `json:"gradients"` // that all ranks together have computed
	Late      float64 `json:"late"`      // share of chunks' results without the rank that receives them; what it gave is in a later one
	Skipped   float64 `json:"skipped"`   // share of steps for which a rank has computed nothing, for it was behind
	// MeanError is how far the mean that ranks were given was from the mean of all ranks' gradients at the same parameters, relative to its norm:
	// the mean over all checkpoints. In modes that do not wait for all it is what is missing, late or of other parameters.
	MeanError float64 `json:"mean_error"`
	// Distance is the largest of all checkpoints of the parameters' distance to those of the single process after as many steps, relative to their
	// norm; LossDistance that of the loss on held-out samples.
	Distance     float64 `json:"distance"`
	LossDistance float64 `json:"loss_distance"`
	// Disagreement is the largest distance of a rank's last parameters from another's, relative to their norm. It is 0 where all ranks
	// get the same results.
	Disagreement float64 `json:"disagreement"`
	Clipped      int     `json:"clipped"` // values that did not fit their scale and went into the next all-reduce
	Packets      uint64  `json:"packets"`
	Resends      uint64  `json:"resends"`
	Points       []Point `json:"points,omitempty"` // the curve: checkpoints, ascending
}

// Point is a checkpoint.
type Point struct {
	Step      int     `json:"step"`       // steps before it
	Seconds   float64 `json:"seconds"`    // since the first rank's first computation began
	Loss      float64 `json:"loss"`       // on held-out samples
	TrainLoss float64 `json:"train_loss"` // on as many that are trained with
	Accuracy  float64 `json:"accuracy"`   // on held-out samples, 0..1
}

// Summary is what a mode came to over all seeds whose runs did not fail.
type Summary struct {
	Mode      scenario.Mode `json:"mode"`
	Name      string        `json:"name"`
	Staleness int           `json:"staleness,omitempty"`
	Runs      int           `json:"runs"`
	Failed    int           `json:"failed"`
	Reached   int           `json:"reached"` // runs that have reached their target
	// StepsToTarget and SecondsToTarget are of the runs that have reached it.
	StepsToTarget   Spread  `json:"steps_to_target"`
	SecondsToTarget Spread  `json:"seconds_to_target"`
	Seconds         Spread  `json:"seconds"`
	Loss            Spread  `json:"loss"`
	TrainLoss       Spread  `json:"train_loss"`
	Accuracy        Spread  `json:"accuracy"`
	Late            Spread  `json:"late"`
	Skipped         Spread  `json:"skipped"`
	MeanError       Spread  `json:"mean_error"`
	Distance        float64 `json:"distance"`      // the largest of all runs
	LossDistance    float64 `json:"loss_distance"` // likewise
	// Worse is how much larger the loss is in the end than that of the single process with the same seed. Its mean lies within Interval of the
	// truth with 95 % confidence, as far as seeds tell; Resolved says whether that leaves it on one side of zero, by more than rounding.
	Worse    Spread  `json:"worse"`
	Interval float64 `json:"interval"` // 0 = a single run says nothing
	Resolved bool    `json:"resolved"`
	// TimeRatio is the time to the target in multiples of that of a sync mode, StepsRatio the steps in multiples of the single process's:
	// of the seeds where both have reached it.
	TimeRatio  *Ratio `json:"time_ratio,omitempty"`
	StepsRatio *Ratio `json:"steps_ratio,omitempty"`
}

// Ratio is a ratio to another mode, seed by seed, with its interval of 95 % confidence.
type Ratio struct {
	To    string  `json:"to"`
	Ratio float64 `json:"ratio"`
	Low   float64 `json:"low"`
	High  float64 `json:"high"`
	Pairs int     `json:"pairs"`
	// Resolved says that the interval is no wider than results.DefaultLimit.
	Resolved bool `json:"resolved"`
}

// ratio returns the ratio of what value says of a mode's runs to the same of another mode's runs with the same seeds; nil for fewer than two pairs, and of
// a mode to itself.
func (r *Report) ratio(name, to string, value func(*Point) float64) *Ratio {
	if name == to {
		return nil
	}
	base := map[uint64]float64{}
	for _, run := range r.Runs {
		if run.Name == to && run.Reached != nil {
			base[run.Seed] = value(run.Reached)
		}
	}
	var pairs []float64
	for _, run := range r.Runs {
		if run.Name == name && run.Reached != nil && base[run.Seed] > 0 && value(run.Reached) > 0 {
			pairs = append(pairs, value(run.Reached)/base[run.Seed])
		}
	}
	if len(pairs) < 2 {
		return nil
	}
	e := results.Ratios(pairs)
	return &Ratio{to, e.Ratio, e.Low, e.High, e.Pairs, e.Resolved(results.DefaultLimit)}
}

// text spells a ratio, after what it is of.
func (r *Ratio) text(of string) string {
	if !r.Resolved {
		return fmt.Sprintf("%s %.2f times that of %s (%.2f to %.2f: not resolved)", of, r.Ratio, r.To, r.Low, r.High)
	}
	return fmt.Sprintf("%s %.2f times that of %s (%.2f to %.2f)", of, r.Ratio, r.To, r.Low, r.High)
}

// Spread is a mean over seeds, and the sample standard deviation.
type Spread struct {
	Mean float64 `json:"mean"`
	SD   float64 `json:"sd"`
}

func spread(x []float64) Spread { return Spread{Mean: stats.Mean(x), SD: stats.Deviation(x)} }

// emulated says what of the numbers is made rather than met.
var emulated = []string{
	"Every rank really computes its gradients, and then sleeps until the time that its computation is modelled to take is over: compute times, and who is slow, are settings.",
	"All ranks, switch and servers share this machine's cores; links are as fast as these.",
	"The task is generated from the seed: it says how modes differ, not how well a network learns something of use.",
	"The single process has no network; its time is the sum over the steps of the slowest rank's computation, which no sync mode can beat.",
}

func newReport(o *Options) *Report {
	r := &Report{
		SchemaVersion: SchemaVersion, Kind: "train",
		Header: header(o),
		Settings: Settings{
			Plan: o.Plan, Seeds: o.Seeds, Quorum: o.Quorum, WaitSeconds: o.Wait.Seconds(), Target: o.Target, Lab: o.Lab,
			OptimizerName: "stochastic gradient descent without momentum",
		},
		Task: TaskInfo{
			About: fmt.Sprintf("%d classes, each a mixture of %d Gaussian clusters with random centres", Classes, clusters), Inputs: Inputs, Classes: Classes,
			Train: trainSize, HeldOut: heldOut, Layers: Sizes, Parameters: Parameters,
		},
	}
	for _, rank := range o.steer() {
		r.Settings.Steer = append(r.Settings.Steer, int(rank))
	}
	if o.Lab == LabMemory {
		r.Header.Emulated = append(emulated[:len(emulated):len(emulated)],
			"All ran in one process, with aggregation servers in user space, and tcp over the loopback interface instead of the switch: its times are not to be compared with the others'.")
	}
	return r
}

// header says where and how the runs are made.
func header(o *Options) results.Header {
	h := bench.Machine()
	h.Kind, h.SchemaVersion, h.Time = "header", results.SchemaVersion, time.Now().UTC()
	h.Command, h.Lab, h.Switch, h.Repeat, h.Emulated = o.Command, o.Lab, o.Switch, o.Seeds, emulated
	for _, p := range o.plans(0) {
		h.Modes = append(h.Modes, p.Name())
	}
	return h
}

// add adds a run, with the target of its seed.
func (r *Report) add(res Result, target float64) {
	res.Target, res.Reached = target, reach(res.Points, target)
	r.Runs = append(r.Runs, res)
}

// baseline returns the sync mode whose times others are compared with: the first of this project's, which run over the same links in every
// lab, or else the first of all.
func (r *Report) baseline() string {
	first := ""
	for _, m := range r.Modes {
		switch {
		case !isSync(m.Mode):
		case m.Mode.Reducer() == scenario.XAgg:
			return m.Name
		case first == "":
			first = m.Name
		}
	}
	return first
}

// summarize makes the summaries of the runs.
func (r *Report) summarize() {
	index := map[string]int{}
	base := map[uint64]float64{}
	for _, run := range r.Runs {
		if _, ok := index[run.Name]; !ok {
			index[run.Name] = len(r.Modes)
			r.Modes = append(r.Modes, Summary{Mode: run.Mode, Name: run.Name, Staleness: run.Staleness})
		}
		if run.Mode == Single {
			base[run.Seed] = run.Loss
		}
	}
	sync := r.baseline()
	for i := range r.Modes {
		s := &r.Modes[i]
		var runs, reached []Result
		var worse []float64
		for _, run := range r.Runs {
			switch {
			case run.Name != s.Name:
				continue
			case run.Failed != "":
				s.Failed++
				continue
			case run.Reached != nil:
				reached = append(reached, run)
			}
			runs = append(runs, run)
			worse = append(worse, run.Loss-base[run.Seed])
			s.Distance, s.LossDistance = max(s.Distance, run.Distance), max(s.LossDistance, run.LossDistance)
		}
		of := func(runs []Result, f func(*Result) float64) Spread {
			var x []float64
			for i := range runs {
				x = append(x, f(&runs[i]))
			}
			return spread(x)
		}
		s.Runs, s.Reached = len(runs), len(reached)
		s.StepsToTarget = of(reached, func(r *Result) float64 { return float64(r.Reached.Step) })
		s.SecondsToTarget = of(reached, func(r *Result) float64 { return r.Reached.Seconds })
		s.Seconds = of(runs, func(r *Result) float64 { return r.Seconds })
		s.Loss = of(runs, func(r *Result) float64 { return r.Loss })
		s.TrainLoss = of(runs, func(r *Result) float64 { return r.TrainLoss })
		s.Accuracy = of(runs, func(r *Result) float64 { return r.Accuracy })
		s.Late = of(runs, func(r *Result) float64 { return r.Late })
		s.Skipped = of(runs, func(r *Result) float64 { return r.Skipped })
		s.MeanError = of(runs, func(r *Result) float64 { return r.MeanError })
		s.Worse = spread(worse)
		if len(worse) > 1 {
			_, s.Interval = results.Mean(worse)
			s.Resolved = math.Abs(s.Worse.Mean) > s.Interval+rounding
		}
		s.TimeRatio = r.ratio(s.Name, sync, func(p *Point) float64 { return p.Seconds })
		s.StepsRatio = r.ratio(s.Name, string(Single), func(p *Point) float64 { return float64(p.Step) })
	}
}

// rounding is a difference of losses that says nothing: that of sums that were rounded differently.
const rounding = 1e-5

// WriteJSON writes the report as one JSON object.
func (r *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	return enc.Encode(r)
}

// WriteTable writes the report for people.
func (r *Report) WriteTable(w io.Writer) error {
	s := &r.Settings
	fmt.Fprintf(w, "%d ranks, %d steps, batches of %d, rate %g, skew %g; a rank computes for %v%s; quorum of %d, wait %v; %d seeds from %d\n\n", s.Ranks, s.Rounds,
		s.Batch, s.Rate, s.Skew, s.Compute.Mean, s.slowness(), s.Quorum, time.Duration(s.WaitSeconds*1e9), s.Seeds, s.Seed)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "MODE\tSTEPS TO TARGET\tTIME TO TARGET\tALL STEPS\tFINAL LOSS\tACCURACY\tLATE\tSKIPPED\tERROR OF MEAN\t")
	for _, m := range r.Modes {
		if m.Runs == 0 {
			fmt.Fprintf(t, "%s\tfailed\t\t\t\t\t\t\t\t\n", m.Name)
			continue
		}
		to, in := "-", "-"
		if m.Reached > 0 {
			to, in = m.StepsToTarget.text("%.0f"), m.SecondsToTarget.text("%.2f")+" s"
		}
		if m.Reached < m.Runs {
			to += fmt.Sprintf(" (%d of %d)", m.Reached, m.Runs)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s s\t%s\t%s %%\t%.1f %%\t%.1f %%\t%.1e\t\n", m.Name, to, in, m.Seconds.text("%.2f"), m.Loss.text("%.3f"),
			m.Accuracy.times(100).text("%.1f"), 100*m.Late.Mean, 100*m.Skipped.Mean, m.MeanError.Mean)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for _, m := range r.Modes {
		if said := m.verdict(); said != "" {
			fmt.Fprintf(w, "%s: %s\n", m.Name, said)
		}
	}
	for _, run := range r.Runs {
		if run.Failed != "" {
			fmt.Fprintf(w, "%s, seed %d: failed: %s\n", run.Name, run.Seed, run.Failed)
		}
	}
	fmt.Fprintln(w)
	target := fmt.Sprintf("a loss of %g on held-out samples.", s.Target)
	if s.Target == 0 {
		target = "the loss on held-out samples that the single process has after two thirds of its steps, seed by seed, rounded up to hundredths."
	}
	fmt.Fprintln(w, "Target:", target)
	fmt.Fprintf(w, "Losses and accuracies are of held-out samples, at a point of the curve the mean of the %d points up to it; ± is the standard deviation over seeds.\n", tail)
	for _, sentence := range r.Header.Emulated {
		fmt.Fprintln(w, sentence)
	}
	if !r.Complete {
		fmt.Fprintln(w, "Interrupted: these are the runs that were finished.")
	}
	return nil
}

// slowness says who computes slower.
func (s *Settings) slowness() string {
	var b strings.Builder
	for rank := range s.Ranks {
		if f, ok := s.Compute.Slow[rank]; ok {
			fmt.Fprintf(&b, ", rank %d %g times as long", rank, f)
		}
	}
	if m := s.Compute.Moving; m != nil {
		fmt.Fprintf(&b, ", one that changes every %d steps %g times as long", m.Every, m.Factor)
	}
	if s.Compute.Jitter > 0 {
		fmt.Fprintf(&b, ", jitter %g", s.Compute.Jitter)
	}
	return b.String()
}

func (s Spread) times(f float64) Spread { return Spread{s.Mean * f, s.SD * f} }

func (s Spread) text(format string) string {
	return fmt.Sprintf(format+" ± "+format, s.Mean, s.SD)
}

// verdict says plainly what a mode did to the training.
func (m *Summary) verdict() string {
	if m.Mode == Single || m.Runs == 0 {
		return ""
	}
	if isSync(m.Mode) {
		said := fmt.Sprintf("the same training as in one process: parameters were never further apart than %.1e of their norm, losses than %.1e", m.Distance, m.LossDistance)
		if m.TimeRatio != nil {
			said += "; " + m.TimeRatio.text("time to target")
		}
		return said
	}
	beside := fmt.Sprintf("in the end a loss %+.3f ± %.3f beside the single process (95 %% confidence)", m.Worse.Mean, m.Interval)
	var said string
	switch {
	case m.Runs < 2:
		said = fmt.Sprintf("in the end a loss %+.3f beside the single process: one seed says nothing", m.Worse.Mean)
	case !m.Resolved:
		said = beside + ": no difference is resolved"
	case m.Worse.Mean > 0:
		said = "converges worse: " + beside
	default:
		said = "converges better: " + beside
	}
	if m.StepsRatio != nil {
		said += "; " + m.StepsRatio.text("steps to target")
	}
	if m.TimeRatio != nil {
		said += "; " + m.TimeRatio.text("time")
	}
	return said
}

// Failed reports whether some run has failed.
func (r *Report) Failed() bool {
	return slices.ContainsFunc(r.Runs, func(run Result) bool { return run.Failed != "" })
}
