package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	"xagg/lab/bench"
	"xagg/lab/scenario"
)

// newBenchTopologyCommand returns the command that tells other labs what a scenario needs. It is for their use.
func newBenchTopologyCommand(env *env) *cobra.Command {
	var slow int
	cmd := &cobra.Command{
		Use:    "topology SCENARIO.yaml",
		Short:  "Say which hosts and links a scenario needs",
		Hidden: true,
		Long: `Write what somebody has to make for a scenario before 'xagg bench run --hosts' can run it: one JSON object with the
numbers of hosts, rates and losses of their links, and the scenario itself.`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if slow < 1 {
				return usagef("--slow %d: want at least 1", slow)
			}
			text, err := os.ReadFile(args[0])
			if err != nil {
				return fmt.Errorf("read scenario: %w", err)
			}
			s, err := scenario.Parse(args[0], text)
			if err != nil {
				return &exitError{exitUsage, err}
			}
			if slow > 1 {
				s = s.Slow(slow)
				if err := s.Validate(); err != nil {
					return usagef("%s with --slow %d: %w", args[0], slow, err)
				}
				if text, err = yaml.Marshal(s); err != nil {
					return fmt.Errorf("write the scenario: %w", err)
				}
			}
			plan, err := bench.NewPlan(s, string(text))
			if err != nil {
				return err
			}
			return json.NewEncoder(env.stdout).Encode(plan)
		},
	}
	cmd.Flags().IntVar(&slow, "slow", 1, "for a switch that is slow: multiply times by `N`, divide sizes by N and rates of links by N squared")
	return cmd
}
