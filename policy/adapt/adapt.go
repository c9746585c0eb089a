// Package adapt moves a job's ranks between switch and servers as a rule asks for, and no more often than an operator
// allows: the same hysteresis, dwell and limits are around every rule. It is pure and deterministic: snapshots in, decisions
// with their reasons out, the same for the same snapshots.
package adapt

import (
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"
	"time"

	"xagg/policy"
	"xagg/policy/cost"
	"xagg/policy/rules"
	"xagg/policy/telemetry"
)

// Limits are what no rule can exceed.
type Limits struct {
	// Dwell is how long a rank stays where it came to, at least.
	Dwell time.Duration `yaml:"dwell"`
	// Moves is how many ranks of a job may be moved in any minute.
	Moves int `yaml:"moves"`
	// MinCohort is the number of ranks that the switch keeps to sum, at least; a sum of one is none. Only a rule that predicts that it is
	// best may have servers sum all.
	MinCohort int `yaml:"min_cohort"`
	// Steered is the number of ranks that servers may have to sum, at most: their cores are not without end. 0 = no limit.
	Steered int `yaml:"steered"`
	// MinSteered is the number of ranks that servers keep, at least: one in any case in a job with a quorum.
	MinSteered int `yaml:"min_steered"`
	// Pin are ranks that stay where they are told, "switch" or "server", whatever they do.
	Pin map[int]Place `yaml:"pin"`
	// Quorum has a rule that predicts choose how many ranks of a quorum job are enough, from the job's own number on, and how long chunks are kept
	// open for more. Else both stay as they are.
	Quorum bool `yaml:"quorum"`
	// Freeze leaves every rank where it is, but for the pinned. DryRun decides, and says what it would do, but does nothing.
	Freeze bool `yaml:"freeze"`
	DryRun bool `yaml:"dry_run"`
}

// DefaultLimits returns what holds unless a policy says otherwise.
func DefaultLimits() Limits { return Limits{Dwell: time.Second, Moves: 12, MinCohort: 2} }

// Place is where a rank is summed.
type Place string

// Places.
const (
	Switch Place = "switch"
	Server Place = "server"
)

// Validate checks limits for a job of so many ranks; 0 = of any number. Its errors are of type [*policy.FieldError].
func (l *Limits) Validate(ranks int) error {
	fail := func(field, format string, args ...any) error {
		return &policy.FieldError{Field: field, Err: fmt.Errorf(format, args...)}
	}
	if ranks == 0 {
		ranks = policy.MaxRanks
	}
	switch {
	case l.Dwell < 0 || l.Dwell > 24*time.Hour:
		return fail("dwell", "%v: want 0s to 24h", l.Dwell)
	case l.Moves < 1 || l.Moves > 600:
		return fail("moves", "%d a minute: want 1 to 600; to keep all ranks where they are set freeze", l.Moves)
	case l.MinCohort < 2 || l.MinCohort > policy.MaxRanks:
		return fail("min_cohort", "%d: want 2 to %d", l.MinCohort, policy.MaxRanks)
	case l.Steered < 0 || l.Steered > policy.MaxRanks:
		return fail("steered", "%d: want 0 (no limit) to %d", l.Steered, policy.MaxRanks)
	case l.MinSteered < 0 || l.MinSteered > policy.MaxRanks || l.Steered > 0 && l.MinSteered > l.Steered:
		return fail("min_steered", "%d: want 0 to steered, or to %d", l.MinSteered, policy.MaxRanks)
	}
	pinned := 0
	for _, rank := range slices.Sorted(maps.Keys(l.Pin)) {
		place := l.Pin[rank]
		if rank < 0 || rank >= ranks {
			return fail("pin", "rank %d: ranks are 0 to %d", rank, ranks-1)
		}
		if place != Switch && place != Server {
			return fail("pin", "rank %d: %q is no place; want %q or %q", rank, place, Switch, Server)
		}
		if place == Server {
			pinned++
		}
	}
	if pinned > 0 && ranks-pinned < l.MinCohort {
		return fail("pin", "%d of %d ranks are pinned to servers, which leaves the switch fewer than min_cohort, %d; use mode %q instead",
			pinned, ranks, l.MinCohort, policy.ModeServer)
	}
	return nil
}

// Decision is what to do with a job's ranks, and why.
type Decision struct {
	Time    float64 `json:"time"`  // of the snapshot
	Round   float64 `json:"round"` // of the job
	Rule    string  `json:"rule"`
	Steered uint64  `json:"steered"` // ranks that servers are to sum: those of before, and what moves make of them
	// Quorum and Wait are [policy.Plan]'s, Wait in seconds: how many ranks are enough, and how long a chunk waits for more. Quorum 0:
	// the rule says nothing of them, and they stay.
	Quorum int     `json:"quorum,omitempty"`
	Wait   float64 `json:"wait,omitempty"`
	Moves  []Move  `json:"moves,omitempty"`
	Ranks  []Why   `json:"ranks"`
	// Alternatives are what could be done, with what is predicted of it, the cheapest first: of rules that predict.
	Alternatives []Alternative `json:"alternatives,omitempty"`
	// Error says why the rule could not decide; the ranks stay where they are.
	Error  string `json:"error,omitempty"`
	DryRun bool   `json:"dry_run,omitempty"`
}

// Apply returns what the decision makes of a plan.
func (d *Decision) Apply(p policy.Plan) policy.Plan {
	p.Cohort, p.Steered = (p.Cohort|p.Steered)&^d.Steered, d.Steered
	if d.Quorum != 0 && !d.DryRun {
		p.Quorum, p.Wait = d.Quorum, time.Duration(math.Round(d.Wait*1e6))*time.Microsecond
	}
	return p
}

// Alternative is a division of the ranks, and what is predicted of it.
type Alternative = cost.Alternative

// Move is a rank that goes elsewhere.
type Move struct {
	Rank int    `json:"rank"`
	To   Place  `json:"to"`
	Why  string `json:"why"`
}

// Why says why a rank is where it is.
type Why struct {
	Rank  int     `json:"rank"`
	Place Place   `json:"place"` // after the decision
	Score float64 `json:"score"`
	When  bool    `json:"when"` // whether the rule's condition holds
	// Enter and Leave are in how many of the rounds that count the score was above the one and below the other threshold.
	Enter int `json:"enter"`
	Leave int `json:"leave"`
	// Held says what keeps a rank that the rule would move where it is.
	Held string `json:"held,omitempty"`
}

// Engine decides for one job.
type Engine struct {
	rule   Rule
	limits Limits
	state  State
	wanted int // rounds since a rank became late, before ranks join the cohort, as the rule has it now
}

// State is what an engine knows of what went before: plain data.
type State struct {
	Ranks  []RankState `json:"ranks"`
	Moves  []float64   `json:"moves"` // times of the last moves, at most Limits.Moves
	Round  float64     `json:"round"` // that was judged last
	Judged bool        `json:"judged"`
	Formed bool        `json:"formed,omitempty"` // there has been a cohort
	Late   uint64      `json:"late,omitempty"`   // ranks that were late in the round that was judged last
	Steady int         `json:"steady,omitempty"` // rounds since one became late
	Choice Choice      `json:"choice,omitzero"`
	Last   float64     `json:"last"` // time of the last snapshot
}

// Choice is what an engine knows of the quorum that its rule wants.
type Choice struct {
	Quorum int     `json:"quorum"`
	Rounds int     `json:"rounds"` // for which it has wanted it
	Made   bool    `json:"made"`   // there was a change, and Since is when
	Since  float64 `json:"since"`
}

// RankState is what an engine knows of a rank.
type RankState struct {
	// Enter and Leave say in which rounds the score was beyond the thresholds, the newest in bit 0.
	Enter  uint64  `json:"enter"`
	Leave  uint64  `json:"leave"`
	Rounds int     `json:"rounds"` // that were judged since it moved
	Moved  bool    `json:"moved"`  // and Since is when
	Since  float64 `json:"since"`
}

// New returns an engine for a job of so many ranks. The limits must be valid.
func New(ranks int, rule Rule, limits Limits) *Engine {
	return &Engine{rule: rule, limits: limits, state: State{Ranks: make([]RankState, ranks)}}
}

// bounds returns which divisions of a job's ranks the limits allow.
func (e *Engine) bounds(s *telemetry.Snapshot) cost.Bounds {
	b := cost.Bounds{Cohort: e.limits.MinCohort, Steered: e.limits.Steered, Serving: e.serving(s), Quorum: e.limits.Quorum}
	for rank, place := range e.limits.Pin {
		if place == Switch {
			b.Switch |= 1 << rank
		} else {
			b.Server |= 1 << rank
		}
	}
	return b
}

// State returns a copy of what the engine knows.
func (e *Engine) State() State {
	s := e.state
	s.Ranks, s.Moves = slices.Clone(s.Ranks), slices.Clone(s.Moves)
	return s
}

// Restore gives the engine the state of another one for a job of as many ranks; another is left out.
func (e *Engine) Restore(s State) {
	if len(s.Ranks) == len(e.state.Ranks) {
		e.state = s
		e.state.Ranks, e.state.Moves = slices.Clone(s.Ranks), slices.Clone(s.Moves)
	}
}

// Step decides from a snapshot, in which Rank.Steered says where ranks are. What it decides holds until the next call: a
// caller that cannot carry it out shows so by its next snapshot. Time that runs back, and a snapshot that cannot be, change
// nothing and are said in Decision.Error.
func (e *Engine) Step(s *telemetry.Snapshot) Decision {
	d := Decision{Time: s.Time, Round: s.Job.Round, Rule: e.rule.Name, DryRun: e.limits.DryRun}
	for i := range s.Ranks {
		place := Switch
		if s.Ranks[i].Steered {
			d.Steered |= 1 << i
			place = Server
		}
		d.Ranks = append(d.Ranks, Why{Rank: i, Place: place})
	}
	if len(s.Ranks) != len(e.state.Ranks) {
		d.Error = fmt.Sprintf("snapshot of %d ranks, the job has %d", len(s.Ranks), len(e.state.Ranks))
		return d
	}
	if err := s.Check(); err != nil {
		d.Error = err.Error()
		return d
	}
	if e.state.Judged && s.Time < e.state.Last {
		d.Error = fmt.Sprintf("time ran back from %.3f s to %.3f s", e.state.Last, s.Time)
		return d
	}
	e.state.Last = s.Time
	v, err := e.rule.judge(s, e.bounds(s))
	passed := 0
	switch {
	case err != nil:
		d.Error = err.Error()
	case len(v.scores) > 0:
		d.Alternatives = v.alternatives
		passed = e.judge(s, v, &d)
	}
	e.move(s, &d)
	if v.quorum > 0 && d.Error == "" {
		e.choose(s, v, passed, &d)
	}
	return d
}

// choose decides how many ranks are enough and how long chunks are kept open: what the rule wants, once it has wanted the same number for as many rounds as
// bring a rank back, and within the limits of moves.
func (e *Engine) choose(s *telemetry.Snapshot, v verdict, passed int, d *Decision) {
	c := &e.state.Choice
	if v.quorum != c.Quorum {
		*c = Choice{Quorum: v.quorum, Since: c.Since, Made: c.Made}
	}
	c.Rounds += atOnce(passed, e.rule.Leave.For)
	quorum, wait := int(s.Job.Quorum), s.Job.Wait
	same := v.quorum == quorum && math.Abs(v.wait-wait) <= max(wait/4, 0.001)
	switch {
	case same || c.Rounds < e.rule.Leave.For || e.limits.Freeze:
	case c.Made && s.Time-c.Since < e.limits.Dwell.Seconds():
	case e.spent(s.Time):
	default:
		d.Quorum, d.Wait = v.quorum, v.wait
		if !e.limits.DryRun {
			c.Since, c.Made = s.Time, true
			e.count(s.Time)
		}
	}
}

// spent reports whether the moves of a minute are used up.
func (e *Engine) spent(now float64) bool {
	return len(e.state.Moves) == e.limits.Moves && now-e.state.Moves[0] < 60
}

// count notes a move, for the limit.
func (e *Engine) count(now float64) {
	e.state.Moves = append(e.state.Moves, now)
	e.state.Moves = e.state.Moves[max(0, len(e.state.Moves)-e.limits.Moves):]
}

// judge notes on which side of the thresholds ranks are, and returns of how many rounds the snapshot is news.
func (e *Engine) judge(s *telemetry.Snapshot, v verdict, d *Decision) int {
	n := e.passed(s)
	if n > 0 {
		e.state.Judged, e.state.Round = true, s.Job.Round
		e.state.Steady += n
		if v.late&^e.state.Late != 0 {
			e.state.Steady = 0
		}
		e.state.Late = v.late
	}
	e.wanted = v.steady
	for i := range e.state.Ranks {
		r, w := &e.state.Ranks[i], &d.Ranks[i]
		w.Score, w.When = v.scores[i], v.holds == nil || v.holds[i]
		r.Enter = note(r.Enter, atOnce(n, e.rule.Enter.For), w.When && w.Score > e.rule.Enter.Above)
		r.Leave = note(r.Leave, atOnce(n, e.rule.Leave.For), !w.When || w.Score < e.rule.Leave.Below)
		r.Rounds += n
		w.Enter = bits.OnesCount64(r.Enter & newest(e.rule.Enter.Of))
		w.Leave = bits.OnesCount64(r.Leave & newest(e.rule.Leave.Of))
	}
	return n
}

// passed returns for how many rounds a snapshot is news: 0 if it tells of none.
func (e *Engine) passed(s *telemetry.Snapshot) int {
	switch {
	case !e.state.Judged:
		return int(min(s.Job.Rounds, 1))
	case s.Job.Round == e.state.Round:
		return 0
	}
	return int(min(max(s.Job.Round-e.state.Round, 1), rules.MaxOf)) // numbers of rounds wrap around
}

// atOnce returns how many rounds a snapshot that is news of n counts for, of so many that are wanted. Ranks report ten times a second: where rounds are
// shorter, a snapshot counts for all the rounds since the one before, but for no more than half of those wanted, so that none moves a rank by itself.
func atOnce(n, wanted int) int { return min(n, (wanted+1)/2) }

// note adds n rounds to a history in which bits stand for rounds, the newest in bit 0.
func note(history uint64, n int, beyond bool) uint64 {
	history <<= n
	if beyond {
		history |= 1<<n - 1
	}
	return history
}

// newest is the mask of the last n rounds.
func newest(n int) uint64 { return ^uint64(0) >> (64 - n) }

// wish is a move that the rule, or a pin, asks for.
type wish struct {
	rank   int
	to     Place
	pinned bool
	score  float64
	why    string
}

// move makes the moves that the limits allow: the pinned first, then who comes back, then who goes, the worst first.
func (e *Engine) move(s *telemetry.Snapshot, d *Decision) {
	var wishes []wish
	for i := range e.state.Ranks {
		w := &d.Ranks[i]
		pin, pinned := e.limits.Pin[i]
		switch {
		case pinned && pin != w.Place:
			wishes = append(wishes, wish{i, pin, true, w.Score, fmt.Sprintf("it is pinned to the %s", pin)})
		case pinned:
			w.Held = "it is pinned"
		case d.Error != "":
		case w.Place == Switch && w.Enter >= e.rule.Enter.For:
			wishes = append(wishes, wish{i, Server, false, w.Score, fmt.Sprintf("score %.4g above %.4g in %d of %d rounds", w.Score,
				e.rule.Enter.Above, w.Enter, min(e.state.Ranks[i].Rounds, e.rule.Enter.Of))})
		case w.Place == Server && w.Leave >= e.rule.Leave.For:
			why := fmt.Sprintf("score %.4g below %.4g in %d of %d rounds", w.Score, e.rule.Leave.Below, w.Leave,
				min(e.state.Ranks[i].Rounds, e.rule.Leave.Of))
			if !w.When {
				why += ", or the rule's condition did not hold"
			}
			wishes = append(wishes, wish{i, Switch, false, w.Score, why})
		}
	}
	slices.SortStableFunc(wishes, func(a, b wish) int {
		switch {
		case a.pinned != b.pinned:
			return order(a.pinned)
		case a.to != b.to:
			return order(a.to == Switch)
		case a.score != b.score:
			return order((a.score > b.score) == (a.to == Server))
		}
		return 0
	})
	before, ranks := e.State(), slices.Clone(d.Ranks)
	steered := d.Steered
	e.carry(s, d, wishes, e.together(d, wishes))
	if n := e.cohort(d); n > 0 && n < e.limits.MinCohort { // some of those that were to go together are held
		e.state, d.Ranks, d.Steered, d.Moves = before, ranks, steered, nil
		e.carry(s, d, wishes, false)
	}
	e.state.Formed = e.state.Formed || e.cohort(d) > 0
}

// cohort returns how many ranks the switch sums by a decision.
func (e *Engine) cohort(d *Decision) int { return len(e.state.Ranks) - bits.OnesCount64(d.Steered) }

// together reports whether moves are those of a whole cohort: one that comes about, or that is dissolved because it is predicted that servers
// had better sum all.
func (e *Engine) together(d *Decision, wishes []wish) bool {
	to := map[Place]int{}
	for _, x := range wishes {
		to[x.to]++
	}
	n := e.cohort(d)
	if n == 0 {
		return to[Switch] >= e.limits.MinCohort
	}
	return to[Server] == n && len(d.Alternatives) > 0 && bits.OnesCount64(d.Alternatives[0].Steered) == len(e.state.Ranks)
}

// carry makes the moves that nothing holds. With together the cohort may come about, or be dissolved.
func (e *Engine) carry(s *telemetry.Snapshot, d *Decision, wishes []wish, together bool) {
	// A job's first cohort has not moved from anywhere: it counts for no limit.
	first := !e.state.Formed && e.cohort(d) == 0
	for _, x := range wishes {
		w := &d.Ranks[x.rank]
		if w.Held = e.held(s, d, x, together); w.Held != "" {
			continue
		}
		d.Moves = append(d.Moves, Move{x.rank, x.to, x.why})
		if e.limits.DryRun {
			continue
		}
		d.Steered ^= 1 << x.rank
		w.Place = x.to
		e.state.Ranks[x.rank] = RankState{Since: s.Time, Moved: !first}
		if !first {
			e.count(s.Time)
		}
	}
}

func order(first bool) int {
	if first {
		return -1
	}
	return 1
}

// serving returns how many ranks servers keep at least. It is they who make the results of a job with a quorum.
func (e *Engine) serving(s *telemetry.Snapshot) int {
	if s.Job.Quorum > 0 {
		return max(1, e.limits.MinSteered)
	}
	return e.limits.MinSteered
}

// held returns what keeps a rank where it is, empty if nothing does.
func (e *Engine) held(s *telemetry.Snapshot, d *Decision, x wish, together bool) string {
	r := &e.state.Ranks[x.rank]
	steered := bits.OnesCount64(d.Steered)
	switch {
	case e.limits.Freeze && !x.pinned:
		return "the policy is frozen"
	case r.Moved && s.Time-r.Since < e.limits.Dwell.Seconds() && !x.pinned:
		return fmt.Sprintf("it moved %.1f s ago and stays for %v", s.Time-r.Since, e.limits.Dwell)
	case e.spent(s.Time):
		return fmt.Sprintf("the job has used its %d moves of a minute", e.limits.Moves)
	case x.to == Server && len(s.Servers) == 0:
		return "there is no server"
	case x.to == Server && !slices.ContainsFunc(s.Servers, func(s telemetry.Server) bool { return s.Ready }):
		return "no server is ready"
	case x.to == Server && e.cohort(d)-1 < e.limits.MinCohort && !together:
		return fmt.Sprintf("the switch keeps at least %d ranks", e.limits.MinCohort)
	case x.to == Server && e.limits.Steered > 0 && steered >= e.limits.Steered:
		return fmt.Sprintf("servers sum at most %d ranks", e.limits.Steered)
	case x.to == Switch && steered-1 < e.serving(s):
		return fmt.Sprintf("servers keep at least %d ranks", e.serving(s))
	case x.to == Switch && e.state.Steady < e.wanted && !x.pinned:
		return fmt.Sprintf("a rank is late, and %d of %d rounds have passed since", e.state.Steady, e.wanted)
	case x.to == Switch && e.cohort(d) == 0 && !together:
		return fmt.Sprintf("the switch sums at least %d ranks", e.limits.MinCohort)
	}
	return ""
}
