package report

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"

	"xagg/lab/results"
)

// trainVersion is the schema version of training reports that Train knows.
const trainVersion = 1

// training is what Train reads of the JSON of 'xagg bench train'.
type training struct {
	SchemaVersion int            `json:"schema_version"`
	Kind          string         `json:"kind"`
	Complete      bool           `json:"complete"`
	Header        results.Header `json:"header"`
	Settings      struct {
		Ranks   int     `json:"ranks"`
		Rounds  int     `json:"rounds"`
		Batch   int     `json:"batch"`
		Rate    float64 `json:"rate"`
		Skew    float64 `json:"skew"`
		Seed    uint64  `json:"seed"`
		Seeds   int     `json:"seeds"`
		Quorum  int     `json:"quorum"`
		Target  float64 `json:"target"`
		Compute struct {
			Slow   map[int]float64
			Moving *struct {
				Every  int
				Factor float64
			}
		} `json:"compute"`
	} `json:"settings"`
	Task struct {
		About      string `json:"about"`
		Parameters int    `json:"parameters"`
	} `json:"task"`
	Modes []struct {
		Name            string  `json:"name"`
		Runs            int     `json:"runs"`
		Failed          int     `json:"failed"`
		Reached         int     `json:"reached"`
		StepsToTarget   meanOf  `json:"steps_to_target"`
		SecondsToTarget meanOf  `json:"seconds_to_target"`
		Seconds         meanOf  `json:"seconds"`
		Loss            meanOf  `json:"loss"`
		Accuracy        meanOf  `json:"accuracy"`
		Late            meanOf  `json:"late"`
		Skipped         meanOf  `json:"skipped"`
		Worse           meanOf  `json:"worse"`
		Resolved        bool    `json:"resolved"`
		Distance        float64 `json:"distance"`
	} `json:"modes"`
	Runs []struct {
		Mode   string `json:"mode"`
		Name   string `json:"name"`
		Seed   uint64 `json:"seed"`
		Failed string `json:"failed"`
		Points []struct {
			Step    int     `json:"step"`
			Seconds float64 `json:"seconds"`
			Loss    float64 `json:"loss"`
		} `json:"points"`
	} `json:"runs"`
}

// meanOf is a mean over seeds, and the sample standard deviation.
type meanOf struct {
	Mean float64 `json:"mean"`
	SD   float64 `json:"sd"`
}

// cell spells the mean of values that are multiplied by factor.
func (m meanOf) cell(factor float64) Cell {
	return Cell{Text: three(factor * m.Mean), Note: "± " + three(factor*m.SD)}
}

// Train returns the section about what 'xagg bench train -o json' has written. name is the file's, for errors.
func Train(name string, src []byte) (*Extra, error) {
	var t training
	if err := decode(name, src, &t, "train", trainVersion); err != nil {
		return nil, err
	}
	set := &t.Settings
	about := fmt.Sprintf("A network with %s parameters is trained on %s: %s, %s, batches of %d, learning rate %g, skew %g", grouped(t.Task.Parameters), t.Task.About,
		count(set.Ranks, "rank"), count(set.Rounds, "step"), set.Batch, set.Rate, set.Skew)
	for rank := range set.Ranks {
		if factor, ok := set.Compute.Slow[rank]; ok {
			about += fmt.Sprintf(", rank %d computes %g times as long", rank, factor)
		}
	}
	if m := set.Compute.Moving; m != nil {
		about += fmt.Sprintf(", a rank that changes every %s computes %g times as long", count(m.Every, "step"), m.Factor)
	}
	about += fmt.Sprintf("; a quorum of %d; %s, the first is %d. Beside it a single process sums the ranks' gradients itself. ", set.Quorum, count(set.Seeds, "seed"), set.Seed)
	if set.Target == 0 {
		about += "The target is the loss on held-out samples that the single process has after two thirds of its steps, seed by seed."
	} else {
		about += fmt.Sprintf("The target is a loss of %g on held-out samples.", set.Target)
	}
	if !t.Complete {
		about += " It was interrupted: not all runs were made."
	}
	table := &Table{Caption: "What training comes to, as means over seeds ± their standard deviation; loss and accuracy are on held-out samples",
		Head: []string{"mode", "reached the target", "steps to it", "seconds to it", "all steps (s)", "loss", "beside one process", "accuracy (%)", "late (%)", "skipped (%)"}}
	for _, m := range t.Modes {
		if m.Runs == 0 {
			row := Row{Head: m.Name, Cells: []Cell{{Text: "failed", Mark: Absent}}}
			for len(row.Cells) < len(table.Head)-1 {
				row.Cells = append(row.Cells, Cell{Text: "–", Mark: Absent})
			}
			table.Rows = append(table.Rows, row)
			continue
		}
		steps, seconds := Cell{Text: "–", Mark: Absent}, Cell{Text: "–", Mark: Absent}
		if m.Reached > 0 {
			steps, seconds = m.StepsToTarget.cell(1), m.SecondsToTarget.cell(1)
		}
		worse := Cell{Text: fmt.Sprintf("%+.3f", m.Worse.Mean), Note: fmt.Sprintf("± %.3f", m.Worse.SD)}
		switch {
		case math.Abs(m.Worse.Mean)+m.Worse.SD < 5e-4:
			worse = Cell{Text: "0.000"}
		case !m.Resolved:
			worse = Cell{Text: "not resolved", Note: worse.Text + " " + worse.Note, Mark: Unresolved}
		}
		table.Rows = append(table.Rows, Row{m.Name, []Cell{{Text: fmt.Sprintf("%d of %d", m.Reached, m.Runs)}, steps, seconds, m.Seconds.cell(1), m.Loss.cell(1), worse,
			m.Accuracy.cell(100), {Text: percent(m.Late.Mean)}, {Text: percent(m.Skipped.Mean)}}})
	}
	e := &Extra{Header: t.Header, Section: Section{ID: "train", Title: "Does training still converge?", Level: 2, Blocks: []Block{{Paragraph: about}, {Table: table},
		{Paragraph: "“Beside one process” is how much larger the loss is in the end than that of the single process with the same seed; it is resolved if the interval of 95 % " +
			"does not contain 0: Student's, of the differences seed by seed."}}}}
	if f := t.curves("train-seconds", "Loss against wall-clock time", "seconds", true); f != nil {
		e.Section.Blocks = append(e.Section.Blocks, Block{Figure: f})
	}
	if f := t.curves("train-steps", "Loss against steps", "steps", false); f != nil {
		e.Section.Blocks = append(e.Section.Blocks, Block{Figure: f})
	}
	var failed []string
	for _, r := range t.Runs {
		if r.Failed != "" {
			failed = append(failed, fmt.Sprintf("%s, seed %d, failed: %s", r.Name, r.Seed, r.Failed))
		}
	}
	if len(failed) > 0 {
		e.Section.Blocks = append(e.Section.Blocks, Block{List: failed})
	}
	return e, nil
}

// decode reads a JSON report of a kind, "" if it says none.
func decode(name string, src []byte, v any, kind string, version int) error {
	var is struct {
		SchemaVersion int    `json:"schema_version"`
		Kind          string `json:"kind"`
	}
	err := json.NewDecoder(bytes.NewReader(src)).Decode(&is)
	switch {
	case err != nil:
		return fmt.Errorf("read %s: %w", name, err)
	case is.Kind != kind:
		return fmt.Errorf("read %s: its kind is %q and not %q: it is of another command", name, is.Kind, kind)
	case is.SchemaVersion > version || is.SchemaVersion < 1:
		return fmt.Errorf("read %s: schema version %d: this xagg knows 1 to %d", name, is.SchemaVersion, version)
	}
	if err := json.Unmarshal(src, v); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	return nil
}

// point is of a curve.
type point struct{ x, y float64 }

// curves draws the loss by mode, as the mean over the seeds of their checkpoints after as many steps.
func (t *training) curves(id, title, axis string, seconds bool) *Figure {
	type sums struct {
		mode   string
		steps  []int // in the order of the first run
		points map[int]point
		n      map[int]int
	}
	var names []string
	by := map[string]*sums{}
	for _, r := range t.Runs {
		if r.Failed != "" {
			continue
		}
		s := by[r.Name]
		if s == nil {
			s = &sums{mode: r.Mode, points: map[int]point{}, n: map[int]int{}}
			by[r.Name] = s
			names = append(names, r.Name)
		}
		for _, p := range r.Points {
			if s.n[p.Step] == 0 {
				s.steps = append(s.steps, p.Step)
			}
			x := float64(p.Step)
			if seconds {
				x = p.Seconds
			}
			s.points[p.Step] = point{s.points[p.Step].x + x, s.points[p.Step].y + p.Loss}
			s.n[p.Step]++
		}
	}
	var all []line
	dashes := map[string]int{}
	for _, name := range names {
		s := by[name]
		l := line{name: name, colour: colour(s.mode), dash: dashes[s.mode] % 3}
		if s.mode == "single" {
			l.colour = "ink"
		}
		dashes[s.mode]++
		for _, step := range s.steps {
			n := float64(s.n[step])
			l.points = append(l.points, point{s.points[step].x / n, s.points[step].y / n})
		}
		if len(l.points) > 1 {
			all = append(all, l)
		}
	}
	return lines(id, title, axis, "By mode: the loss on held-out samples, the mean over the seeds whose run did not fail. The vertical axis is logarithmic.", all)
}

// line is a line of a chart.
type line struct {
	name, colour string
	dash         int
	points       []point
}

// lines draws lines over each other, from 0 on, on a logarithmic vertical axis; nil if there are none.
func lines(id, title, axis, about string, all []line) *Figure {
	const top, height = 6, 260
	right, low, high := 0.0, math.Inf(1), 0.0
	for _, l := range all {
		for _, p := range l.points {
			right, low, high = max(right, p.x), min(low, p.y), max(high, p.y)
		}
	}
	if right <= 0 || low <= 0 || math.IsInf(low, 0) {
		return nil
	}
	f := &Figure{ID: id, Title: title, About: about, Axis: axis, Floor: top + height, Height: top + height + axisHeight}
	var x scale
	x, f.Ticks = linear(right, 1)
	y := scale{low: low / 1.05, high: high * 1.05, log: true}
	place := func(v float64) float64 { return 100 - 100*(y.x(v)-left)/width } // of the height
	for decade := math.Pow(10, math.Floor(math.Log10(y.low))); decade < y.high; decade *= 10 {
		for _, v := range []float64{decade, 2 * decade, 5 * decade} {
			if y.low < v && v < y.high {
				f.Levels = append(f.Levels, Level{Y: top + int(math.Round(place(v)/100*height)), Text: tick(v)})
			}
		}
	}
	g := Group{}
	for _, l := range all {
		var points []string
		for _, p := range l.points {
			points = append(points, fmt.Sprintf("%.1f,%.2f", 10*x.x(p.x), place(p.y)))
		}
		f.Key = append(f.Key, Key{Colour: l.colour, Text: l.name, Line: true, Dash: l.dash})
		g.Marks = append(g.Marks, Marks{Title: l.name, Curves: []Curve{{Y: top, Height: height, Points: strings.Join(points, " "), Colour: l.colour, Dash: l.dash}}})
	}
	slices.Reverse(g.Marks) // what comes first is what others are compared with, and lies on top
	f.Groups = []Group{g}
	return f
}
