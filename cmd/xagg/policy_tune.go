package main

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"xagg/lab/scenario"
	"xagg/policy/adapt"
	"xagg/policy/trace"
	"xagg/sim/timing"
	"xagg/sim/tune"
)

// far is how far a derived scenario's rounds may be from the recorded ones before that is a warning.
const far = 0.15

func newPolicyTuneCommand(env *env) *cobra.Command {
	var (
		name, out, output string
		search            []string
		runs, seeds       int
		seed              uint64
	)
	cmd := &cobra.Command{
		Use:   "tune SCENARIO.yaml|TRACE...",
		Short: "Search a policy's parameters in the simulator",
		Long: `Try policies in the simulator ('xagg sim') and print the best ones: round time against switch slots and server memory, and the policy that
is chosen, which is the one with the fewest slots, the least memory and the fewest changes among those whose rounds are at most 1 % longer than
the shortest. It is judged beside the policy that the search began with, by seeds that it was not chosen with.

A scenario is one of 'xagg bench run'; every job and consistency of it counts that can follow what is measured. Of a trace ('xagg record') a
scenario is made: ranks that compute as long as they did and send as fast as they did. How far that is from what was recorded is said.

Without --search, the thresholds of the policy's rule and the window are searched: of cost-model cost.price, cost.trust, cost.enter.above and
window, of a rule in CEL half and twice its define.enter.above and define.leave.below. Any other field of a policy can be named. If there are
more than --runs combinations, so many are drawn at random.`,
		Example: `  xagg policy tune scenarios/slow-*.yaml --policy outlier --out mine.yaml
  xagg policy tune train.trace --search cost.price=0,0.1,0.5 --search dwell=0s,1s,5s`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			switch {
			case output != "text" && output != "json":
				return usagef("-o %q: want text or json", output)
			case runs < 2 || runs > 100_000:
				return usagef("--runs %d: want 2 to 100000", runs)
			case seeds < 1 || seeds > 1000:
				return usagef("--seeds %d: want 1 to 1000", seeds)
			}
			base, err := adapt.Open(name)
			if err == nil {
				base, err = tune.Open(base)
			}
			if err != nil {
				return usagef("--policy: %w", err)
			}
			opts := tune.Options{Space: tune.DefaultSpace(base), Runs: runs, Seeds: seeds, Seed: seed, Timing: timing.Options{Costs: timing.Lab()}}
			if len(search) > 0 {
				opts.Space = nil
			}
			for _, s := range search {
				d, err := tune.ParseDimension(s)
				if err != nil {
					return usagef("--search %w", err)
				}
				opts.Space = append(opts.Space, d)
			}
			cases, err := tuneCases(env, args)
			if err != nil {
				return err
			}
			opts.Current = func(done, all int) { fmt.Fprintf(env.stderr, "%d of %d simulations\n", done, all) }
			result, err := tune.Tune(base, cases, opts)
			if err != nil {
				return err
			}
			if out != "" {
				if err := os.WriteFile(out, []byte(result.Policy), 0o644); err != nil {
					return err
				}
			}
			if output == "json" {
				return result.WriteJSON(env.stdout)
			}
			return result.WriteText(env.stdout)
		},
	}
	f := cmd.Flags()
	f.StringVar(&name, "policy", adapt.DefaultConfig().Rule, "policy to begin with: a file, or the name of a rule")
	// Not a slice: values have commas.
	f.StringArrayVar(&search, "search", nil, "a field of the policy and the values to try, such as cost.price=0,0.1; repeatable")
	f.IntVar(&runs, "runs", 64, "policies that are tried at most")
	f.IntVar(&seeds, "seeds", 1, "seeds with which each policy is tried in each scenario, and as many others to judge the chosen one")
	f.Uint64Var(&seed, "seed", 1, "the first seed")
	f.StringVar(&out, "out", "", "file for the chosen policy")
	f.StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

// tuneCases reads scenarios and traces.
func tuneCases(env *env, files []string) (cases []tune.Case, err error) {
	for _, file := range files {
		if ext := filepath.Ext(file); ext == ".yaml" || ext == ".yml" {
			s, err := loadScenario(file)
			if err != nil {
				return nil, err
			}
			cases = append(cases, tune.Case{Scenario: s})
			continue
		}
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		traces, err := trace.Read(file, f)
		f.Close()
		if err != nil {
			return nil, err
		}
		for _, t := range traces {
			d, err := tune.Derive(t, timing.Lab())
			if err != nil {
				return nil, err
			}
			off := d.Simulated/d.Recorded - 1
			var warning string
			if math.Abs(off) > far {
				warning = ": it is no good picture of that job; trust what was measured"
			}
			fmt.Fprintf(env.stderr, "job %s: %d ranks, %d chunks, %d rounds of computation, links of %s; a simulated round takes %.1f ms, the recorded ones %.1f ms (%+.0f %%)%s\n",
				t.Job.Job, t.Ranks, d.Jobs[0].Tensors.Values()/256, d.Rounds, links(d.Scenario), 1e3*d.Simulated, 1e3*d.Recorded, 100*off, warning)
			cases = append(cases, d.Case)
		}
	}
	return cases, nil
}

// links says how fast a derived scenario's links are.
func links(s *scenario.Scenario) string {
	list := []string{fmt.Sprintf("%.1f Mbit/s", float64(s.Links.Worker)/1e6)}
	for rank := range s.Jobs[0].Ranks {
		if rate, ok := s.Jobs[0].Links[rank]; ok {
			list = append(list, fmt.Sprintf("rank %d %.1f", rank, float64(rate)/1e6))
		}
	}
	return strings.Join(list, ", ")
}
