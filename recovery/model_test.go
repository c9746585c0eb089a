package recovery

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// job is a job whose network loses its memory again and again: workers as sets, a network that closes chunks, and the
// only truth about what a chunk's RESULT is.
type job struct {
	*rapid.T
	depth  uint32
	quorum int // ranks that are enough; the number of ranks in sync
	keep   uint32
	chunks []uint32 // by round
	ends   []uint32 // by round: the first round after the all-reduce that it belongs to

	workers []*member
	epoch   int
	sent    map[ChunkID]map[int]bool // under the epoch: who has contributed
	closed  map[ChunkID]int          // under the epoch: the RESULT
	truth   map[ChunkID]int          // what anybody has ever taken
	seqs    map[uint32]ChunkID       // under the epoch
	begin   uint32                   // the first of them
	results int
	forgets map[ChunkID]bool // of every chunk that has a RESULT: what its all-reduce did with scales
}

// member is a worker.
type member struct {
	rank                  int
	began                 uint32
	there, frozen         bool
	first, next, boundary uint32
	seq                   uint32
	held                  map[ChunkID]int
	oldest                uint32 // of the rounds that it keeps
	restart               Restart
	forgot                map[uint64]bool // by all-reduce that it has begun: whether it forgot all scales there
}

func newJob(t *rapid.T) *job {
	n := rapid.IntRange(1, 5).Draw(t, "ranks")
	j := &job{T: t, depth: uint32(rapid.IntRange(1, 4).Draw(t, "depth")), quorum: n, truth: map[ChunkID]int{}, forgets: map[ChunkID]bool{}}
	if rapid.Bool().Draw(t, "quorum") {
		j.quorum = rapid.IntRange(1, n).Draw(t, "k")
	}
	j.keep = 2 * j.depth
	for len(j.chunks) < 12 {
		for end := len(j.chunks) + rapid.IntRange(1, 3).Draw(t, "rounds"); len(j.chunks) < end; {
			j.chunks = append(j.chunks, rapid.SampledFrom([]uint32{1, 2, 3, 64, 65}).Draw(t, "chunks"))
			j.ends = append(j.ends, uint32(end))
		}
	}
	// The numbers go round in the middle of the run.
	start := rapid.SampledFrom([]uint32{0, 1<<32 - 20}).Draw(t, "seq")
	for r := range n {
		j.workers = append(j.workers, &member{rank: r, there: true, seq: start, held: map[ChunkID]int{}, restart: Restart{Seq: start},
			forgot: map[uint64]bool{}})
	}
	j.forget(start)
	return j
}

func (j *job) sync() bool { return j.quorum == len(j.workers) }

// forget is the loss of all memory of switch and servers, and a new epoch.
func (j *job) forget(seq uint32) {
	j.epoch++
	j.sent, j.closed, j.seqs, j.begin = map[ChunkID]map[int]bool{}, map[ChunkID]int{}, map[uint32]ChunkID{}, seq
}

func (j *job) some(label string, ok func(*member) bool) *member {
	var list []*member
	for _, w := range j.workers {
		if w.there && !w.frozen && ok(w) {
			list = append(list, w)
		}
	}
	if len(list) == 0 {
		return nil
	}
	return list[rapid.IntRange(0, len(list)-1).Draw(j.T, label)]
}

// canBegin is the rule of the depth. In quorum, where nothing holds back who is ahead, nobody falls behind too far.
func (j *job) canBegin(w *member) bool {
	if int(w.next) == len(j.chunks) || w.next >= w.first+j.depth {
		return false
	}
	for _, o := range j.workers {
		if o.there && w.next >= o.first+j.keep {
			return false
		}
	}
	return true
}

func (j *job) beginRound(w *member) {
	r := w.next
	if r == w.boundary {
		j.beginAllReduce(w, j.count(r))
	}
	w.boundary = max(w.boundary, j.ends[r])
	w.next++
	for c := range j.chunks[r] {
		j.number(w, ChunkID{r, c})
	}
	j.advance(w)
}

// count returns the number of all-reduces whose rounds are before a boundary.
func (j *job) count(boundary uint32) (n uint64) {
	for r := uint32(0); r < boundary; r = j.ends[r] {
		n++
	}
	return n
}

// beginAllReduce: all ranks forget what they know of scales where the same all-reduces begin, or the rounds that follow would
// not be the same. What is known of it only from the RESULTs that somebody has is as binding.
func (j *job) beginAllReduce(w *member, n uint64) {
	forgets := slices.Contains(w.restart.Returns, n)
	w.forgot[n] = forgets
	for _, o := range j.workers {
		if other, ok := o.forgot[n]; ok && o.there && other != forgets {
			j.Fatalf("rank %d forgets the scales at all-reduce %d: %t, rank %d: %t", w.rank, n, forgets, o.rank, other)
		}
		for id := range o.held {
			if o.there && j.count(id.Round+1) == n+1 && j.forgets[id] != forgets {
				j.Fatalf("rank %d forgets the scales at all-reduce %d: %t, but rank %d has its RESULT of %v", w.rank, n, forgets, o.rank, id)
			}
		}
	}
}

// number gives a chunk that is sent under this epoch its seq, and sends it.
func (j *job) number(w *member, id ChunkID) {
	if w.restart.Final(id) {
		if _, ok := w.held[id]; !ok {
			j.Fatalf("rank %d: chunk %v is final, but it has no RESULT", w.rank, id)
		}
		return
	}
	if _, ok := w.held[id]; ok {
		j.Fatalf("rank %d has the RESULT of chunk %v, which is summed anew", w.rank, id)
	}
	if _, ok := j.truth[id]; ok && j.closed[id] == 0 {
		j.Fatalf("rank %d: chunk %v is summed anew, although somebody has its RESULT", w.rank, id)
	}
	if other, ok := j.seqs[w.seq]; ok && other != id {
		j.Fatalf("epoch %d: seq %d is chunk %v of rank %d and %v of others", j.epoch, w.seq, id, w.rank, other)
	}
	j.seqs[w.seq] = id
	w.seq++
	if j.sent[id] == nil {
		j.sent[id] = map[int]bool{}
	}
	j.sent[id][w.rank] = true
}

// deliver gives a worker the RESULT of a chunk, if it is closed or may close now.
func (j *job) deliver(w *member, id ChunkID) {
	if _, ok := w.held[id]; ok || id.Round >= w.next {
		return
	}
	if j.closed[id] == 0 {
		if len(j.sent[id]) < j.quorum {
			return
		}
		j.results++
		j.closed[id] = j.results
		j.forgets[id] = w.forgot[j.count(id.Round+1)-1]
	}
	if got, ok := j.truth[id]; ok && got != j.closed[id] {
		j.Fatalf("chunk %v has two RESULTs", id)
	}
	j.truth[id] = j.closed[id]
	w.held[id] = j.closed[id]
	j.advance(w)
}

// advance moves a worker over finished rounds, and forgets RESULTs that nobody can need.
func (j *job) advance(w *member) {
	for w.first < w.next && w.missing(j, w.first) == 0 {
		w.first++
	}
	for w.oldest < w.first {
		if j.sync() {
			if w.oldest+j.depth >= w.next || w.missing(j, w.oldest+j.depth) == j.chunks[w.oldest+j.depth] {
				break
			}
		} else if w.oldest+j.keep >= w.next {
			break
		}
		for c := range j.chunks[w.oldest] {
			delete(w.held, ChunkID{w.oldest, c})
		}
		w.oldest++
	}
}

func (w *member) missing(j *job, r uint32) (n uint32) {
	for c := range j.chunks[r] {
		if _, ok := w.held[ChunkID{r, c}]; !ok {
			n++
		}
	}
	return n
}

func (w *member) state(j *job) State {
	s := State{Began: w.began, First: w.first, Next: w.next, Boundary: w.boundary, Seq: w.seq,
		AllReduces: j.count(w.boundary), Returns: w.restart.Returns}
	for r := w.oldest; int(r) < len(j.chunks); r++ {
		h := NewHeld(r, j.chunks[r])
		for c := range h.Chunks {
			if _, ok := w.held[ChunkID{r, c}]; ok {
				h.Set(c)
			}
		}
		if r < w.boundary || h.Missing() < h.Chunks {
			s.Rounds = append(s.Rounds, h)
		}
	}
	return s
}

// resume is what a worker does at the end of a recovery.
func (w *member) resume(j *job, restart Restart, results map[ChunkID]int) {
	w.restart, w.seq, w.frozen = restart, restart.Base(w.first), false
	maps.Copy(w.held, results)
	for r := w.first; r < w.next; r++ {
		for c := range j.chunks[r] {
			j.number(w, ChunkID{r, c})
		}
	}
	j.advance(w)
}

func (j *job) recover() {
	states := map[int]State{}
	for _, w := range j.workers {
		if w.there {
			w.frozen = true
			states[w.rank] = w.state(j)
		}
	}
	j.bury()
	j.checkSeqs()
	p, err := Make(states)
	if ahead, ok := errors.AsType[*AheadError](err); ok && j.workers[ahead.Rank].began > 0 {
		j.workers[ahead.Rank].there = false
		j.recover()
		return
	}
	if err != nil {
		j.Fatalf("states %+v: %v", states, err)
	}
	again, _ := Make(states)
	if fmt.Sprint(p) != fmt.Sprint(again) {
		j.Fatal("two plans of the same states")
	}
	for rank, s := range states {
		if int32(p.Seq-s.Seq) < 0 {
			j.Fatalf("seq %d was used by rank %d, which is at %d", p.Seq, rank, s.Seq)
		}
	}
	back := !j.sync() && p.CanReturn(j.depth, j.keep) && rapid.Bool().Draw(j.T, "ranks are back")
	if back {
		p.LetIn()
	}
	over := map[ChunkID]int{}
	for rank, ids := range p.HandOver {
		for _, id := range ids {
			result, ok := j.workers[rank].held[id]
			if _, twice := over[id]; !ok || twice {
				j.Fatalf("rank %d is to hand over chunk %v: it has it: %t, another one does: %t", rank, id, ok, twice)
			}
			over[id] = result
		}
	}
	j.forget(p.Seq)
	needed := map[ChunkID]bool{}
	all := rapid.IntRange(0, 3).Draw(j.T, "superseded") > 0 // else something is lost again before all have resumed
	for rank, ids := range p.Lacks {
		for _, id := range ids {
			if _, ok := j.workers[rank].held[id]; ok {
				j.Fatalf("rank %d is given chunk %v, which it has", rank, id)
			}
			needed[id] = true
		}
	}
	if len(needed) != len(over) {
		j.Fatalf("%d RESULTs are handed over and %d are needed", len(over), len(needed))
	}
	for _, rank := range slices.Sorted(maps.Keys(states)) {
		if !all && rapid.Bool().Draw(j.T, "not resumed") {
			continue
		}
		results := map[ChunkID]int{}
		for _, id := range p.Lacks[rank] {
			results[id] = over[id]
		}
		j.workers[rank].resume(j, p.Restart, results)
	}
	// Everything that is missing anywhere is missing everywhere, or not begun; and is in flight or will be.
	for _, w := range j.workers {
		for r := w.first; w.there && !w.frozen && r < w.next; r++ {
			for c := range j.chunks[r] {
				id := ChunkID{r, c}
				if _, ok := w.held[id]; ok != p.Final(id) {
					j.Fatalf("rank %d: chunk %v: it has it: %t, it is final: %t", w.rank, id, ok, p.Final(id))
				}
			}
		}
	}
	if back { // though some may not have been told to go on
		for _, w := range j.workers {
			if !w.there && rapid.Bool().Draw(j.T, "return") {
				*w = member{rank: w.rank, there: true, began: p.Return, first: p.Return, next: p.Return, boundary: p.Return, seq: p.ReturnSeq,
					oldest: p.Return, held: map[ChunkID]int{}, restart: p.Restart, forgot: map[uint64]bool{}}
			}
		}
	}
}

// bury forgets the RESULTs that only ranks which are gone ever had.
func (j *job) bury() {
	maps.DeleteFunc(j.truth, func(id ChunkID, _ int) bool {
		return !slices.ContainsFunc(j.workers, func(w *member) bool {
			_, ok := w.held[id]
			return w.there && (ok || w.began <= id.Round && id.Round < w.first)
		})
	})
}

// checkSeqs: the seqs under an epoch have no gap, unless a rank has come back: it may be past what others have not begun.
func (j *job) checkSeqs() {
	if slices.ContainsFunc(j.workers, func(w *member) bool { return w.began > 0 }) {
		return
	}
	for i := range uint32(len(j.seqs)) {
		if _, ok := j.seqs[j.begin+i]; !ok {
			j.Fatalf("epoch %d: %d seqs from %d on, but %d is none of them", j.epoch, len(j.seqs), j.begin, j.begin+i)
		}
	}
}

// die takes a rank away, if those that stay are enough: one that came back counts from its first round on.
func (j *job) die() {
	if j.sync() {
		return
	}
	w := j.some("dies", func(*member) bool { return true })
	if w == nil {
		return
	}
	w.there = false
	first := uint32(len(j.chunks))
	for _, o := range j.workers {
		if o.there {
			first = min(first, o.first)
		}
	}
	enough := 0
	for _, o := range j.workers {
		if o.there && o.began <= first {
			enough++
		}
	}
	w.there = enough < j.quorum
}

func (j *job) step() {
	switch rapid.IntRange(0, 9).Draw(j.T, "step") {
	case 0:
		j.recover()
	case 1:
		j.die()
	case 2, 3, 4:
		if w := j.some("begins", j.canBegin); w != nil {
			j.beginRound(w)
		}
	default:
		w := j.some("takes", func(w *member) bool { return w.first < w.next })
		if w == nil {
			return
		}
		r := w.first + rapid.Uint32Range(0, w.next-w.first-1).Draw(j.T, "round")
		for c := range j.chunks[r] {
			if rapid.Bool().Draw(j.T, "chunk") {
				j.deliver(w, ChunkID{r, c})
			}
		}
	}
}

// finish has everybody who is there finish everything.
func (j *job) finish() {
	for slices.ContainsFunc(j.workers, func(w *member) bool { return w.there && w.frozen }) { // it was cut short
		j.recover()
	}
	for moved := true; moved; {
		moved = false
		for _, w := range j.workers {
			if !w.there || w.frozen {
				continue
			}
			for j.canBegin(w) {
				j.beginRound(w)
				moved = true
			}
			before := w.first
			for r := w.first; r < w.next; r++ {
				for c := range j.chunks[r] {
					j.deliver(w, ChunkID{r, c})
				}
			}
			moved = moved || w.first != before
		}
	}
	for _, w := range j.workers {
		if w.there && !w.frozen && int(w.first) != len(j.chunks) {
			j.Fatalf("rank %d has not finished round %d", w.rank, w.first)
		}
	}
}

// TestRecoveries: whatever is lost whenever, no chunk has two RESULTs, nothing is summed again that anybody has, nothing
// that is missing is forgotten, and all number alike.
func TestRecoveries(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		j := newJob(t)
		for range rapid.IntRange(0, 120).Draw(t, "steps") {
			j.step()
		}
		j.finish()
		j.checkSeqs()
	})
}
