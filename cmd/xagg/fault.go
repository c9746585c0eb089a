package main

import (
	"fmt"
	"os"

	"github.com/spf13/pflag"

	"xagg/bmv2/fault"
)

// faultFlags are the options that put faults on links.
type faultFlags struct {
	texts []string
	file  string
}

// add defines the options.
func (f *faultFlags) add(flags *pflag.FlagSet) {
	flags.StringArrayVar(&f.texts, "fault", nil, "damage the switch's links: `KEY=VALUE,...` with rates drop, duplicate, reorder, corrupt, "+
		"delayed (0.1 or 10%), delay=5ms,\nport=N (default all), direction=in|out, seed=N, all=true (not only the protocol's frames); "+
		"repeatable, the last one that is about a port holds there")
	flags.StringVar(&f.file, "faults", "", "`file` (YAML) with a list named faults of the same; those of --fault come after it")
}

// specs reads what the options say.
func (f *faultFlags) specs() ([]fault.Spec, error) {
	var specs []fault.Spec
	if f.file != "" {
		src, err := os.ReadFile(f.file)
		if err != nil {
			return nil, fmt.Errorf("read faults: %w", err)
		}
		if specs, err = fault.ParseYAML(f.file, src); err != nil {
			return nil, usagef("read faults: %w", err)
		}
	}
	for _, text := range f.texts {
		spec, err := fault.Parse(text)
		if err != nil {
			return nil, usagef("--%w", err)
		}
		specs = append(specs, spec)
	}
	if err := fault.Check(specs); err != nil {
		return nil, usagef("%w", err)
	}
	return specs, nil
}
