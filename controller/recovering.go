package controller

import (
	"fmt"
	"time"

	"xagg/policy"
	"xagg/recovery"
	"xagg/wire"
)

// recoverStep is how far a recovery is: see docs/protocol.md, "Recovery".
type recoverStep uint8

const (
	stepFreeze  recoverStep = iota // ranks are told to stop, and to say what they have
	stepInstall                    // the new plan is installed; meanwhile ranks hand over RESULTs
	stepResume                     // all go on
)

// recovering is a recovery of an incarnation of a job. It is pure but for its channels, which only ever close: each says
// that a step is done, and void that the recovery is given up, because something else was lost or the job is over.
type recovering struct {
	number  uint64
	reason  string
	step    recoverStep
	began   time.Time
	stopped time.Time // since when ranks are stopped: when this one began, or the first that was given up for the next
	ranks   uint64    // that take part: those that were there when it began
	back    uint64    // ranks that want to come back with it, and
	letsIn  bool      // whether they can

	states  map[int]recovery.State
	plan    recovery.Plan
	epoch   uint16 // of the new plan
	blocked error  // what the installation waits for, if anything
	gave    uint64 // ranks that have handed over what they were asked for
	results map[recovery.ChunkID][]byte

	asked, planned, given, resumed, void chan struct{}
}

func newRecovering(number uint64, reason string, ranks, back uint64, now time.Time) *recovering {
	r := &recovering{
		number: number, reason: reason, ranks: ranks, back: back, began: now, stopped: now,
		states: make(map[int]recovery.State), results: make(map[recovery.ChunkID][]byte),
		asked: make(chan struct{}), planned: make(chan struct{}), given: make(chan struct{}), resumed: make(chan struct{}),
		void: make(chan struct{}),
	}
	if ranks == 0 {
		close(r.asked)
	}
	return r
}

// underWay reports whether a recovery has begun and neither ended nor been given up.
func (r *recovering) underWay() bool { return r != nil && !closed(r.void) && !closed(r.resumed) }

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// giveUp ends a recovery without its result.
func (r *recovering) giveUp() {
	if r.underWay() {
		close(r.void)
	}
}

// tell notes what a rank has. What it tells again does not count.
func (r *recovering) tell(rank int, s recovery.State) {
	if _, told := r.states[rank]; told || r.ranks>>rank&1 == 0 || r.step != stepFreeze {
		return
	}
	r.states[rank] = s
	if r.silent() == 0 {
		close(r.asked)
	}
}

// silent returns the mask of ranks that have not told what they have.
func (r *recovering) silent() uint64 {
	mask := r.ranks
	for rank := range r.states {
		mask &^= 1 << rank
	}
	return mask
}

// decide fixes how the job goes on, under an epoch.
func (r *recovering) decide(plan recovery.Plan, epoch uint16) {
	r.plan, r.epoch, r.step = plan, epoch, stepInstall
	if r.waited() == 0 {
		close(r.given)
	}
	close(r.planned)
}

// waited returns the mask of ranks that have not handed over what they were asked for.
func (r *recovering) waited() uint64 { return r.ranks &^ r.gave }

// give takes the RESULTs that a rank hands over: exactly those that it was asked for.
func (r *recovering) give(rank int, payloads [][]byte, job uint16) error {
	if r.gave>>rank&1 != 0 {
		return nil // once more, since the answer was lost
	}
	want := r.plan.HandOver[rank]
	if len(payloads) != len(want) {
		return fmt.Errorf("it hands over %d results and was asked for %d", len(payloads), len(want))
	}
	var p wire.Packet
	for i, b := range payloads {
		if err := p.Decode(b); err != nil {
			return fmt.Errorf("result of round %d, chunk %d: %w", want[i].Round, want[i].Chunk, err)
		}
		if p.Type != wire.TypeResult || p.Job != job || (recovery.ChunkID{Round: p.Round, Chunk: p.Chunk}) != want[i] || !p.TagOK() {
			return fmt.Errorf("it hands over a %v of job %d, round %d, chunk %d and was asked for the RESULT of round %d, chunk %d, "+
				"or the tag is wrong", p.Type, p.Job, p.Round, p.Chunk, want[i].Round, want[i].Chunk)
		}
	}
	for i, b := range payloads {
		r.results[want[i]] = b
	}
	r.gave |= 1 << rank
	if r.waited() == 0 {
		close(r.given)
	}
	return nil
}

// resume lets the ranks go on.
func (r *recovering) resume() {
	r.step, r.blocked = stepResume, nil
	close(r.resumed)
}

// lacked returns the RESULTs that a rank lacks.
func (r *recovering) lacked(rank int) [][]byte {
	ids := r.plan.Lacks[rank]
	payloads := make([][]byte, len(ids))
	for i, id := range ids {
		payloads[i] = r.results[id]
	}
	return payloads
}

// describe says in words what a recovery waits for, and why there is one; nothing when none is under way.
func (r *recovering) describe() string {
	if !r.underWay() {
		return ""
	}
	what := ""
	switch ranks := r.lacks(); {
	case r.blocked != nil:
		what = fmt.Sprintf("epoch %d to be installed, which does not succeed: %v", r.epoch, r.blocked)
	case ranks == 0:
		what = fmt.Sprintf("epoch %d to be installed", r.epoch)
	default:
		what = fmt.Sprintf("%s to %s", spellMask(ranks), r.asks())
	}
	return fmt.Sprintf("%s (%s)", what, r.reason)
}

// lacks returns the mask of ranks that a recovery waits for.
func (r *recovering) lacks() uint64 {
	switch r.step {
	case stepFreeze:
		return r.silent()
	case stepInstall:
		return r.waited()
	}
	return 0
}

// asks says what a recovery has its ranks do, in words.
func (r *recovering) asks() string {
	if r.step == stepFreeze {
		return "stop and say what they have"
	}
	return "hand over results"
}

// spellMask returns ranks in words.
func spellMask(mask uint64) string {
	if mask&(mask-1) == 0 {
		return "rank " + policy.FormatMask(mask)
	}
	return "ranks " + policy.FormatMask(mask)
}
