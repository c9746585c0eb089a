package main

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"xagg/api"
	"xagg/internal/endpoint"
	"xagg/wire"
)

// toldController answers what a test has it answer.
type toldController struct {
	api.UnimplementedControllerServer
	why    *api.WhyReply
	status *api.StatusReply
}

func (c *toldController) Why(context.Context, *api.WhyRequest) (*api.WhyReply, error) {
	return c.why, nil
}

func (c *toldController) Status(context.Context, *api.StatusRequest) (*api.StatusReply, error) {
	return c.status, nil
}

// serveTold serves c at an address of its own.
func serveTold(t *testing.T, c *toldController) (address string) {
	t.Helper()
	address = "unix:" + filepath.Join(t.TempDir(), "ctl")
	lis, err := endpoint.Listen(address)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	api.RegisterControllerServer(srv, c)
	go srv.Serve(lis)
	t.Cleanup(srv.Stop)
	return address
}

// xagg runs a command line in this process.
func xagg(ctx context.Context, args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = run(ctx, &env{stdin: strings.NewReader(""), stdout: &out, stderr: &errs, log: slog.New(slog.DiscardHandler)}, args)
	return code, out.String(), errs.String()
}

func straggling() *api.WhyReply {
	return &api.WhyReply{
		Job: "train", Summary: "3 of 4 ranks wait for rank 3 on host w3",
		Blockers: []*api.Blocker{{
			Rank: 3, Host: "w3", Joined: true, Path: "switch", Chunks: 29, OldestUs: 4_200_000, Packets: 90, SilentUs: 4_100_000,
			Progress: &api.Progress{ForUs: 4_300_000, Round: 7, Missing: 0b0110}, ReportedUs: 800_000, Explanation: "rank 3 has not sent",
		}},
		Waiting:     []*api.Waiting{{At: "switch", Epoch: 5, Round: 7, First: 12, Last: 40, Have: 0b0111, Missing: 0b1000, AgeUs: 4_200_000}},
		Unreachable: []string{"s0: gone"},
	}
}

func TestWhy(t *testing.T) {
	told := &toldController{why: straggling()}
	address := serveTold(t, told)
	code, out, errs := xagg(t.Context(), "why", "train", "--controller", address)
	const want = `3 of 4 ranks wait for rank 3 on host w3
  rank 3 has not sent
  could not be asked: s0: gone

AT      EPOCH  ROUND  CHUNKS  HAVE  MISSING  AGE
switch  5      7      12-40   0-2   3        4.2 s
`
	if code != exitDifferences || out != want || errs != "" {
		t.Errorf("exit code %d\ngot\n%s%swant\n%s", code, out, errs, want)
	}

	code, out, _ = xagg(t.Context(), "why", "train", "-o", "json", "--controller", address)
	var got map[string]any
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatal(err)
	}
	blocker := got["blockers"].([]any)[0].(map[string]any)
	waiting := got["waiting"].([]any)[0].(map[string]any)
	progress := blocker["progress"].(map[string]any)
	if code != exitDifferences || got["schema_version"] != 1.0 || got["waits"] != true || blocker["rank"] != 3.0 || blocker["oldest_us"] != 4.2e6 ||
		progress["ago_us"] != 8e5 || progress["missing"] != "1-2" || waiting["have"] != "0-2" || waiting["missing"] != "3" || waiting["first"] != 12.0 {
		t.Errorf("exit code %d\n%s", code, out)
	}

	told.why = &api.WhyReply{Job: "train", Summary: "the job is being recovered", Recovery: "epoch 2 to be installed"}
	code, out, _ = xagg(t.Context(), "why", "train", "-o", "json", "--controller", address)
	if code != exitDifferences || !strings.Contains(out, `"recovery": "epoch 2 to be installed"`) || !strings.Contains(out, `"waits": true`) {
		t.Errorf("exit code %d\n%s", code, out)
	}

	told.why = &api.WhyReply{Job: "train", Summary: "nothing waits: all ranks compute"}
	code, out, _ = xagg(t.Context(), "why", "train", "--controller", address)
	if code != exitOK || out != "nothing waits: all ranks compute\n" {
		t.Errorf("exit code %d\n%s", code, out)
	}
	_, out, _ = xagg(t.Context(), "why", "train", "-o", "json", "--controller", address)
	for _, want := range []string{`"blockers": []`, `"waiting": []`, `"unreachable": []`, `"waits": false`} {
		if !strings.Contains(out, want) {
			t.Errorf("%s lacks %s", out, want)
		}
	}
}

// TestWhyWatch answers at once, and ends well when it is interrupted.
func TestWhyWatch(t *testing.T) {
	address := serveTold(t, &toldController{why: straggling()})
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	code, out, errs := xagg(ctx, "why", "train", "--watch", "--controller", address)
	if code != exitOK || strings.Count(out, "3 of 4 ranks wait") != 1 || errs != "" {
		t.Errorf("exit code %d\n%s%s", code, out, errs)
	}
}

// TestStatusSaysWhatIsRefused: every refusal that there is, with its meaning, and what is ordinary is not among them.
func TestStatusSaysWhatIsRefused(t *testing.T) {
	reasons := make(map[string]uint64)
	for r := range wire.Reason(wire.NumReasons) {
		reasons[r.String()] = 1 + uint64(r)
	}
	told := &toldController{status: &api.StatusReply{
		Switch:  &api.SwitchStatus{Name: "s1", Ready: true, Reasons: reasons},
		Servers: []*api.ServerStatus{{Name: "s0", Ready: true, Reasons: map[string]uint64{"tag": 5, "overlap": 0, "summed": 3}}},
		Jobs:    []*api.Job{{Name: "train", State: "running", Ranks: 4}},
	}}
	address := serveTold(t, told)
	code, out, _ := xagg(t.Context(), "status", "--controller", address)
	if code != exitOK || !strings.HasPrefix(out, "OK\n") {
		t.Errorf("exit code %d\n%s", code, out)
	}
	for r := range wire.Reason(wire.NumReasons) {
		if got := strings.Contains(out, r.Meaning()+"\n"); got != r.Fault() {
			t.Errorf("reason %s, a refusal: %v, is shown: %v", r, r.Fault(), got)
		}
	}
	_, out, _ = xagg(t.Context(), "status", "-o", "json", "--controller", address)
	var view statusView
	if err := json.Unmarshal([]byte(out), &view); err != nil {
		t.Fatal(err)
	}
	last := view.Refused[len(view.Refused)-1]
	if view.SchemaVersion != 1 || !view.Controller.Ready || view.Controller.Address != address ||
		last != (refusedView{"s0", "tag", 5, wire.ReasonTag.Meaning()}) {
		t.Errorf("got %s", out)
	}

	told.status.Switch.Error = "it was programmed, but does not tell its counters"
	code, out, _ = xagg(t.Context(), "status", "--controller", address)
	if code != exitFailure || !strings.HasPrefix(out, "NOT OK\n  switch s1 at : it was programmed, but does not tell") {
		t.Errorf("exit code %d\n%s", code, out)
	}
	told.status.Switch.Error = ""
	told.status.Jobs[0].Gone, told.status.Jobs[0].Recovery = 0b0100, "rank 1 to stop"
	code, out, _ = xagg(t.Context(), "status", "--controller", address)
	if code != exitFailure || !strings.HasPrefix(out, "NOT OK\n  job train is being recovered, which waits for rank 1 to stop\n  job train goes on without rank 2\n") {
		t.Errorf("exit code %d\n%s", code, out)
	}
	told.status.Jobs[0] = &api.Job{Name: "train", State: "running", Ranks: 4, Awaited: 0b0011, Note: "it was planned otherwise"}
	code, out, _ = xagg(t.Context(), "status", "--controller", address)
	if code != exitFailure || !strings.HasPrefix(out, "NOT OK\n  job train waits for rank 0-1 to come back to the controller, which was restarted\n") ||
		!strings.HasSuffix(out, "job train: it was planned otherwise\n") {
		t.Errorf("exit code %d\n%s", code, out)
	}
	code, out, _ = xagg(t.Context(), "job", "show", "train", "--controller", address)
	if code != exitOK || !strings.Contains(out, "\nawaited  0-1, to come back to the controller") || !strings.Contains(out, "\nnote     it was planned otherwise\n") {
		t.Errorf("exit code %d\n%s", code, out)
	}
}
