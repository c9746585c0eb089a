package controller

import (
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strings"

	"xagg/policy"
	"xagg/wire"
)

// state is how far an incarnation of a job is.
type state string

const (
	stateWaiting    state = "waiting"    // for ranks to join
	stateInstalling state = "installing" // all have joined, the switch is being programmed
	stateRunning    state = "running"
	stateFinished   state = "finished" // all have left
	stateAborted    state = "aborted"
)

// rendezvous is where the ranks of one incarnation of a job meet and part. It is pure but for two channels, which
// only ever close.
type rendezvous struct {
	job    string
	id     uint16  // of the job's incarnation
	seats  []*seat // by rank; nil = free
	left   uint64  // mask
	enough int     // ranks without which it cannot go on: all of them, but in quorum
	state  state
	err    error    // stateAborted: why
	odd    []uint32 // stateAborted: the ranks that caused it

	recovery *recovering   // the last one, nil = there was none
	freeze   chan struct{} // closed when another one begins

	raising bool // its plan is about to be changed, since more ranks are there
	settled bool // everything is installed: the ranks are about to be let go, or were

	// awaited is the mask of ranks that joined an earlier controller and have not come back to this one yet.
	awaited uint64

	ready chan struct{} // closed when the state becomes running
	over  chan struct{} // closed when the state becomes finished or aborted
}

// seat is a rank that has joined.
type seat struct {
	member member
	digest string
	epoch  uint16 // of the plan that it has begun a round under, as far as it has told; 0 = it has told nothing

	stream int           // number of its newest stream
	deaf   bool          // that one has ended: the rank is gone, at least for the moment, unless it has left
	back   chan struct{} // of a rank that came back: closed when it may go on
	round  uint32        // that it began with: not 0 where it came back
	seq    uint32        // of that round's chunk 0
	fresh  bool          // it came back, and the rounds before that one may not be over
	missed bool          // while it was away a plan was removed that it may need still
	lost   error         // why it cannot take part any more, though it may be there
	// allReduces is the number of the job's all-reduces before that round; returns is recovery.Restart's.
	allReduces uint64
	returns    []uint64

	heard   hearing  // what it has told of its progress
	counted counting // its packets at the switch
}

func newRendezvous(j *job) *rendezvous {
	return &rendezvous{
		job: j.spec.Name, id: j.id, seats: make([]*seat, j.spec.Ranks), state: stateWaiting,
		enough: j.enough(), freeze: make(chan struct{}),
		ready: make(chan struct{}), over: make(chan struct{}),
	}
}

// joined returns the mask of ranks that have joined and are not gone.
func (r *rendezvous) joined() uint64 {
	return r.mask(func(*seat) bool { return true }) &^ r.absent()
}

// absent returns the mask of ranks that were there and are gone, at least for the moment.
func (r *rendezvous) absent() uint64 { return r.mask(func(s *seat) bool { return s.deaf }) &^ r.left }

// there returns the mask of ranks that can be told something. Those that have left stay until all have.
func (r *rendezvous) there() uint64 {
	return r.mask(func(s *seat) bool { return !s.deaf }) &^ r.returning()
}

// strength returns how many ranks can be in a result now: those that have left are in all of theirs.
func (r *rendezvous) strength() int {
	return bits.OnesCount64(r.joined() &^ r.returning() &^ r.fresh())
}

// since returns how many of some ranks have begun with a round, or before.
func (r *rendezvous) since(round uint32, ranks uint64) int {
	return bits.OnesCount64(ranks & r.mask(func(s *seat) bool { return !wire.SerialLess(round, s.round) }))
}

// returning returns the mask of ranks that came back and wait to be let in.
func (r *rendezvous) returning() uint64 {
	return r.mask((*seat).returning)
}

func (s *seat) returning() bool { return !s.deaf && s.back != nil && !closed(s.back) }

func (r *rendezvous) mask(has func(*seat) bool) (mask uint64) {
	for rank, s := range r.seats {
		if s != nil && has(s) {
			mask |= 1 << rank
		}
	}
	return mask
}

// reached notes that a rank has begun a round under a plan. A report that comes late says nothing new.
func (r *rendezvous) reached(rank int, epoch uint16) {
	if s := r.seats[rank]; s.epoch == 0 || wire.SerialLess16(s.epoch, epoch) {
		s.epoch, s.missed = epoch, false
	}
}

// behind returns the mask of ranks that may need a plan older than epoch: that have not begun a round under it, and so
// may lack a result of the rounds before. Who has left has them all. Nobody waits for who is away: see retired.
func (r *rendezvous) behind(epoch uint16) uint64 {
	if r.ended() {
		return 0
	}
	return r.mask(func(s *seat) bool { return s.epoch != epoch && !s.deaf }) &^ r.left
}

// retired notes that the plans older than epoch are removed. Who is away may be in a round under one of them: when it is
// back, the job has to recover.
func (r *rendezvous) retired(epoch uint16) {
	for _, s := range r.seats {
		if s != nil && s.deaf && s.epoch != epoch {
			s.missed = true
		}
	}
}

// recovers notes that a recovery begins: who is away has no part in it, and cannot take part in the job any more.
func (r *rendezvous) recovers() {
	for rank, s := range r.seats {
		if s != nil && s.deaf && s.lost == nil {
			s.lost = fmt.Errorf("the job has recovered without rank %d meanwhile; join anew", rank)
		}
	}
}

// begins notes that a rank has all RESULTs of the rounds before one: then those rounds are over for all. It says nothing
// of rounds before the one that it began with, unless those are over too.
func (r *rendezvous) begins(rank int, round uint32) {
	older := r.seats[rank]
	for _, s := range r.seats {
		if s != nil && !older.fresh && wire.SerialLess(older.round, s.round) && !wire.SerialLess(round, s.round) {
			s.fresh = false
		}
	}
}

// fresh returns the mask of ranks that came back and may not take part yet. A plan that was announced in the rounds that
// they miss they would not hear of. Where nobody is there who began earlier nobody needs those rounds.
func (r *rendezvous) fresh() uint64 {
	return r.mask(func(s *seat) bool {
		return s.fresh && !s.deaf && slices.ContainsFunc(r.seats, func(older *seat) bool {
			return older != nil && !older.deaf && wire.SerialLess(older.round, s.round)
		})
	})
}

// ended reports whether nobody can join any more.
func (r *rendezvous) ended() bool { return r.state == stateFinished || r.state == stateAborted }

// seatError says that a rank cannot join.
type seatError struct{ msg string }

func (e *seatError) Error() string { return e.msg }

// join takes a rank's seat. When it was the last one the state becomes installing, or aborted if the ranks do not
// agree.
func (r *rendezvous) join(rank int, s seat) error {
	comesBack := r.state == stateRunning && r.absent()>>rank&1 != 0
	if r.seats[rank] != nil && !comesBack {
		return &seatError{fmt.Sprintf("rank %d of job %q has joined already, from %s; it must leave first, or the job be removed",
			rank, r.job, r.seats[rank].member.host.IP)}
	}
	for other, t := range r.seats {
		if t != nil && other != rank && t.member.host.IP == s.member.host.IP && t.member.udpPort == s.member.udpPort {
			return &seatError{fmt.Sprintf("rank %d of job %q receives at %s port %d already; rank %d needs another port",
				other, r.job, s.member.host.IP, s.member.udpPort, rank)}
		}
	}
	if comesBack {
		if old := r.seats[rank]; s.digest != old.digest {
			return &seatError{fmt.Sprintf("rank %d of job %q cannot come back: it has %q, the others have %q", rank, r.job, s.digest, old.digest)}
		}
		s.stream, s.back = r.seats[rank].stream, make(chan struct{})
		r.seats[rank] = &s
		return nil
	}
	r.seats[rank] = &s
	if slices.Contains(r.seats, nil) {
		return nil
	}
	if odd, err := r.disagreement(); err != nil {
		r.abort(err, odd)
		return nil
	}
	r.state = stateInstalling
	return nil
}

// reseat gives a rank its seat again that has only lost its stream, of the same incarnation; its older streams no longer
// count. When the job is over, for all or for this rank, the stream has to say so.
func (r *rendezvous) reseat(rank int, s seat) error {
	old := r.seats[rank]
	switch {
	case old == nil && r.ended():
		return nil
	case old == nil || r.state == stateWaiting || r.state == stateInstalling:
		return &seatError{fmt.Sprintf("rank %d of job %q cannot come back to what has not begun", rank, r.job)}
	case old.member != s.member:
		return &seatError{fmt.Sprintf("rank %d of job %q is at %s port %d, not at %s port %d", rank, r.job,
			old.member.host.IP, old.member.udpPort, s.member.host.IP, s.member.udpPort)}
	case old.digest != s.digest:
		return &seatError{fmt.Sprintf("rank %d of job %q has %q, not %q", rank, r.job, old.digest, s.digest)}
	}
	if old.lost == nil {
		r.awaited &^= 1 << rank
		old.deaf = false
	}
	return nil
}

// outdated reports whether a rank is back, and its plan may be removed.
func (r *rendezvous) outdated(rank int) bool {
	s := r.seats[rank]
	return s != nil && s.missed && !s.deaf && r.left>>rank&1 == 0
}

// stillAway returns the mask of ranks that are expected back after a restart of the controller.
func (r *rendezvous) stillAway() uint64 {
	if r.ended() {
		return 0
	}
	return r.awaited &^ r.left
}

// disagreement finds the ranks whose digest is not the one that most have; of equally common ones the lowest rank's
// counts.
func (r *rendezvous) disagreement() (odd []uint32, err error) {
	count := make(map[string]int)
	for _, s := range r.seats {
		count[s.digest]++
	}
	if len(count) == 1 {
		return nil, nil
	}
	common := r.seats[0].digest
	for _, s := range r.seats {
		if count[s.digest] > count[common] {
			common = s.digest
		}
	}
	byDigest := make(map[string]uint64)
	for rank, s := range r.seats {
		if s.digest != common {
			odd = append(odd, uint32(rank))
			byDigest[s.digest] |= 1 << rank
		}
	}
	var parts []string
	for _, digest := range slices.Sorted(maps.Keys(byDigest)) {
		parts = append(parts, fmt.Sprintf("rank %s has %q", policy.FormatMask(byDigest[digest]), digest))
	}
	return odd, fmt.Errorf("the ranks disagree on the number of ranks, the length, the chunking or the type: %s, the others have %q",
		strings.Join(parts, ", "), common)
}

// members returns where the ranks are; all must have joined.
func (r *rendezvous) members() []member {
	members := make([]member, len(r.seats))
	for rank, s := range r.seats {
		members[rank] = s.member
	}
	return members
}

// installed lets the ranks go.
func (r *rendezvous) installed() {
	if r.state == stateInstalling {
		r.state = stateRunning
		close(r.ready)
	}
}

// gone tells that a rank is no longer there. Before all have joined its seat is free again; later, unless it left,
// that is the end for all where the others are not enough. Those that wait to be let in are none of them.
func (r *rendezvous) gone(rank int) {
	r.goes(rank, "went away without leaving")
}

// goes is gone, in other words.
func (r *rendezvous) goes(rank int, how string) {
	s := r.seats[rank]
	if s == nil || r.ended() {
		return
	}
	if r.state == stateWaiting {
		r.seats[rank] = nil
		return
	}
	s.deaf = true
	r.awaited &^= 1 << rank
	if r.left&(1<<rank) != 0 {
		return
	}
	if n := bits.OnesCount64(r.joined() &^ r.returning()); n >= r.enough {
		if r.left == r.joined() {
			r.finish()
		}
		return
	}
	odd := []uint32{uint32(rank)}
	err := fmt.Errorf("rank %d on host %s %s", rank, s.member.host.Name, how)
	if others := r.absent() &^ (1 << rank); others != 0 {
		err = fmt.Errorf("%w, and without it and rank %s fewer than %d ranks are there", err, policy.FormatMask(others), r.enough)
		odd = nil
		for rank := range r.seats {
			if r.absent()>>rank&1 != 0 {
				odd = append(odd, uint32(rank))
			}
		}
	}
	r.abort(err, odd)
}

// leave tells that a rank has finished. When it was the last one the state becomes finished.
func (r *rendezvous) leave(rank int) error {
	if r.state != stateRunning && !r.ended() {
		return &seatError{fmt.Sprintf("job %q is %s: rank %d cannot leave what has not begun", r.job, r.state, rank)}
	}
	r.left |= 1 << rank
	if r.state == stateRunning && r.left == r.joined() {
		r.finish()
	}
	return nil
}

func (r *rendezvous) finish() {
	r.state = stateFinished
	r.recovery.giveUp()
	close(r.over)
}

// giveUp tells that a rank cannot go on and will be gone.
func (r *rendezvous) giveUp(rank int, reason string) { r.goes(rank, "gave up: "+reason) }

// abort ends it for all, with the ranks that caused it.
func (r *rendezvous) abort(err error, odd []uint32) {
	if r.ended() {
		return
	}
	r.state, r.err, r.odd = stateAborted, err, odd
	r.recovery.giveUp()
	close(r.over)
}

var errRemoved = errors.New("the job was removed")
