package controller

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"

	"xagg/controller/p4rt"
	"xagg/policy"
	"xagg/wire"
)

// floodGroup is the multicast group of all ports, for ARP requests.
const floodGroup = 1

// intent is everything that is wanted: the configuration and the jobs. It is the only truth about the switch and the
// servers. It knows no clock and no device; its methods change it or refuse, and never half of either.
type intent struct {
	cfg         *Config
	slots       int // of the switch
	sizes       map[string]int
	serverSlots map[string]uint64 // of the servers whose agents have said it
	nextID      uint16            // the id that the next job gets unless a live job has it
	// firstEpoch draws the epoch of an incarnation's first plan, 1..65535. Slots of the switch and of the servers keep
	// what an earlier controller's jobs left there, which must not be taken for the answers of a job of this one: a slot
	// of the same job id and epoch would be. Ids alone are too few to be unlikely.
	firstEpoch func() uint16
	jobs       map[string]*job
}

// job is one incarnation of a job.
type job struct {
	spec       JobSpec // complete
	id         uint16
	rule       policy.Static // that the configuration had for it when its plan was decided last; complete
	plan                     // the one that rounds run under, or the newer one once nobody needs the older
	change     *change       // nil = the plan does not change
	recovering recoveringState
	homes      []string // servers that have memory for it: of its plan, or of plans to come
	lease      span     // of switch slots, policy.SlotsPerPool * pool of them, for both halves
	rids       span     // egress_rid of rank r is rids.base + r
	groups     span     // multicast groups: all ranks, then the cohort of each half
	members    []member // by rank; nil until all ranks have joined
}

// freshIntent returns an intent without jobs, for a switch with so many slots and entries of its tables.
func freshIntent(cfg *Config, slots int, sizes map[string]int) intent {
	return intent{
		cfg: cfg, slots: slots, sizes: sizes, serverSlots: make(map[string]uint64),
		// Job ids go on from where an earlier controller of this switch is unlikely to have been lately: its packets
		// may still be under way.
		nextID:     uint16(rand.N(1 << 16)),
		firstEpoch: func() uint16 { return uint16(1 + rand.N(1<<16-1)) },
		jobs:       make(map[string]*job),
	}
}

// recoveringState is how far a recovery of a job is, for what is installed.
type recoveringState uint8

const (
	recoverNot        recoveringState = iota
	recoverHeld                       // its ranks are being stopped: nothing of it is installed or removed
	recoverInstalling                 // they have stopped: older plans go before the new one comes
)

// plan is one version of a job's plan.
type plan struct {
	epoch    uint16
	decision policy.Decision
	// quorum is how many ranks are enough for a result, for as long as the epoch lasts: as many as were decided, or those that
	// are there where they are fewer. 0 in a job without a quorum.
	quorum int
}

// member is where a rank is: its host, and the UDP port that it receives at.
type member struct {
	host    Host
	udpPort uint16
}

// chunks returns the number of chunks of the job's largest vector.
func (j *job) chunks() uint32 { return chunksOf(j.spec.MaxElems) }

func chunksOf(elems uint32) uint32 { return (elems-1)/wire.MaxLanes + 1 }

// rounds returns the number of rounds that a server keeps of the job.
func (j *job) rounds() uint32 { return uint32(j.spec.Consistency.ServerRounds(j.spec.Depth)) }

// async reports whether the job's results are read from running sums.
func (j *job) async() bool { return j.spec.Consistency.Mode == ModeAsync }

// ranks returns the mask of all ranks.
func (j *job) ranks() uint64 { return 1<<uint(j.spec.Ranks) - 1 }

// enough returns the number of ranks without which the job cannot go on, whatever its plan.
func (j *job) enough() int {
	if j.spec.Consistency.Mode == ModeQuorum {
		return j.spec.Consistency.Quorum
	}
	return j.spec.Ranks
}

// newPlan returns a plan of the job while so many ranks are there. Workers take no smaller quorum than the job's own.
func (j *job) newPlan(epoch uint16, d policy.Decision, there int) plan {
	return plan{epoch, d, min(d.Quorum, max(there, j.spec.Consistency.Quorum))}
}

// explanation says why the plan is what it is.
func (p plan) explanation() string {
	if p.quorum < p.decision.Quorum {
		return fmt.Sprintf("%s; only %d are there, which are enough until more are", p.decision.Explanation, p.quorum)
	}
	return p.decision.Explanation
}

// half returns the first slot of a plan's half of the lease. The pool is the same in every plan of a job.
func (j *job) half(p plan) int {
	return j.lease.base + int(p.epoch%2)*2*p.decision.Pool
}

// Multicast groups. The ranks are the same in every plan; a cohort is its plan's own.
const groupsPerJob = 3

func (j *job) groupAll() int          { return j.groups.base }
func (j *job) groupCohort(p plan) int { return j.groups.base + 1 + int(p.epoch%2) }

// span is a range of numbers: base, base+1, ... of them size.
type span struct{ base, size int }

// firstFit returns the lowest span of the given size within [lo, hi) that overlaps none of those taken.
func firstFit(taken []span, lo, hi, size int) (span, bool) {
	taken = slices.Clone(taken)
	slices.SortFunc(taken, func(a, b span) int { return cmp.Compare(a.base, b.base) })
	for _, t := range taken {
		if lo+size <= t.base {
			break
		}
		lo = max(lo, t.base+t.size)
	}
	return span{lo, size}, lo+size <= hi
}

// sorted returns the jobs by name.
func (in *intent) sorted() []*job {
	return slices.SortedFunc(maps.Values(in.jobs), func(a, b *job) int { return cmp.Compare(a.spec.Name, b.spec.Name) })
}

// byID returns the job with an id, or nil.
func (in *intent) byID(id uint16) *job {
	for _, j := range in.jobs {
		if j.id == id {
			return j
		}
	}
	return nil
}

func (in *intent) taken(of func(*job) span) []span {
	var spans []span
	for _, j := range in.jobs {
		spans = append(spans, of(j))
	}
	return spans
}

// slotsFree returns the number of slots that no job has leased.
func (in *intent) slotsFree() int {
	free := in.slots
	for _, j := range in.jobs {
		free -= j.lease.size
	}
	return free
}

// serverNames returns the names of the configured servers, in their order.
func (in *intent) serverNames() []string {
	names := make([]string, len(in.cfg.Servers))
	for i, s := range in.cfg.Servers {
		names[i] = s.Name
	}
	return names
}

func (in *intent) server(name string) Server {
	i := slices.IndexFunc(in.cfg.Servers, func(s Server) bool { return s.Name == name })
	return in.cfg.Servers[i] // a plan only names configured servers
}

// existsError says that a job's name is taken.
type existsError struct{ name string }

func (e *existsError) Error() string {
	return fmt.Sprintf("job %q exists; remove it first, or choose another name", e.name)
}

// exhaustedError says that something a job needs has run out.
type exhaustedError struct {
	what       string // in the plural
	need, free int
	hint       string
}

func (e *exhaustedError) Error() string {
	return fmt.Sprintf("%d %s are needed and %d are free; %s", e.need, e.what, e.free, e.hint)
}

// mayCreate checks a job that is to be created, and returns the rule that decides its plan.
func (in *intent) mayCreate(spec JobSpec) (policy.Static, error) {
	rule := in.ruleOf(spec)
	if err := spec.Validate(); err != nil {
		return rule, err
	}
	if _, taken := in.jobs[spec.Name]; taken {
		return rule, &existsError{spec.Name}
	}
	if spec.Adapt != nil && rule.Mode == policy.ModeServer && spec.Consistency.Mode != ModeQuorum {
		return rule, fieldf("policy.mode", "mode %q leaves nothing to move; begin with mode %q or %q, or leave out adapt", policy.ModeServer,
			policy.ModeSwitch, policy.ModeHybrid)
	}
	return rule, nil
}

// admit takes a job with its plan and its slots, and reserves what else it needs of the switch. Errors: [*policy.FieldError]
// and *exhaustedError.
func (in *intent) admit(j *job) error {
	if err := j.spec.Consistency.allows(j.decision.Plan); err != nil {
		return err
	}
	var ok bool
	// Instance 0 is the flood group's.
	if j.rids, ok = firstFit(in.taken(func(j *job) span { return j.rids }), 1, 1<<16, j.spec.Ranks); !ok {
		return &exhaustedError{"replica numbers in a row", j.spec.Ranks, 0, "remove a job"}
	}
	if j.groups, ok = firstFit(in.taken(func(j *job) span { return j.groups }), floodGroup+1, p4rt.MaxGroup+1, groupsPerJob); !ok {
		return &exhaustedError{"multicast groups in a row", groupsPerJob, 0, "remove a job"}
	}
	if err := in.checkTables(j); err != nil {
		return err
	}
	j.id = in.freshID()
	in.jobs[j.spec.Name] = j
	return nil
}

// ruleOf returns the rule that the configuration has for a job: its own, or the one for all. It is complete.
func (in *intent) ruleOf(spec JobSpec) policy.Static {
	rule := in.cfg.Policy
	if spec.Policy != nil {
		rule = *spec.Policy
	}
	return rule.Complete(in.serverNames())
}

// deviates says in words in what the configuration would have a job otherwise, since it was changed; empty = in nothing.
func (in *intent) deviates(j *job) string {
	i := slices.IndexFunc(in.cfg.Jobs, func(spec JobSpec) bool { return spec.Name == j.spec.Name })
	switch {
	case i >= 0 && !in.cfg.Jobs[i].equal(j.spec):
		return "it keeps what it was created with; remove it and reload the configuration to have it as it is configured now"
	case !j.rule.Equal(in.ruleOf(j.spec)):
		return fmt.Sprintf("its plan was decided when the configuration had another policy or other servers; 'xagg job steer %s' gives it "+
			"another", j.spec.Name)
	}
	return ""
}

// renew makes a fresh incarnation of a job: packets of the old one must not count in the new one.
func (in *intent) renew(j *job) {
	j.id = in.freshID()
	j.members = nil
	j.recovering = recoverNot
	if j.change != nil { // what was asked for last holds
		j.plan = j.change.to
		j.change = nil
	}
	j.plan = j.newPlan(in.firstEpoch(), j.decision, j.spec.Ranks)
}

// freshID returns an id that no live job has, and that was not in use for as long as possible: ids go round.
func (in *intent) freshID() uint16 {
	for {
		id := in.nextID
		in.nextID++
		if id != 0 && in.byID(id) == nil {
			return id
		}
	}
}

// checkTables refuses a job whose entries would not fit the switch's tables, since the switch itself says no more than
// UNKNOWN.
func (in *intent) checkTables(j *job) error {
	need, used := tableUse(j), map[string]int{tableIPv4: len(in.cfg.Hosts) + len(in.cfg.Servers), tableARP: 1}
	for _, other := range in.jobs {
		if other == j {
			continue
		}
		for name, n := range tableUse(other) {
			used[name] += n
		}
	}
	for _, name := range slices.Sorted(maps.Keys(need)) {
		if size, known := in.sizes[name]; known && used[name]+need[name] > size {
			return &exhaustedError{"entries of table " + name, need[name], size - used[name], "remove a job"}
		}
	}
	return nil
}

// tableUse returns the number of entries that a job takes when all its ranks have joined.
func tableUse(j *job) map[string]int {
	use := map[string]int{tableJob: 1, tableReplica: j.spec.Ranks}
	for _, p := range j.plans() {
		use[tablePlan]++
		use[tableMember] += j.spec.Ranks
		use[tableServer] += len(p.decision.Servers)
		use[tableReturning] += len(p.decision.Servers)
	}
	return use
}
