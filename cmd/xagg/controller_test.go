package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"xagg/api"
)

// changing is a job whose plan changes.
func changing() *api.Job {
	return &api.Job{
		Name: "train", Id: 7, Epoch: 1, Ranks: 4, Chunks: 4, Pool: 16, Cohort: 0b1111, Explanation: "so it was", Joined: 0b1111,
		State: "running", Depth: 4, Weight: 3, QuotaSlots: 768, Consistency: &api.Consistency{Mode: "quorum", Quorum: 3, WaitUs: 10000, Rounds: 8}, Change: &api.Change{
			Epoch: 2, Cohort: 0b0111, Servers: []string{"s0"}, Explanation: "so it will be", Behind: 0b0101,
			WaitsFor: "ranks 0,2 to finish the last round of epoch 1",
		},
	}
}

// TestJobThatChanges shows both plans, and whom the change waits for.
func TestJobThatChanges(t *testing.T) {
	var out bytes.Buffer
	if err := (&controllerClient{output: "text"}).printJob(&out, changing()); err != nil {
		t.Fatal(err)
	}
	const want = `job        train (id 7, epoch 1)
state      running
ranks      4, joined 0-3, left none
plan       cohort 0-3, servers none, pool 16, 4 chunks per round
weight     3, with a quota of 768 slots of the switch
results    quorum: at least 3 ranks, after 10ms; servers keep 8 rounds; up to 4 rounds under way
why        so it was
changing   to epoch 2: cohort 0-2, servers s0
why        so it will be
waits for  ranks 0,2 to finish the last round of epoch 1
`
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", out.String(), want)
	}

	out.Reset()
	if err := (&controllerClient{output: "json"}).printJob(&out, changing()); err != nil {
		t.Fatal(err)
	}
	var view struct {
		Job struct {
			Change struct {
				Epoch    int      `json:"epoch"`
				Behind   string   `json:"behind"`
				Servers  []string `json:"servers"`
				WaitsFor string   `json:"waits_for"`
			} `json:"change"`
		} `json:"job"`
	}
	if err := json.Unmarshal(out.Bytes(), &view); err != nil {
		t.Fatal(err)
	}
	if c := view.Job.Change; c.Epoch != 2 || c.Behind != "0,2" || len(c.Servers) != 1 || !strings.HasPrefix(c.WaitsFor, "ranks 0,2") {
		t.Errorf("change is %+v", c)
	}

	out.Reset()
	status := viewStatus("unix:ctl", &api.StatusReply{Switch: &api.SwitchStatus{Ready: true}, Jobs: []*api.Job{changing()}})
	status.text(&out)
	if !strings.Contains(out.String(), "job train changes its plan to epoch 2 and waits for ranks 0,2 to finish the last round of epoch 1\n") {
		t.Errorf("status is\n%s", out.String())
	}
	if !status.OK {
		t.Error("a change of plan is not a problem")
	}
}
