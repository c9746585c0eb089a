package report

import (
	"bytes"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"xagg/lab/results"
)

// world is how a scenario behaves in the model that synthetic results come from.
type world struct {
	name, about string
	slow        map[int]float64 // factors on the computation
	link        float64         // of the slowest, in bits per second
	slowLink    bool
	jobs        []string
	values      int
	quorum      bool
}

var worlds = []world{
	{name: "homogeneous", about: "Four ranks that are alike.", link: 40e6, values: 25600, jobs: []string{"train"}, quorum: true},
	{name: "slow-2", about: "One rank computes twice as long as the others.", link: 40e6, values: 25600, slow: map[int]float64{3: 2}, jobs: []string{"train"}, quorum: true},
	{name: "slow-4", about: "One rank computes four times as long as the others.", link: 40e6, values: 25600, slow: map[int]float64{3: 4}, jobs: []string{"train"}, quorum: true},
	{name: "half-slow", about: "Half of the ranks compute one and a half times as long.", link: 40e6, values: 25600, slow: map[int]float64{2: 1.5, 3: 1.5}, jobs: []string{"train"}, quorum: true},
	{name: "link-25", about: "One link has a quarter of the others' rate.", link: 10e6, slowLink: true, values: 25600, jobs: []string{"train"}, quorum: true},
	{name: "two-jobs", about: "Two jobs on one switch, the first with a straggler.", link: 40e6, values: 12800, slow: map[int]float64{3: 3}, jobs: []string{"first", "second"}, quorum: true},
	{name: "small-buckets", about: "The tensors of ResNet-50, divided, in buckets of their own; all ranks' gradients are needed.", link: 40e6, values: 99840, jobs: []string{"train"}},
}

// costs are the model's, of modes: a factor on what a round takes beyond its lag, CPU seconds per GB by role.
var costs = map[string]struct {
	overhead float64
	cpu      map[string]float64
}{
	"tcp":           {1.9, map[string]float64{"switch": 20, "server": 6, "workers": 9, "kernel": 4}},
	"ring":          {1.6, map[string]float64{"switch": 22, "workers": 14, "kernel": 4}},
	"switch":        {1.15, map[string]float64{"switch": 16, "workers": 11, "controller": 0.4, "kernel": 2}},
	"server":        {1.22, map[string]float64{"switch": 18, "server": 4, "workers": 11, "controller": 0.5, "kernel": 2}},
	"hybrid":        {1.1, map[string]float64{"switch": 17, "server": 2, "workers": 11, "controller": 0.5, "kernel": 2}},
	"auto":          {1.14, map[string]float64{"switch": 17, "server": 2, "workers": 11, "controller": 0.6, "kernel": 2}},
	"hybrid/quorum": {1.12, map[string]float64{"switch": 17, "server": 3, "workers": 11, "controller": 0.5, "kernel": 2}},
}

// synthetic returns plausible results: a seed has a skipped mode, a failed run, and two runs that the machine limited.
func synthetic(t testing.TB, seed uint64) *results.File {
	rnd := rand.New(rand.NewPCG(seed, 5))
	modes := []string{"tcp", "ring", "gloo", "switch", "server", "hybrid", "auto", "hybrid/quorum"}
	h := results.Header{
		Time: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), Command: []string{"xagg", "bench", "run", "-f", "scenarios/*.yaml"}, Revision: "0123456789ab",
		CPU: "Some Processor 9000 @ 2.40GHz", Cores: 2, Memory: 8 << 30, Kernel: "6.12.0-amd64", Lab: "netns", Switch: "engine", XDPMode: "native",
		Versions: map[string]string{"xagg": "devel", "go": "go1.26.8"}, Repeat: 3, Modes: modes,
		Emulated: []string{"The switch is a program on this machine's cores: compare modes, not speeds with a network's.", "Computation is a sleep."},
	}
	for _, w := range worlds {
		h.Scenarios = append(h.Scenarios, results.Scenario{Name: w.name, About: w.about, YAML: "name: " + w.name + "\nlinks: {worker: 40Mbit}\n", Heterogeneous: w.slow != nil || w.slowLink})
	}
	var b bytes.Buffer
	write := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	write(results.WriteHeader(&b, h))
	for rep := range 3 {
		machine := math.Exp(0.02 * rnd.NormFloat64()) // what a repetition shares
		for _, w := range worlds {
			for _, mode := range modes {
				r := results.Run{Scenario: w.name, Mode: mode, Repetition: rep, Seed: uint64(rep) + 1, Began: h.Time, Took: 5 * time.Second}
				switch {
				case mode == "gloo":
					r.Skipped = "no PyTorch: apt-get install python3-torch"
				case mode == "hybrid/quorum" && !w.quorum:
					r.Skipped = "the scenario's job has no quorum"
				case mode == "ring" && w.name == "link-25" && rep == 1:
					r.Failed = "rank 2: read tcp: connection reset by peer"
				case mode == "auto":
					w.run(rand.New(rand.NewPCG(seed, uint64(100+rep))), &r, machine) // leaves the others what they are
				default:
					w.run(rnd, &r, machine)
				}
				write(results.WriteRun(&b, r))
			}
		}
	}
	f, err := results.Read("synthetic.jsonl", strings.NewReader(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// run fills in a run's measurements.
func (w world) run(rnd *rand.Rand, r *results.Run, machine float64) {
	drawn := rand.New(rand.NewPCG(r.Seed, 6)) // the same in all modes
	const ranks, rounds, computation = 4, 20, 0.05
	model := costs[r.Mode]
	noise := machine * math.Exp(0.012*rnd.NormFloat64())
	bytes := 0.0
	for n, name := range w.jobs {
		slow := w.slow
		if n > 0 {
			slow = nil
		}
		j := results.Job{Name: name, Buckets: 4, Values: w.values, Error: 3e-8 * (1 + rnd.Float64()), Slots: 256, Chunks: 100 * ranks * rounds}
		wire := 32 * float64(w.values) / w.link
		for rank := range ranks {
			var comm, round, compute, floor []float64
			for range rounds {
				factor := func(rank int) float64 { return max(slow[rank], 1) * math.Exp(0.03*drawn.NormFloat64()) }
				own := computation * factor(rank)
				last := own
				for other := range ranks {
					if other != rank {
						last = max(last, computation*factor(other))
					}
				}
				lag := last - own
				if results.Consistency(r.Mode) != "sync" {
					lag = min(lag, 0.002)
				}
				ideal := lag + wire
				if results.Consistency(r.Mode) != "sync" && w.slowLink {
					ideal = lag + wire/4
				}
				took := lag + (ideal-lag)*model.overhead*noise*(1+0.08*rnd.ExpFloat64())
				comm, round, compute, floor = append(comm, took), append(round, own+took), append(compute, own), append(floor, ideal)
				j.Span += (own + took) / ranks
				j.IdealSpan += (own + ideal) / ranks
			}
			j.Comm, j.Round, j.Compute, j.Floor = append(j.Comm, comm), append(j.Round, round), append(j.Compute, compute), append(j.Floor, floor)
		}
		if r.Mode == "auto" {
			j.Moves = []results.Move{}
			if slow != nil {
				j.Moves = append(j.Moves, results.Move{Round: 3 - 2*r.Repetition, Rank: 3, To: "server", Why: "score 9.5 above 4 in 5 of 8 rounds"})
			}
			if slow[2] > 1 {
				j.Moves = append(j.Moves, results.Move{Round: 12, Rank: 2, To: "server", Why: "score 5 above 4 in 6 of 8 rounds"})
			}
		}
		if results.Consistency(r.Mode) != "sync" && slow != nil {
			j.Late = j.Chunks / ranks
			j.Skipped = [][]int{nil, nil, nil, {3, 7, 11}}
		}
		if r.Mode != "tcp" && r.Mode != "ring" {
			j.Packets = j.Chunks + 40
			j.Resends = 40
			for i := range 40 {
				j.Open = append(j.Open, results.Sample{Time: 0.1 * float64(i), Server: rnd.IntN(64) + rnd.IntN(16)})
			}
		}
		if strings.HasPrefix(r.Mode, "hybrid") || strings.HasPrefix(r.Mode, "server") {
			r.Usage.Partials += 100 * rounds
			j.Memory = 1 << 20
		}
		bytes += 4 * float64(w.values) * ranks * rounds
		r.Jobs = append(r.Jobs, j)
	}
	r.Usage.Seconds, r.Usage.Bytes = r.Jobs[0].Span, uint64(bytes)
	r.Usage.CPU = map[string]float64{}
	for _, role := range results.Roles {
		if per := model.cpu[role]; per > 0 {
			r.Usage.CPU[role] = per * bytes / 1e9 * math.Exp(0.05*rnd.NormFloat64())
		}
	}
	r.Usage.BPF = r.Usage.CPU["server"] / 3
	r.Usage.Busiest = 0.45 + 0.2*rnd.Float64()
	if r.Mode == "ring" && w.name == "small-buckets" && r.Repetition < 2 {
		r.Usage.Busiest = 0.93
	}
	if r.Mode == "server" && w.name == "slow-4" && r.Repetition == 0 {
		r.Usage.Busiest = 0.84
		r.Jobs[0].Comm = scaled(r.Jobs[0].Comm, 3)
	}
	if r.Mode == "server" && w.name == "half-slow" { // another machine's noise
		r.Jobs[0].Comm = scaled(r.Jobs[0].Comm, math.Exp(0.5*rnd.NormFloat64()))
	}
}

func scaled(m [][]float64, by float64) [][]float64 {
	out := slices.Clone(m)
	for i := range out {
		out[i] = slices.Clone(out[i])
		for n := range out[i] {
			out[i][n] *= by
		}
	}
	return out
}

func document(t testing.TB, seed uint64) (*Document, *results.Analysis, *results.File) {
	f := synthetic(t, seed)
	a, err := results.Analyze(results.DefaultLimit, f)
	if err != nil {
		t.Fatal(err)
	}
	var more []*Extra
	for name, read := range map[string]func(string, []byte) (*Extra, error){"aggregator.json": Aggregator, "train.json": Train} {
		src, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		e, err := read(name, src)
		if err != nil {
			t.Fatal(err)
		}
		more = append(more, e)
	}
	slices.SortFunc(more, func(a, b *Extra) int { return strings.Compare(a.Section.ID, b.Section.ID) })
	return Compare(a, more...), a, f
}
