package metrics

import (
	"context"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"xagg/api"
)

// What a server and a switch both have; device is the name of either.
var (
	Packets   = Desc("packets_total", "Packets that a switch or server has handled, by what became of them.", "device", "reason")
	Slots     = Desc("slots", "Slots that a switch or server has.", "device")
	SlotsFree = Desc("slots_free", "Slots of a switch or server that no job has leased.", "device")
)

// How long the program of a server has run while its agent measured that.
var (
	RunFrames  = Desc("run_frames_total", "Frames that a server's program has run for while its running time was measured.", "device")
	RunSeconds = Desc("run_seconds_total", "Running time of a server's program while that was measured.", "device")
	RunWatched = Desc("run_watched_seconds_total", "Time for which the running time of a server's program was measured.", "device")
)

var (
	serverInfo = Desc("server_info", "1, with what the server is in its labels.", "device", "interface", "mode")
	memory     = Desc("server_memory_bytes", "Memory for slots.", "device")
	lag        = Desc("lag_seconds", "How long after a chunk's first contribution that of a rank came to the server.", "device", "job_id", "rank")
)

// Agent collects what the agent of an aggregation server tells: see [NewAgent].
type Agent struct{ client api.AgentClient }

// NewAgent returns the collector of a server, which asks the server's agent at every scrape, and to measure running time.
func NewAgent(client api.AgentClient) *Agent { return &Agent{client} }

// Describe implements [prometheus.Collector].
func (a *Agent) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{Packets, Slots, SlotsFree, RunFrames, RunSeconds, RunWatched, serverInfo, memory, lag} {
		ch <- d
	}
}

// Collect implements [prometheus.Collector]. An agent that does not answer makes the scrape fail.
func (a *Agent) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	info, err := a.client.Info(ctx, &api.InfoRequest{})
	if err != nil {
		ch <- prometheus.NewInvalidMetric(serverInfo, err)
		return
	}
	name := info.GetName()
	ch <- Gauge(serverInfo, 1, name, info.GetInterface(), info.GetMode())
	ch <- Gauge(memory, float64(info.GetMemoryBytes()), name)
	ch <- Gauge(Slots, float64(info.GetSlots()), name)
	ch <- Gauge(SlotsFree, float64(info.GetSlotsFree()), name)
	stats, err := a.client.Stats(ctx, &api.StatsRequest{Measure: true})
	if err != nil {
		ch <- prometheus.NewInvalidMetric(Packets, err)
		return
	}
	Counts(ch, Packets, name, stats.GetReasons())
	Runs(ch, name, stats)
	for _, r := range stats.GetRanks() {
		ch <- lags(name, r)
	}
}

// Runs emits how long a server's program has run.
func Runs(ch chan<- prometheus.Metric, device string, stats *api.StatsReply) {
	ch <- Counter(RunFrames, float64(stats.GetRunFrames()), device)
	ch <- Counter(RunSeconds, float64(stats.GetRunNs())/1e9, device)
	ch <- Counter(RunWatched, float64(stats.GetWatchedNs())/1e9, device)
}

// Counts emits a counter for each name, the value of the second label.
func Counts(ch chan<- prometheus.Metric, desc *prometheus.Desc, device string, counts map[string]uint64) {
	for name, n := range counts {
		ch <- Counter(desc, float64(n), device, name)
	}
}

// Counter makes a counter.
func Counter(desc *prometheus.Desc, v float64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(desc, prometheus.CounterValue, v, labels...)
}

// Gauge makes a gauge.
func Gauge(desc *prometheus.Desc, v float64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v, labels...)
}

// lags makes a histogram of a rank's lags with a bound at every power of four from 16 us to 67 s: a third of what the server
// counts, for each of up to 64 ranks. The server's buckets end below their bound, which is as good as at it.
func lags(device string, r *api.RankStats) prometheus.Metric {
	buckets := make(map[float64]uint64)
	var count uint64
	for i, n := range r.GetLagLog2() {
		count += n
		if i%2 == 1 && 3 <= i && i <= 25 {
			buckets[float64(uint64(2)<<i)/1e6] = count
		}
	}
	return prometheus.MustNewConstHistogram(lag, count, float64(r.GetLagSumUs())/1e6, buckets,
		device, strconv.FormatUint(uint64(r.GetJob()), 10), strconv.FormatUint(uint64(r.GetRank()), 10))
}
