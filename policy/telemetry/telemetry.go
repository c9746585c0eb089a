// Package telemetry turns what the data planes measured of a job into the numbers that rules decide from. It is pure:
// reports and time in, a [Snapshot] out.
//
// No number is a difference between two hosts' clocks. Who came last in a chunk, and how long the others waited for it, is
// measured by the aggregator that closed the chunk and comes with its RESULT; how long a worker computed and communicated are
// durations on its own clock. The lag of a rank behind the first is the difference of two such durations: results come to
// all ranks at the same time, so that who waited less for them came later by so much. What counters of switch and servers say
// becomes rates on the clock of who reads them ([Devices]), and lags on a server's clock stay that.
package telemetry

import (
	"fmt"
	"reflect"
	"time"
)

// Round is what a worker reports of one of its all-reduces.
type Round struct {
	Number  uint32        `json:"round"`      // of its first round in the job; rises from report to report
	Compute time.Duration `json:"compute_ns"` // from the end of the all-reduce before; 0 where there was none, or where they overlap
	Comm    time.Duration `json:"comm_ns"`    // from its call to its last result
	Chunks  int           `json:"chunks"`
	Late    int           `json:"late"`    // chunks without the rank that reports
	Packets uint64        `json:"packets"` // sent, resends included
	Resends uint64        `json:"resends"`
	Behind  int           `json:"behind"` // rounds by which others were known to be ahead
	// Held and Blocked are sums over the chunks: of how long the aggregator that made the result had the chunk incomplete in a
	// slot, and of the part of it in which all but the last rank had given theirs.
	Held    time.Duration `json:"held_ns,omitempty"`
	Blocked time.Duration `json:"blocked_ns,omitempty"`
	// Last says by rank on how many chunks it was the last, and for how long all others had waited for it in the chunk where
	// that was longest. Ranks that never were are left out.
	Last []Last `json:"last,omitempty"`
}

// Last is a rank's part in [Round.Last].
type Last struct {
	Rank    int           `json:"rank"`
	Chunks  int           `json:"chunks"`
	Blocked time.Duration `json:"blocked_ns"`
}

// Report is what a worker has to say since its report before.
type Report struct {
	Rank   int     `json:"rank"`
	Rounds []Round `json:"rounds"`
}

// Check returns what is wrong with a report of a job with so many ranks. A report that fails is to be left out whole.
func (r *Report) Check(ranks int) error {
	if r.Rank < 0 || r.Rank >= ranks {
		return fmt.Errorf("check report: rank %d, want 0..%d", r.Rank, ranks-1)
	}
	for i := range r.Rounds {
		if err := r.Rounds[i].check(ranks); err != nil {
			return fmt.Errorf("check report of rank %d: round %d: %w", r.Rank, r.Rounds[i].Number, err)
		}
	}
	return nil
}

// maxDuration bounds what a report may say: longer is a clock that was set, not a round.
const maxDuration = 24 * time.Hour

func (r *Round) check(ranks int) error {
	for _, d := range []struct {
		name string
		d    time.Duration
	}{{"computation", r.Compute}, {"communication", r.Comm}} {
		if d.d < 0 || d.d > maxDuration {
			return fmt.Errorf("%s of %v, want 0 to %v: has a clock been set?", d.name, d.d, maxDuration)
		}
	}
	if r.Chunks < 0 || r.Late < 0 || r.Late > r.Chunks || r.Behind < 0 || r.Resends > r.Packets {
		return fmt.Errorf("%d of %d chunks late, %d of %d packets resent, %d rounds behind: impossible", r.Late, r.Chunks, r.Resends,
			r.Packets, r.Behind)
	}
	if r.Held < 0 || r.Blocked < 0 || r.Blocked > r.Held {
		return fmt.Errorf("slots were held for %v, for %[2]v of it by the last rank alone: impossible", r.Held, r.Blocked)
	}
	for _, l := range r.Last {
		if l.Rank < 0 || l.Rank >= ranks || l.Chunks < 0 || l.Chunks > r.Chunks || l.Blocked < 0 || l.Blocked > maxDuration {
			return fmt.Errorf("rank %d last in %d of %d chunks, waited for %v: impossible", l.Rank, l.Chunks, r.Chunks, l.Blocked)
		}
	}
	return nil
}

// Snapshot is what is known at a moment. It is what rules decide from, and what traces hold. Times are seconds, shares
// are 0..1, and every number is finite and a float64, so that rules need no conversions.
type Snapshot struct {
	Time    float64  `json:"time" cel:"time" doc:"seconds since the observation began, on the controller's clock; never runs back"`
	Job     Job      `json:"job" cel:"job"`
	Ranks   []Rank   `json:"ranks" cel:"ranks"` // by rank
	Switch  Switch   `json:"switch" cel:"switch"`
	Servers []Server `json:"servers" cel:"servers"`
}

// Job is what is known of a job as a whole.
type Job struct {
	Name    string  `json:"name" cel:"name" doc:"name of the job"`
	Size    float64 `json:"size" cel:"size" doc:"number of ranks"`
	Mode    string  `json:"mode" cel:"mode" doc:"consistency: sync, quorum or async"`
	Cohort  float64 `json:"cohort" cel:"cohort" doc:"number of ranks that the switch sums"`
	Steered float64 `json:"steered" cel:"steered" doc:"number of ranks that servers sum"`
	Pool    float64 `json:"pool" cel:"pool" doc:"switch slots per version"`
	Quorum  float64 `json:"quorum" cel:"quorum" doc:"number of ranks that are enough for a result, by the present plan; 0 in sync jobs"`
	Least   float64 `json:"least" cel:"least" doc:"number of ranks that are enough at least, as the job was created; 0 in sync jobs"`
	Wait    float64 `json:"wait" cel:"wait" unit:"s" doc:"how long a chunk is kept open for more ranks than are enough, from its first arrival, by the present plan"`
	Chunks  float64 `json:"chunks" cel:"chunks" doc:"chunks of a round, by the last report"`
	Rounds  float64 `json:"rounds" cel:"rounds" doc:"rounds in the window, of the rank that has the most"`
	Round   float64 `json:"round" cel:"round" doc:"number of the newest round that every rank has reported, as far as they are there"`

	RoundP50      float64 `json:"round_p50" cel:"round_p50" unit:"s" doc:"median time of a round, computation and communication, of all ranks"`
	CommP50       float64 `json:"comm_p50" cel:"comm_p50" unit:"s" doc:"median communication time of all ranks"`
	ComputeP50    float64 `json:"compute_p50" cel:"compute_p50" unit:"s" doc:"median computation time of all ranks"`
	BlockedMedian float64 `json:"blocked_median" cel:"blocked_median" unit:"s" doc:"median over ranks of blocked_p50"`
	BlockedMAD    float64 `json:"blocked_mad" cel:"blocked_mad" unit:"s" doc:"median over ranks of the distance of blocked_p50 from blocked_median"`
	LagMedian     float64 `json:"lag_median" cel:"lag_median" unit:"s" doc:"median over ranks of lag_p50"`
	LagMAD        float64 `json:"lag_mad" cel:"lag_mad" unit:"s" doc:"median over ranks of the distance of lag_p50 from lag_median"`
	RateMedian    float64 `json:"rate_median" cel:"rate_median" unit:"bytes/s" doc:"median over ranks of rate"`
	LateShare     float64 `json:"late_share" cel:"late_share" doc:"share of chunks that ranks had results of without their own part"`

	PartialShare    float64 `json:"partial_share" cel:"partial_share" doc:"share of what servers have lately summed of the job that were sums of the switch; 0 where nothing is known"`
	BusySlots       float64 `json:"busy_slots" cel:"busy_slots" doc:"slots that a round had incomplete chunks in while it lasted, mean; of the aggregators that made the results"`
	SlotOccupancy   float64 `json:"slot_occupancy" cel:"slot_occupancy" doc:"the same as a share of pool"`
	BlockedSlotTime float64 `json:"blocked_slot_time" cel:"blocked_slot_time" unit:"s" doc:"time that slots waited for the last rank alone in a round, summed over its chunks, mean"`
	BlockedShare    float64 `json:"blocked_share" cel:"blocked_share" doc:"the same as a share of the time in which slots had incomplete chunks"`
}

// Rank is what is known of a rank. Percentiles are over the window; ewma and dev are an exponentially weighted mean with
// weight 1/8 and the mean deviation from it with weight 1/4, as RFC 6298 has them.
type Rank struct {
	Rank    float64 `json:"rank" cel:"rank" doc:"number of the rank"`
	Steered bool    `json:"steered" cel:"steered" doc:"whether servers sum it, by the present plan"`
	Rounds  float64 `json:"rounds" cel:"rounds" doc:"its rounds in the window"`
	// Age is how long ago it reported a round; it grows while a round takes long, or when the rank is gone.
	Age float64 `json:"age" cel:"age" unit:"s" doc:"time since its last report of a round"`

	BlockedMean float64 `json:"blocked_mean" cel:"blocked_mean" unit:"s" doc:"mean, over rounds, of how long all others waited for it in a chunk where it was the last"`
	BlockedP50  float64 `json:"blocked_p50" cel:"blocked_p50" unit:"s" doc:"median of the same"`
	BlockedP95  float64 `json:"blocked_p95" cel:"blocked_p95" unit:"s" doc:"95th percentile of the same"`
	BlockedP99  float64 `json:"blocked_p99" cel:"blocked_p99" unit:"s" doc:"99th percentile of the same"`
	BlockedEWMA float64 `json:"blocked_ewma" cel:"blocked_ewma" unit:"s" doc:"weighted mean of the same"`
	BlockedDev  float64 `json:"blocked_dev" cel:"blocked_dev" unit:"s" doc:"weighted mean deviation of the same"`
	LagP50      float64 `json:"lag_p50" cel:"lag_p50" unit:"s" doc:"median, over rounds, of how much less it waited for results than the rank that waited longest: how much later it came"`
	LagP95      float64 `json:"lag_p95" cel:"lag_p95" unit:"s" doc:"95th percentile of the same"`
	LagP99      float64 `json:"lag_p99" cel:"lag_p99" unit:"s" doc:"99th percentile of the same"`
	LagEWMA     float64 `json:"lag_ewma" cel:"lag_ewma" unit:"s" doc:"weighted mean of the same"`
	LagDev      float64 `json:"lag_dev" cel:"lag_dev" unit:"s" doc:"weighted mean deviation of the same"`
	LastShare   float64 `json:"last_share" cel:"last_share" doc:"share of chunks on which it was the last"`
	ComputeP50  float64 `json:"compute_p50" cel:"compute_p50" unit:"s" doc:"median of its computation"`
	CommP50     float64 `json:"comm_p50" cel:"comm_p50" unit:"s" doc:"median of its communication"`
	Rate        float64 `json:"rate" cel:"rate" unit:"bytes/s" doc:"gradient bytes of a round by own_p50"`
	ResendShare float64 `json:"resend_share" cel:"resend_share" doc:"share of its packets that were sent again"`
	LateShare   float64 `json:"late_share" cel:"late_share" doc:"share of its chunks whose result it missed"`
	Behind      float64 `json:"behind" cel:"behind" doc:"rounds by which others were ahead of it in its last round"`
	OwnP50      float64 `json:"own_p50" cel:"own_p50" unit:"s" doc:"median of its communication, less what it waited for others, in rounds whose results have its part; while there are none twice the quickest rank's; plans do not change it"`
	// Ready is by round, the oldest first, and of the same rounds for all ranks: of those in the window that everybody has reported. A
	// rank that is gone has none.
	Ready []float64 `json:"ready,omitempty" cel:"ready" unit:"s" doc:"by round: how long its own part took, computation and communication without what it waited for others; what is not seen of it, for it came too late for most results or was skipped, counts as long as usual; plans do not change it"`

	SwitchPackets float64 `json:"switch_packets" cel:"switch_packets" unit:"packets/s" doc:"contributions of it that have lately come to the switch, resends included; 0 while not switch.known"`
	SwitchBytes   float64 `json:"switch_bytes" cel:"switch_bytes" unit:"bytes/s" doc:"the same in bytes of whole frames"`
	Arrivals      float64 `json:"arrivals" cel:"arrivals" doc:"contributions of it that servers have lately summed: what arrival_p50 and so on are of"`
	ArrivalP50    float64 `json:"arrival_p50" cel:"arrival_p50" unit:"s" doc:"median of how long after the first of their chunk these came, on the server's clock; from buckets of a factor of 2"`
	ArrivalP95    float64 `json:"arrival_p95" cel:"arrival_p95" unit:"s" doc:"95th percentile of the same"`
	ArrivalP99    float64 `json:"arrival_p99" cel:"arrival_p99" unit:"s" doc:"99th percentile of the same"`
}

// Switch is what is known of the switch.
type Switch struct {
	Slots     float64 `json:"slots" cel:"slots" doc:"number of slots"`
	SlotsFree float64 `json:"slots_free" cel:"slots_free" doc:"share of slots that no job has leased"`

	// What its counters say, over the last few seconds of them.
	Known            bool    `json:"known" cel:"known" doc:"whether its counters were read lately; where not, what they would say is 0"`
	PacketsPerSecond float64 `json:"packets_per_second" cel:"packets_per_second" unit:"packets/s" doc:"packets of the protocol that came, of all jobs"`
	BytesPerSecond   float64 `json:"bytes_per_second" cel:"bytes_per_second" unit:"bytes/s" doc:"the same in bytes of whole frames"`
	DuplicateShare   float64 `json:"duplicate_share" cel:"duplicate_share" doc:"share of them that were summed before"`
	RefusedShare     float64 `json:"refused_share" cel:"refused_share" doc:"share of them that something was wrong with"`
}

// Server is what is known of an aggregation server.
type Server struct {
	Name       string  `json:"name" cel:"name" doc:"its name"`
	Ready      bool    `json:"ready" cel:"ready" doc:"whether the controller reaches it"`
	MemoryFree float64 `json:"memory_free" cel:"memory_free" doc:"share of its memory that no job has leased"`

	// What its counters say, over the last few seconds of them.
	Known            bool    `json:"known" cel:"known" doc:"whether its counters were read lately; where not, what they would say is 0"`
	PacketsPerSecond float64 `json:"packets_per_second" cel:"packets_per_second" unit:"packets/s" doc:"packets of the protocol that came, of all jobs"`
	Slots            float64 `json:"slots" cel:"slots" doc:"number of slots of its memory, as it says"`
	SlotsUsed        float64 `json:"slots_used" cel:"slots_used" doc:"slots that are leased, as it says"`
	Timed            bool    `json:"timed" cel:"timed" doc:"whether the running time of its program was measured lately, which a server in user space does not do; where not, ns_per_packet and cpu are 0"`
	NsPerPacket      float64 `json:"ns_per_packet" cel:"ns_per_packet" unit:"ns" doc:"running time of its program for a frame, mean"`
	CPU              float64 `json:"cpu" cel:"cpu" doc:"share of one core that its program runs on"`
}

// Check returns the first number of a snapshot that no rule may be given: not finite, or beyond its range.
func (s *Snapshot) Check() error {
	if float64(len(s.Ranks)) != s.Job.Size {
		return fmt.Errorf("check snapshot: %d ranks, the job has %v", len(s.Ranks), s.Job.Size)
	}
	if err := check("", reflect.ValueOf(s).Elem(), snapshotNumbers); err != nil {
		return err
	}
	if err := check("job.", reflect.ValueOf(&s.Job).Elem(), jobNumbers); err != nil {
		return err
	}
	for i := range s.Ranks {
		if err := check("rank.", reflect.ValueOf(&s.Ranks[i]).Elem(), rankNumbers); err != nil {
			return err
		}
	}
	if err := check("switch.", reflect.ValueOf(&s.Switch).Elem(), switchNumbers); err != nil {
		return err
	}
	for i := range s.Servers {
		if err := check("server.", reflect.ValueOf(&s.Servers[i]).Elem(), serverNumbers); err != nil {
			return err
		}
	}
	return nil
}
