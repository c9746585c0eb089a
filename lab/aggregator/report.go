package aggregator

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"xagg/internal/stats"
	"xagg/lab/results"
)

// SchemaVersion is that of a [Report]. It rises when a field changes its meaning or goes.
const SchemaVersion = 1

// Subject names what is measured.
type Subject string

// The subjects.
const (
	XDPFrames   Subject = "xdp, frames"             // the XDP server, fed with XDP frames
	XDPSockets  Subject = "xdp, sockets"            // the XDP server, fed from UDP sockets
	TCPPlain    Subject = "tcp without TSO/GSO/GRO" // the TCP aggregator
	TCPOffloads Subject = "tcp with TSO/GSO/GRO"
)

// Usage is the processor time of one measurement, in seconds.
type Usage struct {
	Seconds float64 `json:"seconds"` // of the clock on the wall
	// CPU is the aggregator's: Process + Threads + Softirq - Foreign.
	CPU     float64 `json:"cpu"`
	Process float64 `json:"process"` // of the aggregator's process, with softirqs that came upon it
	Threads float64 `json:"threads"` // of the kernel's threads that receive for the aggregator (NAPI)
	Softirq float64 `json:"softirq"` // in softirqs that received for it, whatever they came upon but its process
	Foreign float64 `json:"foreign"` // in its process, but in softirqs that received for the load
	// Tasklet is the time of all tasklets, whose TCP queues they ever served: not counted.
	Tasklet float64 `json:"tasklet"`
	// Busy is how long the aggregator's processors were not idle, whatever they did, and Stolen what the hypervisor took.
	Busy   float64 `json:"busy"`
	Stolen float64 `json:"stolen"`
	// Looks is how often the programs ran that found out Softirq, Foreign and Tasklet.
	Looks uint64 `json:"looks"`
}

// Measurement is one run of a subject.
type Measurement struct {
	Subject    Subject `json:"subject"`
	Cores      string  `json:"cores"`
	Lanes      int     `json:"lanes,omitempty"` // a packet; TCP has none
	Repetition int     `json:"repetition"`      // from 0
	Bytes      int64   `json:"bytes"`           // of gradients that were summed
	Usage
	// ProgramNs is the XDP program's run time a packet in nanoseconds, by the kernel's statistics, in a stretch of its own.
	ProgramNs float64 `json:"program_ns,omitempty"`
}

// Row is what a subject came to: means over its measurements.
type Row struct {
	Subject   Subject `json:"subject"`
	Cores     string  `json:"cores"`
	Lanes     int     `json:"lanes,omitempty"`
	CPUPerGB  float64 `json:"cpu_seconds_per_gb"` // median
	Least     float64 `json:"least"`
	Most      float64 `json:"most"`
	GBPerS    float64 `json:"gb_per_s"`   // median, as fast as this load could feed it
	GBPerCPU  float64 `json:"gb_per_cpu"` // per CPU second: what a core that did nothing else would sum in a second
	BusyPerGB float64 `json:"busy_seconds_per_gb"`
	ProgramNs float64 `json:"program_ns,omitempty"`
}

// Ratio says how many times the processor time of an XDP server the TCP aggregator takes for the same bytes.
type Ratio struct {
	Subject Subject `json:"subject"`
	Against Subject `json:"against"`
	Cores   string  `json:"cores"`
	Lanes   int     `json:"lanes"`
	Ratio   float64 `json:"ratio"` // geometric mean of the repetitions' ratios; 0: there are none
	// Low and High are the ends of the 95 % interval; both are 0 with less than two pairs.
	Low      float64 `json:"low"`
	High     float64 `json:"high"`
	Pairs    int     `json:"pairs"`
	Resolved bool    `json:"resolved"`
	Target   float64 `json:"target,omitempty"` // 0: there is none
	// Met is yes or no where the whole interval says so, and else "not resolved"; empty without a target.
	Met string `json:"met,omitempty"`
}

// Report is what [Run] measured.
type Report struct {
	SchemaVersion int       `json:"schema_version"`
	Time          time.Time `json:"time"`
	Command       []string  `json:"command,omitempty"`
	Machine       Machine   `json:"machine"`
	XDPMode       string    `json:"xdp_mode"`
	Workers       int       `json:"workers"`
	Values        int       `json:"values"`
	Repeat        int       `json:"repeat"`
	Complete      bool      `json:"complete"` // false: it was interrupted
	Stalled       int       `json:"stalled"`  // measurements that were made again, because frames were lost
	Limit         float64   `json:"limit"`    // width above which a ratio is not resolved, as a share of it
	CoreSets      []CoreSet `json:"core_sets"`
	Notes         []string  `json:"notes"` // what is counted, and what is not

	Ratios       []Ratio       `json:"ratios"`
	Rows         []Row         `json:"rows"`
	Measurements []Measurement `json:"measurements"`
}

// CoreSet says which processors the aggregator and its load have.
type CoreSet struct {
	Name       string `json:"name"`
	Aggregator []int  `json:"aggregator"`
	Load       []int  `json:"load"`
}

// The targets, in multiples of the XDP server's processor time when it is fed with frames.
const (
	targetPlain    = 3.3 // the paper's ratio
	targetOffloads = 2
)

// notes are what a reader of the numbers has to know.
var notes = []string{
	"CPU seconds are those of the aggregator's whole receive path, and of sending the results: of an XDP server the kernel's threads that " +
		"serve its queues (NAPI; they run program, XDP_TX and what gets a frame to the program); of the TCP aggregator its process and " +
		"the softirqs that receive its packets, on whatever they came upon.",
	"Not counted is the load: what sends contributions, and what receives, compares and drops results. Neither are interrupts " +
		"between processors, timers and tasklets (the latter are in the JSON).",
	"GB are 10^9 bytes of gradients (4 a value, of every rank) that were summed. Results are sent too: over TCP to every worker, by " +
		"the XDP server once, and an acknowledgement for every other contribution; the switch copies them.",
	"\"frames\" are XDP frames that reach the server's end of a veth without ever having been socket buffers, as in a driver with native " +
		"XDP. What a card's driver does beyond that (descriptors, DMA) is not in it. \"sockets\" are UDP packets over the same veth, " +
		"which the kernel copies into frames for the program: no card needs that.",
	"In set \"one\" the bytes are in the aggregator's own cache when it reads them, in set \"apart\" in another processor's; in set \"all\" " +
		"frames are in the own one and TCP's bytes in either, which is to the advantage of frames.",
	"TCP goes over a veth too, with checksums left out as between any veths, so that it computes none; the XDP server checks them all.",
	"GB/s is what this load, which has the same processors in sets \"one\" and \"all\", brought about; GB per CPU second is what " +
		"a processor could do that had nothing else to do.",
	"Every number of every result was compared with the plain sum, and the server's counters with what was sent.",
}

// summarize computes rows and ratios from the measurements.
func (r *Report) summarize() {
	type key struct {
		subject Subject
		cores   string
		lanes   int
	}
	of := make(map[key][]Measurement)
	var keys []key
	for _, m := range r.Measurements {
		k := key{m.Subject, m.Cores, m.Lanes}
		if of[k] == nil {
			keys = append(keys, k)
		}
		of[k] = append(of[k], m)
	}
	perGB := func(k key) (v []float64) {
		return each(of[k], func(m Measurement) float64 { return m.CPU / gigabytes(m) })
	}
	r.Rows, r.Ratios = nil, nil
	for _, k := range keys {
		cost := perGB(k)
		r.Rows = append(r.Rows, Row{
			Subject: k.subject, Cores: k.cores, Lanes: k.lanes,
			CPUPerGB: stats.Median(cost), Least: slices.Min(cost), Most: slices.Max(cost), GBPerCPU: 1 / stats.Median(cost),
			GBPerS:    stats.Median(each(of[k], func(m Measurement) float64 { return gigabytes(m) / m.Seconds })),
			BusyPerGB: stats.Median(each(of[k], func(m Measurement) float64 { return m.Busy / gigabytes(m) })),
			ProgramNs: stats.Median(each(of[k], func(m Measurement) float64 { return m.ProgramNs })),
		})
	}
	for _, k := range keys {
		if k.subject != XDPFrames && k.subject != XDPSockets {
			continue
		}
		for _, against := range []Subject{TCPPlain, TCPOffloads} {
			// The measurements of a repetition are neighbours; one that was interrupted has no pair.
			e := results.Ratios(quotients(perGB(key{against, k.cores, 0}), perGB(k)))
			ratio := Ratio{Subject: k.subject, Against: against, Cores: k.cores, Lanes: k.lanes,
				Ratio: e.Ratio, Pairs: e.Pairs, Resolved: e.Resolved(r.Limit)}
			if e.Pairs > 1 {
				ratio.Low, ratio.High = e.Low, e.High
			}
			if k.subject == XDPFrames {
				ratio.Target = map[Subject]float64{TCPPlain: targetPlain, TCPOffloads: targetOffloads}[against]
				switch {
				case ratio.Pairs > 1 && ratio.Low >= ratio.Target:
					ratio.Met = "yes"
				case ratio.Pairs > 1 && ratio.High < ratio.Target:
					ratio.Met = "no"
				default:
					ratio.Met = "not resolved"
				}
			}
			r.Ratios = append(r.Ratios, ratio)
		}
	}
}

// quotients divides the numbers that have a partner.
func quotients(x, y []float64) []float64 {
	q := make([]float64, min(len(x), len(y)))
	for i := range q {
		q[i] = x[i] / y[i]
	}
	return q
}

func gigabytes(m Measurement) float64 { return float64(m.Bytes) / 1e9 }

func each(all []Measurement, f func(Measurement) float64) []float64 {
	var v []float64
	for _, m := range all {
		v = append(v, f(m))
	}
	return v
}

// WriteJSON writes the report as JSON.
func (r *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// WriteText writes the report for people.
func (r *Report) WriteText(w io.Writer) error {
	fmt.Fprintf(w, "Aggregation throughput: %d workers with vectors of %d values, %d repetitions\n", r.Workers, r.Values, r.Repeat)
	fmt.Fprintf(w, "%s, %d processors, %s, XDP %s\n", r.Machine.CPU, r.Machine.Cores, r.Machine.Kernel, r.XDPMode)
	if !r.Complete {
		fmt.Fprintln(w, "Interrupted: this is what was finished.")
	}
	if r.Stalled > 0 {
		fmt.Fprintf(w, "%d measurements were made again, because frames were lost.\n", r.Stalled)
	}
	for _, set := range r.CoreSets {
		fmt.Fprintf(w, "processors %q: aggregator on %v, load on %v\n", set.Name, set.Aggregator, set.Load)
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "PROCESSORS\tAGGREGATOR\tLANES\tCPU s/GB\t(LEAST, MOST)\tGB/CPU s\tGB/s\tBUSY s/GB\tPROGRAM\t")
	for _, row := range r.Rows {
		lanes, program := "", ""
		if row.Lanes != 0 {
			lanes, program = fmt.Sprint(row.Lanes), fmt.Sprintf("%.0f ns", row.ProgramNs)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%.3f\t(%.3f, %.3f)\t%.2f\t%.2f\t%.3f\t%s\t\n", row.Cores, row.Subject, lanes, row.CPUPerGB, row.Least, row.Most,
			row.GBPerCPU, row.GBPerS, row.BusyPerGB, program)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "\nCPU seconds of TCP in multiples of the XDP server's, with %.0f %% intervals; wider than %.0f %%: not resolved\n\n",
		100*results.Confidence, 100*r.Limit)
	t = tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "PROCESSORS\tXDP SERVER\tLANES\tBESIDE\tRATIO\tINTERVAL\tTARGET\tMET\t")
	for _, ratio := range r.Ratios {
		value, interval, target := "not resolved", "", ""
		if ratio.Resolved {
			value = fmt.Sprintf("%.2f", ratio.Ratio)
		}
		if ratio.Pairs > 1 {
			interval = fmt.Sprintf("%.2f to %.2f", ratio.Low, ratio.High)
		}
		if ratio.Target != 0 {
			target = fmt.Sprint(ratio.Target)
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t\n", ratio.Cores, ratio.Subject, ratio.Lanes, ratio.Against, value, interval, target, ratio.Met)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for _, note := range r.Notes {
		fmt.Fprint(w, wrap("- ", note, 120))
	}
	return nil
}

// wrap breaks a paragraph into lines of at most that width, the first of which begins with the mark.
func wrap(mark, text string, width int) string {
	var b strings.Builder
	line := mark[:len(mark)-1]
	for word := range strings.FieldsSeq(text) {
		if len(line)+1+len(word) > width {
			b.WriteString(line + "\n")
			line = strings.Repeat(" ", len(mark)-1)
		}
		line += " " + word
	}
	b.WriteString(line + "\n")
	return b.String()
}
