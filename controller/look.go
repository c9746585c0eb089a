package controller

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/policy/telemetry"
)

// lookTimeout bounds an answer of one device.
const lookTimeout = 5 * time.Second

// hearing is the last that a rank has told of its progress.
type hearing struct {
	progress *api.Progress // nil = nothing
	at       time.Time
}

// counting is what the controller has seen of a rank's count of packets at the switch.
type counting struct {
	packets uint64
	first   time.Time // when it was looked at first; zero = never
	grown   time.Time // when it was first seen as it is
}

// see takes a count. A plan that is removed takes its part of the count along, so any other number is news.
func (c *counting) see(now time.Time, packets uint64) {
	if c.first.IsZero() {
		*c = counting{packets, now, now}
	}
	if packets != c.packets {
		c.packets, c.grown = packets, now
	}
}

// Why implements the API.
func (s *service) Why(ctx context.Context, req *api.WhyRequest) (*api.WhyReply, error) {
	reply, err := s.c.why(ctx, req.GetJob())
	if err != nil {
		return nil, apiError(err)
	}
	return reply, nil
}

// target is what is looked at of a running job: where the devices have its chunks.
type target struct {
	id    uint16
	ranks int
	plans []targetPlan
}

type targetPlan struct {
	epoch   uint16
	cohort  uint64
	servers []string
	half    span // of the switch's slots
}

// target returns what is to be looked at of a job, nil if it does not run or recovers: its ranks stand still then.
func (c *Controller) target(name string) (t *target, meet *rendezvous) {
	c.mu.Lock()
	defer c.mu.Unlock()
	j := c.intent.jobs[name]
	if j == nil {
		return nil, nil
	}
	meet = c.meets[name]
	if meet.state != stateRunning || meet.recovery.underWay() {
		return nil, meet
	}
	t = &target{id: j.id, ranks: j.spec.Ranks}
	for _, p := range j.plans() {
		t.plans = append(t.plans, targetPlan{
			epoch: p.epoch, cohort: p.decision.Cohort, servers: p.decision.Servers,
			half: span{j.half(p), 2 * p.decision.Pool},
		})
	}
	return t, meet
}

// look is what was read of a job.
type look struct {
	chunks []sight
	counts []uint64          // of each rank's packets at the switch; nil = it could not be asked
	before []uint64          // the same at the beginning of the look
	began  time.Time         // of the look
	blind  map[string]string // devices that could not be asked, with the reason
}

// why looks at a job and explains it. One caller looks at a time, so that the devices answer a bounded number of
// questions, however many ask.
func (c *Controller) why(ctx context.Context, name string) (*api.WhyReply, error) {
	select {
	case c.looking <- struct{}{}:
		defer func() { <-c.looking }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	t, meet := c.target(name)
	if meet == nil {
		return nil, noJob(name)
	}
	seen := look{began: time.Now(), blind: c.missed()}
	if t != nil {
		var err error
		if seen, err = c.look(ctx, t); err != nil {
			return nil, err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	j := c.intent.jobs[name]
	if j == nil || c.meets[name] != meet {
		return nil, status.Errorf(codes.Aborted, "job %q was removed or began anew meanwhile; ask again", name)
	}
	e := meet.evidence(time.Now(), seen)
	e.job = c.describe(j)
	return explain(e), nil
}

// missed returns the devices that are not there, with the reason.
func (c *Controller) missed() map[string]string {
	missed := make(map[string]string)
	reply := c.links.status()
	if !reply.Switch.Ready {
		missed[atSwitch] = reply.Switch.Error
	}
	for _, s := range reply.Servers {
		if !s.Ready {
			missed[s.Name] = s.Error
		}
	}
	return missed
}

// look asks the devices of a job twice, for what is incomplete at the second look too, and what comes in between. It fails
// only with ctx; a device that does not answer is named instead.
func (c *Controller) look(ctx context.Context, t *target) (look, error) {
	l := look{began: time.Now(), blind: make(map[string]string)}
	first := c.glance(ctx, t, allSlots(t), nil)
	var again []slotIndex
	for _, s := range first.chunks {
		switch {
		case s.at != atSwitch:
		case s.closed:
			l.chunks = append(l.chunks, s)
		default:
			again = append(again, s.slot)
		}
	}
	select {
	case <-time.After(stuckAfter + time.Millisecond): // what was incomplete at the first look is stuck
	case <-ctx.Done():
		return l, ctx.Err()
	}
	second := c.glance(ctx, t, again, first.blind)
	l.chunks = append(l.chunks, second.chunks...)
	if first.counts != nil && second.counts != nil {
		l.before, l.counts = first.counts, second.counts
	}
	maps.Copy(l.blind, first.blind)
	maps.Copy(l.blind, second.blind)
	return l, ctx.Err()
}

// glance asks the devices of a job once: the switch for the slots given, and the servers; not those that have not answered
// before.
func (c *Controller) glance(ctx context.Context, t *target, slots []slotIndex, silent map[string]string) look {
	l := look{blind: make(map[string]string)}
	var mu sync.Mutex
	var asking sync.WaitGroup
	note := func(name string, chunks []sight, counts []uint64, err error) {
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			l.blind[name] = err.Error()
			return
		}
		l.chunks = append(l.chunks, chunks...)
		if counts != nil {
			l.counts = counts
		}
	}
	if silent[atSwitch] == "" {
		asking.Go(func() {
			chunks, counts, err := c.readSwitch(ctx, t, slots)
			note(atSwitch, chunks, counts, err)
		})
	}
	for _, name := range t.servers() {
		if silent[name] != "" {
			continue
		}
		asking.Go(func() {
			chunks, err := c.readServer(ctx, t, name)
			note(name, chunks, nil, err)
		})
	}
	asking.Wait()
	return l
}

// servers returns the names of the servers of a job's plans.
func (t *target) servers() (names []string) {
	for _, p := range t.plans {
		names = append(names, p.servers...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// allSlots returns the slots of the halves of a job's plans that have a cohort.
func allSlots(t *target) (indexes []slotIndex) {
	for _, p := range t.plans {
		for i := range p.half.size {
			if p.cohort != 0 {
				indexes = append(indexes, slotIndex(p.half.base+i))
			}
		}
	}
	return indexes
}

// readSwitch reads slots of a job, without those that are another's, and the counts of its ranks' packets.
func (c *Controller) readSwitch(ctx context.Context, t *target, indexes []slotIndex) ([]sight, []uint64, error) {
	session, err := c.links.session()
	if err != nil {
		return nil, nil, err
	}
	headers, err := c.readSlots(ctx, indexes)
	if err != nil {
		return nil, nil, err
	}
	var seen []sight
	for i, h := range headers {
		for _, p := range t.plans {
			if h.Job != t.id || h.Epoch != p.epoch {
				continue
			}
			seen = append(seen, sight{
				at: atSwitch, slot: i, epoch: h.Epoch, place: spot{h.Round, h.Chunk}, have: h.Contributors,
				closed: h.Reason != 0 || h.Contributors == p.cohort, age: microseconds(uint64(h.SpreadUs)),
			})
		}
	}
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	read, err := session.Counts(ctx, nil, []string{tableMember})
	if err != nil {
		return nil, nil, err
	}
	traffic := members(read)
	counts := make([]uint64, t.ranks)
	for rank := range counts {
		for _, p := range t.plans {
			counts[rank] += traffic[telemetry.Member{Job: t.id, Epoch: p.epoch, Rank: rank}].Packets
		}
	}
	return seen, counts, nil
}

// readServer reads the open chunks of a job at a server.
func (c *Controller) readServer(ctx context.Context, t *target, name string) ([]sight, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	client, err := c.links.agent(name)
	if err != nil {
		return nil, err
	}
	reply, err := client.OpenSlots(ctx, &api.OpenSlotsRequest{Job: uint32(t.id)})
	if err != nil {
		return nil, errors.New(status.Convert(err).Message())
	}
	var seen []sight
	for _, s := range reply.GetSlots() {
		if !slices.ContainsFunc(t.plans, func(p targetPlan) bool { return uint32(p.epoch) == s.GetEpoch() }) {
			continue // of a plan that is no more
		}
		seen = append(seen, sight{
			at: name, epoch: uint16(s.GetEpoch()), place: spot{s.GetRound(), s.GetChunk()}, have: s.GetContributors(),
			age: microseconds(s.GetAgeUs()),
		})
	}
	return seen, nil
}

// evidence returns what a look and what was known before say together.
func (r *rendezvous) evidence(now time.Time, l look) *evidence {
	e := &evidence{
		chunks: l.chunks, blind: l.blind,
		hosts: make([]string, len(r.seats)), reports: make([]report, len(r.seats)),
	}
	if rec := r.recovery; rec.underWay() {
		e.recovery = &recoveryEvidence{rec.lacks(), rec.asks(), now.Sub(rec.began)}
	}
	if l.counts != nil {
		e.traffic = make([]traffic, len(r.seats))
	}
	for rank, s := range r.seats {
		if s == nil {
			continue
		}
		e.hosts[rank] = s.member.host.Name
		if s.heard.progress != nil {
			e.reports[rank] = report{s.heard.progress, now.Sub(s.heard.at)}
		}
		if l.counts != nil {
			s.counted.see(l.began, l.before[rank])
			s.counted.see(now, l.counts[rank])
			e.traffic[rank] = traffic{s.counted.packets, now.Sub(s.counted.grown)}
		}
	}
	return e
}
