package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"xagg/api"
	"xagg/policy"
)

// whySchema is the version of what `xagg why -o json` prints. Fields are only added within a version.
const whySchema = 1

// watchInterval is how long `xagg why --watch` rests between two answers.
const watchInterval = time.Second

func newWhyCommand(env *env) *cobra.Command {
	var client controllerClient
	var watch bool
	cmd := &cobra.Command{
		Use:   "why JOB",
		Short: "Say whom a job waits for, on which chunks, where and since when",
		Long: `Say whom a job waits for, on which chunks, where and since when, and what was last heard of them.

The controller reads the job's slots on the switch and its chunks on the servers twice, a fifth of a second apart: what is
incomplete both times waits for somebody. It adds what it knows of the ranks: whether they have joined, how many packets of
theirs the switch has seen, and what they last reported. The job does not notice.

While the job recovers from a loss, all its ranks stand still: it says why, and whom or what the recovery waits for.

The exit code is 0 if nothing waits, 2 if somebody is waited for, the job recovers or a device could not be asked, and 1 if
there is no answer.
With --watch it asks again every second, prints what has changed, and ends with 0 when it is interrupted.`,
		Example: `  xagg why train
  xagg why train --watch
  xagg why train -o json | jq '.blockers[].rank'`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if watch {
				return watchWhy(cmd.Context(), env.stdout, &client, args[0])
			}
			view, err := client.why(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if err := client.print(env.stdout, view, view.text); err != nil {
				return err
			}
			if view.Waits {
				return &exitError{code: exitDifferences}
			}
			return nil
		},
	}
	client.flags(cmd)
	cmd.Flags().BoolVar(&watch, "watch", false, "ask again every second until interrupted")
	return cmd
}

// watchWhy prints an answer whenever its summary is another one.
func watchWhy(ctx context.Context, w io.Writer, client *controllerClient, job string) error {
	last := ""
	for {
		view, err := client.why(ctx, job)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		if view.Summary != last {
			last = view.Summary
			if client.output == "text" {
				fmt.Fprintf(w, "%s ", time.Now().Format(time.TimeOnly))
			}
			if err := client.print(w, view, view.text); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(watchInterval):
		}
	}
}

func (c *controllerClient) why(ctx context.Context, job string) (view *whyView, err error) {
	err = c.call(ctx, func(ctx context.Context, ctl api.ControllerClient) error {
		reply, err := ctl.Why(ctx, &api.WhyRequest{Job: job})
		if err == nil {
			view = viewWhy(reply)
		}
		return err
	})
	return view, err
}

// whyView is an explanation as it is printed.
type whyView struct {
	SchemaVersion int           `json:"schema_version"`
	Job           string        `json:"job"`
	Waits         bool          `json:"waits"` // somebody is waited for, the job recovers, or a device could not be asked
	Summary       string        `json:"summary"`
	Recovery      string        `json:"recovery,omitempty"` // what a recovery under way waits for, and why there is one
	Blockers      []blockerView `json:"blockers"`           // whom the job waits for, the worst first
	Waiting       []waitingView `json:"waiting"`
	Unreachable   []string      `json:"unreachable"` // devices that could not be asked, with the reason
}

type blockerView struct {
	Rank        uint32        `json:"rank"`
	Host        string        `json:"host,omitempty"`
	Joined      bool          `json:"joined"`
	Path        string        `json:"path"`      // "switch", or the servers' names
	Chunks      uint32        `json:"chunks"`    // incomplete chunks that lack it
	OldestUs    uint64        `json:"oldest_us"` // age of the oldest of them
	Packets     uint64        `json:"packets"`   // of it that the switch has seen
	SilentUs    uint64        `json:"silent_us"` // since the switch has seen one, as far as anybody has looked
	Progress    *progressView `json:"progress,omitempty"`
	Explanation string        `json:"explanation"`
}

// progressView is what a rank has last reported.
type progressView struct {
	AgoUs      uint64 `json:"ago_us"` // when
	Waiting    bool   `json:"waiting"`
	ForUs      uint64 `json:"for_us"` // how long it had been waiting or computing then
	Round      uint32 `json:"round"`
	ChunksLeft uint32 `json:"chunks_left"`
	Chunk      uint32 `json:"chunk"`
	Missing    string `json:"missing"` // the ranks that aggregators told it they wait for
	AtServer   bool   `json:"at_server"`
	Key        string `json:"key,omitempty"`
}

type waitingView struct {
	At      string `json:"at"` // "switch", or a server's name
	Epoch   uint32 `json:"epoch"`
	Round   uint32 `json:"round"`
	First   uint32 `json:"first"` // chunk; of several servers each has every n-th one
	Last    uint32 `json:"last"`
	Have    string `json:"have"` // ranks
	Missing string `json:"missing"`
	AgeUs   uint64 `json:"age_us"`
}

func viewWhy(r *api.WhyReply) *whyView {
	v := &whyView{
		SchemaVersion: whySchema, Job: r.GetJob(), Summary: r.GetSummary(),
		Waits:    len(r.GetBlockers())+len(r.GetWaiting())+len(r.GetUnreachable()) > 0 || r.GetRecovery() != "",
		Recovery: r.GetRecovery(),
		Blockers: []blockerView{}, Waiting: []waitingView{}, Unreachable: append([]string{}, r.GetUnreachable()...),
	}
	for _, b := range r.GetBlockers() {
		view := blockerView{
			Rank: b.GetRank(), Host: b.GetHost(), Joined: b.GetJoined(), Path: b.GetPath(), Chunks: b.GetChunks(), OldestUs: b.GetOldestUs(),
			Packets: b.GetPackets(), SilentUs: b.GetSilentUs(), Explanation: b.GetExplanation(),
		}
		if p := b.GetProgress(); p != nil {
			view.Progress = &progressView{
				AgoUs: b.GetReportedUs(), Waiting: p.GetWaiting(), ForUs: p.GetForUs(), Round: p.GetRound(), ChunksLeft: p.GetChunksLeft(),
				Chunk: p.GetChunk(), Missing: policy.FormatMask(p.GetMissing()), AtServer: p.GetAtServer(), Key: p.GetKey(),
			}
		}
		v.Blockers = append(v.Blockers, view)
	}
	for _, w := range r.GetWaiting() {
		v.Waiting = append(v.Waiting, waitingView{
			At: w.GetAt(), Epoch: w.GetEpoch(), Round: w.GetRound(), First: w.GetFirst(), Last: w.GetLast(),
			Have: policy.FormatMask(w.GetHave()), Missing: policy.FormatMask(w.GetMissing()), AgeUs: w.GetAgeUs(),
		})
	}
	return v
}

// maxWaiting is how many runs of chunks are shown to a person.
const maxWaiting = 20

// text begins with the answer, goes on with a sentence for each rank, and ends with the chunks.
func (v *whyView) text(w io.Writer) {
	fmt.Fprintln(w, v.Summary)
	for _, b := range v.Blockers {
		fmt.Fprintln(w, "  "+b.Explanation)
	}
	for _, u := range v.Unreachable {
		fmt.Fprintln(w, "  could not be asked: "+u)
	}
	if len(v.Waiting) == 0 {
		return
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	defer tw.Flush()
	fmt.Fprintln(tw, "\nAT\tEPOCH\tROUND\tCHUNKS\tHAVE\tMISSING\tAGE")
	for _, run := range v.Waiting[:min(len(v.Waiting), maxWaiting)] {
		chunks := fmt.Sprint(run.First)
		if run.Last != run.First {
			chunks = fmt.Sprintf("%d-%d", run.First, run.Last)
		}
		fmt.Fprintf(tw, "%s\t%d\t%d\t%s\t%s\t%s\t%.1f s\n", run.At, run.Epoch, run.Round, chunks, run.Have, run.Missing, float64(run.AgeUs)/1e6)
	}
	if more := len(v.Waiting) - maxWaiting; more > 0 {
		fmt.Fprintf(tw, "and %d more; -o json has them all\n", more)
	}
}
