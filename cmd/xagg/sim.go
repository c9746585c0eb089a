package main

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"time"

	"github.com/spf13/cobra"

	"xagg/lab/scenario"
	"xagg/policy/adapt"
	"xagg/sim/timing"
	"xagg/sim/tune"
	"xagg/wire"
)

func newSimCommand(env *env) *cobra.Command {
	var (
		files, modes []string
		workers      []int
		rounds       int
		seed         uint64
		hop          time.Duration
		file, output string

		regret              bool
		seeds               int
		maxRegret, maxAlike float64
	)
	cmd := &cobra.Command{
		Use:   "sim [-f] SCENARIO.yaml...",
		Short: "Predict how long rounds take in every mode, by simulation",
		Long: `Simulate scenarios of 'xagg bench run' without a lab: computation, links and their queues, the switch, servers and workers, with times
per packet that were measured in the lab. The transport, the switch, the servers and the policies are the code that runs on real
machines; what is simulated is time. Needs no privileges, and takes a second or so for a scenario.

With --workers every job of a scenario gets as many ranks as each of the numbers says. Ranks that are unlike the others stay as many,
and a quorum goes without as many ranks as before.

Mode auto is a sync job that begins in mode switch and whose plan follows what is measured; auto/quorum one with a quorum, which begins in
mode server. Both follow the rule cost-model; --policy names another. How far predictions are from measurements, and what they leave out, is
in docs/simulator.md.

With --regret it prints instead, for each job and consistency, how much longer a mean round takes with the plan that follows what is measured
than with the best plan that stays, over so many --seeds; and fails where that is more than --max-regret, or with sync jobs whose ranks are all
alike more than --max-alike longer than in mode switch.

Exit codes:
  0   all was simulated
  2   with --regret: a bound was exceeded
  64  the command line or a scenario is wrong`,
		Example: `  xagg sim -f scenarios/slow-4.yaml --modes switch,server,hybrid,hybrid/quorum
  xagg sim scenarios/*.yaml -o json
  xagg sim -f scenarios/slow-4.yaml --workers 2,4,8,16,32,64 --modes switch,server,hybrid
  xagg sim scenarios/*.yaml --regret --seeds 5 --max-regret 0.05 --max-alike 0.02`,
		RunE: func(_ *cobra.Command, args []string) error {
			if output != "text" && output != "json" {
				return usagef("--output %q: want text or json", output)
			}
			if rounds < 0 || rounds > scenario.MaxRounds {
				return usagef("--rounds %d: want 1 to %d, or 0 for those of the scenario", rounds, scenario.MaxRounds)
			}
			if files = append(files, args...); len(files) == 0 {
				return usagef("which scenario? Name a file, such as scenarios/slow-4.yaml")
			}
			opts := timing.Options{Costs: timing.Lab()}
			if opts.Costs.Hop = hop; hop < 0 || hop > time.Second {
				return usagef("--hop %v: want 0s to 1s", hop)
			}
			if file != "" {
				cfg, err := adapt.Open(file)
				if err != nil {
					return usagef("%w", err)
				}
				opts.Adapt = &cfg
			}
			var wanted []scenario.Mode
			for _, name := range modes {
				m, err := timing.ParseMode(name)
				if err != nil {
					return usagef("--modes: %w", err)
				}
				wanted = append(wanted, m)
			}
			if seeds < 1 || seeds > 1000 {
				return usagef("--seeds %d: want 1 to 1000", seeds)
			}
			report := &timing.Report{SchemaVersion: timing.SchemaVersion, Seed: seed}
			regrets := &tune.RegretReport{SchemaVersion: tune.SchemaVersion}
			for i := range uint64(seeds) {
				regrets.Seeds = append(regrets.Seeds, max(seed, 1)+i)
			}
			for _, name := range files {
				s, err := loadScenario(name)
				if err != nil {
					return err
				}
				if rounds > 0 {
					s.Rounds = rounds
				}
				sizes := []*scenario.Scenario{s}
				if len(workers) > 0 {
					sizes = nil
				}
				for _, n := range workers {
					sized, err := timing.Resize(s, n)
					if err != nil {
						return usagef("--workers: %w", err)
					}
					sizes = append(sizes, sized)
				}
				for _, s := range sizes {
					if regret {
						regrets.Rows = append(regrets.Rows, tune.Regrets(s, opts, regrets.Seeds)...)
						continue
					}
					for _, m := range wanted {
						opts.Mode, opts.Seed = m, seed
						if seed == 0 {
							opts.Seed = s.Seed
						}
						if err := report.Add(s, opts); err != nil {
							return err
						}
					}
				}
			}
			switch {
			case regret:
				return writeRegrets(env, regrets, output, maxRegret, maxAlike)
			case output == "json":
				return report.WriteJSON(env.stdout)
			}
			return report.WriteText(env.stdout)
		},
	}
	f := cmd.Flags()
	f.StringSliceVarP(&files, "file", "f", nil, "files with scenarios; repeatable")
	f.StringSliceVar(&modes, "modes", names(timing.Modes()), "modes to simulate")
	f.IntSliceVar(&workers, "workers", nil, fmt.Sprintf("numbers of ranks of each job, 2 to %d, instead of the scenario's", wire.MaxRanks))
	f.IntVar(&rounds, "rounds", 0, "rounds of each run, without warm-up; 0 = the scenario's")
	f.Uint64Var(&seed, "seed", 0, "of computation times and losses; 0 = the scenario's")
	f.DurationVar(&hop, "hop", timing.Lab().Hop, "from one end of a link to the other, beside its rate: propagation, interfaces and wake-ups")
	f.StringVar(&file, "policy", "", "policy of the modes auto and auto/quorum: a file or the name of a rule; empty = the mode's own")
	f.StringVarP(&output, "output", "o", "text", "text or json")
	f.BoolVar(&regret, "regret", false, "compare plans that follow what is measured with the best that stay")
	f.IntVar(&seeds, "seeds", 3, "with --regret: number of seeds, from --seed or 1 on")
	f.Float64Var(&maxRegret, "max-regret", math.Inf(1), "with --regret: a larger share is an error")
	f.Float64Var(&maxAlike, "max-alike", math.Inf(1), "with --regret: a larger share than in mode switch is an error in sync jobs whose ranks are alike")
	return cmd
}

// writeRegrets writes a report, and fails where a bound is exceeded.
func writeRegrets(env *env, r *tune.RegretReport, output string, maxRegret, maxAlike float64) error {
	write := r.WriteText
	if output == "json" {
		write = r.WriteJSON
	}
	if err := write(env.stdout); err != nil {
		return err
	}
	bad := r.Exceeding(maxRegret, maxAlike)
	for _, why := range bad {
		fmt.Fprintln(env.stderr, why)
	}
	if len(bad) > 0 {
		return &exitError{code: exitDifferences}
	}
	return nil
}

// loadScenario reads a scenario; what is wrong in the file has the exit code of a wrong command line, a file that cannot be read
// that of a failure.
func loadScenario(path string) (*scenario.Scenario, error) {
	s, err := scenario.Load(path)
	if _, unread := errors.AsType[*fs.PathError](err); err != nil && !unread {
		return nil, &exitError{exitUsage, err}
	}
	return s, err
}
