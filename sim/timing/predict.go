package timing

import (
	"math/bits"
	"time"

	"xagg/policy"
	"xagg/policy/adapt"
	"xagg/xdp"
)

// Prediction is what a run predicts for a job. Times are by rank and round, without the warm-up rounds.
type Prediction struct {
	Job     string
	Comm    [][]time.Duration // how long a gradient of the rank was ready whose result was not usable
	Round   [][]time.Duration // from the beginning of the computation to the last result
	Floor   [][]time.Duration // communication time that no way of aggregating can beat
	Skipped [][]bool          // rounds that the rank did not compute in, because it was behind
	Packets uint64            // that its ranks sent, resends included
	Resends uint64
	Slots   int    // of the switch that it has leased
	Memory  uint64 // bytes of servers that it has leased, of all of them
	Steered int    // ranks that servers sum at the end
	Moves   []Move // of mode auto
	// Switch is the share of time in which the switch was busy, Server that of the busiest server: 1 is a limit.
	Switch, Server float64
	// Lost is how many frames links lost, Full how many found a link's queue full: of all jobs, warm-up rounds included.
	Lost, Full uint64
}

// Move is a decision to have a rank summed elsewhere.
type Move struct {
	At    time.Duration // since the run began
	Round int           // of the rank, warm-up included, that was under way
	adapt.Move
}

func (w *world) predict(j *job) Prediction {
	p := Prediction{Job: j.spec.Name, Slots: policy.SlotsPerPool * j.plan.Pool, Steered: bits.OnesCount64(j.plan.Steered)}
	if len(j.plan.Servers) > 0 || j.auto != nil && j.auto.steered {
		p.Memory = uint64(len(w.servers)) * uint64(j.rounds) * uint64(j.chunks) * xdp.SlotSize
	}
	if j.auto != nil {
		p.Moves = j.auto.moves
	}
	ideal := w.s.Ideal(w.opts.Seed, j.number, j.consistency.Mode)
	for _, k := range j.ranks {
		var comm, took []time.Duration
		var skipped []bool
		for _, t := range k.turns[w.s.Warmup:] {
			comm, took = append(comm, t.comm()), append(took, t.took())
			skipped = append(skipped, t.skipped)
			p.Packets += t.packets
			p.Resends += t.resends
		}
		p.Comm, p.Round, p.Floor = append(p.Comm, comm), append(p.Round, took), append(p.Floor, ideal.Comm[k.number][w.s.Warmup:])
		p.Skipped = append(p.Skipped, skipped)
	}
	all := w.agenda.now.Seconds()
	p.Switch = w.pipeline.used.Seconds() / all
	for _, v := range w.servers {
		p.Server = max(p.Server, v.station.used.Seconds()/all)
	}
	for _, h := range w.hosts[1:] {
		p.Lost += h.up.lost + h.down.lost
		p.Full += h.up.full + h.down.full
	}
	return p
}
