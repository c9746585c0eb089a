package controller

import (
	"cmp"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strings"
	"time"

	"xagg/api"
	"xagg/policy"
	"xagg/wire"
)

const (
	// atSwitch is what an explanation calls the switch.
	atSwitch = "switch"
	// stuckAfter is how long a chunk must have been incomplete to be worth a word: a job that is well has incomplete
	// chunks at any moment, each for less than that.
	stuckAfter = 200 * time.Millisecond
	// freshReport is how old a rank's report may be that stands for what the rank does now.
	freshReport = 5 * time.Second
	// quietReport is how old the last report of a rank may be that is alive: reports come every second.
	quietReport = 3 * time.Second
	// longWait is how long a rank's own waiting is ordinary, if no aggregator waits for anybody.
	longWait = time.Second
)

// evidence is what was read for an explanation: plain data, with times as durations until the moment of the last look.
type evidence struct {
	job     *api.Job
	hosts   []string  // by rank; "" = it has not joined
	chunks  []sight   // as the aggregators have them
	traffic []traffic // by rank; nil = the switch could not be asked
	reports []report  // by rank
	// blind has the devices that could not be asked, "switch" or a server's name, with the reason.
	blind map[string]string
	// recovery is nil unless one is under way. The ranks stand still then, and nothing that aggregators have says anything.
	recovery *recoveryEvidence
}

// recoveryEvidence is how far a recovery is.
type recoveryEvidence struct {
	ranks uint64        // mask of those that it waits for
	asked string        // to do what, in words
	began time.Duration // ago
}

// sight is a chunk as an aggregator has it.
type sight struct {
	at     string    // "switch" or a server's name
	slot   slotIndex // at the switch
	epoch  uint16
	place  spot
	have   uint64        // mask of contributors
	closed bool          // it has passed its sum on
	age    time.Duration // since the first arrival; of a closed one at the switch until the last
}

// slotIndex counts slots through the whole switch.
type slotIndex = uint32

// spot is a chunk of a round.
type spot struct{ round, chunk uint32 }

// compare orders places as the job comes to them.
func (p spot) compare(q spot) int {
	if p.round != q.round {
		if wire.SerialLess(p.round, q.round) {
			return -1
		}
		return 1
	}
	return cmp.Compare(p.chunk, q.chunk)
}

// traffic is what the switch has counted of a rank.
type traffic struct {
	packets uint64
	silent  time.Duration // since the count last grew, as far as anybody has looked
}

// report is the last one of a rank.
type report struct {
	progress *api.Progress // nil = there is none
	ago      time.Duration
}

// waits returns whether the rank has lately said that it waits.
func (r report) waits() bool { return r.progress.GetWaiting() && r.ago <= freshReport }

// rule is what an epoch of the job says of who sums.
type rule struct {
	epoch   uint32
	cohort  uint64
	servers []string
	quorum  int // 0 = all ranks
}

// rules returns the plans that the job has installed.
func (e *evidence) rules() []rule {
	rules := []rule{{e.job.GetEpoch(), e.job.GetCohort(), e.job.GetServers(), int(e.job.GetQuorum())}}
	if c := e.job.GetChange(); c != nil {
		rules = append(rules, rule{c.GetEpoch(), c.GetCohort(), c.GetServers(), int(c.GetQuorum())})
	}
	return rules
}

// under returns the rule of an epoch; of one that is not installed, the job's.
func (e *evidence) under(epoch uint16) rule {
	rules := e.rules()
	if i := slices.IndexFunc(rules, func(r rule) bool { return r.epoch == uint32(epoch) }); i >= 0 {
		return rules[i]
	}
	return rules[0]
}

func (e *evidence) ranks() uint64 { return 1<<e.job.GetRanks() - 1 }

// stuck is a chunk that has been incomplete for long.
type stuck struct {
	sight
	missing uint64 // of whom the aggregator lacks contributions
	culprit uint64 // those of them that have not sent: not whom another aggregator knows better about
}

// explain says whom a job waits for, and why. It is a pure function of what was read.
func explain(e *evidence) *api.WhyReply {
	reply := &api.WhyReply{Job: e.job.GetName()}
	current := state(e.job.GetState())
	if current == stateInstalling || current == stateRunning { // others need no device
		for _, name := range slices.Sorted(maps.Keys(e.blind)) {
			reply.Unreachable = append(reply.Unreachable, name+": "+e.blind[name])
		}
	}
	switch current {
	case stateWaiting:
		e.explainWaiting(reply)
	case stateInstalling:
		reply.Summary = "all ranks have joined; the job waits for the switch to be programmed"
		if err := e.job.GetError(); err != "" {
			reply.Summary += ": " + err
		}
	case stateFinished:
		reply.Summary = "nothing waits: the job has finished"
	case stateAborted:
		reply.Summary = "nothing waits: the job was aborted: " + e.job.GetError()
	default:
		e.explainRunning(reply)
	}
	return reply
}

// explainWaiting is about a job whose ranks are not all there.
func (e *evidence) explainWaiting(reply *api.WhyReply) {
	absent := e.ranks() &^ e.job.GetJoined()
	for _, rank := range ranksOf(absent) {
		reply.Blockers = append(reply.Blockers, &api.Blocker{
			Rank: uint32(rank), Path: e.path(rank),
			Explanation: fmt.Sprintf("rank %d has not joined; %s for it", rank, e.share(e.job.GetJoined())),
		})
	}
	if e.job.GetJoined() == 0 {
		reply.Summary = fmt.Sprintf("none of the %d ranks has joined yet", e.job.GetRanks())
		return
	}
	reply.Summary = fmt.Sprintf("%s not joined; %s for %s", subject(absent, "has", "have"), e.share(e.job.GetJoined()),
		verb(absent, "it", "them"))
}

// share says how many ranks wait.
func (e *evidence) share(waiting uint64) string {
	return fmt.Sprintf("%d of %d ranks %s", bits.OnesCount64(waiting), e.job.GetRanks(), verb(waiting, "waits", "wait"))
}

// explainRunning is about a job that all-reduces.
func (e *evidence) explainRunning(reply *api.WhyReply) {
	var found []stuck
	if reply.Recovery = e.job.GetRecovery(); reply.Recovery == "" {
		found = e.stuck()
	}
	reply.Waiting = e.runs(found)
	reply.Blockers = e.blockers(found)
	if e.recovery != nil {
		reply.Blockers = e.late()
	}

	var says []string
	switch {
	case e.job.GetRecovery() != "":
		says = append(says, "the job is being recovered; that waits for "+e.job.GetRecovery())
	case len(reply.Blockers) > 0:
		says = append(says, e.blame(found, reply.Blockers))
	case len(found) > 0:
		says = append(says, e.blamePaths(found))
	default:
		says = append(says, e.idle())
	}
	if c := e.job.GetChange(); c != nil {
		says = append(says, fmt.Sprintf("its change of plan to epoch %d waits for %s", c.GetEpoch(), c.GetWaitsFor()))
	}
	if away := e.job.GetAwaited(); away != 0 && reply.Recovery == "" {
		says = append(says, fmt.Sprintf("%s not come back yet to the controller, which was restarted; the job goes on meanwhile",
			subject(away, "has", "have")))
	}
	if e.job.GetQuorum() > 0 {
		says = append(says, e.leeway())
	}
	if left := e.job.GetLeft(); left != 0 {
		says = append(says, fmt.Sprintf("%s finished and %s for %s to leave", subject(left, "has", "have"),
			verb(left, "waits", "wait"), subject(e.job.GetJoined()&^left, "", "")))
	}
	if len(e.blind) > 0 {
		says = append(says, "not wholly asked: "+strings.Join(slices.Sorted(maps.Keys(e.blind)), ", "))
	}
	reply.Summary = strings.Join(says, "; ")
}

// stuck returns the chunks that have been incomplete for long, in the order in which the job comes to them.
func (e *evidence) stuck() []stuck {
	type key struct {
		epoch uint16
		place spot
	}
	summing := make(map[key]sight) // at the switch
	union := make(map[key]uint64)
	for _, s := range e.chunks {
		k := key{s.epoch, s.place}
		union[k] |= s.have
		if s.at == atSwitch {
			summing[k] = s
		}
	}
	var found []stuck
	for _, s := range e.seen() {
		if s.closed || s.age < stuckAfter {
			continue
		}
		k := key{s.epoch, s.place}
		r := e.under(s.epoch)
		f := stuck{sight: s}
		switch s.at {
		case atSwitch:
			f.missing = r.cohort &^ s.have
			f.culprit = f.missing
		default:
			f.missing = e.ranks() &^ s.have
			f.culprit = f.missing
			// Of its cohort the switch says more: whom it waits for, or whom it has passed on, which may be lost. If it has
			// nothing of the chunk, none of them has sent; nor have those that a flush left out.
			switch sum, known := summing[k]; {
			case known && sum.closed:
				f.culprit &^= sum.have
			case known:
				f.culprit &^= r.cohort
			}
		}
		if f.missing == 0 || r.quorum > 0 && bits.OnesCount64(union[k]|s.have) >= r.quorum {
			continue // it is complete, or is closed when somebody asks
		}
		found = append(found, f)
	}
	slices.SortStableFunc(found, func(a, b stuck) int { return a.place.compare(b.place) })
	return found
}

// seen returns what aggregators have, or, of those that could not be asked, what the ranks say that they were told.
func (e *evidence) seen() []sight {
	seen := slices.Clone(e.chunks)
	for rank, r := range e.reports {
		if !r.waits() || r.progress.GetMissing() == 0 {
			continue
		}
		at, rule := atSwitch, e.under(uint16(e.job.GetEpoch()))
		told := e.ranks()
		if r.progress.GetAtServer() && len(rule.servers) > 0 {
			at = rule.servers[int(r.progress.GetChunk())%len(rule.servers)]
		} else {
			told = rule.cohort
		}
		s := sight{
			at: at, epoch: uint16(rule.epoch), place: spot{r.progress.GetRound(), r.progress.GetChunk()},
			have: told&^r.progress.GetMissing() | 1<<rank, age: microseconds(r.progress.GetForUs()) + r.ago,
		}
		same := func(o sight) bool { return o.at == s.at && o.place == s.place }
		if _, blind := e.blind[at]; blind && !slices.ContainsFunc(seen, same) {
			seen = append(seen, s)
		}
	}
	return seen
}

// blockers returns the ranks that the others wait for, the worst first. Who waits itself for an earlier chunk is not
// one of them: it will send once that chunk is complete.
func (e *evidence) blockers(found []stuck) []*api.Blocker {
	of := make(map[int][]stuck)
	var waiting uint64 // contributors of the chunks before
	for i := 0; i < len(found); {
		here := found[i].place
		var have uint64
		for ; i < len(found) && found[i].place == here; i++ {
			for _, rank := range ranksOf(found[i].culprit &^ waiting) {
				of[rank] = append(of[rank], found[i])
			}
			have |= found[i].have
		}
		waiting |= have
	}
	var blockers []*api.Blocker
	for rank, lacking := range of {
		blockers = append(blockers, e.blocker(rank, lacking))
	}
	slices.SortFunc(blockers, func(a, b *api.Blocker) int {
		return cmp.Or(cmp.Compare(b.OldestUs, a.OldestUs), cmp.Compare(b.Chunks, a.Chunks), cmp.Compare(a.Rank, b.Rank))
	})
	return blockers
}

// known returns what is known of a rank, whatever it is waited for for.
func (e *evidence) known(rank int) *api.Blocker {
	b := &api.Blocker{
		Rank: uint32(rank), Host: e.hosts[rank], Path: e.path(rank),
		Joined: e.job.GetJoined()&^e.job.GetGone()&(1<<rank) != 0,
	}
	if e.traffic != nil {
		b.Packets, b.SilentUs = e.traffic[rank].packets, uint64(e.traffic[rank].silent.Microseconds())
	}
	if r := e.reports[rank]; r.progress != nil {
		b.Progress, b.ReportedUs = r.progress, uint64(r.ago.Microseconds())
	}
	return b
}

// blocker describes a rank that chunks lack.
func (e *evidence) blocker(rank int, lacking []stuck) *api.Blocker {
	b := e.known(rank)
	for _, s := range lacking {
		b.OldestUs = max(b.OldestUs, uint64(s.age.Microseconds()))
	}
	sent := make([]stuck, len(lacking)) // where it sends to, which need not be where it was missed
	for i, s := range lacking {
		sent[i] = s
		if e.under(s.epoch).cohort&(1<<rank) != 0 {
			sent[i].at = atSwitch
		}
	}
	places, at := whereabouts(sent)
	b.Chunks = uint32(len(places))
	b.Explanation = e.sentence(rank, b, places, at, seconds(microseconds(b.OldestUs)))
	return b
}

// whereabouts returns the places of chunks, which come in their order, and at what they are incomplete, for people.
func whereabouts(chunks []stuck) (places []spot, at string) {
	var names []string
	for _, s := range chunks {
		places = append(places, s.place)
		switch s.at {
		case atSwitch:
			names = append(names, "the switch")
		default:
			names = append(names, "server "+s.at)
		}
	}
	slices.Sort(names)
	return slices.Compact(places), formatNames(slices.Compact(names))
}

// sentence says what is known of a rank that has not sent its part of chunks to aggregators since an age.
func (e *evidence) sentence(rank int, b *api.Blocker, places []spot, at, age string) string {
	chunks, round := formatPlaces(places), places[0].round
	who := fmt.Sprintf("rank %d on host %s", rank, b.Host)
	switch {
	case e.job.GetGone()&(1<<rank) != 0:
		return fmt.Sprintf("%s is gone, and with it too few are left for %s at %s", who, chunks, at)
	case e.job.GetLeft()&(1<<rank) != 0:
		return fmt.Sprintf("%s has left and will not send its part of %s to %s: the ranks do not all-reduce the same number of times",
			who, chunks, at)
	}
	says := []string{fmt.Sprintf("%s has not sent its part of %s to %s for %s", who, chunks, at, age)}
	switch {
	case e.traffic == nil:
	case b.Packets == 0:
		says = append(says, "the switch has not seen a single packet of it")
	case microseconds(b.SilentUs) >= stuckAfter:
		say := fmt.Sprintf("the switch has seen none of its packets for at least %s", seconds(microseconds(b.SilentUs)))
		if e.sendsInVain(rank, b, round) {
			say += ", though it sends: they are lost on the way"
		}
		says = append(says, say)
	default:
		says = append(says, "the switch does see packets of it, of other chunks or such as it does not sum: 'xagg status' has the reasons")
	}
	return strings.Join(append(says, e.hearsay(rank)), "; ")
}

// sendsInVain reports whether a rank has told, while the switch has seen nothing of it, that it has waited for long in the
// round that lacks it: it then sends again and again. What it told before that says nothing.
func (e *evidence) sendsInVain(rank int, b *api.Blocker, round uint32) bool {
	r := e.reports[rank]
	return r.waits() && r.progress.GetRound() == round && microseconds(r.progress.GetForUs()) >= longWait &&
		r.ago < microseconds(b.SilentUs)
}

// hearsay is what a rank has last said of itself.
func (e *evidence) hearsay(rank int) string {
	r := e.reports[rank]
	if r.progress == nil {
		return "it has reported nothing"
	}
	since := seconds(microseconds(r.progress.GetForUs()))
	if r.ago >= quietReport {
		return fmt.Sprintf("it has reported nothing for %s: its process is stopped, or cut off from the controller", seconds(r.ago))
	}
	if !r.progress.GetWaiting() {
		return fmt.Sprintf("it last reported %s ago that it has been computing for %s", seconds(r.ago), since)
	}
	return fmt.Sprintf("it last reported %s ago that it has waited for %s for %d chunks of round %d, from chunk %d on",
		seconds(r.ago), since, r.progress.GetChunksLeft(), r.progress.GetRound(), r.progress.GetChunk())
}

// late returns the ranks that a recovery waits for.
func (e *evidence) late() (blockers []*api.Blocker) {
	rec := e.recovery
	for _, rank := range ranksOf(rec.ranks) {
		b := e.known(rank)
		b.OldestUs = uint64(rec.began.Microseconds())
		b.Explanation = fmt.Sprintf("rank %d on host %s was asked %s ago to %s, for the recovery, and has not; %s", rank, b.Host,
			seconds(rec.began), rec.asked, e.hearsay(rank))
		if e.job.GetAwaited()&(1<<rank) != 0 {
			b.Explanation = fmt.Sprintf("rank %d on host %s has not come back yet to the controller, which was restarted; the recovery needs it", rank, b.Host)
		}
		blockers = append(blockers, b)
	}
	return blockers
}

// blame sums up what ranks hold up.
func (e *evidence) blame(found []stuck, blockers []*api.Blocker) string {
	var mask, waiting uint64
	for _, b := range blockers {
		mask |= 1 << b.Rank
	}
	for _, s := range found {
		waiting |= s.have
	}
	waiting &^= mask
	worst := blockers[0]
	say := fmt.Sprintf("%s for %s", e.share(waiting), subject(mask, "", ""))
	if bits.OnesCount64(mask) == 1 && worst.Host != "" {
		say += " on host " + worst.Host
	}
	say += fmt.Sprintf(": %d %s rank %d, the oldest for %s", worst.Chunks, noun(int(worst.Chunks), "chunk lacks", "chunks lack"),
		worst.Rank, seconds(microseconds(worst.OldestUs)))
	for rank, r := range e.reports {
		if waiting&(1<<rank) != 0 && r.waits() {
			return say + fmt.Sprintf("; rank %d has waited for round %d for %s", rank, r.progress.GetRound(),
				seconds(microseconds(r.progress.GetForUs())+r.ago))
		}
	}
	return say
}

// blamePaths sums up chunks that every rank has sent, and that an aggregator lacks all the same.
func (e *evidence) blamePaths(found []stuck) string {
	places, at := whereabouts(found)
	return fmt.Sprintf("the switch has summed its cohort's part of %s, which has not reached %s: packets between the two are lost",
		formatPlaces(places), at)
}

// idle sums up a job of which no aggregator waits for anybody.
func (e *evidence) idle() string {
	computing, heard := true, false
	for rank, r := range e.reports {
		if r.progress == nil || r.ago > freshReport {
			computing = false
			continue
		}
		heard = true
		computing = computing && !r.progress.GetWaiting()
		if r.waits() && microseconds(r.progress.GetForUs()) >= longWait && len(e.blind) == 0 {
			return fmt.Sprintf("no aggregator waits for anybody, but rank %d on host %s has waited for %s for %d chunks of round %d: "+
				"either the round is long, or the answers to it are lost", rank, e.hosts[rank],
				seconds(microseconds(r.progress.GetForUs())), r.progress.GetChunksLeft(), r.progress.GetRound())
		}
	}
	open, how := 0, "for "+seconds(stuckAfter)
	for _, s := range e.chunks {
		if s.closed {
			continue
		}
		open++
		if s.age >= stuckAfter {
			how = "for want of ranks"
		}
	}
	switch {
	case len(e.blind) > 0:
		return "nothing is known to wait"
	case heard && computing && open == 0:
		return "nothing waits: all ranks compute"
	case open > 0:
		return fmt.Sprintf("nothing waits: %d %s under way, none of them %s", open, noun(open, "chunk is", "chunks are"), how)
	}
	return "nothing waits: no chunk is incomplete"
}

// leeway says whom a quorum job does not wait for.
func (e *evidence) leeway() string {
	say := fmt.Sprintf("%d of %d ranks are enough, %s after the first", e.job.GetQuorum(), e.job.GetRanks(),
		seconds(microseconds(uint64(e.job.GetWaitUs()))))
	if gone := e.job.GetGone(); gone != 0 {
		say += fmt.Sprintf(", and nobody waits for %s, which %s gone", subject(gone, "", ""), verb(gone, "is", "are"))
	}
	return say
}

// path says where a rank's contributions are summed.
func (e *evidence) path(rank int) string {
	if e.job.GetCohort()&(1<<rank) != 0 {
		return atSwitch
	}
	return strings.Join(e.job.GetServers(), ",")
}

// runs joins chunks in a row that lack the same ranks at the same place. Of n servers each has every n-th chunk.
func (e *evidence) runs(found []stuck) []*api.Waiting {
	sorted := slices.Clone(found)
	slices.SortStableFunc(sorted, func(a, b stuck) int { return cmp.Or(cmp.Compare(a.at, b.at), a.place.compare(b.place)) })
	var out []*api.Waiting
	for _, s := range sorted {
		stride := uint32(1)
		if s.at != atSwitch {
			stride = uint32(max(1, len(e.under(s.epoch).servers)))
		}
		if len(out) > 0 {
			w := out[len(out)-1]
			if w.At == s.at && w.Round == s.place.round && w.Last+stride == s.place.chunk && w.Epoch == uint32(s.epoch) &&
				w.Have == s.have && w.Missing == s.missing {
				w.Last = s.place.chunk
				w.AgeUs = max(w.AgeUs, uint64(s.age.Microseconds()))
				continue
			}
		}
		out = append(out, &api.Waiting{
			At: s.at, Round: s.place.round, First: s.place.chunk, Last: s.place.chunk, Epoch: uint32(s.epoch),
			Have: s.have, Missing: s.missing, AgeUs: uint64(s.age.Microseconds()),
		})
	}
	slices.SortStableFunc(out, func(a, b *api.Waiting) int {
		return spot{a.Round, a.First}.compare(spot{b.Round, b.First})
	})
	return out
}

// maxRuns is how many runs of chunks a sentence lists.
const maxRuns = 4

// formatPlaces writes chunks for people: "chunks 12-40 and 43 of round 7".
func formatPlaces(places []spot) string {
	var parts []string
	for i := 0; i < len(places); {
		round := places[i].round
		var list []string
		n := 0
		for i < len(places) && places[i].round == round {
			first := places[i].chunk
			last := first
			for n, i = n+1, i+1; i < len(places) && places[i] == (spot{round, last + 1}); n, i = n+1, i+1 {
				last++
			}
			if first == last {
				list = append(list, fmt.Sprint(first))
			} else {
				list = append(list, fmt.Sprintf("%d-%d", first, last))
			}
		}
		if len(list) > maxRuns {
			parts = append(parts, fmt.Sprintf("%d chunks of round %d from chunk %s on", n, round, strings.Split(list[0], "-")[0]))
			continue
		}
		parts = append(parts, fmt.Sprintf("%s %s of round %d", noun(n, "chunk", "chunks"), formatNames(list), round))
	}
	return formatNames(parts)
}

// formatNames writes a list for people: "a, b and c".
func formatNames(names []string) string {
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	return strings.Join(names[:len(names)-1], ", ") + " and " + names[len(names)-1]
}

// subject writes ranks as the subject of a sentence, with its verb if there is one: "ranks 1-3 have".
func subject(mask uint64, singular, plural string) string {
	say := verb(mask, "rank ", "ranks ") + policy.FormatMask(mask)
	if v := verb(mask, singular, plural); v != "" {
		say += " " + v
	}
	return say
}

func verb(mask uint64, singular, plural string) string {
	return noun(bits.OnesCount64(mask), singular, plural)
}

func noun(n int, singular, plural string) string {
	if n == 1 {
		return singular
	}
	return plural
}

// seconds writes a time for people: tenths of a second at first, whole ones from 100 s on.
func seconds(d time.Duration) string {
	if d < 100*time.Second {
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	return d.Round(time.Second).String()
}

func microseconds(us uint64) time.Duration { return time.Duration(us) * time.Microsecond }

// ranksOf returns the ranks of a mask in their order.
func ranksOf(mask uint64) (ranks []int) {
	for ; mask != 0; mask &= mask - 1 {
		ranks = append(ranks, bits.TrailingZeros64(mask))
	}
	return ranks
}
