package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/controller"
	"xagg/internal/endpoint"
	"xagg/policy"
	"xagg/wire"
)

// statusSchema is the version of what `xagg status -o json` and `xagg job ... -o json` print. Fields are only added
// within a version.
const statusSchema = 1

// clientTimeout bounds a call from the command line to the controller.
const clientTimeout = 30 * time.Second

func newControllerCommand(env *env) *cobra.Command {
	var path, state, metricsAddr string
	cmd := &cobra.Command{
		Use:         "controller --config FILE",
		Annotations: daemon,
		Short:       "Run the daemon that programs the switch and the servers, and where workers meet",
		Long: `Run the daemon that programs the switch and the servers, and where workers meet.

It connects to the switch over P4Runtime and to the servers' agents, keeps both programmed, and serves its API until
it is interrupted. What it has to know after a restart, whatever ended it, it keeps in a file: started again, it finds its
jobs running, and they do not notice. On SIGHUP it reads its configuration again, as 'xagg config reload' has it do. The
configuration is YAML, for example:

` + indent(controller.Example),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if path == "" {
				return usagef("--config is missing: the file that names switch, hosts and servers; see '%s --help'", cmd.CommandPath())
			}
			reload := make(chan struct{}, 1)
			env.hangup.Store(new(func() {
				select {
				case reload <- struct{}{}:
				default: // it is going to be read anyway
				}
			}))
			file := controller.File{Path: path, State: state}
			cfg, err := file.Load()
			var unread *fs.PathError
			switch {
			case errors.As(err, &unread):
				return err
			case err != nil:
				return &exitError{exitUsage, err}
			}
			// First: who listens here has the state file alone.
			lis, err := endpoint.Listen(cfg.Listen)
			if err != nil {
				return err
			}
			defer lis.Close()
			c, err := controller.New(cfg, controller.WithLogger(env.log), controller.WithFile(file))
			if err != nil {
				return err
			}
			return withMetrics(cmd.Context(), env.log, metricsAddr, c.Collector(), func(ctx context.Context) error {
				return besideReloads(ctx, env.log, c, reload, func(ctx context.Context) error { return c.Run(ctx, lis) })
			})
		},
	}
	cmd.Flags().StringVar(&path, "config", "", "configuration file (YAML)")
	cmd.Flags().StringVar(&state, "state", "",
		"file that keeps what a restarted controller has to know, or \"none\" (default: the configuration's \"state\", or FILE.state)")
	metricsFlag(cmd, &metricsAddr)
	return cmd
}

// indent sets text off by two blanks.
func indent(text string) string {
	return "  " + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n  ")
}

// controllerClient is the way of the client commands to the daemon.
type controllerClient struct {
	address string
	output  string
}

func (c *controllerClient) flags(cmd *cobra.Command) {
	cmd.PersistentFlags().StringVar(&c.address, "controller", controller.DefaultListen,
		"address of the controller: host:port or unix:PATH")
	cmd.PersistentFlags().StringVarP(&c.output, "output", "o", "text", "form of the output: text, json")
}

// call runs f, which takes a moment, with a client, and explains an error for a person.
func (c *controllerClient) call(ctx context.Context, f func(context.Context, api.ControllerClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, clientTimeout)
	defer cancel()
	return c.stream(ctx, f)
}

// stream is call for what may take as long as it likes.
func (c *controllerClient) stream(ctx context.Context, f func(context.Context, api.ControllerClient) error) error {
	if c.output != "text" && c.output != "json" {
		return usagef("--output %q: want text or json", c.output)
	}
	if err := endpoint.Check(c.address); err != nil {
		return usagef("--controller %w", err)
	}
	conn, err := endpoint.Dial(c.address)
	if err != nil {
		return err
	}
	defer conn.Close()
	err = f(ctx, api.NewControllerClient(conn))
	var unreached *endpoint.ConnectError
	if errors.As(err, &unreached) {
		return fmt.Errorf("no controller answers at %s (%w): start one with 'xagg controller --config FILE', "+
			"or name its address with --controller", c.address, unreached.Reason())
	}
	st, isStatus := status.FromError(err)
	switch {
	case err == nil || !isStatus:
		return err
	case st.Code() == codes.InvalidArgument:
		return &exitError{exitUsage, errors.New(st.Message())}
	}
	return errors.New(st.Message())
}

func newStatusCommand(env *env) *cobra.Command {
	var client controllerClient
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Say whether controller, switch, servers and jobs are all right",
		Long: `Say whether controller, switch, servers and jobs are all right.

The first line is OK, or NOT OK with the reasons below it. The exit code is 0 if all is well and 1 if something is not:
no controller answers, a device is not ready, a job was aborted or cannot be installed, is being recovered, or goes on
without some of its ranks. A job that waits for ranks to join is all right; 'xagg why JOB' says for whom. Refused packets
are listed with what they mean, and are no problem by themselves: a few are ordinary where links lose packets.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return client.call(cmd.Context(), func(ctx context.Context, ctl api.ControllerClient) error {
				reply, err := ctl.Status(ctx, &api.StatusRequest{})
				if err != nil {
					return err
				}
				view := viewStatus(client.address, reply)
				if err := client.print(env.stdout, view, view.text); err != nil {
					return err
				}
				if !view.OK {
					return &exitError{code: exitFailure}
				}
				return nil
			})
		},
	}
	client.flags(cmd)
	return cmd
}

func newJobCommand(env *env) *cobra.Command {
	var client controllerClient
	cmd := &cobra.Command{
		Use:   "job",
		Short: "Create, steer, remove and show jobs",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	client.flags(cmd)
	cmd.AddCommand(
		newJobCreateCommand(env, &client),
		newJobSteerCommand(env, &client),
		newJobAdaptCommand(env, &client),
		newJobExplainCommand(env, &client),
		newJobRemoveCommand(env, &client),
		newJobListCommand(env, &client),
		newJobShowCommand(env, &client),
	)
	return cmd
}

func newJobCreateCommand(env *env, client *controllerClient) *cobra.Command {
	var ranks, maxElems, depth, weight uint32
	var rule ruleFlags
	var consistency consistencyFlags
	var adaptName string
	cmd := &cobra.Command{
		Use:   "create NAME --ranks N --max-elems N",
		Short: "Create a job, so that its workers can join",
		Long: `Create a job, so that its workers can join.

Its consistency says what a result is: in a sync job the sum of all ranks; in a quorum job the mean of those who came in
time, at least so many; in an async job a running sum that no rank is further ahead of than the staleness. It stays for the
job's life. Quorum needs a server (--mode server or hybrid), async all ranks at servers (--mode server).`,
		Example: `  xagg job create train --ranks 4 --max-elems 1000000 --depth 4
  xagg job create train --ranks 4 --max-elems 1000000 --mode hybrid --steer 3 --consistency quorum --quorum 3 --wait 10ms
  xagg job create train --ranks 4 --max-elems 1000000 --mode server --consistency async --staleness 2
  xagg job create train --ranks 4 --max-elems 1000000 --mode switch --adapt cost-model`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if ranks == 0 || maxElems == 0 {
				return usagef("--ranks and --max-elems are needed: how many workers, and the lanes of their largest vector")
			}
			req := &api.CreateJobRequest{
				Name: args[0], Ranks: ranks, MaxElems: maxElems, Policy: rule.policy(), Depth: depth, Weight: weight,
			}
			var err error
			if req.Consistency, err = consistency.proto(); err != nil {
				return err
			}
			if req.Adapt, err = adaptPolicy(adaptName); err != nil {
				return err
			}
			if req.Policy == nil && rule.given() {
				return usagef("--steer, --servers and --pool belong to a --mode; without one the controller's policy decides")
			}
			return client.call(cmd.Context(), func(ctx context.Context, ctl api.ControllerClient) error {
				job, err := ctl.CreateJob(ctx, req)
				if err != nil {
					return err
				}
				return client.printJob(env.stdout, job)
			})
		},
	}
	cmd.Flags().Uint32Var(&ranks, "ranks", 0, "number of workers, 1..64")
	cmd.Flags().Uint32Var(&maxElems, "max-elems", 0, "lanes of the largest vector")
	rule.flags(cmd, " (default: what the controller's policy says)")
	cmd.Flags().Uint32Var(&rule.pool, "pool", 0, "slots per version, a power of two (default: the policy's)")
	cmd.Flags().Uint32Var(&depth, "depth", 1, "rounds that may be under way, 1..16")
	cmd.Flags().Uint32Var(&weight, "weight", 1, "share of switch slots beside other jobs, 1..1000")
	consistency.flags(cmd)
	cmd.Flags().StringVar(&adaptName, "adapt", "", "policy by which the plan follows what is measured: a file, the name of a rule, or \"configured\"")
	return cmd
}

// consistencyFlags are the flags that say what a job's results are.
type consistencyFlags struct {
	mode                      string
	quorum, staleness, rounds uint32
	wait                      time.Duration
}

func (c *consistencyFlags) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&c.mode, "consistency", string(controller.ModeSync), "what a result is: sync, quorum, async")
	cmd.Flags().Uint32Var(&c.quorum, "quorum", 0, "ranks that are enough (quorum)")
	cmd.Flags().DurationVar(&c.wait, "wait", 0, "how long a chunk is kept open for more ranks from its first arrival, up to 1h (quorum)")
	cmd.Flags().Uint32Var(&c.rounds, "rounds", 0, "rounds that servers keep for stragglers, a power of two (quorum) (default: 8, or twice the depth)")
	cmd.Flags().Uint32Var(&c.staleness, "staleness", 0, "contributions that a rank may be ahead of the slowest (async)")
}

// proto returns what the flags say. The controller checks it; only what the message cannot hold is an error.
func (c *consistencyFlags) proto() (*api.Consistency, error) {
	if err := checkWait(c.wait); err != nil {
		return nil, err
	}
	return &api.Consistency{
		Mode: c.mode, Quorum: c.quorum, WaitUs: uint32(c.wait / time.Microsecond), Staleness: c.staleness, Rounds: c.rounds,
	}, nil
}

// checkWait refuses what a message cannot hold.
func checkWait(wait time.Duration) error {
	if wait < 0 || wait > policy.MaxWait || wait%time.Microsecond != 0 {
		return usagef("--wait %s: want 0s to %s, in whole microseconds", wait, policy.MaxWait)
	}
	return nil
}

// ruleFlags are the flags that say who sums.
type ruleFlags struct {
	mode    string
	steer   []uint
	servers []string
	pool    uint32
}

func (r *ruleFlags) flags(cmd *cobra.Command, modeDefault string) {
	cmd.Flags().StringVar(&r.mode, "mode", "", "who sums: switch, server, hybrid"+modeDefault)
	cmd.Flags().UintSliceVar(&r.steer, "steer", nil, "ranks that go to a server (mode hybrid)")
	cmd.Flags().StringSliceVar(&r.servers, "servers", nil, "names of the servers (default: all)")
}

// given reports whether there is anything that needs a mode.
func (r *ruleFlags) given() bool { return len(r.steer) > 0 || len(r.servers) > 0 || r.pool != 0 }

// policy returns the rule, or nil without a mode.
func (r *ruleFlags) policy() *api.Policy {
	if r.mode == "" {
		return nil
	}
	p := &api.Policy{Rule: policy.RuleStatic, Mode: r.mode, Servers: r.servers, Pool: r.pool}
	for _, rank := range r.steer {
		p.Steer = append(p.Steer, uint32(rank))
	}
	return p
}

func newJobSteerCommand(env *env, client *controllerClient) *cobra.Command {
	var rule ruleFlags
	var quorum uint32
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "steer NAME [--mode MODE] [--quorum K] [--wait D]",
		Short: "Change who sums, and a quorum job's quorum and wait, while the job runs",
		Long: `Change who sums, and a quorum job's quorum and wait, while the job runs.

The new plan is installed beside the old one and announced; the workers change to it between two rounds, all at the same
one, and nothing stops. The command returns when the change is under way. 'xagg job show NAME' says what it waits for; it
is over when every rank has finished the last round under the old plan. Until then another change is refused.

Without --mode who sums stays. Quorum and wait stay too unless they are given; a quorum is at least the one that the job was created
with, which its workers take for the least.`,
		Example: `  xagg job steer train --mode hybrid --steer 3
  xagg job steer train --mode server --servers s0
  xagg job steer train --mode switch
  xagg job steer train --quorum 4 --wait 2ms`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			p := rule.policy()
			waits := cmd.Flags().Changed("wait")
			switch {
			case p == nil && rule.given():
				return usagef("--steer and --servers belong to a --mode")
			case p == nil && quorum == 0 && !waits:
				return usagef("--mode is missing: who is to sum from now on; or --quorum, or --wait: how many ranks are enough, and how long chunks wait for more")
			case p == nil:
				p = &api.Policy{Rule: policy.RuleStatic}
			}
			p.Quorum = quorum
			if waits {
				if err := checkWait(wait); err != nil {
					return err
				}
				p.WaitUs = new(uint32(wait / time.Microsecond))
			}
			return client.call(cmd.Context(), func(ctx context.Context, ctl api.ControllerClient) error {
				job, err := ctl.Steer(ctx, &api.SteerRequest{Job: args[0], Policy: p})
				if err != nil {
					return err
				}
				return client.printJob(env.stdout, job)
			})
		},
	}
	rule.flags(cmd, "")
	cmd.Flags().Uint32Var(&quorum, "quorum", 0, "ranks that are enough for a result of a quorum job (default: as many as now)")
	cmd.Flags().DurationVar(&wait, "wait", 0, "how long a chunk of a quorum job is kept open for more (default: as long as now)")
	return cmd
}

func newJobRemoveCommand(_ *env, client *controllerClient) *cobra.Command {
	return &cobra.Command{
		Use:   "remove NAME",
		Short: "Remove a job; workers that are still joined are told",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return client.call(cmd.Context(), func(ctx context.Context, ctl api.ControllerClient) error {
				_, err := ctl.RemoveJob(ctx, &api.RemoveJobRequest{Name: args[0]})
				return err
			})
		},
	}
}

func newJobListCommand(env *env, client *controllerClient) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the jobs",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return client.call(cmd.Context(), func(ctx context.Context, ctl api.ControllerClient) error {
				reply, err := ctl.Status(ctx, &api.StatusRequest{})
				if err != nil {
					return err
				}
				list := struct {
					SchemaVersion int       `json:"schema_version"`
					Jobs          []jobView `json:"jobs"`
				}{statusSchema, viewStatus(client.address, reply).Jobs}
				return client.print(env.stdout, list, func(w io.Writer) { jobTable(w, list.Jobs) })
			})
		},
	}
}

func newJobShowCommand(env *env, client *controllerClient) *cobra.Command {
	return &cobra.Command{
		Use:   "show NAME",
		Short: "Show a job with the reason for its plan",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return client.call(cmd.Context(), func(ctx context.Context, ctl api.ControllerClient) error {
				reply, err := ctl.Status(ctx, &api.StatusRequest{})
				if err != nil {
					return err
				}
				for _, job := range reply.Jobs {
					if job.Name == args[0] {
						return client.printJob(env.stdout, job)
					}
				}
				return fmt.Errorf("there is no job %q; see 'xagg job list'", args[0])
			})
		},
	}
}

// statusView is a status as it is printed.
type statusView struct {
	SchemaVersion int            `json:"schema_version"`
	OK            bool           `json:"ok"`
	Problems      []string       `json:"problems"` // a sentence each; empty if all is well
	Controller    controllerView `json:"controller"`
	Switch        switchView     `json:"switch"`
	Servers       []serverView   `json:"servers"`
	Refused       []refusedView  `json:"refused"` // packets, by device and reason; only where there are any
	Jobs          []jobView      `json:"jobs"`
	Config        configView     `json:"config"`
}

type controllerView struct {
	Address string `json:"address"`
	Ready   bool   `json:"ready"` // always: it has answered
}

// refusedView is how many packets a device has refused for a reason.
type refusedView struct {
	At      string `json:"at"` // name of the switch or server
	Reason  string `json:"reason"`
	Packets uint64 `json:"packets"`
	Meaning string `json:"meaning"`
}

type switchView struct {
	Name      string            `json:"name"`
	Address   string            `json:"address"`
	Ready     bool              `json:"ready"`
	Error     string            `json:"error,omitempty"`
	Slots     uint32            `json:"slots"`
	SlotsFree uint32            `json:"slots_free"`
	Reasons   map[string]uint64 `json:"reasons,omitempty"` // packets by reason
	Sent      map[string]uint64 `json:"sent,omitempty"`    // packets by type
}

type serverView struct {
	Name        string            `json:"name"`
	Address     string            `json:"address"`
	Ready       bool              `json:"ready"`
	Error       string            `json:"error,omitempty"`
	Interface   string            `json:"interface,omitempty"`
	Mode        string            `json:"mode,omitempty"`
	MemoryBytes uint64            `json:"memory_bytes"`
	Slots       uint32            `json:"slots"`
	SlotsFree   uint32            `json:"slots_free"`
	Reasons     map[string]uint64 `json:"reasons,omitempty"`
}

type jobView struct {
	Name        string   `json:"name"`
	ID          uint32   `json:"id"`
	Epoch       uint32   `json:"epoch"`
	State       string   `json:"state"`
	Error       string   `json:"error,omitempty"`
	Ranks       uint32   `json:"ranks"`
	Joined      string   `json:"joined"` // ranks, such as "0-2"
	Left        string   `json:"left"`
	Gone        string   `json:"gone"`               // ranks that the job goes on without
	Awaited     string   `json:"awaited,omitempty"`  // ranks that have not come back yet to a controller that was restarted
	Recovery    string   `json:"recovery,omitempty"` // what a recovery under way waits for
	Note        string   `json:"note,omitempty"`     // in what the configuration would have it otherwise
	Cohort      string   `json:"cohort"`
	Servers     []string `json:"servers"`
	Pool        uint32   `json:"pool"`
	Chunks      uint32   `json:"chunks"`
	Explanation string   `json:"explanation"`
	Depth       uint32   `json:"depth"`
	Weight      uint32   `json:"weight"`
	QuotaSlots  uint32   `json:"quota_slots"` // of the switch, that its weight entitles it to
	// Consistency says what results are.
	Consistency consistencyView `json:"consistency"`
	// Quorum and WaitUS are what the plan makes of a quorum job's: at least the job's own quorum, or as many ranks as are there.
	Quorum uint32 `json:"quorum,omitempty"`
	WaitUS uint32 `json:"wait_us,omitempty"`
	// Change is there while the plan changes; the fields above are the old plan's until no rank needs it any more.
	Change *changeView `json:"change,omitempty"`
}

// consistencyView has what the mode does not use left out.
type consistencyView struct {
	Mode      string `json:"mode"`
	Quorum    uint32 `json:"quorum,omitempty"`
	WaitUS    uint32 `json:"wait_us,omitempty"`
	Staleness uint32 `json:"staleness,omitempty"`
	Rounds    uint32 `json:"rounds,omitempty"` // that servers keep for stragglers
}

// String says it for people.
func (c consistencyView) String() string {
	switch controller.Mode(c.Mode) {
	case controller.ModeQuorum:
		return fmt.Sprintf("quorum: at least %d ranks, after %s; servers keep %d rounds",
			c.Quorum, time.Duration(c.WaitUS)*time.Microsecond, c.Rounds)
	case controller.ModeAsync:
		return fmt.Sprintf("async: at most %d contributions ahead of the slowest rank", c.Staleness)
	}
	return c.Mode
}

type changeView struct {
	Epoch       uint32   `json:"epoch"`
	Cohort      string   `json:"cohort"`
	Servers     []string `json:"servers"`
	Explanation string   `json:"explanation"`
	Behind      string   `json:"behind"` // ranks that have not finished the last round of the old plan
	WaitsFor    string   `json:"waits_for"`
	Quorum      uint32   `json:"quorum,omitempty"`
	WaitUS      uint32   `json:"wait_us,omitempty"`
}

// enough says what a plan wants for a result, as the end of a line about it; nothing in a job without a quorum.
func enough(quorum, waitUS uint32) string {
	if quorum == 0 {
		return ""
	}
	return fmt.Sprintf(", quorum %d, wait %s", quorum, time.Duration(waitUS)*time.Microsecond)
}

func viewStatus(address string, r *api.StatusReply) *statusView {
	v := &statusView{
		SchemaVersion: statusSchema, Problems: []string{}, Servers: []serverView{}, Refused: []refusedView{}, Jobs: []jobView{},
		Controller: controllerView{Address: address, Ready: true}, Config: viewConfig(r.GetConfig()),
	}
	if v.Config.Error != "" {
		v.Problems = append(v.Problems, fmt.Sprintf("configuration %s was not taken, and the one of before holds on: %s", v.Config.File, v.Config.Error))
	}
	sw := r.GetSwitch()
	v.refuse(sw.GetName(), sw.GetReasons())
	v.Switch = switchView{
		Name: sw.GetName(), Address: sw.GetAddress(), Ready: sw.GetReady(), Error: sw.GetError(),
		Slots: sw.GetSlots(), SlotsFree: sw.GetSlotsFree(), Reasons: sw.GetReasons(), Sent: sw.GetSent(),
	}
	switch {
	case !sw.GetReady():
		v.Problems = append(v.Problems, fmt.Sprintf("switch %s at %s is not ready: %s", sw.GetName(), sw.GetAddress(), sw.GetError()))
	case sw.GetError() != "":
		v.Problems = append(v.Problems, fmt.Sprintf("switch %s at %s: %s", sw.GetName(), sw.GetAddress(), sw.GetError()))
	}
	for _, s := range r.GetServers() {
		v.refuse(s.GetName(), s.GetReasons())
		v.Servers = append(v.Servers, serverView{
			Name: s.GetName(), Address: s.GetAddress(), Ready: s.GetReady(), Error: s.GetError(),
			Interface: s.GetInfo().GetInterface(), Mode: s.GetInfo().GetMode(), MemoryBytes: s.GetInfo().GetMemoryBytes(),
			Slots: s.GetInfo().GetSlots(), SlotsFree: s.GetInfo().GetSlotsFree(), Reasons: s.GetReasons(),
		})
		if !s.GetReady() {
			v.Problems = append(v.Problems, fmt.Sprintf("server %s with its agent at %s is not ready: %s",
				s.GetName(), s.GetAddress(), s.GetError()))
		}
	}
	for _, j := range r.GetJobs() {
		v.Jobs = append(v.Jobs, viewJob(j))
		if j.GetError() != "" {
			v.Problems = append(v.Problems, fmt.Sprintf("job %s is %s: %s", j.GetName(), j.GetState(), j.GetError()))
		}
		if j.GetAwaited() != 0 {
			v.Problems = append(v.Problems, fmt.Sprintf("job %s waits for rank %s to come back to the controller, which was restarted",
				j.GetName(), policy.FormatMask(j.GetAwaited())))
		}
		if j.GetRecovery() != "" {
			v.Problems = append(v.Problems, fmt.Sprintf("job %s is being recovered, which waits for %s", j.GetName(), j.GetRecovery()))
		}
		if j.GetGone() != 0 {
			v.Problems = append(v.Problems, fmt.Sprintf("job %s goes on without rank %s", j.GetName(), policy.FormatMask(j.GetGone())))
		}
	}
	v.OK = len(v.Problems) == 0
	return v
}

// refuse adds what a device has refused, in the order of the reason codes.
func (v *statusView) refuse(at string, reasons map[string]uint64) {
	for r := range wire.Reason(wire.NumReasons) {
		if n := reasons[r.String()]; n != 0 && r.Fault() {
			v.Refused = append(v.Refused, refusedView{at, r.String(), n, r.Meaning()})
		}
	}
}

func viewJob(j *api.Job) jobView {
	servers := j.GetServers()
	if servers == nil {
		servers = []string{}
	}
	var change *changeView
	if c := j.GetChange(); c != nil {
		change = &changeView{
			Epoch: c.GetEpoch(), Cohort: policy.FormatMask(c.GetCohort()), Servers: append([]string{}, c.GetServers()...),
			Explanation: c.GetExplanation(), Behind: policy.FormatMask(c.GetBehind()), WaitsFor: c.GetWaitsFor(),
			Quorum: c.GetQuorum(), WaitUS: c.GetWaitUs(),
		}
	}
	awaited := ""
	if mask := j.GetAwaited(); mask != 0 {
		awaited = policy.FormatMask(mask)
	}
	return jobView{
		Name: j.GetName(), ID: j.GetId(), Epoch: j.GetEpoch(), State: j.GetState(), Error: j.GetError(), Ranks: j.GetRanks(),
		Joined: policy.FormatMask(j.GetJoined()), Left: policy.FormatMask(j.GetLeft()),
		Gone: policy.FormatMask(j.GetGone()), Awaited: awaited, Recovery: j.GetRecovery(), Note: j.GetNote(), Cohort: policy.FormatMask(j.GetCohort()),
		Servers: servers, Pool: j.GetPool(), Chunks: j.GetChunks(), Explanation: j.GetExplanation(),
		Change: change, Depth: j.GetDepth(), Weight: j.GetWeight(), QuotaSlots: j.GetQuotaSlots(), Quorum: j.GetQuorum(), WaitUS: j.GetWaitUs(),
		Consistency: consistencyView{
			Mode: j.GetConsistency().GetMode(), Quorum: j.GetConsistency().GetQuorum(), WaitUS: j.GetConsistency().GetWaitUs(),
			Staleness: j.GetConsistency().GetStaleness(), Rounds: j.GetConsistency().GetRounds(),
		},
	}
}

// print writes v as JSON, or calls text, as the user asked.
func (c *controllerClient) print(w io.Writer, v any, text func(io.Writer)) error {
	if c.output == "json" {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(v)
	}
	text(w)
	return nil
}

func (c *controllerClient) printJob(w io.Writer, job *api.Job) error {
	v := struct {
		SchemaVersion int     `json:"schema_version"`
		Job           jobView `json:"job"`
	}{statusSchema, viewJob(job)}
	return c.print(w, v, func(w io.Writer) {
		tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		defer tw.Flush()
		j := v.Job
		fmt.Fprintf(tw, "job\t%s (id %d, epoch %d)\n", j.Name, j.ID, j.Epoch)
		fmt.Fprintf(tw, "state\t%s\n", j.State)
		if j.Error != "" {
			fmt.Fprintf(tw, "error\t%s\n", j.Error)
		}
		fmt.Fprintf(tw, "ranks\t%d, joined %s, left %s\n", j.Ranks, j.Joined, j.Left)
		if j.Gone != policy.FormatMask(0) {
			fmt.Fprintf(tw, "gone\t%s\n", j.Gone)
		}
		if j.Awaited != "" {
			fmt.Fprintf(tw, "awaited\t%s, to come back to the controller, which was restarted\n", j.Awaited)
		}
		if j.Recovery != "" {
			fmt.Fprintf(tw, "recovery\t%s\n", j.Recovery)
		}
		fmt.Fprintf(tw, "plan\tcohort %s, servers %s, pool %d, %d chunks per round%s\n",
			j.Cohort, listOrNone(j.Servers), j.Pool, j.Chunks, enough(j.Quorum, j.WaitUS))
		fmt.Fprintf(tw, "weight\t%d, with a quota of %d slots of the switch\n", j.Weight, j.QuotaSlots)
		fmt.Fprintf(tw, "results\t%s; up to %d rounds under way\n", j.Consistency, j.Depth)
		fmt.Fprintf(tw, "why\t%s\n", j.Explanation)
		if j.Note != "" {
			fmt.Fprintf(tw, "note\t%s\n", j.Note)
		}
		if c := j.Change; c != nil {
			fmt.Fprintf(tw, "changing\tto epoch %d: cohort %s, servers %s%s\n", c.Epoch, c.Cohort, listOrNone(c.Servers),
				enough(c.Quorum, c.WaitUS))
			fmt.Fprintf(tw, "why\t%s\n", c.Explanation)
			fmt.Fprintf(tw, "waits for\t%s\n", c.WaitsFor)
		}
	})
}

func listOrNone(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ",")
}

// text answers "is it OK?" first.
func (v *statusView) text(w io.Writer) {
	if v.OK {
		fmt.Fprintln(w, "OK")
	} else {
		fmt.Fprintln(w, "NOT OK")
		for _, p := range v.Problems {
			fmt.Fprintln(w, "  "+p)
		}
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "\ncontroller\t\t%s\t%s\n", v.Controller.Address, readyWord(v.Controller.Ready))
	fmt.Fprintf(tw, "switch\t%s\t%s\t%s\t%d of %d slots free\n", v.Switch.Name, v.Switch.Address, readyWord(v.Switch.Ready),
		v.Switch.SlotsFree, v.Switch.Slots)
	for _, s := range v.Servers {
		fmt.Fprintf(tw, "server\t%s\t%s\t%s\t%d of %d slots free\n", s.Name, s.Address, readyWord(s.Ready), s.SlotsFree, s.Slots)
	}
	tw.Flush()
	countLine(w, "switch packets by reason", v.Switch.Reasons)
	countLine(w, "switch packets sent", v.Switch.Sent)
	for _, s := range v.Servers {
		countLine(w, "server "+s.Name+" packets by reason", s.Reasons)
	}
	if len(v.Refused) > 0 {
		fmt.Fprintln(tw, "\nREFUSED\tAT\tPACKETS\tTHEY ARE")
		for _, r := range v.Refused {
			fmt.Fprintf(tw, "%s\t%s\t%d\t%s\n", r.Reason, r.At, r.Packets, r.Meaning)
		}
		tw.Flush()
	}
	if len(v.Jobs) > 0 {
		fmt.Fprintln(w)
		jobTable(w, v.Jobs)
	}
	for _, c := range v.Config.Restart {
		fmt.Fprintf(w, "configuration %s, %s: %s\n", v.Config.File, c.Field, c.Note)
	}
	for _, j := range v.Jobs {
		if c := j.Change; c != nil {
			fmt.Fprintf(w, "job %s changes its plan to epoch %d and waits for %s\n", j.Name, c.Epoch, c.WaitsFor)
		}
		if j.Note != "" {
			fmt.Fprintf(w, "job %s: %s\n", j.Name, j.Note)
		}
	}
}

func readyWord(ready bool) string {
	if ready {
		return "ready"
	}
	return "not ready"
}

// countLine writes the counts that are not zero.
func countLine(w io.Writer, title string, counts map[string]uint64) {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		if counts[name] != 0 {
			parts = append(parts, fmt.Sprintf("%s %d", name, counts[name]))
		}
	}
	if len(parts) > 0 {
		fmt.Fprintf(w, "%s: %s\n", title, strings.Join(parts, ", "))
	}
}

// quorumOrAll says how many ranks are enough, in a table.
func quorumOrAll(quorum uint32) string {
	if quorum == 0 {
		return "all"
	}
	return fmt.Sprint(quorum)
}

func jobTable(w io.Writer, jobs []jobView) {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	defer tw.Flush()
	fmt.Fprintln(tw, "JOB\tID\tEPOCH\tSTATE\tRANKS\tJOINED\tLEFT\tCOHORT\tSERVERS\tQUORUM\tWEIGHT\tPOOL\tCHUNKS")
	for _, j := range jobs {
		fmt.Fprintf(tw, "%s\t%d\t%d\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\n", j.Name, j.ID, j.Epoch, j.State, j.Ranks, j.Joined, j.Left,
			j.Cohort, listOrNone(j.Servers), quorumOrAll(j.Quorum), j.Weight, j.Pool, j.Chunks)
	}
}
