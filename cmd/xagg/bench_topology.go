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
	var divide int
	cmd := &cobra.Command{
		Use:    "topology SCENARIO.yaml",
		Short:  "Say which hosts and links a scenario needs",
		Hidden: true,
		Long: `Write what somebody has to make for a scenario before 'xagg bench run --hosts' can run it: one JSON object with the
numbers of hosts, rates and losses of their links, and the scenario itself, with rates and sizes divided where that is wanted.`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if divide < 1 {
				return usagef("--divide %d: want at least 1", divide)
			}
			text, err := os.ReadFile(args[0])
			if err != nil {
				return fmt.Errorf("read scenario: %w", err)
			}
			s, err := scenario.Parse(args[0], text)
			if err != nil {
				return &exitError{exitUsage, err}
			}
			if divide > 1 {
				s = s.Divide(divide)
				if err := s.Validate(); err != nil {
					return usagef("%s with --divide %d: %w", args[0], divide, err)
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
	cmd.Flags().IntVar(&divide, "divide", 1, "divide rates of links and sizes of tensors, for slow switches")
	return cmd
}
