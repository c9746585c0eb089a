package timing

import (
	"fmt"
	"math/rand/v2"
	"time"

	"xagg/agg"
	"xagg/controller"
	"xagg/lab/reducer"
	"xagg/lab/scenario"
	"xagg/policy"
	"xagg/policy/adapt"
	"xagg/policy/place"
	"xagg/policy/telemetry"
	"xagg/wire"
)

// Modes returns the modes that can be simulated, in the order in which reports have them.
func Modes() []scenario.Mode {
	var modes []scenario.Mode
	for _, m := range scenario.Modes() {
		if m.Reducer() == scenario.XAgg {
			modes = append(modes, m)
		}
	}
	return modes
}

// ParseMode returns the mode of that name.
func ParseMode(name string) (scenario.Mode, error) {
	m, err := scenario.ParseMode(name)
	if err == nil && m.Reducer() != scenario.XAgg {
		return "", fmt.Errorf("mode %q: its traffic is TCP's, which is not simulated; want one of %v", name, Modes())
	}
	return m, err
}

// Options say how a scenario is simulated.
type Options struct {
	Mode  scenario.Mode
	Seed  uint64 // of computation times, losses and the rest
	Costs Costs  // see [Lab]
	// Adapt is the policy of the modes whose plan follows what is measured; nil = the mode's rule with the default limits.
	Adapt *adapt.Config
	// Compute, if set, is how long a rank of a job computes in a round, instead of what the scenario says.
	Compute func(job, rank, round int) time.Duration
	// Watch, if set, hears of every decision about the plan of a job, and from what it was made, as long as the call lasts.
	Watch func(job int, s *telemetry.Snapshot, d *adapt.Decision)
	// Slots is the number of slots of the switch; 0 = DefaultSlots.
	Slots int
}

// DefaultSlots is the number of slots of the switch that comes with this project, p4/xagg.p4.
const DefaultSlots = 4096

// world is a run.
type world struct {
	s      *scenario.Scenario
	opts   Options
	costs  Costs
	agenda agenda
	rng    *rand.Rand
	packet wire.Packet // that is being handled

	sw       *agg.Switch
	pipeline station
	servers  []*server
	hosts    []host // by address; 0 is the service's
	jobs     []*job
	devices  *devices // nil unless the plan of a job follows what is measured
	failure  error
}

// server is an aggregation server.
type server struct {
	name       string
	aggregator *agg.Server
	station    station
	slots      uint32 // that are leased
}

// job is a job.
type job struct {
	number      int // of the scenario's
	id          uint16
	spec        *scenario.Job
	consistency controller.Consistency
	rounds      uint32 // that servers keep
	chunks      uint32 // of a round, at most
	base        uint32 // of its slots on the switch
	serverBases []uint32
	ranks       []*rank
	left        int // ranks that have not finished

	plan      policy.Plan // the newest one
	epoch     uint16      // of it
	installed map[uint16]*installed
	auto      *auto // nil unless the plan follows what is measured
}

// installed is a plan on switch and servers.
type installed struct {
	policy.Plan
	servers []int // numbers
}

func (j *job) all() uint64 { return ^uint64(0) >> (wire.MaxRanks - len(j.ranks)) }

// byID returns the job of an id, or one that has no plan.
func (w *world) byID(id uint16) *job {
	if i := int(id) - 1; i >= 0 && i < len(w.jobs) {
		return w.jobs[i]
	}
	return &job{}
}

// serverAddress returns a server's address: behind those of all workers.
func (w *world) serverAddress(number int) address {
	return address(len(w.hosts) - len(w.servers) + number)
}

func (w *world) failf(format string, args ...any) {
	if w.failure == nil {
		w.failure = fmt.Errorf(format, args...)
	}
}

// longest is how much simulated time a run may take: a job that does not get on ends as an error.
const longest = 24 * time.Hour

// Run simulates a scenario and returns what it predicts for each of its jobs. It fails where the scenario cannot be run in the
// mode, where the switch or a server has not room enough, and where an all-reduce does not end.
func Run(s *scenario.Scenario, opts Options) ([]Prediction, error) {
	if why := s.Skip(opts.Mode); why != "" {
		return nil, fmt.Errorf("simulate scenario %s in mode %s: %s", s.Name, opts.Mode, why)
	}
	w, err := newWorld(s, opts)
	if err == nil {
		err = w.run()
	}
	if err != nil {
		return nil, fmt.Errorf("simulate scenario %s in mode %s: %w", s.Name, opts.Mode, err)
	}
	var out []Prediction
	for _, j := range w.jobs {
		out = append(out, w.predict(j))
	}
	return out, nil
}

func newWorld(s *scenario.Scenario, opts Options) (*world, error) {
	if opts.Slots == 0 {
		opts.Slots = DefaultSlots
	}
	w := &world{s: s, opts: opts, costs: opts.Costs, rng: rand.New(rand.NewPCG(opts.Seed, 0x71413)), sw: agg.NewSwitch(opts.Slots)}
	w.pipeline = station{agenda: &w.agenda, serve: w.switched, cost: w.costs.SwitchPacket}
	w.hosts = make([]host, 1)
	for number := range s.Jobs {
		j := &job{number: number, id: uint16(number + 1), spec: &s.Jobs[number], epoch: 1, installed: map[uint16]*installed{}}
		w.jobs = append(w.jobs, j)
		for r := range j.spec.Ranks {
			rate, loss := float64(s.LinkRate(number, r)), float64(j.spec.Loss[r])
			k := &rank{world: w, job: j, number: r, address: address(len(w.hosts))}
			j.ranks = append(j.ranks, k)
			w.hosts = append(w.hosts, host{newLine(rate, loss), newLine(rate, loss), k.receive})
		}
	}
	for i := range s.Servers {
		v := &server{name: fmt.Sprintf("s%d", i)}
		v.station = station{agenda: &w.agenda, serve: func(f frame) time.Duration { return w.served(i, f) }, cost: w.costs.ServerPacket}
		w.servers = append(w.servers, v)
		rate := float64(s.ServerRate())
		w.hosts = append(w.hosts, host{newLine(rate, 0), newLine(rate, 0), v.station.arrive})
	}
	if err := w.create(); err != nil {
		return nil, err
	}
	for _, v := range w.servers {
		v.aggregator = agg.NewServer(int(v.slots))
	}
	for _, j := range w.jobs {
		if err := w.install(j, j.epoch, j.plan); err != nil {
			return nil, err
		}
		for _, k := range j.ranks {
			k.start()
		}
		if j.auto != nil {
			j.auto.start()
			if w.devices == nil {
				w.watchDevices()
			}
		}
	}
	return w, nil
}

// create decides the jobs' first plans as a controller does that begins with them, and leases what they need.
func (w *world) create() error {
	problem := place.Problem{Switches: []place.Switch{{Slots: w.opts.Slots}}, Reserve: controller.DefaultReserve}
	for _, v := range w.servers {
		problem.Servers = append(problem.Servers, place.Server{Name: v.name})
	}
	for _, j := range w.jobs {
		ask, err := w.ask(j)
		if err != nil {
			return fmt.Errorf("job %s: %w", j.spec.Name, err)
		}
		problem.Jobs = append(problem.Jobs, ask)
	}
	placed, err := problem.Solve()
	if err != nil {
		return err
	}
	for i, j := range w.jobs {
		j.plan, j.base = placed[i].Plan, uint32(placed[i].Base)
		for _, v := range w.servers { // an adaptive job may come to any of them
			j.serverBases = append(j.serverBases, v.slots)
			if len(j.plan.Servers) > 0 || j.auto != nil {
				v.slots += j.rounds * j.chunks
			}
		}
	}
	return nil
}

// ask returns what a job asks for.
func (w *world) ask(j *job) (place.Job, error) {
	mode := w.opts.Mode
	j.consistency = w.s.Consistency(j.number, mode)
	j.rounds = uint32(j.consistency.ServerRounds(j.spec.Depth))
	j.chunks = uint32((w.s.MaxElems(j.number, mode) + wire.MaxLanes - 1) / wire.MaxLanes)
	req := reducer.JobRequest(w.s, j.number, mode)
	rule := policy.Static{Mode: policy.Mode(req.Policy.Mode), Pool: int(req.Policy.Pool)}
	for _, rank := range req.Policy.Steer {
		rule.Steer = append(rule.Steer, int(rank))
	}
	if req.Adapt != "" {
		cfg, err := adapt.Parse("adapt", []byte(req.Adapt))
		if err != nil {
			return place.Job{}, err
		}
		if w.opts.Adapt != nil {
			cfg = *w.opts.Adapt
		}
		if err := w.adapt(j, &cfg); err != nil {
			return place.Job{}, err
		}
	}
	return place.Job{
		Input: w.input(j), Weight: 1, Rule: rule, Steerable: j.auto != nil, Memory: uint64(j.rounds) * uint64(j.chunks),
	}, nil
}

// input is what a job's plans are decided from.
func (w *world) input(j *job) policy.Input {
	return policy.Input{
		Job: j.spec.Name, Ranks: len(j.ranks), Servers: w.names(), Pool: j.plan.Pool,
		Quorum: j.consistency.Quorum, Wait: j.consistency.Wait,
	}
}

func (w *world) names() (names []string) {
	for _, v := range w.servers {
		names = append(names, v.name)
	}
	return names
}

// install puts a plan on the servers and then on the switch.
func (w *world) install(j *job, epoch uint16, plan policy.Plan) error {
	p := w.resolve(plan)
	for _, number := range p.servers {
		if err := w.installServer(j, epoch, plan, number); err != nil {
			return err
		}
	}
	return w.installSwitch(j, epoch, p)
}

// resolve finds a plan's servers.
func (w *world) resolve(plan policy.Plan) *installed {
	p := &installed{Plan: plan}
	for _, name := range plan.Servers {
		for number, v := range w.servers {
			if v.name == name {
				p.servers = append(p.servers, number)
			}
		}
	}
	return p
}

func (w *world) installServer(j *job, epoch uint16, plan policy.Plan, number int) error {
	c := &j.consistency
	return w.servers[number].aggregator.Install(agg.ServerPlan{
		Job: j.id, Epoch: epoch, Ranks: j.all(), Base: j.serverBases[number], Chunks: j.chunks, Rounds: j.rounds,
		Quorum: uint32(plan.Quorum), WaitUs: uint32(plan.Wait.Microseconds()),
		Async: c.Mode == controller.ModeAsync, Staleness: uint32(c.Staleness),
	})
}

func (w *world) installSwitch(j *job, epoch uint16, p *installed) error {
	members := map[uint8]agg.Member{}
	for _, k := range j.ranks {
		members[uint8(k.number)] = agg.Member{Port: uint16(k.address), Src: uint32(k.address)}
	}
	var ports []uint16
	for _, number := range p.servers {
		ports = append(ports, uint16(w.serverAddress(number)))
	}
	j.installed[epoch] = p
	pool := uint32(p.Pool)
	return w.sw.Install(agg.SwitchPlan{
		Job: j.id, Epoch: epoch, Ranks: j.all(), Cohort: p.Cohort, Servers: len(p.servers), Base: j.base + uint32(epoch%2)*2*pool, Pool: pool,
		Quorum: p.Quorum != 0, WaitUs: uint32(p.Wait.Microseconds()),
	}, members, ports)
}

// run lets everything happen until all jobs are through.
func (w *world) run() error {
	for w.failure == nil && w.running() {
		if !w.agenda.next() {
			return fmt.Errorf("nothing happens any more after %v, and not all ranks are through", w.agenda.now)
		}
		if w.agenda.now > longest {
			return fmt.Errorf("not all ranks are through after %v", longest)
		}
	}
	return w.failure
}

func (w *world) running() bool {
	for _, j := range w.jobs {
		if j.left > 0 {
			return true
		}
	}
	return false
}
