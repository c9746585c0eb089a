package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"xagg/api"
	"xagg/controller"
)

// besideReloads runs a controller, and has it read its configuration again whenever it is asked to.
func besideReloads(ctx context.Context, log *slog.Logger, c *controller.Controller, asked <-chan struct{}, run func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() {
		for {
			select {
			case <-asked:
				if _, err := c.Reload(ctx, false); err != nil { // a bad file is no error, and in the log already
					log.Error("configuration is not read again", "err", err)
				}
			case <-ctx.Done():
				return
			}
		}
	})
	defer done.Wait()
	defer cancel()
	return run(ctx)
}

func newConfigCommand(env *env) *cobra.Command {
	var client controllerClient
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Have a controller read its configuration again",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	client.flags(cmd)
	cmd.AddCommand(newConfigReloadCommand(env, &client))
	return cmd
}

// reloadView is the answer to a reload as it is printed.
type reloadView struct {
	SchemaVersion int                `json:"schema_version"`
	OK            bool               `json:"ok"`
	DryRun        bool               `json:"dry_run"`
	Error         string             `json:"error,omitempty"`
	Changes       []configChangeView `json:"changes"`
}

type configChangeView struct {
	Field   string `json:"field"`
	Outcome string `json:"outcome"`
	Note    string `json:"note"`
}

// configView is what became of a configuration file as it is printed.
type configView struct {
	File        string             `json:"file,omitempty"`
	Error       string             `json:"error,omitempty"` // why it was not taken when it was read last
	SuccessTime float64            `json:"success_time"`    // when one was taken last, in seconds since 1970
	Restart     []configChangeView `json:"restart"`         // what it has otherwise until job or controller is restarted
}

func viewChanges(changes []*api.ConfigChange) []configChangeView {
	views := []configChangeView{}
	for _, c := range changes {
		views = append(views, configChangeView{c.GetField(), c.GetOutcome(), c.GetNote()})
	}
	return views
}

func viewConfig(c *api.ConfigStatus) configView {
	return configView{c.GetFile(), c.GetError(), c.GetSuccessTime(), viewChanges(c.GetRestart())}
}

func newConfigReloadCommand(env *env, client *controllerClient) *cobra.Command {
	var dry bool
	cmd := &cobra.Command{
		Use:   "reload",
		Short: "Have the controller read its configuration file again",
		Long: `Have the controller read its configuration file again, as SIGHUP does, and say what becomes of every change.

The whole file is checked before anything changes. One that is wrong changes nothing: the reason, with file, line and column, is the
answer, and the exit code is 2. What cannot change while a job or the controller runs stays as it is and is told, and the rest
takes effect. A job that runs and is in the file no more goes on.`,
		Example: "  xagg config reload --dry-run\n  xagg config reload",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return client.call(cmd.Context(), func(ctx context.Context, ctl api.ControllerClient) error {
				reply, err := ctl.ReloadConfig(ctx, &api.ReloadConfigRequest{DryRun: dry})
				if err != nil {
					return err
				}
				v := reloadView{statusSchema, reply.GetError() == "", dry, reply.GetError(), viewChanges(reply.GetChanges())}
				if err := client.print(env.stdout, v, v.text); err != nil {
					return err
				}
				if !v.OK {
					return &exitError{code: exitDifferences}
				}
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&dry, "dry-run", false, "say what would change, and change nothing")
	return cmd
}

func (v reloadView) text(w io.Writer) {
	switch {
	case v.Error != "":
		fmt.Fprintf(w, "%s\nnothing is changed\n", v.Error)
		return
	case len(v.Changes) == 0:
		fmt.Fprintln(w, "nothing is otherwise than it was")
		return
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, c := range v.Changes {
		fmt.Fprintf(tw, "%s\t%s\t%s\n", c.Field, c.Outcome, c.Note)
	}
	tw.Flush()
	if v.DryRun {
		fmt.Fprintln(w, "nothing is changed: this is what a reload would do")
	}
}
