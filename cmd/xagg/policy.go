package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"xagg/docs/schema"
	"xagg/policy"
	"xagg/policy/adapt"
	"xagg/policy/cases"
	"xagg/policy/telemetry"
	"xagg/policy/trace"
)

func newPolicyCommand(env *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Write, test and compare policies that follow what is measured",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newPolicyRulesCommand(env), newPolicyExplainCommand(env), newPolicyLintCommand(env), newPolicyTestCommand(env),
		newPolicyReplayCommand(env), newPolicyTuneCommand(env), newPolicyPlaceCommand(env))
	return cmd
}

func newPolicyRulesCommand(env *env) *cobra.Command {
	return &cobra.Command{
		Use:     "rules [NAME]",
		Short:   "List the rules that come with the program, or show one as an example for rules of your own",
		Example: "  xagg policy rules outlier > mine.yaml",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) == 1 {
				src, err := adapt.Source(args[0])
				if err != nil {
					return usagef("%w", err)
				}
				fmt.Fprint(env.stdout, src)
				return nil
			}
			t := tabwriter.NewWriter(env.stdout, 0, 0, 2, ' ', 0)
			for _, name := range adapt.Names() {
				c := adapt.DefaultConfig()
				c.Rule = name
				r, err := c.Compile(0)
				if err != nil {
					return err
				}
				fmt.Fprintf(t, "%s\t%s\n", name, r.About)
			}
			return t.Flush()
		},
	}
}

func newPolicyExplainCommand(env *env) *cobra.Command {
	return &cobra.Command{
		Use:   "explain [FIELD]",
		Short: "Say what a field of telemetry or of a policy means: type, unit or range, default, meaning",
		Long: `Say what a field means that rules can use or that a policy has, or list all of both. The fields of a group are explained by its
name: job, rank, switch, server of telemetry; define, cost of policies. In a rule rank is the rank that is judged; ranks and servers
are the lists of all. All numbers of telemetry are doubles.`,
		Example: "  xagg policy explain rank.blocked_p95\n  xagg policy explain job\n  xagg policy explain cost",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			asked := func(name string) bool { return len(args) == 0 || name == args[0] || strings.HasPrefix(name, args[0]+".") }
			fields, err := schema.Fields("policy")
			if err != nil {
				return err
			}
			telemetry := slices.DeleteFunc(slices.Clone(telemetry.Fields), func(f telemetry.Field) bool { return !asked(f.Name) })
			fields = slices.DeleteFunc(fields, func(f schema.Field) bool { return !asked(f.Name) })
			if len(telemetry)+len(fields) == 0 {
				return usagef("there is no field %q; 'xagg policy explain' lists them", args[0])
			}
			t := tabwriter.NewWriter(env.stdout, 0, 0, 2, ' ', 0)
			if len(telemetry) > 0 {
				fmt.Fprintln(t, "TELEMETRY\tTYPE\tUNIT\tMEANING")
			}
			for _, f := range telemetry {
				fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", f.Name, f.Type, f.Unit, f.Doc)
			}
			if err := t.Flush(); err != nil {
				return err
			}
			if len(telemetry) > 0 && len(fields) > 0 {
				fmt.Fprintln(env.stdout)
			}
			if len(fields) > 0 {
				fmt.Fprintln(t, "POLICY\tTYPE\tRANGE\tDEFAULT\tMEANING")
			}
			for _, f := range fields {
				fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", f.Name, f.Type, f.Range, f.Default, f.Doc)
			}
			return t.Flush()
		},
	}
}

func newPolicyLintCommand(env *env) *cobra.Command {
	return &cobra.Command{
		Use:   "lint FILE...",
		Short: "Check policies: fields, thresholds, types of expressions",
		Long: `Check policies without running anything. Every mistake is told with its line and column.

Exit codes:
  0   all are in order
  2   some are not
  64  the command line is wrong`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			bad := 0
			for _, name := range args {
				src, err := os.ReadFile(name)
				if err != nil {
					return err
				}
				if _, err := adapt.Parse(name, src); err != nil {
					bad++
					fmt.Fprintln(env.stdout, err)
				}
			}
			if bad > 0 {
				return &exitError{code: exitDifferences}
			}
			return nil
		},
	}
}

func newPolicyTestCommand(env *env) *cobra.Command {
	return &cobra.Command{
		Use:   "test FILE...",
		Short: "Test policies as code is tested: telemetry in, expected plan out",
		Long: `Run the tests in files such as

  policy: mine.yaml        # a file beside this one, or the name of a rule
  tests:
  - name: a slow rank is steered and comes back
    ranks: 4
    steps:                 # fields of telemetry ('xagg policy explain') that hold for so many rounds
    - {rounds: 20, job: {round_p50: 0.1}, rank: {lag_p50: 0.001}, expect: {steered: [], moves: 0}}
    - {rounds: 30, ranks: {3: {lag_p50: 0.3}}, expect: {steered: [3], within: 10, moves: 1}}
    - {rounds: 30, ranks: {3: {lag_p50: 0}}, expect: {steered: [], within: 20}}

Exit codes:
  0   all tests pass
  2   some do not
  64  the command line is wrong`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			failed := 0
			for _, name := range args {
				src, err := os.ReadFile(name)
				if err != nil {
					return err
				}
				f, err := cases.Parse(name, src)
				if err != nil {
					return err
				}
				beside := filepath.Join(filepath.Dir(name), f.Policy)
				if _, err := os.Stat(beside); err != nil {
					beside = f.Policy
				}
				c, err := adapt.Open(beside)
				if err != nil {
					return err
				}
				for _, test := range f.Tests {
					err := test.Run(c)
					if err == nil {
						fmt.Fprintf(env.stdout, "ok    %s: %s\n", name, test.Name)
						continue
					}
					failed++
					fmt.Fprintf(env.stdout, "FAIL  %s: %v\n", name, err)
					if bad, ok := errors.AsType[*cases.Failure](err); ok {
						if err := writeDecision(env, &bad.Decision, "      "); err != nil {
							return err
						}
					}
				}
			}
			if failed > 0 {
				return &exitError{code: exitDifferences}
			}
			return nil
		},
	}
}

// writeDecision writes why each rank is where it is.
func writeDecision(env *env, d *adapt.Decision, indent string) error {
	t := tabwriter.NewWriter(env.stdout, 0, 0, 2, ' ', 0)
	for _, w := range d.Ranks {
		fmt.Fprintf(t, "%srank %d\t%s\tscore %.4g\tabove enter in %d rounds, below leave in %d\t%s\n", indent, w.Rank, w.Place, w.Score,
			w.Enter, w.Leave, w.Held)
	}
	return t.Flush()
}

func newPolicyReplayCommand(env *env) *cobra.Command {
	var (
		policies []string
		output   string
	)
	cmd := &cobra.Command{
		Use:   "replay TRACE --policy A [--policy B]...",
		Short: "Let policies decide again from a recorded trace, side by side",
		Long: `Let policies decide from what a trace recorded, and show every round in which one of them moves a rank, or changes the
quorum or its wait. First the trace's own policy decides again, and each of its decisions must be the recorded one, byte for byte.

Where a rule predicts, the time of a round that is predicted of each division of the ranks is shown beside it, and its mean over the trace: as
the policy predicts it itself, else as the recorded one does, else as the first of the others.

What ranks would have measured under another plan nobody knows: the numbers stay the recorded ones.

Exit codes:
  0   the recorded decisions are confirmed
  2   some are not
  64  the command line is wrong`,
		Example: "  xagg policy replay train.trace --policy outlier --policy mine.yaml",
		Args:    cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if output != "text" && output != "json" {
				return usagef("-o %q: want text or json", output)
			}
			file, err := os.Open(args[0])
			if err != nil {
				return err
			}
			defer file.Close()
			traces, err := trace.Read(args[0], file)
			if err != nil {
				return err
			}
			configs := make([]adapt.Config, len(policies))
			for i, name := range policies {
				if configs[i], err = adapt.Open(name); err != nil {
					return err
				}
			}
			differ := false
			for _, t := range traces {
				if err := t.Verify(); err != nil {
					differ = true
					fmt.Fprintf(env.stderr, "job %s: %v\n", t.Job.Job, err)
				}
				if err := replayTrace(env, t, policies, configs, output); err != nil {
					return err
				}
			}
			if differ {
				return &exitError{code: exitDifferences}
			}
			return nil
		},
	}
	cmd.Flags().StringSliceVar(&policies, "policy", nil, "file of a policy, or the name of a rule; may be repeated")
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

// replayTrace shows what policies make of a trace, beside what was recorded.
func replayTrace(env *env, t *trace.Trace, names []string, configs []adapt.Config, output string) error {
	all := make([][]adapt.Decision, len(configs))
	for i := range configs {
		var err error
		if all[i], err = t.Replay(configs[i]); err != nil {
			return fmt.Errorf("policy %s: %w", names[i], err)
		}
	}
	if output == "json" {
		enc := json.NewEncoder(env.stdout)
		for i := range all {
			for k, d := range all[i] {
				round, _ := predicted(t, all, k, &d)
				if err := enc.Encode(struct {
					Policy   string         `json:"policy"`
					Decision adapt.Decision `json:"decision"`
					Round    float64        `json:"round,omitempty"` // that is predicted of it, s
				}{names[i], d, round}); err != nil {
					return err
				}
			}
		}
		return nil
	}
	fmt.Fprintf(env.stdout, "job %s, %d ranks, %d steps\n", t.Job.Job, t.Ranks, len(t.Steps))
	w := tabwriter.NewWriter(env.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "TIME\tROUND\tRECORDED")
	for _, name := range names {
		fmt.Fprintf(w, "\t%s", name)
	}
	fmt.Fprintln(w)
	type column struct {
		sum    float64 // of predicted times of rounds, s
		steps  int     // that have one
		quorum int
		wait   float64
	}
	columns, any := make([]column, 1+len(all)), false
	for k, step := range t.Steps {
		var cells []string
		moved := false
		for i := range columns {
			d := step.Decision
			if i > 0 {
				d = &all[i-1][k]
			}
			if d == nil {
				cells = append(cells, "?")
				continue
			}
			c := &columns[i]
			round, ok := predicted(t, all, k, d)
			if ok {
				any = true
				c.sum += round
				c.steps++
			}
			cells = append(cells, summary(d, round))
			moved = moved || len(d.Moves) > 0 || d.Quorum != c.quorum || d.Wait != c.wait || i == 0 && d.Error != ""
			c.quorum, c.wait = d.Quorum, d.Wait
		}
		if moved || k == len(t.Steps)-1 {
			fmt.Fprintf(w, "%.2f s\t%.0f\t%s\n", step.Snapshot.Time, step.Snapshot.Job.Round, strings.Join(cells, "\t"))
		}
	}
	if any {
		fmt.Fprint(w, "mean\t")
		for _, c := range columns {
			if c.steps == 0 {
				fmt.Fprint(w, "\tnothing is predicted")
				continue
			}
			fmt.Fprintf(w, "\tround %s, predicted in %d of %d steps", ms(c.sum/float64(c.steps)), c.steps, len(t.Steps))
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}

// predicted returns the time of a round that is predicted of a decision from step k, in s: by its own rule, or else by that of the recorded one or of
// the first of the others that knows of such a division.
func predicted(t *trace.Trace, all [][]adapt.Decision, k int, d *adapt.Decision) (round float64, ok bool) {
	by := []*adapt.Decision{d, t.Steps[k].Decision}
	for i := range all {
		by = append(by, &all[i][k])
	}
	for _, other := range by {
		if other == nil {
			continue
		}
		if i := d.Find(other.Alternatives); i >= 0 {
			return other.Alternatives[i].Round, true
		}
	}
	return 0, false
}

// summary is a decision in few words. round is what is predicted of it, in s; 0: nothing.
func summary(d *adapt.Decision, round float64) string {
	s := "servers sum " + policy.FormatMask(d.Steered)
	if d.Quorum > 0 {
		s += fmt.Sprintf(", quorum %d, wait %s", d.Quorum, ms(d.Wait))
	}
	if round > 0 {
		s += ", round " + ms(round)
	}
	for _, m := range d.Moves {
		s += fmt.Sprintf("; %d to %s: %s", m.Rank, m.To, m.Why)
	}
	if d.Error != "" {
		s += "; " + d.Error
	}
	return s
}
