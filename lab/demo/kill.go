package demo

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"xagg/controller"
)

// Kill is a part of the lab that is killed (kill -9) while each of the demo's jobs runs, and at once started again. Parts of
// one round are killed together.
type Kill struct {
	Part  string // PartSwitch, PartServer, PartController or a worker's, see PartWorker
	Round int    // when all workers have finished so many vectors, 1 to 3 before the last
}

// The parts of the lab that can be killed.
const (
	PartSwitch     = "switch"
	PartServer     = "server" // the first, with its memory
	PartController = "controller"
)

// PartWorker is a worker: of a job with a quorum, which goes on, and lets the rank come back.
func PartWorker(rank int) string { return fmt.Sprintf("worker%d", rank) }

// worker returns the rank of a part that is a worker.
func (o *Options) worker(part string) (rank int, ok bool) {
	for rank := range o.Workers {
		if part == PartWorker(rank) {
			return rank, true
		}
	}
	return 0, false
}

// killsWorkers reports whether workers are to die.
func (o *Options) killsWorkers() bool {
	return slices.ContainsFunc(o.Kills, func(k Kill) bool { _, ok := o.worker(k.Part); return ok })
}

// ParseKill reads PART@ROUND.
func ParseKill(s string) (Kill, error) {
	part, round, ok := strings.Cut(s, "@")
	n, err := strconv.Atoi(round)
	if !ok || err != nil {
		return Kill{}, usagef("kill %q: want PART@ROUND, as in %s@3", s, PartSwitch)
	}
	return Kill{part, n}, nil
}

func (k Kill) String() string { return fmt.Sprintf("%s@%d", k.Part, k.Round) }

// Killed is what came of the death of parts.
type Killed struct {
	Parts []string `json:"parts"`
	Round int      `json:"round"` // vectors that all workers had finished
	// Seconds is the time from the kill until every worker had a result of an all-reduce that it began after it.
	Seconds float64 `json:"seconds"`
}

// checkKills checks the parts that are to be killed.
func (o *Options) checkKills() error {
	if len(o.Kills) > 0 && o.Lab != LabNetns {
		return usagef("kill: the lab in memory is one process; parts to kill are in --lab %s, which needs root", LabNetns)
	}
	vectors := len(o.Set.Schedule(o.Rounds))
	for i, k := range o.Kills {
		_, worker := o.worker(k.Part)
		switch {
		case k.Part != PartSwitch && k.Part != PartServer && k.Part != PartController && !worker:
			return usagef("kill %q: want %s, %s, %s, or %s to %s", k, PartSwitch, PartServer, PartController, PartWorker(0), PartWorker(o.Workers-1))
		case worker && !o.isQuorum():
			return usagef("kill %q: a worker's death ends a job, unless its consistency is %q", k, controller.ModeQuorum)
		case worker && o.Consistency.Quorum == o.Workers:
			return usagef("kill %q: the quorum of %d ranks cannot do without one", k, o.Workers)
		case k.Round < 1 || k.Round > vectors-3:
			return usagef("kill %q: there are %d vectors, want a round from 1 to %d: three must be left that show how it goes on", k, vectors, vectors-3)
		case k.Part == PartServer && o.isAsync():
			return usagef("kill %q: the sums of a job with consistency %q would be gone, and it would end", k, controller.ModeAsync)
		case slices.Contains(o.Kills[:i], k):
			return usagef("kill %q: it is there twice", k)
		}
	}
	switch {
	case len(o.Kills) == 0:
	case slices.Contains(o.Modes, ModeTCP):
		return usagef("kill: mode %s has none of the parts that can be killed", ModeTCP)
	case slices.Contains(o.Modes, ModeSteered):
		return usagef("kill: mode %s changes plans, which waits while a job recovers: leave out one of them", ModeSteered)
	}
	return nil
}

// killer kills parts while a job runs.
type killer struct {
	restart  func(ctx context.Context, killed func(), parts []string) error
	progress func(format string, args ...any)
	mode     string
	buckets  int // of a vector

	due chan *death

	mu      sync.Mutex
	parts   map[int][]string // that live, by the round of their death
	reached []int            // [rank] all-reduces of the job that it has done or missed
	deaths  []*death
}

// death is what is measured.
type death struct {
	Killed
	at   time.Time
	over []time.Time // [rank] when it had its first result that was begun after it; zero = it has none
}

func newKiller(o *Options, mode string, restart func(context.Context, func(), []string) error) *killer {
	k := &killer{
		restart: restart, progress: o.Progress, mode: mode, buckets: o.Buckets,
		due: make(chan *death, len(o.Kills)), parts: map[int][]string{}, reached: make([]int, o.Workers),
	}
	for _, kill := range o.Kills {
		k.parts[kill.Round] = append(k.parts[kill.Round], kill.Part)
	}
	return k
}

// took notes that a rank has the result of an all-reduce, by its number. When that was the rank says: what it has written may have been waiting
// to be read.
func (k *killer) took(rank, number int, began, ended time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.reached[rank] = number + 1
	done := slices.Min(k.reached) / k.buckets
	for _, round := range slices.Sorted(maps.Keys(k.parts)) {
		if round <= done {
			k.due <- &death{Killed: Killed{Parts: k.parts[round], Round: round}, over: make([]time.Time, len(k.reached))}
			delete(k.parts, round)
		}
	}
	for _, d := range k.deaths {
		if !d.over[rank].IsZero() || !began.After(d.at) {
			continue
		}
		d.over[rank] = ended
		if !slices.ContainsFunc(d.over, time.Time.IsZero) {
			d.Seconds = slices.MaxFunc(d.over, time.Time.Compare).Sub(d.at).Seconds()
			k.progress("%s: %s", k.mode, d.Killed)
		}
	}
}

// run kills what is due until ended is called.
func (k *killer) run(ctx context.Context) error {
	for d := range k.due {
		killed := func() {
			k.mu.Lock()
			defer k.mu.Unlock()
			d.at = time.Now()
			k.deaths = append(k.deaths, d)
			k.progress("%s: kill -9 of %s", k.mode, strings.Join(d.Parts, " and "))
		}
		if err := k.restart(ctx, killed, d.Parts); err != nil {
			return err
		}
	}
	return nil
}

// ended says that there are no more results.
func (k *killer) ended() { close(k.due) }

// killed returns what came of the deaths, and an error when the job was over before that could be seen.
func (k *killer) killed() (list []Killed, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, d := range k.deaths {
		if d.Seconds == 0 {
			return nil, fmt.Errorf("kill -9 of %s when %d all-reduces were done: the job was over before all workers had begun another: let it have more rounds",
				strings.Join(d.Parts, " and "), d.Round)
		}
		list = append(list, d.Killed)
	}
	return list, nil
}

func (k Killed) String() string {
	return fmt.Sprintf("kill -9 of %s when %d all-reduces were done: all workers had the result of one that was begun after it in %v",
		strings.Join(k.Parts, " and "), k.Round, seconds(k.Seconds))
}
