package timing

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"xagg/lab/results"
	"xagg/lab/scenario"
)

// SchemaVersion is that of [Report]'s JSON. It rises when a field changes its meaning or goes.
const SchemaVersion = 1

// Report is what was predicted, for people and programs.
type Report struct {
	SchemaVersion int    `json:"schema_version"`
	Seed          uint64 `json:"seed"`
	Rows          []Row  `json:"rows"`
}

// Row is a job of a scenario in a mode. Times are seconds, over all ranks and measured rounds.
type Row struct {
	Scenario string `json:"scenario"`
	Job      string `json:"job"`
	Mode     string `json:"mode"`
	Workers  int    `json:"workers"` // ranks of the job
	// Skipped says why there is nothing.
	Skipped string  `json:"skipped,omitempty"`
	Comm    Spread  `json:"comm"`     // communication time
	Round   Spread  `json:"round"`    // time of a round
	Floor   float64 `json:"floor"`    // mean of the communication time of the ideal schedule
	OfFloor float64 `json:"of_floor"` // mean communication time in multiples of it; 0 = there is no floor
	Packets uint64  `json:"packets"`  // that ranks sent, resends included
	Resends uint64  `json:"resends"`
	Slots   int     `json:"slots"`       // of the switch that the job has leased
	Memory  uint64  `json:"memory"`      // bytes on servers that it has leased
	Switch  float64 `json:"switch_busy"` // share of time
	Server  float64 `json:"server_busy"` // share of time of the busiest
	Lost    uint64  `json:"lost"`        // frames that links lost, of all jobs and rounds
	Full    uint64  `json:"queue_full"`  // likewise, that found a link's queue full
	Moves   []Shift `json:"moves,omitempty"`
}

// Spread says how times are distributed, in seconds.
type Spread struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P99  float64 `json:"p99"`
}

// Shift is a [Move] of mode auto.
type Shift struct {
	Time  float64 `json:"time"`  // seconds since the run began
	Round int     `json:"round"` // of the rank, warm-up included
	Rank  int     `json:"rank"`
	To    string  `json:"to"`
	Why   string  `json:"why"`
}

// Add simulates a scenario in a mode and adds a row for each of its jobs. Where the scenario cannot be run in the mode the rows
// say why.
func (r *Report) Add(s *scenario.Scenario, opts Options) error {
	if why := s.Skip(opts.Mode); why != "" {
		for _, j := range s.Jobs {
			r.Rows = append(r.Rows, Row{Scenario: s.Name, Job: j.Name, Mode: string(opts.Mode), Workers: j.Ranks, Skipped: why})
		}
		return nil
	}
	predictions, err := Run(s, opts)
	if err != nil {
		return err
	}
	for _, p := range predictions {
		row := Row{
			Scenario: s.Name, Job: p.Job, Mode: string(opts.Mode), Workers: len(p.Comm), Comm: p.spread(p.Comm), Round: p.spread(p.Round),
			Floor: p.spread(p.Floor).Mean, Packets: p.Packets, Resends: p.Resends, Slots: p.Slots, Memory: p.Memory,
			Switch: p.Switch, Server: p.Server, Lost: p.Lost, Full: p.Full,
		}
		if row.Floor > 0 {
			row.OfFloor = row.Comm.Mean / row.Floor
		}
		for _, m := range p.Moves {
			row.Moves = append(row.Moves, Shift{m.At.Seconds(), m.Round, m.Rank, string(m.To), m.Why})
		}
		r.Rows = append(r.Rows, row)
	}
	return nil
}

// spread says how times by rank and round are distributed, those of skipped rounds left out.
func (p *Prediction) spread(times [][]time.Duration) Spread {
	var all []float64
	for rank := range times {
		for round, t := range times[rank] {
			if !p.Skipped[rank][round] {
				all = append(all, t.Seconds())
			}
		}
	}
	if len(all) == 0 {
		return Spread{}
	}
	d := results.Describe(all)
	return Spread{d.Mean, d.P50, d.P99}
}

// WriteJSON writes the report as JSON.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// WriteText writes the report as a table.
func (r *Report) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "scenario\tjob\tworkers\tmode\tcommunication\tp50\tp99\tround\tof floor\tpackets\tresends\tslots\tserver memory\tmoves\t")
	ms := func(seconds float64) string { return fmt.Sprintf("%.1f ms", 1e3*seconds) }
	for _, x := range r.Rows {
		if x.Skipped != "" {
			continue
		}
		floor := "-"
		if x.OfFloor > 0 {
			floor = fmt.Sprintf("%.2f", x.OfFloor)
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%s\t%d\t\n", x.Scenario, x.Job, x.Workers, x.Mode, ms(x.Comm.Mean), ms(x.Comm.P50),
			ms(x.Comm.P99), ms(x.Round.Mean), floor, x.Packets, x.Resends, x.Slots, kib(x.Memory), len(x.Moves))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, x := range r.Rows {
		switch {
		case x.Skipped != "":
			fmt.Fprintf(w, "skipped: %s of %s, %d workers, in mode %s: %s\n", x.Job, x.Scenario, x.Workers, x.Mode, x.Skipped)
		case x.Switch > results.MaxBusy:
			fmt.Fprintf(w, "%s with %d workers in mode %s: the switch is busy for %.0f %% of the time\n", x.Scenario, x.Workers, x.Mode, 100*x.Switch)
		case x.Server > results.MaxBusy:
			fmt.Fprintf(w, "%s with %d workers in mode %s: a server is busy for %.0f %% of the time\n", x.Scenario, x.Workers, x.Mode, 100*x.Server)
		}
		for _, m := range x.Moves {
			if _, err := fmt.Fprintf(w, "%s of %s, mode %s: at %.2f s, round %d: rank %d to the %s: %s\n", x.Job, x.Scenario, x.Mode, m.Time, m.Round,
				m.Rank, m.To, m.Why); err != nil {
				return err
			}
		}
	}
	return nil
}

func kib(bytes uint64) string { return fmt.Sprintf("%d KiB", (bytes+1023)/1024) }
