package scenario

import (
	"fmt"
	"maps"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"xagg/controller"
	"xagg/internal/strictyaml"
	"xagg/lab"
	"xagg/lab/netns"
	"xagg/policy"
	"xagg/worker"
)

// Limits of a scenario.
const (
	MaxRounds  = 100_000
	MaxBuckets = 4096    // of a job
	MaxValues  = 1 << 28 // of a round of a job: 1 GiB
	MaxCompute = time.Minute
	MaxSlow    = 1000 // times as slow
	MaxLoss    = 0.5
	// MaxReductions is the largest number of all-reduces of all ranks of a job: as many times are computed to check a scenario.
	MaxReductions = 4 << 20
)

// Load reads a scenario from a file.
func Load(path string) (*Scenario, error) {
	src, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read scenario: %w", err)
	}
	return Parse(path, src)
}

// Parse reads a scenario from YAML and fills in what it does not say; name is the file's, for errors. An unknown
// field, a wrong type and a wrong value are errors that begin with name, line and column.
func Parse(name string, src []byte) (*Scenario, error) {
	s := &Scenario{Servers: 1, Warmup: DefaultWarmup, Rounds: DefaultRounds}
	if err := strictyaml.Decode(name, src, s, strictyaml.Text[Rate](), strictyaml.Text[Share](), strictyaml.Durations()); err != nil {
		return nil, err
	}
	for i := range s.Jobs {
		j := &s.Jobs[i]
		if j.Depth == 0 {
			j.Depth = 1
		}
	}
	if err := s.Validate(); err != nil {
		return nil, strictyaml.Locate(name, src, policy.FieldOf(err), err)
	}
	return s, nil
}

var namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)

// Validate checks the whole scenario. Errors are of type [*policy.FieldError] and name the first field at fault.
func (s *Scenario) Validate() error {
	switch {
	case !namePattern.MatchString(s.Name):
		return fieldf("name", "%q is not a name; want 1 to 32 lower-case letters, digits and dashes", s.Name)
	case s.About == "":
		return fieldf("about", "is missing; want a sentence for the report")
	case s.Servers < 1 || s.Servers > lab.MaxServers:
		return fieldf("servers", "%d is outside 1..%d", s.Servers, lab.MaxServers)
	case s.Warmup < 1 || s.Warmup > MaxRounds:
		return fieldf("warmup", "%d is outside 1..%d: in the first round all wait for each other", s.Warmup, MaxRounds)
	case s.Rounds < 1 || s.Rounds > MaxRounds:
		return fieldf("rounds", "%d is outside 1..%d", s.Rounds, MaxRounds)
	case len(s.Jobs) == 0:
		return fieldf("jobs", "is empty; want at least one job")
	}
	if err := checkRate("links.worker", s.Links.Worker); err != nil {
		return err
	}
	if s.Links.Server != 0 {
		if err := checkRate("links.server", s.Links.Server); err != nil {
			return err
		}
	}
	hosts := 0
	for i := range s.Jobs {
		j, field := &s.Jobs[i], fmt.Sprintf("jobs[%d]", i)
		for _, other := range s.Jobs[:i] {
			if other.Name == j.Name {
				return fieldf(field+".name", "%q is another job's name too", j.Name)
			}
		}
		if err := s.checkJob(i, field); err != nil {
			return err
		}
		if hosts += j.Ranks; hosts > lab.MaxWorkers {
			return fieldf(field+".ranks", "%d with those of the jobs before; a switch has ports for %d workers", hosts, lab.MaxWorkers)
		}
	}
	if rate := s.ServerRate(); s.Links.Server == 0 && rate > netns.MaxRate {
		return fieldf("links.server", "is missing, and the sum of the workers' rates, %v, is more than the %v that a link can have", rate,
			Rate(netns.MaxRate))
	}
	for i := range s.Jobs {
		if err := s.checkLag(i, fmt.Sprintf("jobs[%d]", i)); err != nil {
			return err
		}
	}
	return nil
}

func checkRate(field string, rate Rate) error {
	switch {
	case rate == 0:
		return fieldf(field, "is missing or zero; want the rate of a link, as in 40Mbit")
	case rate > netns.MaxRate:
		return fieldf(field, "%v is more than the %v that a link can have", rate, Rate(netns.MaxRate))
	}
	return nil
}

// checkJob checks what concerns a job alone.
func (s *Scenario) checkJob(i int, field string) error {
	j := &s.Jobs[i]
	switch {
	case !namePattern.MatchString(j.Name):
		return fieldf(field+".name", "%q is not a name; want 1 to 32 lower-case letters, digits and dashes", j.Name)
	case j.Ranks < 1 || j.Ranks > lab.MaxWorkers:
		return fieldf(field+".ranks", "%d is outside 1..%d: a contributors' mask has a bit for each", j.Ranks, lab.MaxWorkers)
	case j.Depth < 1 || j.Depth > controller.MaxDepth:
		return fieldf(field+".depth", "%d is outside 1..%d", j.Depth, controller.MaxDepth)
	case j.Pool < 0 || j.Pool&(j.Pool-1) != 0:
		return fieldf(field+".pool", "%d is not a power of two", j.Pool)
	}
	if err := j.Tensors.check(field + ".tensors"); err != nil {
		return err
	}
	for _, check := range []func(string) error{j.checkCompute, j.checkRanks, j.checkConsistency} {
		if err := check(field); err != nil {
			return err
		}
	}
	for k, e := range j.Compute.Episodes {
		at := fmt.Sprintf("%s.compute.episodes[%d]", field, k)
		switch {
		case e.Rank < 0 || e.Rank >= j.Ranks:
			return fieldf(at+".rank", "there is no rank %d; want 0..%d", e.Rank, j.Ranks-1)
		case !isFactor(e.Factor):
			return fieldf(at+".factor", "%g is outside 1..%d", e.Factor, MaxSlow)
		case e.From < 0 || e.From >= s.Rounds:
			return fieldf(at+".from", "%d is none of the measured rounds, 0..%d", e.From, s.Rounds-1)
		case e.To <= e.From || e.To > s.Rounds:
			return fieldf(at+".to", "%d is outside %d..%d: it is the round before which the episode is over", e.To, e.From+1, s.Rounds)
		}
		for n, o := range j.Compute.Episodes[:k] {
			if o.Rank == e.Rank && o.From < e.To && e.From < o.To {
				return fieldf(at, "it overlaps episodes[%d] of the same rank, %d", n, e.Rank)
			}
		}
	}
	for _, rank := range slices.Sorted(maps.Keys(j.Links)) {
		if err := checkRate(fmt.Sprintf("%s.links.%d", field, rank), j.Links[rank]); err != nil {
			return err
		}
	}
	if n := (s.Warmup + s.Rounds) * len(j.Tensors.Buckets()) * j.Ranks; n > MaxReductions {
		return fieldf("rounds", "%d all-reduces of all ranks of job %s, warm-up included; want at most %d, by fewer rounds or larger buckets", n, j.Name,
			MaxReductions)
	}
	values := j.Tensors.Values()
	for rank := range j.Ranks {
		at := "links.worker"
		if _, ok := j.Links[rank]; ok {
			at = fmt.Sprintf("%s.links.%d", field, rank)
		}
		if took := s.LinkRate(i, rank).time(values); took > worker.DefaultTimeout {
			return fieldf(at, "the %d values of a round of job %s take %v through a link of %v; want a faster link or smaller tensors, for at most %v",
				values, j.Name, took.Round(time.Second), s.LinkRate(i, rank), worker.DefaultTimeout)
		}
	}
	return nil
}

func (t Tensors) check(field string) error {
	switch {
	case t.Model == "" && len(t.Sizes) == 0:
		return fieldf(field, "has neither sizes nor a model")
	case t.Model != "" && len(t.Sizes) > 0:
		return fieldf(field+".model", "comes beside sizes; want one of them")
	case t.Model != "" && models[t.Model] == nil:
		names := slices.Sorted(maps.Keys(models))
		return fieldf(field+".model", "%q is not known; want %s", t.Model, strings.Join(names, " or "))
	case t.Divide < 0:
		return fieldf(field+".divide", "%d is not positive", t.Divide)
	case t.Bucket < 0 || t.Bucket > MaxValues:
		return fieldf(field+".bucket", "%d is outside 0..%d", t.Bucket, MaxValues)
	}
	for i, n := range t.Sizes {
		if n < 1 || n > MaxValues {
			return fieldf(fmt.Sprintf("%s.sizes[%d]", field, i), "%d is outside 1..%d", n, MaxValues)
		}
	}
	if n := len(t.Buckets()); n > MaxBuckets {
		return fieldf(field, "%d buckets; want at most %d, so put tensors together with bucket", n, MaxBuckets)
	}
	if n := t.Values(); n > MaxValues {
		return fieldf(field, "%d values; want at most %d", n, MaxValues)
	}
	return nil
}

func (j *Job) checkCompute(field string) error {
	c := &j.Compute
	field += ".compute"
	switch {
	case c.Mean <= 0 || c.Mean > MaxCompute:
		return fieldf(field+".mean", "%v is no time up to %v; want how long a rank computes, as in 40ms", c.Mean, MaxCompute)
	case !(c.Jitter >= 0 && c.Jitter <= 3):
		return fieldf(field+".jitter", "%g is outside 0..3", c.Jitter)
	case !(c.Backward >= 0 && c.Backward <= 1):
		return fieldf(field+".backward", "%g is outside 0..1", c.Backward)
	case c.Moving == nil:
		return nil
	case c.Moving.Every < 1 || c.Moving.Every > MaxRounds:
		return fieldf(field+".moving.every", "%d is outside 1..%d rounds", c.Moving.Every, MaxRounds)
	case !isFactor(c.Moving.Factor):
		return fieldf(field+".moving.factor", "%g is outside 1..%d", c.Moving.Factor, MaxSlow)
	}
	return nil
}

// isFactor reports whether f is by how much something may be slower; NaN is not.
func isFactor(f float64) bool { return f >= 1 && f <= MaxSlow && !math.IsNaN(f) }

// checkRanks checks what is said by rank.
func (j *Job) checkRanks(field string) error {
	for _, f := range []struct {
		name  string
		ranks []int
	}{
		{"compute.slow", slices.Sorted(maps.Keys(j.Compute.Slow))}, {"links", slices.Sorted(maps.Keys(j.Links))},
		{"loss", slices.Sorted(maps.Keys(j.Loss))},
	} {
		for _, rank := range f.ranks {
			if rank < 0 || rank >= j.Ranks {
				return fieldf(fmt.Sprintf("%s.%s.%d", field, f.name, rank), "there is no rank %d; want 0..%d", rank, j.Ranks-1)
			}
		}
	}
	for _, rank := range slices.Sorted(maps.Keys(j.Compute.Slow)) {
		if f := j.Compute.Slow[rank]; !isFactor(f) {
			return fieldf(fmt.Sprintf("%s.compute.slow.%d", field, rank), "%g is outside 1..%d", f, MaxSlow)
		}
	}
	for _, rank := range slices.Sorted(maps.Keys(j.Loss)) {
		if share := j.Loss[rank]; share > MaxLoss {
			return fieldf(fmt.Sprintf("%s.loss.%d", field, rank), "%v is more than %v", share, Share(MaxLoss))
		}
	}
	for i, rank := range j.Steer {
		at := fmt.Sprintf("%s.steer[%d]", field, i)
		switch {
		case rank < 0 || rank >= j.Ranks:
			return fieldf(at, "there is no rank %d; want 0..%d", rank, j.Ranks-1)
		case slices.Contains(j.Steer[:i], rank):
			return fieldf(at, "rank %d is listed twice", rank)
		}
	}
	return nil
}

func (j *Job) checkConsistency(field string) error {
	if a := j.Async; a != nil && (a.Staleness < 0 || a.Staleness > controller.MaxStaleness) {
		return fieldf(field+".async.staleness", "%d is outside 0..%d", a.Staleness, controller.MaxStaleness)
	}
	q := j.Quorum
	if q == nil {
		return nil
	}
	field += ".quorum"
	switch {
	case q.Ranks < 1 || q.Ranks > j.Ranks:
		return fieldf(field+".ranks", "%d is outside 1..%d", q.Ranks, j.Ranks)
	case q.Wait < 0 || q.Wait > policy.MaxWait || q.Wait%time.Microsecond != 0:
		return fieldf(field+".wait", "%v is outside 0s..%v, or not in whole microseconds", q.Wait, policy.MaxWait)
	case q.Rounds != 0 && (q.Rounds < 2*j.Depth || q.Rounds > controller.MaxRounds || q.Rounds&(q.Rounds-1) != 0):
		return fieldf(field+".rounds", "%d is not a power of two from twice the depth, %d, to %d", q.Rounds, 2*j.Depth, controller.MaxRounds)
	}
	return nil
}

func fieldf(field, format string, args ...any) error {
	return &policy.FieldError{Field: field, Err: fmt.Errorf(format, args...)}
}
