package main

import (
	"strings"

	"github.com/spf13/cobra"

	"xagg/docs/schema"
)

func newSchemaCommand(env *env) *cobra.Command {
	return &cobra.Command{
		Use:   "schema " + strings.Join(schema.Names, "|"),
		Short: "Print the JSON Schema of a kind of YAML file, for editors",
		Long: `Print the JSON Schema (draft 2020-12) of a kind of YAML file: fields with type, range, default and meaning. Editors complete and check
files by it. What is wrong in a file only by its meaning, such as a threshold to leave that is above the one to enter, is found when it is read:
see 'xagg policy lint' and 'xagg config reload --dry-run'.`,
		Example:   "  xagg schema controller > controller.schema.json",
		Args:      cobra.ExactArgs(1),
		ValidArgs: schema.Names,
		RunE: func(_ *cobra.Command, args []string) error {
			text, ok := schema.Of(args[0])
			if !ok {
				return usagef("there is no schema of %q; there are those of %s", args[0], strings.Join(schema.Names, ", "))
			}
			_, err := env.stdout.Write(text)
			return err
		},
	}
}
