package report

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"xagg/lab/results"
)

// The claims that results are held against: the communication time that XAgg's authors report to save, as shares of that
// of aggregation in the switch alone, and how much worse it may be where there is nothing to save.
const (
	PaperLeast = 0.49
	PaperMost  = 0.82
	MaxWorse   = 0.02
	MaxRegret  = 0.05 // by how much longer rounds may take than with the best static choice where a plan follows what is measured
)

// about says what a mode is.
var about = map[string]string{
	"tcp":           "workers stream to a parameter server over TCP, through the same switch",
	"ring":          "ring all-reduce over TCP",
	"gloo":          "Gloo's all-reduce (PyTorch)",
	"mpi":           "MPI_Iallreduce (Open MPI)",
	"switch":        "the switch sums all ranks: what the others are compared with",
	"server":        "XDP servers sum all ranks",
	"hybrid":        "the switch sums the ranks that are fast, XDP servers those that are not",
	"server/quorum": "XDP servers sum; results do not wait for the slowest ranks, whose contributions come with a later round",
	"hybrid/quorum": "switch and XDP servers sum; results do not wait for the slowest ranks, whose contributions come with a later round",
	"server/async":  "XDP servers sum; a result is what is there, and waits only for ranks that are too far behind",
	"auto":          "a policy decides while the job runs",
	"auto/quorum":   "a policy decides while the job runs; results do not wait for the slowest ranks",
	"auto/async":    "a policy decides while the job runs; a result is what is there",
}

// Extra is a section about other measurements, and where and how these were made.
type Extra struct {
	Section Section
	Header  results.Header
}

// Compare returns the report of an analysis, with more sections where there are more measurements.
func Compare(a *results.Analysis, more ...*Extra) *Document {
	c := &comparison{Analysis: a, labs: map[string]bool{}}
	for _, sc := range a.Scenarios {
		c.labs[sc.Lab] = true
		for j := range sc.Jobs {
			c.cases = append(c.cases, caseOf{&sc, &sc.Jobs[j]})
		}
	}
	d := &Document{Title: "Ways of aggregating gradients, compared"}
	d.Sections = append(d.Sections, c.answer(), c.claims(), c.sync())
	d.Sections = append(d.Sections, c.regret()...)
	if len(a.Scenarios) > 0 {
		d.Sections = append(d.Sections, Section{ID: "scenarios", Title: "Scenarios", Level: 2, Blocks: []Block{{Paragraph: timesExplained}}})
	}
	for i := range a.Scenarios {
		d.Sections = append(d.Sections, c.scenario(i))
	}
	headers := a.Sessions
	for _, e := range more {
		d.Sections = append(d.Sections, e.Section)
		headers = append(headers[:len(headers):len(headers)], e.Header)
	}
	d.Sections = append(d.Sections, c.gaps(), c.method(headers), machine(headers))
	return d
}

const timesExplained = "Communication time is how long at least one gradient of a rank was ready whose result was not usable. " +
	"The floor is what it would be with an aggregator in the network that takes no time, under the consistency of the mode: what other ranks compute longer, " +
	"if results wait for them, and the gradients' bytes through the slowest link; ranks that add up by themselves, as in a ring, can be a little below it. Exposed communication is round time less " +
	"the slowest computation of the round; it is negative where nobody waits for the slowest. “Of the ideal” is the time of all rounds in multiples of " +
	"what it would be at the floor. All times are over all ranks, rounds and " +
	"repetitions, but for rounds that a rank skipped: one that is behind others goes through what it has missed without computing. p50 and p99 are the times that half and 1 % of them exceed. " +
	"The relative error is that of results to exact sums; in quorum and async of the sums over all rounds, which lack what was still to come at the " +
	"end. GB are 1e9 bytes of gradients as ranks give them."

// comparison is an analysis under report.
type comparison struct {
	*results.Analysis
	cases []caseOf
	labs  map[string]bool
}

// caseOf is a job of a scenario: what a claim is about.
type caseOf struct {
	scenario *results.ScenarioResult
	job      *results.JobResult
}

func (c *comparison) name(k caseOf) string {
	name := c.title(k.scenario)
	if len(k.scenario.Jobs) > 1 {
		name += " / " + k.job.Name
	}
	return name
}

func (c *comparison) title(sc *results.ScenarioResult) string {
	if len(c.labs) > 1 {
		return sc.Name + " (" + sc.Lab + ")"
	}
	return sc.Name
}

// estimate spells an estimate for a table of ratios.
func (c *comparison) estimate(e results.Estimate) Cell {
	switch {
	case e.Pairs == 0:
		return Cell{Text: "–", Mark: Absent}
	case e.Limited:
		return Cell{Text: ratio(e.Ratio), Note: "limited by CPU", Mark: Limited}
	case e.Pairs == 1:
		return Cell{Text: "not resolved", Note: "one pair: " + ratio(e.Ratio), Mark: Unresolved}
	case !e.Resolved(c.Limit):
		return Cell{Text: "not resolved", Note: interval(e), Mark: Unresolved}
	case e.Low == e.High:
		return Cell{Text: ratio(e.Ratio), Heat: heat(e.Ratio)}
	}
	return Cell{Text: ratio(e.Ratio), Note: interval(e), Heat: heat(e.Ratio)}
}

// absent says why there is no run of a mode.
func (c *comparison) absent(scenario, mode string) Cell {
	for _, g := range c.Gaps {
		if g.Scenario == scenario && g.Mode == mode {
			if g.Skipped {
				return Cell{Text: "skipped", Mark: Absent}
			}
			return Cell{Text: "failed", Mark: Absent}
		}
	}
	return Cell{Text: "–", Mark: Absent}
}

// matrix is a table of all cases and modes.
func (c *comparison) matrix(caption string, of func(results.Cell) results.Estimate, best bool) *Table {
	t := &Table{Caption: caption, Head: append([]string{"scenario"}, c.Modes...)}
	for _, k := range c.cases {
		row := Row{Head: c.name(k)}
		for m, mode := range c.Modes {
			cell := k.job.Cells[m]
			out := c.estimate(of(cell))
			switch {
			case cell.Runs == 0:
				out = c.absent(k.scenario.Name, mode)
			case best && out.Mark == "" && slices.Index(k.job.Best, m) == 0:
				out.Mark = Best
			case best && out.Mark == "" && slices.Contains(k.job.Best, m):
				out.Mark = AsGood
			}
			row.Cells = append(row.Cells, out)
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

func ofBase(c results.Cell) results.Estimate  { return c.OfBase }
func ofFloor(c results.Cell) results.Estimate { return c.OfFloor }

// claimable reports whether an estimate is good for a number in a sentence.
func (c *comparison) claimable(e results.Estimate) bool { return !e.Limited && e.Resolved(c.Limit) }

func (c *comparison) answer() Section {
	s := Section{ID: "answer", Title: "Which should I use, and what does it bring?", Level: 2}
	if len(c.cases) == 0 {
		s.Blocks = []Block{{Paragraph: "No run has finished: nothing can be said."}}
		return s
	}
	s.Blocks = append(s.Blocks, Block{Paragraph: c.runs()})
	var says []string
	for _, want := range []struct{ consistency, need string }{
		{"sync", "If every result needs all ranks' gradients (sync)"},
		{"quorum", "If results may go without the slowest ranks, whose gradients then come with a later round (quorum)"},
		{"async", "If results need not wait for anybody, up to a bound (async)"},
	} {
		if text := c.recommend(want.consistency); text != "" {
			says = append(says, want.need+": "+text)
		}
	}
	s.Blocks = append(s.Blocks, Block{List: says})
	if slices.Contains(c.Modes, results.Base) {
		s.Blocks = append(s.Blocks,
			Block{Table: c.matrix("Communication time in multiples of switch-only's (mode switch), with the interval of 95 %", ofBase, true)},
			Block{Paragraph: fmt.Sprintf("“Best” is the shortest, “as good” what nothing shows to be longer than that. “Not resolved” are ratios whose interval is "+
				"wider than %s %% of switch-only's time (of their own where that is longer), or of which there is only one pair.", strconv.FormatFloat(100*c.Limit, 'g', 4, 64))},
			Block{Figure: c.forest()},
		)
	} else {
		s.Blocks = append(s.Blocks, Block{Paragraph: "Mode switch was not run: there is nothing to compare the others with but the floor."})
	}
	s.Blocks = append(s.Blocks,
		Block{Table: c.matrix("Communication time in multiples of its floor, that with an ideal aggregator in the network under the mode's consistency", ofFloor, false)},
		Block{Table: c.modes()})
	return s
}

// runs says what there is to go by.
func (c *comparison) runs() string {
	skipped, failed := 0, 0
	for _, g := range c.Gaps {
		if g.Skipped {
			skipped += g.Runs
		} else {
			failed += g.Runs
		}
	}
	var wheres []string
	for _, h := range c.Sessions {
		where := fmt.Sprintf("%s; %s, %s", h.Where(), h.CPU, count(h.Cores, "core"))
		if !slices.Contains(wheres, where) {
			wheres = append(wheres, where)
		}
	}
	return fmt.Sprintf("From %s of %s and %s, up to %s of each (%s). %d of the runs were limited by CPU and carry no claim, %d failed, %d were skipped.", count(c.Finished, "run"),
		count(len(c.Scenarios), "scenario"), count(len(c.Modes), "mode"), count(c.Repetitions, "repetition"), strings.Join(wheres, ", and "), c.Limited, failed, skipped)
}

// recommend says which mode of a consistency is the fastest, and what it brings; "" if there is none.
func (c *comparison) recommend(consistency string) string {
	var modes, open []int // those with a resolved ratio, and without
	for m, mode := range c.Modes {
		switch {
		case results.Consistency(mode) != consistency || !slices.ContainsFunc(c.cases, func(k caseOf) bool { return k.job.Cells[m].Runs > 0 }):
		case slices.ContainsFunc(c.cases, func(k caseOf) bool { return c.claimable(k.job.Cells[m].OfBase) }):
			modes = append(modes, m)
		default:
			open = append(open, m)
		}
	}
	switch {
	case len(modes)+len(open) == 0:
		return ""
	case len(modes) == 0:
		return fmt.Sprintf("not resolved. Of %s no communication time is good for a claim; more repetitions, or a machine with more to spare, may tell.", list(pick(c.Modes, open)))
	}
	undecided := ""
	if len(open) > 0 {
		undecided = fmt.Sprintf(" Nothing is resolved of %s.", list(pick(c.Modes, open)))
	}
	// Modes are compared over the cases in which all of them are resolved.
	sums, common, ran := make([]float64, len(modes)), 0, 0
	for _, k := range c.cases {
		if slices.ContainsFunc(modes, func(m int) bool { return k.job.Cells[m].Runs > 0 }) {
			ran++
		}
		if slices.ContainsFunc(modes, func(m int) bool { return !c.claimable(k.job.Cells[m].OfBase) }) {
			continue
		}
		common++
		for i, m := range modes {
			sums[i] += math.Log(k.job.Cells[m].OfBase.Ratio)
		}
	}
	if common == 0 {
		return fmt.Sprintf("not resolved. There is no case in which the ratios of %s all are.", list(pick(c.Modes, modes))) + undecided
	}
	first := modes[slices.Index(sums, slices.Min(sums))]
	fastest, low, high, resolved := 0, math.Inf(1), 0.0, 0
	for _, k := range c.cases {
		if cell := k.job.Cells[first]; c.claimable(cell.OfBase) {
			resolved++
			low, high = min(low, cell.OfBase.Ratio), max(high, cell.OfBase.Ratio)
			if c.fastest(k, first, modes) {
				fastest++
			}
		}
	}
	text := c.Modes[first] + "."
	if len(modes) > 1 {
		text += fmt.Sprintf(" Of %s it takes the least communication time on the geometric mean of the %s in which all of them are resolved, and has the "+
			"lowest ratio in %d of the %d in which its own is.", list(pick(c.Modes, modes)), count(common, "case"), fastest, resolved)
	}
	if c.Modes[first] != results.Base {
		text += fmt.Sprintf(" It takes %s times switch-only's communication time (%s), resolved in %d of %s.", span(low, high, ratio), span(low, high, less), resolved, count(ran, "case"))
	}
	return text + undecided
}

// fastest reports whether a mode has the lowest ratio of some that are resolved.
func (c *comparison) fastest(k caseOf, mode int, of []int) bool {
	return !slices.ContainsFunc(of, func(m int) bool {
		return c.claimable(k.job.Cells[m].OfBase) && k.job.Cells[m].OfBase.Ratio < k.job.Cells[mode].OfBase.Ratio
	})
}

func pick(from []string, indices []int) []string {
	var out []string
	for _, i := range indices {
		out = append(out, from[i])
	}
	return out
}

// modes is a table of what the modes are and come to over all cases.
func (c *comparison) modes() *Table {
	t := &Table{Caption: "The modes over all cases (a case is a job of a scenario); ranges are of the resolved ratios", Head: []string{"mode", "cases", "resolved", "of switch-only", "of the floor", "best or as good in", "what it is"}}
	for m, mode := range c.Modes {
		ran, resolved, best := 0, 0, 0
		var base, floor []float64
		for _, k := range c.cases {
			cell := k.job.Cells[m]
			if cell.Runs == 0 {
				continue
			}
			ran++
			if c.claimable(cell.OfBase) {
				resolved++
				base = append(base, cell.OfBase.Ratio)
			}
			if c.claimable(cell.OfFloor) {
				floor = append(floor, cell.OfFloor.Ratio)
			}
			if slices.Contains(k.job.Best, m) {
				best++
			}
		}
		between := func(ratios []float64) Cell {
			if len(ratios) == 0 {
				return Cell{Text: "–", Mark: Absent}
			}
			return Cell{Text: span(slices.Min(ratios), slices.Max(ratios), ratio)}
		}
		t.Rows = append(t.Rows, Row{mode, []Cell{
			{Text: grouped(ran)}, {Text: grouped(resolved)}, between(base), between(floor), {Text: grouped(best)}, {Text: about[mode]},
		}})
	}
	return t
}

// claims holds the results against what was claimed.
func (c *comparison) claims() Section {
	s := Section{ID: "claims", Title: "Against what the paper claims", Level: 2}
	s.Blocks = append(s.Blocks, Block{Paragraph: fmt.Sprintf("XAgg's authors report %.0f to %.0f %% less communication time than aggregation in the switch alone "+
		"under heterogeneity. Where every result has to wait for all ranks most of that time is the stragglers', and nobody's to save: see the next section. A case counts here if its whole interval is on "+
		"one side of the bound; runs that the machine limited do not count. Of a heterogeneous scenario with several jobs all are cases, also those whose "+
		"ranks are alike.", 100*PaperLeast, 100*PaperMost)})
	t := &Table{Caption: "Communication time against switch-only's",
		Head: []string{"mode", "heterogeneous cases", fmt.Sprintf("at least %.0f %% less", 100*PaperLeast), fmt.Sprintf("at least %.0f %% less", 100*PaperMost),
			"largest saving", "homogeneous cases", fmt.Sprintf("at most %.0f %% worse", 100*MaxWorse)}}
	for m, mode := range c.Modes {
		if slices.Contains([]string{results.Base, "tcp", "ring", "gloo", "mpi"}, mode) {
			continue
		}
		var uneven, even tally
		var least, most, worse tally
		saved := results.Estimate{}
		for _, k := range c.cases {
			e := k.job.Cells[m].OfBase
			switch {
			case e.Pairs == 0:
				continue
			case k.scenario.Heterogeneous:
				uneven.yes++
				least.add(e.AtMost(1 - PaperLeast))
				most.add(e.AtMost(1 - PaperMost))
				if c.claimable(e) && (saved.Pairs == 0 || e.Ratio < saved.Ratio) {
					saved = e
				}
			default:
				even.yes++
				worse.add(e.AtMost(1 + MaxWorse))
			}
		}
		if uneven.yes+even.yes == 0 {
			continue
		}
		largest := Cell{Text: "–", Mark: Absent}
		if saved.Pairs > 0 && saved.Ratio < 1 {
			largest = Cell{Text: less(saved.Ratio), Note: fmt.Sprintf("%.0f to %.0f %%", 100*(1-saved.High), 100*(1-saved.Low))}
		}
		t.Rows = append(t.Rows, Row{mode, []Cell{{Text: grouped(uneven.yes)}, least.cell(), most.cell(), largest, {Text: grouped(even.yes)}, worse.cell()}})
	}
	if len(t.Rows) == 0 {
		s.Blocks = append(s.Blocks, Block{Paragraph: "None of this project's modes was run beside switch-only."})
	} else {
		s.Blocks = append(s.Blocks, Block{Table: t})
	}
	return s
}

// tally counts verdicts.
type tally struct{ yes, no, open int }

func (t *tally) add(v results.Verdict) {
	switch v {
	case results.Yes:
		t.yes++
	case results.No:
		t.no++
	default:
		t.open++
	}
}

func (t *tally) cell() Cell {
	if t.yes+t.no+t.open == 0 {
		return Cell{Text: "–", Mark: Absent}
	}
	cell := Cell{Text: fmt.Sprintf("%d of %d", t.yes, t.yes+t.no+t.open)}
	if t.open > 0 {
		cell.Note = fmt.Sprintf("%d not resolved", t.open)
	}
	return cell
}

// sync says what can be gained where all ranks' gradients are needed.
func (c *comparison) sync() Section {
	s := Section{ID: "sync", Title: "What sync can gain, and what it cannot", Level: 2}
	s.Blocks = append(s.Blocks, Block{Paragraph: "When every result needs all ranks' gradients, a straggler's lag is communication time of all others, wherever the sum is " +
		"made. What an aggregator in the network can gain is the rest, what switch-only takes above " +
		"the floor; a negative gain is a loss. More can be had only where results may go without a rank."})
	base := slices.Index(c.Modes, results.Base)
	if base < 0 {
		return s
	}
	t := &Table{Caption: "Sync: communication time of switch-only, its floor, and what the fastest other sync mode gains",
		Head: []string{"scenario", "switch-only (ms)", "floor (ms)", "most that can be gained", "gained", "by"}}
	for _, k := range c.cases {
		cell := k.job.Cells[base]
		if cell.Runs == 0 {
			continue
		}
		row := Row{Head: c.name(k), Cells: []Cell{{Text: milliseconds(cell.Comm.Mean)}, {Text: milliseconds(cell.Floor.Mean)}}}
		switch e := cell.OfFloor; {
		case e.Pairs == 0:
			row.Cells = append(row.Cells, Cell{Text: "–", Mark: Absent})
		case cell.Limited:
			row.Cells = append(row.Cells, Cell{Text: gain(1 / e.Ratio), Note: "limited by CPU", Mark: Limited})
		default:
			row.Cells = append(row.Cells, Cell{Text: gain(1 / e.Ratio)})
		}
		fastest := -1
		for m, mode := range c.Modes {
			if results.Consistency(mode) == "sync" && m != base && c.claimable(k.job.Cells[m].OfBase) &&
				(fastest < 0 || k.job.Cells[m].OfBase.Ratio < k.job.Cells[fastest].OfBase.Ratio) {
				fastest = m
			}
		}
		if fastest < 0 {
			row.Cells = append(row.Cells, Cell{Text: "not resolved", Mark: Unresolved}, Cell{Text: "–", Mark: Absent})
		} else {
			e := k.job.Cells[fastest].OfBase
			row.Cells = append(row.Cells, Cell{Text: gain(e.Ratio), Note: gain(e.High) + " to " + gain(e.Low)}, Cell{Text: c.Modes[fastest]})
		}
		t.Rows = append(t.Rows, row)
	}
	s.Blocks = append(s.Blocks, Block{Table: t})
	return s
}

// regret holds modes whose plan follows what is measured against each static choice; there is no such section without both.
func (c *comparison) regret() []Section {
	t := &Table{Caption: "Mean time of a round in multiples of that with each static choice, with the interval of 95 %", Head: []string{"scenario", "mode", "round (ms)"}}
	for _, static := range results.Static {
		t.Head = append(t.Head, "of "+static)
	}
	t.Head = append(t.Head, "upper bound, of the best", fmt.Sprintf("at most %.0f %% more", 100*MaxRegret), fmt.Sprintf("alike ranks: at most %.0f %% more than switch", 100*MaxWorse))
	for _, k := range c.cases {
		for _, r := range k.job.Regrets {
			mode := c.Modes[r.Mode]
			row := Row{Head: c.name(k), Cells: []Cell{{Text: mode}, {Text: milliseconds(1 / k.job.Cells[r.Mode].Rate)}}}
			worst, even := r.Worst(), Cell{Text: "–", Mark: Absent}
			for _, static := range results.Static {
				cell := Cell{Text: "–", Mark: Absent}
				for other, e := range r.Of {
					if way, _, _ := strings.Cut(c.Modes[other], "/"); way != static {
						continue
					}
					cell = c.estimate(e)
					if c.Modes[other] == results.Base && !k.scenario.Heterogeneous {
						even = Cell{Text: e.AtMost(1 + MaxWorse).String()}
					}
				}
				row.Cells = append(row.Cells, cell)
			}
			bound := Cell{Text: "–", Mark: Absent}
			if !math.IsInf(worst, 1) && worst > 0 {
				bound = Cell{Text: ratio(worst)}
			}
			row.Cells = append(row.Cells, bound, Cell{Text: r.AtMost(1 + MaxRegret).String()}, even)
			t.Rows = append(t.Rows, row)
		}
	}
	if len(t.Rows) == 0 {
		return nil
	}
	return []Section{{ID: "regret", Title: "Does the policy choose well?", Level: 2, Blocks: []Block{
		{Paragraph: "A plan that follows what is measured begins without knowing anything, and is held against every choice that stays as it is. Static hybrid is told who is " +
			"slow. The mean time of a round is what all measured rounds together took, by their number. Each ratio is of pairs, as all ratios here; which static choice " +
			"is the best is not looked up in the same measurements: the upper bound is the largest of all of them, so that it holds against each, whichever is the best."},
		{Table: t}}}}
}

// gain spells what a ratio saves.
func gain(r float64) string { return fmt.Sprintf("%.0f %%", math.Round(100*(1-r))+0) } // no -0

func (c *comparison) scenario(i int) Section {
	sc := &c.Scenarios[i]
	id := fmt.Sprintf("s%d", i+1)
	s := Section{ID: id, Title: c.title(sc), Level: 3}
	if sc.About != "" {
		s.Blocks = append(s.Blocks, Block{Paragraph: sc.About})
	}
	for n := range sc.Jobs {
		job := &sc.Jobs[n]
		of := ""
		if len(sc.Jobs) > 1 {
			of = " of job " + job.Name
		}
		s.Blocks = append(s.Blocks,
			Block{Paragraph: fmt.Sprintf("%s%s: %s with %s in %s a round (%s), %s measured; %s.", strings.ToUpper(sc.Lab[:1]), sc.Lab[1:]+of,
				count(job.Ranks, "rank"), count(job.Values, "value"), count(job.Buckets, "bucket"), memory(4*uint64(job.Values)), count(job.Rounds, "round"), seeds(sc.Seeds))},
			Block{Figure: c.times(fmt.Sprintf("%s-j%d-times", id, n+1), "Communication time"+of, job)},
			Block{Table: c.timeTable("Times"+of, job)},
			Block{Table: c.trafficTable("Traffic and memory"+of, sc, job)})
		s.Blocks = append(s.Blocks, c.decisions(of, job)...)
		if f := c.open(fmt.Sprintf("%s-j%d-open", id, n+1), "Slots held over time"+of, job); f != nil {
			s.Blocks = append(s.Blocks, Block{Figure: f})
		}
	}
	if f := c.cpu(id+"-cpu", sc); f != nil {
		s.Blocks = append(s.Blocks, Block{Figure: f})
	}
	s.Blocks = append(s.Blocks, Block{Table: c.costTable(sc)})
	if sc.YAML != "" {
		s.Blocks = append(s.Blocks, Block{Listing: &Listing{"The scenario", sc.YAML}})
	}
	return s
}

// seeds spells the seeds of repetitions.
func seeds(all []uint64) string {
	if len(all) == 1 {
		return "seed " + numbers(all)
	}
	return "seeds " + numbers(all)
}

func (c *comparison) timeTable(caption string, job *results.JobResult) *Table {
	t := &Table{Caption: caption, Head: []string{"mode", "communication (ms)", "p50", "p99", "floor (ms)", "of the floor", "of switch-only", "round (ms)",
		"of the ideal", "exposed (ms)", "goodput (Mbit/s)", "rounds/s"}}
	for m, mode := range c.Modes {
		cell := job.Cells[m]
		if cell.Runs == 0 {
			continue
		}
		t.Rows = append(t.Rows, Row{mode, []Cell{
			{Text: milliseconds(cell.Comm.Mean)}, {Text: milliseconds(cell.Comm.P50)}, {Text: milliseconds(cell.Comm.P99)}, {Text: milliseconds(cell.Floor.Mean)},
			c.estimate(cell.OfFloor), c.estimate(cell.OfBase), {Text: milliseconds(cell.Round.Mean)}, c.estimate(cell.Span), {Text: milliseconds(cell.Exposed)},
			{Text: three(cell.Goodput / 1e6)}, {Text: three(cell.Rate)},
		}})
	}
	return t
}

// decisions says what policies have decided: how often, and of each run what and why; nothing where no plan follows what is measured.
func (c *comparison) decisions(of string, job *results.JobResult) []Block {
	t := &Table{Caption: "Ranks that the policy has moved" + of + "; rounds below 0 are warm-up", Head: []string{"mode", "runs", "moves a run", "first move in round", "ranks that were moved"}}
	var text strings.Builder
	for m, mode := range c.Modes {
		decided := job.Cells[m].Decided
		if len(decided) == 0 {
			continue
		}
		var moves, first []int
		var ranks []uint64
		for _, d := range decided {
			fmt.Fprintf(&text, "%s, repetition %d:", mode, d.Repetition+1)
			if len(d.Moves) == 0 {
				text.WriteString(" nobody is moved")
			}
			text.WriteString("\n")
			for i, move := range d.Moves {
				fmt.Fprintf(&text, "  round %d: rank %d to the %s: %s\n", move.Round, move.Rank, move.To, move.Why)
				if i == 0 {
					first = append(first, move.Round)
				}
				if rank := uint64(move.Rank); !slices.Contains(ranks, rank) {
					ranks = append(ranks, rank)
				}
			}
			for _, q := range d.Quorums {
				fmt.Fprintf(&text, "  round %d: a quorum of %d, chunks wait %s ms for more\n", q.Round, q.Ranks, milliseconds(q.Wait))
			}
			moves = append(moves, len(d.Moves))
		}
		who := Cell{Text: numbers(ranks)}
		if len(ranks) == 0 {
			who = Cell{Text: "–", Mark: Absent}
		}
		t.Rows = append(t.Rows, Row{mode, []Cell{{Text: grouped(len(decided))}, between(moves), between(first), who}})
	}
	if len(t.Rows) == 0 {
		return nil
	}
	return []Block{{Table: t}, {Listing: &Listing{"What the policy has decided" + of + ", and why", text.String()}}}
}

// between spells the smallest and the greatest of some numbers.
func between(all []int) Cell {
	if len(all) == 0 {
		return Cell{Text: "–", Mark: Absent}
	}
	return Cell{Text: span(float64(slices.Min(all)), float64(slices.Max(all)), func(x float64) string { return strconv.Itoa(int(x)) })}
}

func (c *comparison) trafficTable(caption string, sc *results.ScenarioResult, job *results.JobResult) *Table {
	t := &Table{Caption: caption, Head: []string{"mode", "packets/round", "resent (%)", "partials/round", "late (%)", "skipped (%)", "switch slots", "server memory", "relative error"}}
	for m, mode := range c.Modes {
		cell := job.Cells[m]
		if cell.Runs == 0 {
			continue
		}
		row := Row{Head: mode}
		if cell.Packets == 0 { // they are the kernel's business
			row.Cells = []Cell{{Text: "–", Mark: Absent}, {Text: "–", Mark: Absent}}
		} else {
			row.Cells = []Cell{{Text: three(cell.Packets)}, {Text: percent(cell.Resends)}}
		}
		row.Cells = append(row.Cells, Cell{Text: three(sc.Costs[m].Partials)}, Cell{Text: percent(cell.Late)}, Cell{Text: percent(cell.Skipped)}, Cell{Text: grouped(cell.Slots)},
			Cell{Text: memory(cell.Memory)}, Cell{Text: fmt.Sprintf("%.1e", cell.Error)})
		t.Rows = append(t.Rows, row)
	}
	return t
}

func (c *comparison) costTable(sc *results.ScenarioResult) *Table {
	t := &Table{Caption: "CPU seconds per GB by role; XDP programs are part of the others", Head: append([]string{"mode"}, results.Roles...)}
	t.Head = append(t.Head, "all", "XDP programs", "busiest core (%)", "stolen (%)", "runs limited")
	for m, mode := range c.Modes {
		cost := sc.Costs[m]
		if cost.Runs == 0 {
			continue
		}
		row := Row{Head: mode}
		for _, role := range results.Roles {
			row.Cells = append(row.Cells, Cell{Text: three(cost.PerGB[role])})
		}
		limited := Cell{Text: fmt.Sprintf("%d of %d", cost.Limited, cost.Runs)}
		if cost.Limited > 0 {
			limited.Mark = Limited
		}
		row.Cells = append(row.Cells, Cell{Text: three(cost.Total())}, Cell{Text: three(cost.BPF)}, Cell{Text: fmt.Sprintf("%.0f", 100*cost.Busiest)},
			Cell{Text: fmt.Sprintf("%.1f", 100*cost.Stolen)}, limited)
		t.Rows = append(t.Rows, row)
	}
	return t
}

// gaps says what was not measured, and what was and does not count.
func (c *comparison) gaps() Section {
	s := Section{ID: "gaps", Title: "What is missing, and what does not count", Level: 2}
	if len(c.Gaps) == 0 {
		s.Blocks = append(s.Blocks, Block{Paragraph: "No run was skipped, and none failed."})
	} else {
		t := &Table{Caption: "Runs that were skipped or failed", Head: []string{"mode", "runs", "", "why", "scenarios"}}
		type key struct{ mode, what, why string }
		rows := map[key]*Row{}
		runs := map[key]int{}
		var order []key
		for _, g := range c.Gaps {
			k := key{g.Mode, "failed", g.Reason}
			if g.Skipped {
				k.what = "skipped"
			}
			if rows[k] == nil {
				rows[k] = &Row{g.Mode, []Cell{{}, {Text: k.what}, {Text: g.Reason}, {}}}
				order = append(order, k)
			} else {
				rows[k].Cells[3].Text += ", "
			}
			runs[k] += g.Runs
			rows[k].Cells[0].Text = grouped(runs[k])
			rows[k].Cells[3].Text += g.Scenario
		}
		for _, k := range order {
			t.Rows = append(t.Rows, *rows[k])
		}
		s.Blocks = append(s.Blocks, Block{Table: t})
	}
	limits := fmt.Sprintf("A run is limited by CPU when a core was busy for more than %.0f %% of its time, or the hypervisor took more than %.0f %%: the machine, and not the network, "+
		"may then have decided how long it took. ", 100*results.MaxBusy, 100*results.MaxStolen)
	if c.Limited == 0 {
		s.Blocks = append(s.Blocks, Block{Paragraph: limits + fmt.Sprintf("None of %s was.", count(c.Finished, "finished run"))})
		return s
	}
	t := &Table{Caption: "Runs that were limited by CPU", Head: []string{"scenario", "mode", "limited", "busiest core (%)", "stolen (%)", "what becomes of them"}}
	for i := range c.Scenarios {
		sc := &c.Scenarios[i]
		for m, mode := range c.Modes {
			cost := sc.Costs[m]
			if cost.Limited == 0 {
				continue
			}
			becomes := "left out"
			if sc.Jobs[0].Cells[m].Limited {
				becomes = "shown, marked, without claim"
			}
			t.Rows = append(t.Rows, Row{c.title(sc), []Cell{{Text: mode}, {Text: fmt.Sprintf("%d of %d", cost.Limited, cost.Runs)},
				{Text: fmt.Sprintf("%.0f", 100*cost.Busiest)}, {Text: fmt.Sprintf("%.1f", 100*cost.Stolen)}, {Text: becomes}}})
		}
	}
	s.Blocks = append(s.Blocks, Block{Paragraph: limits + fmt.Sprintf("%d of %s were. They are left out where at least two others of the same scenario and mode are there; "+
		"otherwise they are shown and marked, and carry no claim.", c.Limited, count(c.Finished, "finished run"))}, Block{Table: t})
	return s
}

func (c *comparison) method(headers []results.Header) Section {
	s := Section{ID: "method", Title: "How it was measured and computed", Level: 2}
	var emulated []string
	for _, h := range headers {
		for _, text := range h.Emulated {
			if !slices.Contains(emulated, text) {
				emulated = append(emulated, text)
			}
		}
	}
	if len(emulated) > 0 {
		s.Blocks = append(s.Blocks, Block{Paragraph: "What is emulated, and what that means for the numbers:"}, Block{List: emulated})
	}
	s.Blocks = append(s.Blocks, Block{List: []string{
		fmt.Sprintf("Ratios are geometric means over up to %s. The two runs of a pair belong to one repetition: they are neighbours in time and have the same seed, so "+
			"that the computations that it draws, and whatever slows the machine for a while, are in both.", count(c.Repetitions, "pair")),
		"Intervals are Student's, of the logarithms of the pairs' ratios, and of 95 % each. With as many intervals as there are here some do not hold the truth: one in twenty is " +
			"expected not to. Bootstrap intervals of so few repetitions would be too narrow (Hesterberg, What Teachers Should Know About the Bootstrap, The American Statistician 69, 2015).",
		"The rounds of a run are no repetitions of the experiment (Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, ISMM 2013): they show how times are " +
			"distributed, and do not narrow an interval.",
		"Floors are computed from the scenario and the seed: links carry only the gradients' bytes, and nothing takes time but links and computation.",
	}})
	return s
}

// machine says where measurements were made.
func machine(headers []results.Header) Section {
	s := Section{ID: "machine", Title: "Machine, versions and command lines", Level: 2}
	for i, h := range headers {
		t := &Table{Caption: fmt.Sprintf("Session %d, %s", i+1, h.Time.UTC().Format(time.DateTime+" UTC")), Head: []string{"", ""}}
		add := func(head, text string) {
			if text == "" {
				text = "unknown"
			}
			t.Rows = append(t.Rows, Row{head, []Cell{{Text: text}}})
		}
		add("command line", strings.Join(h.Command, " "))
		add("git revision", h.Revision)
		if h.CPU == "" {
			h.CPU = "unknown CPU"
		}
		add("CPU", fmt.Sprintf("%s, %s", h.CPU, count(h.Cores, "core")))
		add("memory", memory(h.Memory))
		add("kernel", h.Kernel)
		add("lab", h.Lab)
		if h.Switch != "" { // an aggregator by itself has none
			add("switch", h.Switch)
		}
		add("XDP mode", h.XDPMode)
		for _, name := range slices.Sorted(maps.Keys(h.Versions)) {
			add(name, h.Versions[name])
		}
		add("repetitions", grouped(h.Repeat))
		if len(h.Modes) > 0 {
			add("modes", strings.Join(h.Modes, ", "))
		}
		s.Blocks = append(s.Blocks, Block{Table: t})
	}
	return s
}
