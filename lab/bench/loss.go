// Package bench measures what the modes of aggregation bring, beside TCP on the same links.
package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"text/tabwriter"
	"time"

	"xagg/bmv2/fault"
	"xagg/internal/stats"
	"xagg/lab/demo"
	"xagg/policy"
	"xagg/worker/grads"
)

// LossModes are the modes that [Loss] compares, the last one is what the others are compared with.
var LossModes = []string{string(policy.ModeSwitch), string(policy.ModeServer), string(policy.ModeHybrid), demo.ModeTCP}

// LossRates are the shares of frames that [Loss] has every link lose in each direction, unless others are asked for.
var LossRates = []float64{0, 0.0001, 0.001, 0.01, 0.05}

// LossOptions say what [Loss] measures.
type LossOptions struct {
	Rates      []float64     // shares of frames, 0..0.5
	Lanes      int           // values of a vector
	Workers    int           // at least 3
	Allreduces int           // of each mode at each rate, in each repetition
	Repeat     int           // labs that are made per rate
	Timeout    time.Duration // of one all-reduce
	Seed       uint64        // of the losses of the first repetition
	Progress   func(format string, args ...any)
	Log        *slog.Logger
}

// LossRow is what one mode came to at one rate.
type LossRow struct {
	Rate       float64 `json:"rate"`
	Mode       string  `json:"mode"`
	Lanes      int     `json:"lanes"`
	Workers    int     `json:"workers"`
	Allreduces int     `json:"allreduces"`
	// Median, P90 and Max are seconds per all-reduce, of its slowest worker.
	Median float64 `json:"median_seconds"`
	P90    float64 `json:"p90_seconds"`
	Max    float64 `json:"max_seconds"`
	// Goodput is what a worker receives of sums while it waits for them, in bits per second: vector / mean time.
	Goodput float64 `json:"goodput_bps"`
	// OfTCP is the mean time in multiples of TCP's at the same rate.
	OfTCP   float64 `json:"of_tcp"`
	Packets uint64  `json:"packets"`
	Resends uint64  `json:"resends"`
}

// Loss measures all-reduces in every mode while every link of the lab loses frames, of TCP too, in both directions. All
// modes of a repetition run in the same lab, one after the other. An inexact sum is an error.
func Loss(ctx context.Context, opts LossOptions) ([]LossRow, error) {
	input := fmt.Sprintf("synthetic:%d", opts.Lanes)
	set, err := grads.Parse(input, opts.Workers)
	if err != nil {
		return nil, err
	}
	type cell struct {
		seconds          []float64
		packets, resends uint64
	}
	cells := make([]map[string]*cell, len(opts.Rates))
	for i := range cells {
		cells[i] = map[string]*cell{}
	}
	for repetition := range opts.Repeat {
		for i, rate := range opts.Rates {
			opts.Progress("repetition %d of %d: %g %% of loss", repetition+1, opts.Repeat, 100*rate)
			report, err := demo.Run(ctx, demo.Options{
				Modes: LossModes, Lab: demo.LabNetns, Switch: demo.SwitchEngine, Workers: opts.Workers, Set: set,
				Grads: input, Rounds: opts.Allreduces, Timeout: opts.Timeout,
				// A rate of nearly nothing keeps the relays on the links: what they cost does not differ between the rates.
				Faults: []fault.Spec{{Drop: max(rate, 1e-12), All: true, Seed: opts.Seed + uint64(repetition)}},
				Log:    opts.Log, Progress: func(string, ...any) {},
			})
			if err != nil {
				return nil, fmt.Errorf("measure at %g %% of loss: %w", 100*rate, err)
			}
			for _, run := range report.Runs {
				if !run.Exact {
					return nil, fmt.Errorf("measure mode %s at %g %% of loss: %s", run.Mode, 100*rate, run.Error)
				}
				c := cells[i][run.Mode]
				if c == nil {
					c = &cell{}
					cells[i][run.Mode] = c
				}
				c.seconds = append(c.seconds, run.AllreduceSeconds...)
				c.packets += run.Packets
				c.resends += run.Resends
			}
		}
	}
	var rows []LossRow
	for i, rate := range opts.Rates {
		tcp := stats.Mean(cells[i][demo.ModeTCP].seconds)
		for _, mode := range LossModes {
			c := cells[i][mode]
			slices.Sort(c.seconds)
			rows = append(rows, LossRow{
				Rate: rate, Mode: mode, Lanes: opts.Lanes, Workers: opts.Workers, Allreduces: len(c.seconds),
				Median: stats.Quantile(c.seconds, 0.5), P90: stats.Quantile(c.seconds, 0.9), Max: stats.Quantile(c.seconds, 1),
				Goodput: 32 * float64(opts.Lanes) / stats.Mean(c.seconds), OfTCP: stats.Mean(c.seconds) / tcp,
				Packets: c.packets, Resends: c.resends,
			})
		}
	}
	return rows, nil
}

// WriteLossTable writes rows for people.
func WriteLossTable(w io.Writer, rows []LossRow) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "LOSS\tMODE\tMEDIAN\tP90\tMAX\tGOODPUT\tOF TCP\tRESENDS\t")
	for _, r := range rows {
		resends := ""
		if r.Packets > 0 {
			resends = fmt.Sprintf("%.2f %%", 100*float64(r.Resends)/float64(r.Packets))
		}
		fmt.Fprintf(t, "%g %%\t%s\t%.1f ms\t%.1f ms\t%.1f ms\t%.0f Mbit/s\t%.2f\t%s\t\n", 100*r.Rate, r.Mode, 1e3*r.Median, 1e3*r.P90,
			1e3*r.Max, r.Goodput/1e6, r.OfTCP, resends)
	}
	return t.Flush()
}

// WriteLossJSON writes rows as JSON, one a line.
func WriteLossJSON(w io.Writer, rows []LossRow) error {
	enc := json.NewEncoder(w)
	for _, r := range rows {
		if err := enc.Encode(r); err != nil {
			return err
		}
	}
	return nil
}
