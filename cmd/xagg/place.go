package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"xagg/controller"
	"xagg/policy"
	"xagg/policy/place"
)

// placeSchema is the version of what `xagg policy place -o json` prints. Fields are only added within a version.
const placeSchema = 1

func newPolicyPlaceCommand(env *env) *cobra.Command {
	var path, output string
	cmd := &cobra.Command{
		Use:   "place -f FILE",
		Short: "Say where a controller would place the jobs of its configuration, and why",
		Long: `Say where a controller that begins with nothing would place the jobs of its configuration: the pool of each and its slots of the
switch, the servers that have memory for it, and why. Nothing is connected to. How much memory a server has says its memory: in the
configuration; where that is missing it is taken to have enough.

Exit codes:
  0   every job has a place
  2   there is too little of something; the error says of what, and how much
  64  the command line or the configuration is wrong`,
		Example: "  xagg policy place -f controller.yaml",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case path == "":
				return usagef("-f is missing: the controller's configuration; see '%s --help'", cmd.CommandPath())
			case output != "text" && output != "json":
				return usagef("-o %q: want text or json", output)
			}
			cfg, err := controller.Load(path)
			if _, unread := errors.AsType[*fs.PathError](err); unread {
				return err
			}
			if err != nil {
				return &exitError{exitUsage, err}
			}
			placed, err := controller.Place(cfg)
			_, mistake := errors.AsType[*policy.FieldError](err)
			switch {
			case mistake:
				return &exitError{exitUsage, err}
			case err != nil:
				return &exitError{exitDifferences, err}
			case output == "json":
				return printPlacesJSON(env, cfg, placed)
			}
			return printPlaces(env, cfg, placed)
		},
	}
	cmd.Flags().StringVarP(&path, "file", "f", "", "configuration of the controller (YAML)")
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

// placeView is where a job is placed.
type placeView struct {
	Job         string   `json:"job"`
	Weight      int      `json:"weight"`
	Quota       int      `json:"quota"` // pool that the weight entitles it to
	Pool        int      `json:"pool"`
	Switch      string   `json:"switch"`
	FirstSlot   int      `json:"first_slot"`
	Slots       int      `json:"slots"`
	Cohort      string   `json:"cohort"`  // ranks that the switch sums, such as "0-2"
	Servers     []string `json:"servers"` // of its plan
	Homes       []string `json:"homes"`   // servers that have memory for it, also for plans to come
	Even        bool     `json:"even"`    // no other choice of servers for the jobs shares their load more evenly
	Explanation string   `json:"explanation"`
}

func viewPlaces(cfg controller.Config, placed []place.Placement) []placeView {
	views := []placeView{}
	for i, p := range placed {
		views = append(views, placeView{
			Job: p.Job, Weight: max(1, cfg.Jobs[i].Weight), Quota: p.Quota, Pool: p.Pool, Switch: p.Switch, FirstSlot: p.Base,
			Slots: policy.SlotsPerPool * p.Pool, Cohort: policy.FormatMask(p.Cohort), Servers: append([]string{}, p.Servers...),
			Homes: append([]string{}, p.Homes...), Even: p.Even, Explanation: p.Explanation,
		})
	}
	return views
}

func printPlacesJSON(env *env, cfg controller.Config, placed []place.Placement) error {
	enc := json.NewEncoder(env.stdout)
	enc.SetIndent("", "  ")
	return enc.Encode(struct {
		SchemaVersion int         `json:"schema_version"`
		Reserve       float64     `json:"reserve"`
		Jobs          []placeView `json:"jobs"`
	}{placeSchema, cfg.Reserve, viewPlaces(cfg, placed)})
}

func printPlaces(env *env, cfg controller.Config, placed []place.Placement) error {
	if len(placed) == 0 {
		fmt.Fprintln(env.stdout, "the configuration has no jobs")
		return nil
	}
	t := tabwriter.NewWriter(env.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "JOB\tWEIGHT\tQUOTA\tPOOL\tSLOTS\tCOHORT\tSERVERS\tMEMORY AT")
	views := viewPlaces(cfg, placed)
	for _, v := range views {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d-%d\t%s\t%s\t%s\n", v.Job, v.Weight, v.Quota, v.Pool, v.FirstSlot, v.FirstSlot+v.Slots-1, v.Cohort,
			listOrNone(v.Servers), listOrNone(v.Homes))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(env.stdout)
	for _, v := range views {
		fmt.Fprintf(env.stdout, "%s: %s\n", v.Job, strings.TrimSpace(v.Explanation))
	}
	return nil
}
