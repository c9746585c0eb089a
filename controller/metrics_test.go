package controller

import (
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"xagg/api"
)

// metric returns a metric of the controller's by its name and the values of its labels; nil where there is none.
func (r *room) metric(name string, labels ...string) *dto.Metric {
	r.t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(r.c.Collector())
	families, err := registry.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var has []string
			for _, l := range m.GetLabel() {
				has = append(has, l.GetValue())
			}
			if f.GetName() == name && slices.Equal(has, labels) {
				return m
			}
		}
	}
	return nil
}

// TestMetricsOfRanks: who has left, is gone or only has not come back yet slows nobody down, nor does a job that is over;
// and a recovery is counted once, however often it began.
func TestMetricsOfRanks(t *testing.T) {
	cfg := keptConfig(t)
	cfg.Switch.Name = "switch" // no server's
	r := newRoom(t, cfg, nil)
	r.ready()
	job := r.quorumOfThree()
	stations := r.serveAll(job, func(s *station) { s.deaf = s.n == 1 })
	for n, round := range []uint32{7, 8, 5} {
		if _, err := r.client.Report(r.context(), &api.ReportRequest{
			Job: "q", Rank: uint32(n), Id: job.Id, Progress: &api.Progress{Round: round, Waiting: true},
		}); err != nil {
			t.Fatal(err)
		}
	}
	check := func(what string, round, waiting float64) {
		t.Helper()
		if got := r.metric("xagg_job_round", "q").GetGauge().GetValue(); got != round {
			t.Errorf("%s: round %v, want %v", what, got, round)
		}
		if got := r.metric("xagg_job_ranks_waiting", "q").GetGauge().GetValue(); got != waiting {
			t.Errorf("%s: %v ranks wait, want %v", what, got, waiting)
		}
	}
	check("all are there", 5, 3)
	r.losesStream(stations[2])
	check("rank 2 is gone", 7, 2)

	r.loseSwitch()
	r.until("it waits for rank 1", func() bool { return strings.Contains(r.job("q").Recovery, "rank 1 to stop") })
	if got := r.metric("xagg_job_recovering", "q").GetGauge().GetValue(); got != 1 {
		t.Errorf("the job recovers, and the metric is %v", got)
	}
	stations[1].mu.Lock()
	stations[1].deaf = false
	stations[1].mu.Unlock()
	r.loseSwitch()
	r.replies(stations[:2])
	r.until("the recovery is over", func() bool { return r.job("q").Recovery == "" })
	if h := r.metric("xagg_recovery_seconds").GetHistogram(); h.GetSampleCount() != 1 || h.GetSampleSum() <= 0 || h.GetSampleSum() > 10 {
		t.Errorf("recoveries are %v", h)
	}

	r.restart()
	if got := r.metric("xagg_job_recovering", "q").GetGauge().GetValue(); got != 0 {
		t.Errorf("ranks are awaited, and xagg_job_recovering is %v", got)
	}
	if got := r.metric("xagg_job_ranks", "q", "awaited").GetGauge().GetValue(); got != 2 {
		t.Errorf("%v ranks are awaited, want 2", got)
	}
	ranks := []*rank{r.back("q", 0, job.Id), r.back("q", 1, job.Id)}
	for _, k := range ranks {
		k.ready()
		if _, err := r.client.Report(r.context(), &api.ReportRequest{Job: "q", Rank: k.n, Id: job.Id, Progress: &api.Progress{Round: 9 + k.n}}); err != nil {
			t.Fatal(err)
		}
	}
	left := make(chan error, 1)
	go func() { left <- ranks[0].leave() }()
	r.until("rank 0 has left", func() bool { return r.job("q").Left == 1 })
	check("rank 0 has left", 10, 0)
	if err := ranks[1].leave(); err != nil {
		t.Error(err)
	}
	<-left
	if m := r.metric("xagg_job_round", "q"); m != nil {
		t.Errorf("the job is over, and its round %v", m)
	}
}
