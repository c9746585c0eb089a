package memory_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"xagg/api"
	"xagg/internal/metrics"
	"xagg/wire"
	"xagg/worker"
	"xagg/worker/grads"
	"xagg/worker/replay"
)

// scrape serves a collector and reads what Prometheus would.
func scrape(t *testing.T, c prometheus.Collector) map[string]*dto.MetricFamily {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- metrics.Serve(ctx, lis, slog.New(slog.DiscardHandler), c) }()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Get("http://" + lis.Addr().String() + metrics.Path)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(response.Body)
	response.Body.Close()
	cancel()
	if err := <-served; err != nil {
		t.Errorf("serve: %v", err)
	}
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s, %v", response.Status, body, err)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(string(body)))
	if err != nil {
		t.Fatalf("%v in\n%s", err, body)
	}
	return families
}

// value returns the metric of a family with the label values given, as name=value.
func value(t *testing.T, families map[string]*dto.MetricFamily, name string, labels ...string) *dto.Metric {
	t.Helper()
	for _, m := range families[name].GetMetric() {
		var has []string
		for _, l := range m.GetLabel() {
			has = append(has, l.GetName()+"="+l.GetValue())
		}
		if !slices.ContainsFunc(labels, func(l string) bool { return !slices.Contains(has, l) }) {
			return m
		}
	}
	t.Fatalf("there is no %s with %v: %v", name, labels, families[name])
	return nil
}

// documented returns the metrics in docs/why.md with type and labels.
func documented(t *testing.T) map[string]string {
	t.Helper()
	doc, err := os.ReadFile("../../docs/why.md")
	if err != nil {
		t.Fatal(err)
	}
	list := make(map[string]string)
	for _, row := range regexp.MustCompile("(?m)^\\| `(xagg_[a-z_]+)` \\| ([a-z]+) \\| ([a-z_, ]*) ?\\|").FindAllStringSubmatch(string(doc), -1) {
		list[row[1]] = strings.TrimSpace(row[2] + " " + row[3])
	}
	return list
}

// TestMetrics scrapes controller and server after a job, compares numbers with the status and the servers' statistics, and
// the list of metrics with the one in docs/why.md.
func TestMetrics(t *testing.T) {
	l := newLab(t, 3, 1)
	client := api.NewControllerClient(l.Controller())
	createJob(t, l, &api.CreateJobRequest{Name: "done", Ranks: 3, MaxElems: 5000, Policy: &api.Policy{Rule: "static", Mode: "server"}})
	set := grads.Synthetic(5000, 3, 1)
	if err := reduce(t.Context(), l, "done", set, 4, []int{0, 1, 2}, func(int, replay.Reduced) error { return nil }); err != nil {
		t.Fatal(err)
	}
	createJob(t, l, &api.CreateJobRequest{Name: "train", Ranks: 2, MaxElems: 256, Adapt: "{rule: outlier, dry_run: true}",
		Policy: &api.Policy{Rule: "static", Mode: "switch", Pool: 16}})
	workers := make(chan *worker.Worker, 2)
	for rank := range 2 {
		go func() {
			w, err := worker.Join(t.Context(), client, worker.Config{Job: "train", Rank: rank, Link: l.Link(rank, wire.Port)})
			if err != nil {
				t.Error(err)
			}
			workers <- w
		}()
	}
	a, b := <-workers, <-workers
	if a == nil || b == nil {
		t.FailNow()
	}
	status, err := client.Status(t.Context(), &api.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var done, train *api.Job
	for _, j := range status.Jobs {
		if j.Name == "train" {
			train = j
		} else {
			done = j
		}
	}
	reported := func() map[string]*dto.MetricFamily {
		for rank := range uint32(2) {
			if _, err := client.Report(t.Context(), &api.ReportRequest{
				Job: "train", Rank: rank, Id: train.Id, Progress: &api.Progress{Waiting: rank == 0, Round: 7 + rank},
				Rounds: []*api.Round{{Round: 6, ComputeUs: 600, CommUs: 400, Chunks: 10, Late: 1, HeldUs: 8000, BlockedUs: 2000}},
			}); err != nil {
				t.Fatal(err)
			}
		}
		return scrape(t, l.Collectors()[0])
	}
	controller, server := reported(), scrape(t, l.Collectors()[1])
	for tries := 0; tries < 100 && value(t, controller, "xagg_job_round", "job=train").GetGauge().GetValue() != 7; tries++ {
		controller = reported() // a worker has told itself how far it is, in between
	}
	for _, device := range []struct {
		name    string
		reasons map[string]uint64
		slots   uint32
	}{{"sw", status.Switch.Reasons, status.Switch.Slots}, {"s0", status.Servers[0].Reasons, status.Servers[0].Info.Slots}} {
		for reason, n := range device.reasons {
			if got := value(t, controller, "xagg_packets_total", "device="+device.name, "reason="+reason).GetCounter().GetValue(); got != float64(n) {
				t.Errorf("%s %s: %v, want %d", device.name, reason, got, n)
			}
		}
		if got := value(t, controller, "xagg_slots", "device="+device.name).GetGauge().GetValue(); got != float64(device.slots) {
			t.Errorf("%s has %v slots, want %d", device.name, got, device.slots)
		}
	}
	if status.Switch.Reasons["steered"] == 0 {
		t.Error("the switch has passed nothing on")
	}
	for _, tt := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"xagg_device_ready", []string{"device=sw"}, 1},
		{"xagg_device_ready", []string{"device=s0"}, 1},
		{"xagg_sent_packets_total", []string{"device=sw", "type=RESULT"}, float64(status.Switch.Sent["RESULT"])},
		{"xagg_slots_free", []string{"device=sw"}, float64(status.Switch.SlotsFree)},
		{"xagg_jobs", []string{"state=finished"}, 1},
		{"xagg_jobs", []string{"state=running"}, 1},
		{"xagg_jobs", []string{"state=aborted"}, 0},
		{"xagg_job_ranks", []string{"job=train", "which=all"}, 2},
		{"xagg_job_ranks", []string{"job=train", "which=joined"}, 2},
		{"xagg_job_ranks", []string{"job=done", "which=left"}, 3},
		{"xagg_job_ranks", []string{"job=done", "which=gone"}, 0},
		{"xagg_job_changing", []string{"job=train"}, 0},
		{"xagg_job_recovering", []string{"job=train"}, 0},
		{"xagg_job_round", []string{"job=train"}, 7},
		{"xagg_job_ranks_waiting", []string{"job=train"}, 1},
		{"xagg_job_slot_occupancy", []string{"job=train"}, 8.0 / 16},
		{"xagg_job_blocked_slot_seconds", []string{"job=train"}, 0.002},
		{"xagg_job_late_share", []string{"job=train"}, 0.1},
		{"xagg_job_partial_share", []string{"job=train"}, 0},
		{"xagg_run_frames_total", []string{"device=s0"}, 0}, // user space
	} {
		m := value(t, controller, tt.name, tt.labels...)
		if got := m.GetGauge().GetValue() + m.GetCounter().GetValue(); got != tt.want {
			t.Errorf("%s%v is %v, want %v", tt.name, tt.labels, got, tt.want)
		}
	}

	for rank := range 3 {
		h := value(t, server, "xagg_lag_seconds", fmt.Sprintf("job_id=%d", done.Id), fmt.Sprintf("rank=%d", rank)).GetHistogram()
		if h.GetSampleCount() == 0 || h.GetSampleCount()*3 != uint64(value(t, server, "xagg_packets_total", "reason=summed").GetCounter().GetValue()) {
			t.Errorf("rank %d has %d lags: %v", rank, h.GetSampleCount(), server["xagg_packets_total"])
		}
		before := uint64(0)
		for _, bucket := range h.GetBucket() {
			if bucket.GetCumulativeCount() < before || bucket.GetCumulativeCount() > h.GetSampleCount() {
				t.Errorf("rank %d: buckets are %v", rank, h.GetBucket())
			}
			before = bucket.GetCumulativeCount()
		}
	}

	// A change of plan, which takes its time.
	changes := func() uint64 {
		return value(t, scrape(t, l.Collectors()[0]), "xagg_change_seconds").GetHistogram().GetSampleCount()
	}
	if got := changes(); got != 0 {
		t.Errorf("%d changes before there was one", got)
	}
	if _, err := client.Steer(t.Context(), &api.SteerRequest{Job: "train", Policy: &api.Policy{Rule: "static", Mode: "server"}}); err != nil {
		t.Fatal(err)
	}
	left := make(chan error, 2)
	for _, w := range []*worker.Worker{a, b} {
		go func() {
			defer w.Close()
			for range 3 {
				if _, err := w.AllReduceInt32(t.Context(), "x", []int32{1}); err != nil {
					left <- err
					return
				}
			}
			left <- w.Leave(t.Context())
		}()
	}
	for range 2 {
		if err := <-left; err != nil {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(20 * time.Second); changes() == 0; {
		if time.Now().After(deadline) {
			t.Fatal("the change of plan is not over within 20 s")
		}
	}

	want, got := documented(t), make(map[string]string)
	for _, families := range []map[string]*dto.MetricFamily{controller, server} {
		for name, f := range families {
			var labels []string
			for _, l := range f.GetMetric()[0].GetLabel() {
				labels = append(labels, l.GetName())
			}
			got[name] = strings.TrimSpace(strings.ToLower(f.GetType().String()) + " " + strings.Join(labels, ", "))
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("metrics\ngot  %v\ndocs %v", got, want)
	}
}
