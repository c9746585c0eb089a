package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"xagg/doctor"
)

func newDoctorCommand(env *env) *cobra.Command {
	var output string
	var fix bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what this machine has of what xagg can use, and how to get the rest",
		Long: `Doctor looks at the kernel, at privileges, at XDP (a frame really goes out and back over a link in namespaces
that it makes and removes), at compilers, switches and labs, and prints a line for each with the cure below.

Exit code 0: everything that is required is there. 3: something that is required is missing.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return usagef("--output %q: want text or json", output)
			}
			if fix {
				removed, err := doctor.Fix()
				for _, id := range removed.Labs {
					env.log.Info("removed what a lab had left", "lab", id)
				}
				for _, dir := range removed.Pins {
					env.log.Info("removed a pinned server whose interface is gone", "pins", dir)
				}
				if err != nil {
					return fmt.Errorf("remove leftovers: %w", err)
				}
			}
			report, err := doctor.Examine(cmd.Context(), doctor.Local())
			if err != nil {
				return errInterrupted
			}
			write := report.WriteText
			if output == "json" {
				write = report.WriteJSON
			}
			if err := write(env.stdout); err != nil {
				return fmt.Errorf("write report: %w", err)
			}
			if !report.OK() {
				return &exitError{code: exitEnvironment}
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "form of the report: text, json")
	cmd.Flags().BoolVar(&fix, "fix", false, "first remove what dead labs have left, and servers pinned for interfaces that are gone")
	return cmd
}
