package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"xagg/lab/results"
)

// Geometry of pictures: pixels from top to bottom, percent from left to right.
const (
	left, width = 1.0, 97.0 // of the area of values
	rowHeight   = 42
	axisHeight  = 40
)

// scale is where values are on the axis.
type scale struct {
	low, high float64
	log       bool
}

// x returns the place of a value, in percent of the picture's width.
func (s scale) x(v float64) float64 {
	low, high := s.low, s.high
	if s.log {
		low, high, v = math.Log(low), math.Log(high), math.Log(max(v, low))
	}
	return left + width*min(max((v-low)/(high-low), 0), 1)
}

func at(x float64) string { return fmt.Sprintf("%.2f%%", x) }

// linear returns a scale from 0 to a bit above the greatest value, and its ticks, on which values are multiplied by
// factor.
func linear(greatest, factor float64) (scale, []Tick) {
	s, values := round(greatest)
	var ticks []Tick
	for _, v := range values {
		ticks = append(ticks, Tick{at(s.x(v)), tick(factor * v)})
	}
	return s, ticks
}

// tick spells a value that is round.
func tick(v float64) string { return strconv.FormatFloat(v, 'g', 4, 64) }

// round returns a scale from 0 to a bit above the greatest value, and 3 to 6 round values on it.
func round(greatest float64) (scale, []float64) {
	if greatest <= 0 {
		greatest = 1
	}
	step := math.Pow(10, math.Floor(math.Log10(greatest)))
	for _, part := range []float64{0.2, 0.5, 1} {
		if greatest/(part*step) <= 6 {
			step *= part
			break
		}
	}
	s := scale{high: greatest * 1.02}
	var values []float64
	for i := 0.0; i*step <= s.high; i++ {
		values = append(values, i*step)
	}
	return s, values
}

// colours are the classes of modes' colours: the same in every report.
var colours = []string{"tcp", "ring", "switch", "server", "hybrid", "hybrid/quorum", "server/quorum", "server/async", "gloo", "mpi", "auto"}

func colour(mode string) string {
	if i := slices.Index(colours, mode); i >= 0 {
		return fmt.Sprintf("m%d", i)
	}
	return fmt.Sprintf("m%d", len(colours))
}

// times draws communication times by mode: the box of the middle half, the range from 1 to 99 %, the median, the mean, and
// the floor.
func (c *comparison) times(id, title string, job *results.JobResult) *Figure {
	f := &Figure{ID: id, Title: title, Axis: "communication time (ms)",
		About: "By mode: the pale bar is from the time that 1 % fall below to p99, the dark one the middle half; the disk is the mean.",
		Key:   []Key{{Colour: "floor", Text: "floor, of an ideal aggregator in the network"}, {Colour: "ink", Text: "median"}}}
	greatest := 0.0
	for _, cell := range job.Cells {
		if cell.Runs > 0 {
			greatest = max(greatest, cell.Comm.P99, cell.Comm.Mean, cell.Floor.Mean)
		}
	}
	var s scale
	s, f.Ticks = linear(greatest, 1e3)
	g := Group{}
	y := 4
	for m, mode := range c.Modes {
		cell := job.Cells[m]
		if cell.Runs == 0 {
			continue
		}
		bar := func(from, to float64, faint, inset int) Bar {
			return Bar{X: at(s.x(from)), Width: at(max(s.x(to)-s.x(from), 0.3)), Y: y + 18 + inset, Height: 16 - 2*inset, Colour: colour(mode), Faint: faint}
		}
		label := fmt.Sprintf("mean %s, p50 %s, p99 %s, floor %s", milliseconds(cell.Comm.Mean), milliseconds(cell.Comm.P50), milliseconds(cell.Comm.P99),
			milliseconds(cell.Floor.Mean))
		if cell.Limited {
			label += ", limited by CPU"
		}
		g.Marks = append(g.Marks, Marks{
			Name: mode, Label: label, LabelX: at(left), LabelY: y + 12, Anchor: "start", Title: mode + ": " + label + " (ms)",
			Bars: []Bar{bar(cell.Comm.P1, cell.Comm.P99, 2, 3), bar(cell.Comm.P25, cell.Comm.P75, 1, 0),
				{X: at(s.x(cell.Comm.P50) - 0.1), Width: "0.2%", Y: y + 18, Height: 16, Colour: "ink"},
				{X: at(s.x(cell.Floor.Mean) - 0.15), Width: "0.3%", Y: y + 15, Height: 22, Colour: "floor"}},
			Dots: []Dot{{X: at(s.x(cell.Comm.Mean)), Y: y + 26, Colour: colour(mode)}},
		})
		y += rowHeight
	}
	f.Groups = []Group{g}
	f.Floor, f.Height = y, y+axisHeight
	return f
}

// forest draws the ratios of all cases and modes to switch-only with their intervals.
func (c *comparison) forest() *Figure {
	f := &Figure{ID: "ratios", Title: "Communication time in multiples of switch-only's", Axis: "times switch-only's communication time (logarithmic)",
		About: "By scenario and mode: a disk at the ratio, a bar over its interval; pale without a disk where it is not resolved. The lines are switch-only, and the 49 and 82 % less of the paper."}
	s := scale{low: 1 - PaperMost, high: 1, log: true}
	for _, k := range c.cases {
		for _, cell := range k.job.Cells {
			if e := cell.OfBase; e.Pairs > 0 && !e.Limited {
				s.low, s.high = min(s.low, e.Ratio), max(s.high, e.Ratio)
			}
		}
	}
	s.low, s.high = max(s.low/1.3, 0.01), min(s.high*1.3, 100)
	for _, v := range []float64{0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50} {
		if v >= s.low && v <= s.high {
			f.Ticks = append(f.Ticks, Tick{at(s.x(v)), fmt.Sprint(v)})
		}
	}
	f.Lines = []Tick{{at(s.x(1)), results.Base}, {at(s.x(1 - PaperLeast)), fmt.Sprintf("%.0f %%", -100*PaperLeast)}, {at(s.x(1 - PaperMost)), fmt.Sprintf("%.0f %%", -100*PaperMost)}}
	const row, title = 14, 22
	y := 18
	for _, k := range c.cases {
		g := Group{Title: c.name(k), Y: y + 14}
		y += title
		for m, mode := range c.Modes {
			e := k.job.Cells[m].OfBase
			if mode == results.Base || e.Pairs == 0 || e.Limited {
				continue
			}
			from, to := s.x(e.Low), s.x(e.High)
			marks := Marks{Label: mode, LabelY: y + 11, Title: fmt.Sprintf("%s, %s: %s (%s)", c.name(k), mode, ratio(e.Ratio), interval(e))}
			marks.LabelX, marks.Anchor = at(to+1.2), "start"
			if to > 75 {
				marks.LabelX, marks.Anchor = at(from-1.2), "end"
			}
			if from < 25 && to > 75 { // on the bar
				marks.LabelX, marks.Anchor = at(50), "middle"
			}
			resolved := c.claimable(e)
			bar := Bar{X: at(from), Width: at(max(to-from, 0.3)), Y: y + 5, Height: 4, Colour: colour(mode), Faint: 1}
			if resolved {
				marks.Dots = []Dot{{X: at(s.x(e.Ratio)), Y: y + 7, Colour: colour(mode)}}
			} else {
				marks.Label += " (not resolved)"
				bar.Faint = 2
			}
			marks.Bars = []Bar{bar}
			g.Marks = append(g.Marks, marks)
			y += row
		}
		f.Groups = append(f.Groups, g)
		y += 6
	}
	f.Floor, f.Height = y, y+axisHeight
	return f
}

// cpu draws CPU time per GB by mode, stacked by role.
func (c *comparison) cpu(id string, sc *results.ScenarioResult) *Figure {
	f := &Figure{ID: id, Title: "CPU seconds per GB by role", Axis: "CPU seconds per GB of gradients", About: "By mode: a bar whose parts are the roles, in the order of the legend."}
	greatest := 0.0
	for _, cost := range sc.Costs {
		greatest = max(greatest, cost.Total())
	}
	if greatest == 0 {
		return nil
	}
	for i, role := range results.Roles {
		f.Key = append(f.Key, Key{Colour: fmt.Sprintf("r%d", i), Text: role})
	}
	var s scale
	s, f.Ticks = linear(greatest, 1)
	g := Group{}
	y := 4
	for m, mode := range c.Modes {
		cost := sc.Costs[m]
		if cost.Runs == 0 {
			continue
		}
		marks := Marks{Name: mode, Label: three(cost.Total()), LabelX: at(left), LabelY: y + 12, Anchor: "start"}
		sum := 0.0
		var parts []string
		for i, role := range results.Roles {
			v := cost.PerGB[role]
			if v <= 0 {
				continue
			}
			marks.Bars = append(marks.Bars, Bar{X: at(s.x(sum)), Width: at(s.x(sum+v) - s.x(sum)), Y: y + 18, Height: 14, Colour: fmt.Sprintf("r%d", i)})
			sum += v
			parts = append(parts, role+" "+three(v))
		}
		marks.Title = mode + ": " + strings.Join(parts, ", ") + " s/GB"
		g.Marks = append(g.Marks, marks)
		y += rowHeight - 2
	}
	f.Groups = []Group{g}
	f.Floor, f.Height = y, y+axisHeight
	return f
}

// open draws how many chunks were open on servers over a run; nil if nobody looked.
func (c *comparison) open(id, title string, job *results.JobResult) *Figure {
	f := &Figure{ID: id, Title: title, Axis: "seconds since the run began",
		About: "Chunks that were open on servers when they were looked at, in one run of each mode; each row from 0 to the figure beside its mode."}
	greatest := 0.0
	for _, cell := range job.Cells {
		for _, o := range cell.Open {
			greatest = max(greatest, o.Time)
		}
	}
	if greatest == 0 {
		return nil
	}
	var s scale
	s, f.Ticks = linear(greatest, 1)
	g := Group{}
	y := 4
	for m, mode := range c.Modes {
		open := job.Cells[m].Open
		if len(open) < 2 {
			continue
		}
		most := 1
		for _, o := range open {
			most = max(most, o.Server)
		}
		var line strings.Builder
		for _, o := range open {
			fmt.Fprintf(&line, "%.1f,%.1f ", 10*s.x(o.Time), 100-100*float64(o.Server)/float64(most))
		}
		label := fmt.Sprintf("at most %s", grouped(slices.MaxFunc(open, func(a, b results.Sample) int { return a.Server - b.Server }).Server))
		g.Marks = append(g.Marks, Marks{Name: mode, Label: label, LabelX: at(left), LabelY: y + 12, Anchor: "start", Title: mode + ": " + label, Curves: []Curve{
			{Y: y + 18, Height: 26, Points: strings.TrimSpace(line.String()), Colour: "r1"},
		}})
		y += rowHeight + 10
	}
	if len(g.Marks) == 0 {
		return nil
	}
	f.Groups = []Group{g}
	f.Floor, f.Height = y, y+axisHeight
	return f
}
