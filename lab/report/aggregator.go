package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"xagg/lab/results"
)

// aggregatorVersion is the schema version of reports on aggregators that Aggregator knows.
const aggregatorVersion = 1

// aggregation is what Aggregator reads of the JSON of 'xagg bench aggregator'.
type aggregation struct {
	Time    time.Time `json:"time"`
	Command []string  `json:"command"`
	Machine struct {
		CPU      string `json:"cpu"`
		Cores    int    `json:"cores"`
		Memory   uint64 `json:"memory"`
		Kernel   string `json:"kernel"`
		Go       string `json:"go"`
		Version  string `json:"version"`
		Revision string `json:"revision"`
	} `json:"machine"`
	XDPMode  string  `json:"xdp_mode"`
	Workers  int     `json:"workers"`
	Values   int     `json:"values"`
	Repeat   int     `json:"repeat"`
	Complete bool    `json:"complete"`
	Limit    float64 `json:"limit"`
	CoreSets []struct {
		Name       string `json:"name"`
		Aggregator []int  `json:"aggregator"`
		Load       []int  `json:"load"`
	} `json:"core_sets"`
	Notes  []string `json:"notes"`
	Ratios []struct {
		Subject  string  `json:"subject"`
		Against  string  `json:"against"`
		Cores    string  `json:"cores"`
		Lanes    int     `json:"lanes"`
		Ratio    float64 `json:"ratio"`
		Low      float64 `json:"low"`
		High     float64 `json:"high"`
		Pairs    int     `json:"pairs"`
		Resolved bool    `json:"resolved"`
		Target   float64 `json:"target"`
		Met      string  `json:"met"`
	} `json:"ratios"`
	Rows []struct {
		Subject   string  `json:"subject"`
		Cores     string  `json:"cores"`
		Lanes     int     `json:"lanes"`
		CPUPerGB  float64 `json:"cpu_seconds_per_gb"`
		Least     float64 `json:"least"`
		Most      float64 `json:"most"`
		GBPerS    float64 `json:"gb_per_s"`
		GBPerCPU  float64 `json:"gb_per_cpu"`
		BusyPerGB float64 `json:"busy_seconds_per_gb"`
		ProgramNs float64 `json:"program_ns"`
	} `json:"rows"`
}

// Aggregator returns the section about what 'xagg bench aggregator -o json' has written. name is the file's, for errors.
func Aggregator(name string, src []byte) (*Extra, error) {
	var a aggregation
	if err := decode(name, src, &a, "", aggregatorVersion); err != nil {
		return nil, err
	}
	if len(a.CoreSets) == 0 {
		return nil, fmt.Errorf("read %s: no core_sets: it is not what 'xagg bench aggregator -o json' writes", name)
	}
	about := fmt.Sprintf("The processor time of the XDP server, fed with XDP frames and from sockets, beside a parameter server over TCP, without and with the offloads of its links (TSO, GSO, "+
		"GRO): the same bytes on the same processors, %s with vectors of %s, %s.", count(a.Workers, "worker"), count(a.Values, "value"), count(a.Repeat, "repetition"))
	for _, set := range a.CoreSets {
		about += fmt.Sprintf(" Processors “%s”: the aggregator on %s, its load on %s.", set.Name, processors(set.Aggregator), processors(set.Load))
	}
	if !a.Complete {
		about += " It was interrupted: not all was measured."
	}
	ratios := &Table{Caption: fmt.Sprintf("CPU seconds of TCP in multiples of the XDP server's, with the interval of 95 %%; not resolved if it is wider than %s %% of the ratio", tick(100*a.Limit)),
		Head: []string{"XDP server", "processors", "lanes", "beside", "ratio", "target", "met"}}
	for _, r := range a.Ratios {
		cell := Cell{Text: ratio(r.Ratio), Note: ratio(r.Low) + " to " + ratio(r.High)}
		switch {
		case r.Pairs < 2:
			cell = Cell{Text: "not resolved", Note: "one pair: " + ratio(r.Ratio), Mark: Unresolved}
		case !r.Resolved:
			cell.Text, cell.Mark = "not resolved", Unresolved
		}
		target, met := Cell{Text: "–", Mark: Absent}, Cell{Text: "–", Mark: Absent}
		if r.Target > 0 {
			target, met = Cell{Text: "≥ " + strconv.FormatFloat(r.Target, 'g', -1, 64)}, Cell{Text: r.Met}
		}
		ratios.Rows = append(ratios.Rows, Row{r.Subject, []Cell{{Text: r.Cores}, {Text: grouped(r.Lanes)}, {Text: r.Against}, cell, target, met}})
	}
	rows := &Table{Caption: "CPU seconds per GB of gradients: medians over repetitions, with the least and the most", Head: []string{"aggregator", "processors", "lanes", "CPU s/GB", "GB per CPU s", "GB/s",
		"busy s/GB", "XDP program (ns a packet)"}}
	greatest := 0.0
	for _, r := range a.Rows {
		lanes, program := Cell{Text: "–", Mark: Absent}, Cell{Text: "–", Mark: Absent}
		if r.Lanes > 0 {
			lanes, program = Cell{Text: grouped(r.Lanes)}, Cell{Text: three(r.ProgramNs)}
		}
		rows.Rows = append(rows.Rows, Row{r.Subject, []Cell{{Text: r.Cores}, lanes, {Text: three(r.CPUPerGB), Note: three(r.Least) + " to " + three(r.Most)}, {Text: three(r.GBPerCPU)},
			{Text: three(r.GBPerS)}, {Text: three(r.BusyPerGB)}, program}})
		greatest = max(greatest, r.Most)
	}
	s := Section{ID: "aggregator", Title: "What does an aggregator cost?", Level: 2, Blocks: []Block{{Paragraph: about}, {Table: ratios}}}
	if greatest > 0 && !math.IsInf(greatest, 0) {
		f := &Figure{ID: "aggregator-cpu", Title: "CPU seconds per GB", Axis: "CPU seconds per GB of gradients", About: "By aggregator and processors: a bar up to the median, and a line from the least to the most of all repetitions."}
		var x scale
		x, f.Ticks = linear(greatest, 1)
		y := 4
		g := Group{}
		for _, r := range a.Rows {
			name := r.Subject
			if r.Lanes > 0 {
				name += fmt.Sprintf(", %d lanes", r.Lanes)
			}
			c := colour("server")
			if strings.HasPrefix(r.Subject, "tcp") {
				c = colour("tcp")
			}
			label := fmt.Sprintf("processors “%s”: %s (%s to %s)", r.Cores, three(r.CPUPerGB), three(r.Least), three(r.Most))
			g.Marks = append(g.Marks, Marks{Name: name, Label: label, LabelX: at(left), LabelY: y + 12, Anchor: "start", Title: name + ", " + label, Bars: []Bar{
				{X: at(x.x(0)), Width: at(x.x(r.CPUPerGB) - x.x(0)), Y: y + 18, Height: 12, Colour: c, Faint: 1},
				{X: at(x.x(r.Least)), Width: at(max(x.x(r.Most)-x.x(r.Least), 0.2)), Y: y + 23, Height: 2, Colour: "ink"},
			}})
			y += rowHeight - 4
		}
		f.Groups = []Group{g}
		f.Floor, f.Height = y, y+axisHeight
		s.Blocks = append(s.Blocks, Block{Figure: f})
	}
	s.Blocks = append(s.Blocks, Block{Table: rows}, Block{List: slices.Clone(a.Notes)})
	h := results.Header{Time: a.Time, Command: a.Command, Revision: a.Machine.Revision, CPU: a.Machine.CPU, Cores: a.Machine.Cores, Memory: a.Machine.Memory, Kernel: a.Machine.Kernel,
		Lab: "two ends of veth links", XDPMode: a.XDPMode, Versions: map[string]string{"xagg": a.Machine.Version, "go": a.Machine.Go}, Repeat: a.Repeat}
	return &Extra{Section: s, Header: h}, nil
}

// processors spells numbers of processors.
func processors(n []int) string {
	var all []uint64
	for _, p := range n {
		all = append(all, uint64(p))
	}
	if len(all) == 0 {
		return "any"
	}
	return numbers(all)
}
