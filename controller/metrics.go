package controller

import (
	"context"
	"math/bits"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"xagg/api"
	"xagg/internal/metrics"
	"xagg/policy/telemetry"
	"xagg/wire"
)

var (
	metricReady = metrics.Desc("device_ready", "1 if the controller has programmed the switch or server and reaches it, else 0.", "device")
	metricSent  = metrics.Desc("sent_packets_total", "Packets that the switch has made, by type.", "device", "type")
	metricJobs  = metrics.Desc("jobs", "Jobs in a state.", "state")
	metricRanks = metrics.Desc("job_ranks", "Ranks of a job: all of them, and those that have joined, have left, are gone, or are awaited by a controller that was restarted.",
		"job", "which")
	metricChanging  = metrics.Desc("job_changing", "1 while the job's plan changes, else 0.", "job")
	metricRecovery  = metrics.Desc("job_recovering", "1 while the job is being recovered, else 0.", "job")
	metricRound     = metrics.Desc("job_round", "Oldest unfinished round of the slowest rank, as far as ranks have reported.", "job")
	metricWaiting   = metrics.Desc("job_ranks_waiting", "Ranks whose last report says that they wait in an all-reduce.", "job")
	metricReportAge = metrics.Desc("job_report_age_seconds", "Age of the oldest of the ranks' last reports.", "job")

	metricConfig      = metrics.Desc("config_last_reload_successful", "1 if the configuration file was taken when it was read last, else 0: what held before holds on.")
	metricConfigTime  = metrics.Desc("config_last_reload_success_timestamp_seconds", "When a configuration file was taken last, since 1970.")
	metricRankPackets = metrics.Desc("rank_packets_total", "Contributions of a rank that came to the switch, resends included, as far as the controller has looked.",
		"device", "job", "rank")
	metricRankBytes = metrics.Desc("rank_bytes_total", "The same in bytes of whole frames.", "device", "job", "rank")
)

// measuredMetrics are those of what is measured of a job whose plan follows that, as of the last decision.
var measuredMetrics = []struct {
	desc *prometheus.Desc
	of   func(*telemetry.Job) float64
}{
	{metrics.Desc("job_slot_occupancy", "Slots that a round had incomplete chunks in while it lasted, as a share of the pool, mean.", "job"),
		func(j *telemetry.Job) float64 { return j.SlotOccupancy }},
	{metrics.Desc("job_blocked_slot_seconds", "Time that slots waited for the last rank alone in a round, summed over its chunks, mean.", "job"),
		func(j *telemetry.Job) float64 { return j.BlockedSlotTime }},
	{metrics.Desc("job_partial_share", "Share of what servers summed of the job that were sums of the switch.", "job"),
		func(j *telemetry.Job) float64 { return j.PartialShare }},
	{metrics.Desc("job_late_share", "Share of chunks that ranks had results of without their own part.", "job"),
		func(j *telemetry.Job) float64 { return j.LateShare }},
}

// newChanges returns the histogram of how long changes of plan take.
func newChanges() prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "xagg_change_seconds",
		Help:    "How long changes of a job's plan took, from their request until the old plan was removed.",
		Buckets: prometheus.ExponentialBuckets(0.001, 4, 10), // to 262 s
	})
}

// newRecoveryTimes returns the histogram of how long recoveries take.
func newRecoveryTimes() prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "xagg_recovery_seconds",
		Help:    "How long recoveries of jobs took, from what began them until the ranks went on.",
		Buckets: prometheus.ExponentialBuckets(0.001, 4, 10), // to 262 s
	})
}

// Collector returns what Prometheus collects of the controller, its devices and its jobs. Every collection asks the devices
// for their counters; what does not answer in time is missing.
func (c *Controller) Collector() prometheus.Collector { return collector{c} }

type collector struct{ c *Controller }

// Describe implements [prometheus.Collector].
func (m collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		metrics.Packets, metrics.Slots, metrics.SlotsFree, metricReady, metricSent, metricJobs, metricRanks, metricChanging,
		metricRecovery, metricRound, metricWaiting, metricReportAge, metricConfig, metricConfigTime, metricRankPackets, metricRankBytes,
		metrics.RunFrames, metrics.RunSeconds, metrics.RunWatched,
	} {
		ch <- d
	}
	for _, x := range measuredMetrics {
		ch <- x.desc
	}
	m.c.changes.Describe(ch)
	m.c.recoveryTimes.Describe(ch)
}

// Collect implements [prometheus.Collector].
func (m collector) Collect(ch chan<- prometheus.Metric) {
	m.c.changes.Collect(ch)
	m.c.recoveryTimes.Collect(ch)
	reply, stats := m.c.survey(context.Background(), true)
	ch <- metrics.Gauge(metricConfig, truth(reply.Config.Error == ""))
	ch <- metrics.Gauge(metricConfigTime, reply.Config.SuccessTime)
	sw := reply.Switch
	ch <- metrics.Gauge(metricReady, truth(sw.Ready), sw.Name)
	ch <- metrics.Gauge(metrics.Slots, float64(sw.Slots), sw.Name)
	ch <- metrics.Gauge(metrics.SlotsFree, float64(sw.SlotsFree), sw.Name)
	metrics.Counts(ch, metrics.Packets, sw.Name, sw.Reasons)
	metrics.Counts(ch, metricSent, sw.Name, sw.Sent)
	for _, s := range reply.Servers {
		ch <- metrics.Gauge(metricReady, truth(s.Ready), s.Name)
		if s.Info != nil {
			ch <- metrics.Gauge(metrics.Slots, float64(s.Info.Slots), s.Name)
			ch <- metrics.Gauge(metrics.SlotsFree, float64(s.Info.SlotsFree), s.Name)
		}
		metrics.Counts(ch, metrics.Packets, s.Name, s.Reasons)
		if answer := stats[s.Name]; answer != nil {
			metrics.Runs(ch, s.Name, answer)
		}
	}
	states := make(map[state]int)
	for _, j := range reply.Jobs {
		states[state(j.State)]++
		ch <- metrics.Gauge(metricRanks, float64(j.Ranks), j.Name, "all")
		for which, mask := range map[string]uint64{"joined": j.Joined, "left": j.Left, "gone": j.Gone, "awaited": j.Awaited} {
			ch <- metrics.Gauge(metricRanks, float64(bits.OnesCount64(mask)), j.Name, which)
		}
		ch <- metrics.Gauge(metricChanging, truth(j.Change != nil), j.Name)
		ch <- metrics.Gauge(metricRecovery, truth(j.Recovery != ""), j.Name)
		m.progress(ch, j)
		m.measured(ch, j)
		if sw.Reasons == nil {
			continue // the switch has not answered
		}
		for rank := range j.Ranks {
			n, label := m.c.devices.total(uint16(j.Id), int(rank)), strconv.Itoa(int(rank))
			ch <- metrics.Counter(metricRankPackets, float64(n.Packets), sw.Name, j.Name, label)
			ch <- metrics.Counter(metricRankBytes, float64(n.Bytes), sw.Name, j.Name, label)
		}
	}
	for _, s := range []state{stateWaiting, stateInstalling, stateRunning, stateFinished, stateAborted} {
		ch <- metrics.Gauge(metricJobs, float64(states[s]), string(s))
	}
}

// measured emits what the last decision on a job's plan was made from, if there was one.
func (m collector) measured(ch chan<- prometheus.Metric, j *api.Job) {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	a := m.c.adaptations[j.Name]
	if a == nil || uint32(a.id) != j.Id || a.decision == nil {
		return
	}
	for _, x := range measuredMetrics {
		ch <- metrics.Gauge(x.desc, x.of(&a.follow.Snapshot.Job), j.Name)
	}
}

// progress emits what the ranks of a job that runs have reported, if any has that is there and has not left.
func (m collector) progress(ch chan<- prometheus.Metric, j *api.Job) {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	meet := m.c.meets[j.Name]
	if meet == nil || uint32(meet.id) != j.Id || meet.state != stateRunning { // also if it was removed or began anew this very moment
		return
	}
	var round uint32
	var oldest time.Duration
	waiting, heard := 0, 0
	for _, rank := range ranksOf(meet.joined() &^ meet.left) {
		s := meet.seats[rank]
		if s.heard.progress == nil {
			continue
		}
		p := s.heard.progress
		if heard == 0 || wire.SerialLess(p.GetRound(), round) {
			round = p.GetRound()
		}
		heard++
		oldest = max(oldest, time.Since(s.heard.at))
		if p.GetWaiting() {
			waiting++
		}
	}
	if heard == 0 {
		return
	}
	ch <- metrics.Gauge(metricRound, float64(round), j.Name)
	ch <- metrics.Gauge(metricWaiting, float64(waiting), j.Name)
	ch <- metrics.Gauge(metricReportAge, oldest.Seconds(), j.Name)
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
