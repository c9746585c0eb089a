// Package scenario describes experiments that compare ways of aggregating: workers, their links, how long they compute, what
// goes wrong, and what they all-reduce. It is pure: a scenario and a seed in; compute times, and the times that no
// way of aggregating can beat, out.
package scenario

import "time"

// Scenario is an experiment: plain data, read from YAML by [Parse].
type Scenario struct {
	Name  string `yaml:"name"`  // lower-case letters, digits and dashes, unique in a suite
	About string `yaml:"about"` // a sentence for the report
	// Servers is the number of hosts with an XDP aggregator, and as many more for parameter servers; 1 where it does not say.
	Servers int   `yaml:"servers"`
	Links   Links `yaml:"links"`
	// Warmup are rounds at the beginning of every run that are not measured, Rounds those that are.
	Warmup int    `yaml:"warmup"` // DefaultWarmup where it does not say
	Rounds int    `yaml:"rounds"` // DefaultRounds where it does not say
	Seed   uint64 `yaml:"seed"`   // of compute times, values and faults of the first repetition
	Jobs   []Job  `yaml:"jobs"`   // at least one; they share the switch, the servers and their links
}

// Defaults of a scenario.
const (
	DefaultWarmup = 3
	DefaultRounds = 20
)

// Links are the rates of links, in each direction.
type Links struct {
	Worker Rate `yaml:"worker"` // of each worker's link, unless its job says otherwise
	Server Rate `yaml:"server"` // of each server's link, the parameter servers' too; 0 = the sum of the workers' rates of the largest job
}

// Job is a training job of a scenario. Its ranks are hosts of their own.
type Job struct {
	Name    string  `yaml:"name"`
	Ranks   int     `yaml:"ranks"`
	Depth   int     `yaml:"depth"` // rounds under way in the modes of this project; 1 where it does not say
	Pool    int     `yaml:"pool"`  // switch slots per version; 0 = the controller's default
	Tensors Tensors `yaml:"tensors"`
	Compute Compute `yaml:"compute"`
	// Links are rates of ranks' links that differ from Scenario.Links.Worker.
	Links map[int]Rate `yaml:"links"`
	// Loss is the share of frames that ranks' links lose in each direction, 0..0.5.
	Loss map[int]Share `yaml:"loss"`
	// Steer are the ranks that the static hybrid mode has servers sum; none: those with a slow link, lossy link or slow
	// computation, and if there are none the last rank.
	Steer  []int   `yaml:"steer"`
	Quorum *Quorum `yaml:"quorum"` // absent: the job needs all ranks' gradients, and quorum modes are skipped
	Async  *Async  `yaml:"async"`  // absent: async modes are skipped
}

// Quorum allows results without the slowest ranks.
type Quorum struct {
	Ranks  int           `yaml:"ranks"`  // that are enough
	Wait   time.Duration `yaml:"wait"`   // for more, from the first arrival of a chunk
	Rounds int           `yaml:"rounds"` // that servers keep for stragglers; 0 = Scenario.QuorumRounds
}

// Async allows results that wait for nobody.
type Async struct {
	Staleness int `yaml:"staleness"` // contributions by which a rank may be ahead of the slowest
}

// Tensors are what a job all-reduces in every round, in the order in which the backward pass makes it: either Sizes, or the
// tensors of a model.
type Tensors struct {
	Sizes []int `yaml:"sizes"` // values of each
	// Model is "resnet50" or "transformer": the sizes of its parameters' tensors, the last layer first. Divide divides each, and
	// rounds up; 0 = 1.
	Model  string `yaml:"model"`
	Divide int    `yaml:"divide"`
	// Bucket puts consecutive tensors together until a bucket has at least so many values, as data-parallel trainers do; 0 = each
	// tensor is a bucket of its own.
	Bucket int `yaml:"bucket"`
}

// Compute is how long ranks compute in a round, before what they have computed is all-reduced.
type Compute struct {
	Mean time.Duration `yaml:"mean"`
	// Jitter is sigma of a lognormal factor with mean 1, drawn for every rank and round.
	Jitter float64 `yaml:"jitter"`
	// Slow are factors by rank.
	Slow map[int]float64 `yaml:"slow"`
	// Moving makes another rank, drawn at random, slower by Factor after every so many rounds.
	Moving *Moving `yaml:"moving"`
	// Episodes are rounds in which a rank is slower than otherwise.
	Episodes []Episode `yaml:"episodes"`
	// Backward is the share of the computation, at its end, in which buckets become ready one after the other, evenly by their
	// values; 0 = all are ready at its end.
	Backward float64 `yaml:"backward"`
}

// Moving is a straggler that changes.
type Moving struct {
	Every  int     `yaml:"every"` // rounds
	Factor float64 `yaml:"factor"`
}

// Episode makes a rank slower by Factor in the measured rounds From to To, To itself not among them. Round 0 is the first after the
// warm-up.
type Episode struct {
	Rank   int     `yaml:"rank"`
	Factor float64 `yaml:"factor"`
	From   int     `yaml:"from"`
	To     int     `yaml:"to"`
}

// Alike reports whether all ranks of a job are alike in all that a scenario says of them.
func (s *Scenario) Alike(job int) bool {
	j := &s.Jobs[job]
	c := &j.Compute
	return len(j.Links) == 0 && len(j.Loss) == 0 && len(c.Slow) == 0 && c.Jitter == 0 && c.Moving == nil && len(c.Episodes) == 0
}
