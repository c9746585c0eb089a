package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"xagg/api"
	"xagg/policy"
	"xagg/policy/adapt"
	"xagg/policy/telemetry"
)

// configuredPolicy is the name of the policy that the controller's configuration has for jobs that leave out all.
const configuredPolicy = "configured"

// adaptPolicy returns the policy that a flag names, as requests have it: what it leaves out the controller's configuration says.
func adaptPolicy(name string) (string, error) {
	switch name {
	case "":
		return "", nil
	case configuredPolicy:
		return "{}", nil
	}
	src, err := adapt.ReadSource(name)
	if err != nil {
		return "", err
	}
	_, err = adapt.Parse(name, src) // here the file's name is known
	return string(src) + "\n", err  // not empty
}

func newJobAdaptCommand(env *env, client *controllerClient) *cobra.Command {
	var name string
	var none bool
	cmd := &cobra.Command{
		Use:   "adapt NAME --policy FILE|RULE|configured",
		Short: "Have a job's plan follow what is measured, or change by which policy",
		Long: `Have a job's plan follow what is measured, from now on by another policy, or no more. A policy that is wrong changes nothing. Its
rules are tested with 'xagg policy test'; with dry_run it only says what it would do. What a policy leaves out is as in 'adapt' of the
controller's configuration, which policy "configured" is the whole of.`,
		Example: "  xagg job adapt train --policy cost-model\n  xagg job adapt train --policy mine.yaml\n  xagg job adapt train --none",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if (name == "") == !none {
				return usagef("want --policy with a file or the name of a rule, or --none")
			}
			src, err := adaptPolicy(name)
			if err != nil {
				return err
			}
			return client.call(cmd.Context(), func(ctx context.Context, ctl api.ControllerClient) error {
				job, err := ctl.Adapt(ctx, &api.AdaptRequest{Job: args[0], Adapt: src})
				if err != nil {
					return err
				}
				return client.printJob(env.stdout, job)
			})
		},
	}
	cmd.Flags().StringVar(&name, "policy", "", "file of a policy, the name of a rule (see 'xagg policy rules'), or \"configured\"")
	cmd.Flags().BoolVar(&none, "none", false, "the plan stays as it is")
	return cmd
}

func newJobExplainCommand(env *env, client *controllerClient) *cobra.Command {
	return &cobra.Command{
		Use:   "explain NAME",
		Short: "Say why each rank of a job is where it is: rule, inputs, what holds it, alternatives",
		Long: `Say why each rank of a job is where it is: the rule of its policy, what the ranks measured, and what keeps one where it is. Of a rule that
predicts, the alternatives with the times that it predicts of them, the cheapest first.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return client.call(cmd.Context(), func(ctx context.Context, ctl api.ControllerClient) error {
				reply, err := ctl.Explain(ctx, &api.ExplainRequest{Job: args[0]})
				if err != nil {
					return err
				}
				if client.output == "json" {
					return writeExplanationJSON(env, reply)
				}
				return writeExplanation(env, reply)
			})
		},
	}
}

func writeExplanationJSON(env *env, reply *api.ExplainReply) error {
	raw := func(b []byte) json.RawMessage {
		if len(b) == 0 {
			return json.RawMessage("null")
		}
		return b
	}
	return json.NewEncoder(env.stdout).Encode(struct {
		Job      string          `json:"job"`
		Plan     string          `json:"plan"`
		Adapt    string          `json:"adapt"`
		Snapshot json.RawMessage `json:"snapshot"`
		Decision json.RawMessage `json:"decision"`
		Error    string          `json:"error,omitempty"`
		Gaps     uint64          `json:"gaps"`
	}{reply.Job.GetName(), reply.Job.GetExplanation(), reply.Adapt, raw(reply.Snapshot), raw(reply.Decision), reply.Error, reply.Gaps})
}

func writeExplanation(env *env, reply *api.ExplainReply) error {
	out := env.stdout
	fmt.Fprintf(out, "plan: %s\n", reply.Job.GetExplanation())
	if reply.Adapt == "" {
		fmt.Fprintf(out, "It follows nothing that is measured: 'xagg job adapt %s --policy cost-model' changes that.\n", reply.Job.GetName())
		return nil
	}
	fmt.Fprintf(out, "policy:\n%s\n", reply.Adapt)
	if len(reply.Decision) == 0 {
		fmt.Fprintln(out, "Nothing is decided yet: no round has been reported by all ranks.")
		return nil
	}
	var s telemetry.Snapshot
	var d adapt.Decision
	if err := json.Unmarshal(reply.Snapshot, &s); err != nil {
		return fmt.Errorf("read snapshot: %w", err)
	}
	if err := json.Unmarshal(reply.Decision, &d); err != nil {
		return fmt.Errorf("read decision: %w", err)
	}
	fmt.Fprintf(out, "decision of %.1f s, round %.0f, by rule %s:\n", d.Time, d.Round, d.Rule)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "RANK\tSUMMED BY\tSCORE\tABOVE ENTER\tBELOW LEAVE\tLAG P50\tP95\tBLOCKED P50\tP95\tLAST\tHELD BECAUSE")
	for i, w := range d.Ranks {
		r := s.Ranks[i]
		fmt.Fprintf(t, "%d\t%s\t%.4g\t%d rounds\t%d rounds\t%s\t%s\t%s\t%s\t%.0f %%\t%s\n", w.Rank, w.Place, w.Score, w.Enter, w.Leave, ms(r.LagP50),
			ms(r.LagP95), ms(r.BlockedP50), ms(r.BlockedP95), 100*r.LastShare, w.Held)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if err := writeAlternatives(out, &d); err != nil {
		return err
	}
	if d.Quorum > 0 {
		fmt.Fprintf(out, "%d ranks are enough for a result, chunks wait %s for more\n", d.Quorum, ms(d.Wait))
	}
	for _, m := range d.Moves {
		fmt.Fprintf(out, "rank %d goes to the %s: %s\n", m.Rank, m.To, m.Why)
	}
	if d.Error != "" {
		fmt.Fprintf(out, "the rule could not decide: %s\n", d.Error)
	}
	if reply.Error != "" {
		fmt.Fprintf(out, "it could not be carried out: %s\n", reply.Error)
	}
	return nil
}

// writeAlternatives writes what could be done instead, and what is predicted of it; nothing where the rule does not predict.
func writeAlternatives(out io.Writer, d *adapt.Decision) error {
	if len(d.Alternatives) == 0 {
		return nil
	}
	chosen, quorum := d.Chosen(), slices.ContainsFunc(d.Alternatives, func(a adapt.Alternative) bool { return a.Quorum > 0 })
	fmt.Fprintln(out, "alternatives, the cheapest first, with what is predicted of them:")
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	head := "SERVERS SUM"
	if quorum {
		head += "\tENOUGH"
	}
	fmt.Fprintln(t, head+"\tROUND\tSLOTS BLOCKED\tCOST")
	for i, a := range d.Alternatives {
		row := policy.FormatMask(a.Steered)
		if quorum {
			row += fmt.Sprintf("\t%d", a.Quorum)
		}
		row += fmt.Sprintf("\t%s\t%s\t%s", ms(a.Round), ms(a.Blocked), ms(a.Cost))
		if i == chosen {
			row += "\tchosen"
		}
		fmt.Fprintln(t, row)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	switch {
	case chosen < 0:
		fmt.Fprintf(out, "that servers sum %s is none of them\n", policy.FormatMask(d.Steered))
	case d.Alternatives[chosen].Cost > d.Alternatives[0].Cost:
		fmt.Fprintf(out, "the cheapest is predicted to cost %s less than the chosen one: a rank moves when its score has said so for long enough, and nothing holds it\n",
			ms(d.Alternatives[chosen].Cost-d.Alternatives[0].Cost))
	}
	return nil
}

// ms spells a time in seconds.
func ms(seconds float64) string { return fmt.Sprintf("%.1f ms", 1e3*seconds) }

func newRecordCommand(env *env) *cobra.Command {
	var client controllerClient
	var file string
	cmd := &cobra.Command{
		Use:   "record NAME",
		Short: "Record what the policy of a job is told and decides, until Ctrl-C or the job's end",
		Long: `Record a trace: what the policy of a job is told in every round, and what it decides, as JSON lines whose format
docs/policy.md has. 'xagg policy replay' lets policies decide again from it.`,
		Example: "  xagg record train --out train.trace",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			var out io.Writer = env.stdout
			if file != "" {
				f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
				if err != nil {
					return fmt.Errorf("record: %w", err)
				}
				defer func() {
					if cerr := f.Close(); err == nil {
						err = cerr
					}
				}()
				out = f
			}
			return client.stream(cmd.Context(), func(ctx context.Context, ctl api.ControllerClient) error {
				lines, err := ctl.Record(ctx, &api.RecordRequest{Job: args[0]})
				if err != nil {
					return err
				}
				for {
					line, err := lines.Recv()
					switch {
					case errors.Is(err, io.EOF) || ctx.Err() != nil: // the job is over, or somebody has seen enough
						return nil
					case err != nil:
						return err
					}
					if _, err := out.Write(append(line.Json, '\n')); err != nil {
						return err
					}
				}
			})
		},
	}
	client.flags(cmd)
	cmd.Flags().StringVar(&file, "out", "", "file to write, which must not exist (default: standard output)")
	return cmd
}
