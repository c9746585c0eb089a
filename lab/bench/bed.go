package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/goccy/go-yaml"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/bmv2/fault"
	"xagg/controller"
	"xagg/internal/endpoint"
	"xagg/lab"
	"xagg/lab/loop"
	"xagg/lab/netns"
	"xagg/lab/results"
	"xagg/lab/scenario"
	"xagg/lab/testbed"
	"xagg/policy"
	"xagg/wire"
	"xagg/xdp"
)

// Ports of the hosts' own programs.
const (
	serverPort = 19870 // of parameter servers; each job's is the next
	ringPort   = 19890 // of ranks that talk to each other
)

// BedConfig says what the runs of a scenario take place on.
type BedConfig struct {
	Switch       string // testbed.SwitchEngine or testbed.SwitchSimpleSwitch
	SimpleSwitch string // program of the latter; empty: the one on the PATH
	Modes        []scenario.Mode
	Log          *slog.Logger
}

// bed is the place of a scenario's runs on a testbed.
type bed struct {
	s        *scenario.Scenario
	topology lab.Topology
	bed      *testbed.Testbed
	meter    *meter
	file     string // the scenario's
	mode     string // where the servers' programs run
	agents   map[string]*endpoint.Conn
}

// Topology returns the machines of a scenario: workers, servers, and as many others for parameter servers.
func Topology(s *scenario.Scenario) (lab.Topology, error) {
	ranks := 0
	for _, j := range s.Jobs {
		ranks += j.Ranks
	}
	topology, err := lab.Star(ranks, s.Servers)
	if err != nil {
		return lab.Topology{}, err
	}
	for range s.Servers {
		topology.AddOther()
	}
	return topology, nil
}

// Spec returns the lab of a scenario's machines: their links, and what goes wrong on these.
func Spec(s *scenario.Scenario, topology lab.Topology) netns.Spec {
	rates := map[string]scenario.Rate{}
	var faults []fault.Spec
	for job := range s.Jobs {
		for rank := range s.Jobs[job].Ranks {
			host := topology.Workers[s.Host(job, rank)]
			rates[host.Name] = s.LinkRate(job, rank)
			if loss := s.Jobs[job].Loss[rank]; loss > 0 {
				faults = append(faults, fault.Spec{Port: host.Port, Drop: float64(loss), All: true, Seed: s.Seed})
			}
		}
	}
	spec := testbed.Spec(topology, func(h lab.Host) uint64 {
		if rate, ok := rates[h.Name]; ok {
			return uint64(rate)
		}
		return uint64(s.ServerRate())
	})
	spec.Faults = faults
	return spec
}

// OpenBed makes the place of a scenario's runs: a lab of network namespaces.
func OpenBed(ctx context.Context, s *scenario.Scenario, cfg BedConfig) (Place, error) {
	topology, err := Topology(s)
	if err != nil {
		return nil, err
	}
	hosts, err := netns.Create(ctx, Spec(s, topology))
	if err != nil {
		return nil, err
	}
	return OpenOn(ctx, hosts, s, testbed.Config{
		Topology: topology, Switch: cfg.Switch, SimpleSwitch: cfg.SimpleSwitch, Memory: memory(s, cfg.Modes), Log: cfg.Log,
	}, 0)
}

// OpenOn makes the place of a scenario's runs on hosts that exist; they are removed with it. switchPID is the process of a switch that
// runs already.
func OpenOn(ctx context.Context, hosts testbed.Hosts, s *scenario.Scenario, cfg testbed.Config, switchPID int) (Place, error) {
	t, err := testbed.Start(ctx, hosts, cfg)
	if err != nil {
		return nil, err
	}
	b := &bed{s: s, topology: cfg.Topology, bed: t, agents: map[string]*endpoint.Conn{}}
	if err := b.prepare(ctx, switchPID); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

func (b *bed) prepare(ctx context.Context, switchPID int) (err error) {
	text, err := yaml.Marshal(b.s)
	if err != nil {
		return fmt.Errorf("write the scenario: %w", err)
	}
	b.file = filepath.Join(b.bed.Hosts().Dir(), "scenario.yaml")
	if err := os.WriteFile(b.file, text, 0o644); err != nil {
		return err
	}
	var servers []string
	for _, h := range b.topology.Servers {
		servers = append(servers, h.Name)
		if b.agents[h.Name], err = endpoint.Dial(b.bed.AgentAddr(h.Name)); err != nil {
			return err
		}
	}
	now, err := api.NewControllerClient(b.bed.Controller()).Status(ctx, &api.StatusRequest{})
	if err != nil {
		return fmt.Errorf("ask the controller for its status: %w", err)
	}
	for _, s := range now.GetServers() {
		b.mode = s.GetInfo().GetMode()
	}
	b.meter, err = newMeter(b.bed, servers, switchPID)
	return err
}

// memory returns the memory of a server that has room for all jobs of a scenario in each of the modes, and for as much again while one
// incarnation follows another.
func memory(s *scenario.Scenario, modes []scenario.Mode) xdp.Size {
	most := 0
	for _, m := range modes {
		if m.Reducer() != scenario.XAgg || s.Skip(m) != "" {
			continue
		}
		slots := 0
		for job := range s.Jobs {
			slots += leaseRounds(s.Consistency(job, m), s.Jobs[job].Depth) * ((s.MaxElems(job, m) + wire.MaxLanes - 1) / wire.MaxLanes)
		}
		most = max(most, slots)
	}
	const mib = 1 << 20
	return (xdp.Size(2*most)*xdp.SlotSize + mib - 1) / mib * mib
}

// leaseRounds returns how many rounds servers keep of a job (docs/protocol.md, "Server slots").
func leaseRounds(c controller.Consistency, depth int) int {
	switch c.Mode {
	case controller.ModeQuorum:
		return c.Rounds
	case controller.ModeAsync:
		return 4
	}
	return 1 << bits.Len(uint(2*depth-1))
}

// XDPMode implements [Place].
func (b *bed) XDPMode() string { return b.mode }

// Healthy implements [Place].
func (b *bed) Healthy() bool { return b.bed.Dead() == nil }

// Close implements [Place].
func (b *bed) Close() error {
	var errs []error
	for _, conn := range b.agents {
		errs = append(errs, conn.Close())
	}
	if b.meter != nil {
		errs = append(errs, b.meter.close())
	}
	return errors.Join(append(errs, b.bed.Close())...)
}

// Run implements [Place].
func (b *bed) Run(ctx context.Context, mode scenario.Mode, seed uint64) (*results.Run, error) {
	limit := runLimit(b.s.Estimate(seed, mode))
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it took more than %v", limit))
	defer cancel()
	r := &bedRun{bed: b, mode: mode, seed: seed, record: newRecord(b.s, mode)}
	run, err := r.run(ctx)
	return run, errors.Join(err, b.bed.Dead())
}

// runLimit is how long a run may take of which an estimate is known.
func runLimit(estimate time.Duration) time.Duration { return 30*time.Second + 5*estimate }

// bedRun is a run of a scenario on a testbed.
type bedRun struct {
	*bed
	mode   scenario.Mode
	seed   uint64
	record *record

	workers, servers []*worker // processes
	looks            [2]*look  // at the beginning and at the end of the measured part
	looked           sync.WaitGroup
	mu               sync.Mutex
	errs             []error // of looks
}

func (r *bedRun) run(ctx context.Context) (_ *results.Run, err error) {
	jobs, remove, err := r.createJobs(ctx)
	defer func() { err = errors.Join(err, remove()) }()
	if err != nil {
		return nil, err
	}
	r.record.begins = func() {
		mark(r.workers, (*worker).begin)
		mark(r.servers, (*worker).begin)
		r.look(ctx, 0)
	}
	r.record.ends = func() {
		mark(r.workers, (*worker).end)
		mark(r.servers, (*worker).end)
		r.look(ctx, 1)
	}
	sampling, stop := context.WithCancel(ctx)
	sampler := r.sample(sampling, jobs)
	err = r.processes(ctx)
	stop()
	open := sampler()
	r.looked.Wait()
	if err = errors.Join(append(r.errs, err)...); err != nil {
		return nil, err
	}
	run := &results.Run{}
	if run.Jobs, err = r.record.jobs(r.seed); err != nil {
		return nil, err
	}
	for i := range jobs {
		run.Jobs[i].Slots, run.Jobs[i].Memory, run.Jobs[i].Open = jobs[i].slots, jobs[i].memory, open[i]
	}
	run.Usage = usage(r.looks[0], r.looks[1], sumUsed(r.workers), sumUsed(r.servers))
	run.Usage.Bytes = r.record.bytes(r.looks[0].at, r.looks[1].at)
	return run, nil
}

func mark(workers []*worker, moment func(*worker)) {
	for _, w := range workers {
		moment(w)
	}
}

func sumUsed(workers []*worker) (sum time.Duration) {
	for _, w := range workers {
		sum += w.used()
	}
	return sum
}

// look looks at the machine without holding up the reading of lines.
func (r *bedRun) look(ctx context.Context, i int) {
	r.looked.Go(func() {
		l, err := r.meter.look(ctx)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.looks[i] = l
		if err != nil {
			r.errs = append(r.errs, err)
		}
	})
}

// lease is what the controller has leased to a job.
type lease struct {
	id      uint32
	servers []string
	slots   int    // of the switch
	memory  uint64 // bytes on servers
}

// createJobs creates the jobs of a mode of this project; in others there are none. remove takes them away again.
func (r *bedRun) createJobs(ctx context.Context) (jobs []lease, remove func() error, err error) {
	client := api.NewControllerClient(r.bed.bed.Controller())
	var names []string
	remove = func() error {
		var errs []error
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		for _, name := range names {
			if _, err := client.RemoveJob(ctx, &api.RemoveJobRequest{Name: name}); err != nil {
				errs = append(errs, fmt.Errorf("remove job %s: %s", name, status.Convert(err).Message()))
			}
		}
		return errors.Join(errs...)
	}
	if r.mode.Reducer() != scenario.XAgg {
		return nil, remove, nil
	}
	before, err := client.Status(ctx, &api.StatusRequest{})
	if err != nil {
		return nil, remove, fmt.Errorf("ask the controller for its status: %w", err)
	}
	for i, j := range r.s.Jobs {
		job, err := client.CreateJob(ctx, r.request(i))
		if err != nil {
			return nil, remove, fmt.Errorf("create job %s: %s", j.Name, status.Convert(err).Message())
		}
		names = append(names, j.Name)
		after, err := client.Status(ctx, &api.StatusRequest{})
		if err != nil {
			return nil, remove, fmt.Errorf("ask the controller for its status: %w", err)
		}
		l := lease{id: job.Id, servers: job.Servers, slots: int(before.GetSwitch().GetSlotsFree()) - int(after.GetSwitch().GetSlotsFree())}
		for i, s := range after.GetServers() {
			l.memory += uint64(before.GetServers()[i].GetInfo().GetSlotsFree()-s.GetInfo().GetSlotsFree()) * xdp.SlotSize
		}
		jobs = append(jobs, l)
		before = after
	}
	return jobs, remove, nil
}

// request returns what job i is created with.
func (r *bedRun) request(i int) *api.CreateJobRequest {
	j, c := &r.s.Jobs[i], r.s.Consistency(i, r.mode)
	req := &api.CreateJobRequest{
		Name: j.Name, Ranks: uint32(j.Ranks), Depth: uint32(j.Depth), MaxElems: uint32(r.s.MaxElems(i, r.mode)),
		Policy: &api.Policy{Rule: policy.RuleStatic, Mode: string(r.mode.Policy()), Pool: uint32(j.Pool)},
		Consistency: &api.Consistency{
			Mode: string(c.Mode), Quorum: uint32(c.Quorum), WaitUs: uint32(c.Wait / time.Microsecond), Rounds: uint32(c.Rounds),
			Staleness: uint32(c.Staleness),
		},
	}
	if r.mode.Policy() == policy.ModeHybrid {
		for _, rank := range r.s.Steered(i) {
			req.Policy.Steer = append(req.Policy.Steer, uint32(rank))
		}
	}
	return req
}

// abortGrace is how long processes have to end by themselves when one of them has failed: what the others say then belongs to the
// picture.
const abortGrace = 2 * time.Second

// process is a program of a run. It is called what when it fails; its lines are given to line.
type process struct {
	what    string
	program testbed.Program
	line    func([]byte) error
}

// processes runs the processes of all jobs until they have ended. It returns what they failed of, the cause first.
func (r *bedRun) processes(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var all []process
	for job := range r.s.Jobs {
		dir := filepath.Join(r.bed.bed.Hosts().Dir(), "job-"+r.s.Jobs[job].Name)
		defer os.RemoveAll(dir)
		ranks, err := r.ranks(job, dir)
		if err != nil {
			return err
		}
		all = append(all, r.parameterServers(job)...)
		all = append(all, ranks...)
	}
	var group sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for _, p := range all {
		group.Go(func() {
			err := r.bed.bed.Run(ctx, p.program, p.line)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil || len(errs) > 0 && errors.Is(err, context.Canceled): // the latter was told to end
			case len(errs) == 0:
				time.AfterFunc(abortGrace, cancel)
				fallthrough
			default:
				errs = append(errs, fmt.Errorf("%s: %w", p.what, err))
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// counted has the CPU time of a process counted.
func counted(as *[]*worker, p process) process {
	w := &worker{}
	*as = append(*as, w)
	p.program.Started, p.program.Ended = w.started, w.over
	return p
}

// parameterServers returns the parameter servers of a job, of modes that have some.
func (r *bedRun) parameterServers(job int) (all []process) {
	if r.mode.Reducer() != scenario.ParameterServer {
		return nil
	}
	name := r.s.Jobs[job].Name
	for i, addr := range r.peers(job) {
		host := r.topology.Others[i].Name
		all = append(all, counted(&r.servers, process{
			what: fmt.Sprintf("job %s, parameter server %d", name, i),
			program: testbed.Program{
				Name: fmt.Sprintf("%s-%s", host, name), Host: host,
				Args: []string{"bench", "parameter-server", "--scenario", r.file, "--job", name, "--listen", addr},
			},
			line: func([]byte) error { return nil },
		}))
	}
	return all
}

// ranks returns the workers of a job. What they need of files is written to dir, which does not exist.
func (r *bedRun) ranks(job int, dir string) (all []process, err error) {
	programs := r.workerPrograms(job)
	if library, ok := libraries[r.mode.Reducer()]; ok {
		var hosts []string
		for rank := range r.s.Jobs[job].Ranks {
			hosts = append(hosts, r.host(job, rank).Name)
		}
		if programs, err = peerPrograms(library, dir, r.s, r.seed, job, r.bed.bed.Hosts(), hosts); err != nil {
			return nil, err
		}
	}
	for rank, program := range programs {
		all = append(all, counted(&r.workers, process{
			what:    fmt.Sprintf("job %s, rank %d", r.s.Jobs[job].Name, rank),
			program: program,
			line:    func(line []byte) error { return r.record.take(job, rank, line) },
		}))
	}
	return all, nil
}

// workerPrograms returns the programs of a job's workers in modes for which this program has some.
func (r *bedRun) workerPrograms(job int) (programs []testbed.Program) {
	others := []string{"--controller", r.bed.bed.ControllerAddr()}
	if r.mode.Reducer() != scenario.XAgg {
		others = []string{"--peers", strings.Join(r.peers(job), ",")}
	}
	for rank := range r.s.Jobs[job].Ranks {
		host := r.host(job, rank)
		args := []string{"bench", "worker", "--scenario", r.file, "--seed", strconv.FormatUint(r.seed, 10), "--job", r.s.Jobs[job].Name,
			"--rank", strconv.Itoa(rank), "--mode", string(r.mode), "--ip", host.IP.String()}
		programs = append(programs, testbed.Program{Name: host.Name, Host: host.Name, Args: append(args, others...)})
	}
	return programs
}

func (r *bedRun) host(job, rank int) lab.Host { return r.topology.Workers[r.s.Host(job, rank)] }

// peers returns the addresses that the workers of a job have to know in modes without a controller: those of its parameter servers, or
// of all its ranks.
func (r *bedRun) peers(job int) (peers []string) {
	if r.mode.Reducer() == scenario.ParameterServer {
		for _, h := range r.topology.Others {
			peers = append(peers, netip.AddrPortFrom(h.IP, uint16(serverPort+job)).String())
		}
		return peers
	}
	for rank := range r.s.Jobs[job].Ranks {
		peers = append(peers, netip.AddrPortFrom(r.host(job, rank).IP, ringPort).String())
	}
	return peers
}

// sampleEvery is how often servers are asked for the slots that are open. An answer costs a server's agent as many reads of memory
// as the job has slots there.
const sampleEvery = 250 * time.Millisecond

// sample looks at the open slots of jobs until ctx ends. The function that it returns waits for that, and returns the samples by job.
func (r *bedRun) sample(ctx context.Context, jobs []lease) func() [][]results.Sample {
	samples := make([][]results.Sample, len(jobs))
	done := make(chan struct{})
	began := loop.Now()
	go func() {
		defer close(done)
		tick := time.NewTicker(sampleEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			for i, job := range jobs {
				if len(job.servers) == 0 {
					continue
				}
				sample := results.Sample{Time: (loop.Now() - began).Seconds()}
				for _, name := range job.servers {
					reply, err := api.NewAgentClient(r.agents[name]).OpenSlots(ctx, &api.OpenSlotsRequest{Job: job.id})
					if err != nil {
						break // the end of ctx, or the server's, which is noticed elsewhere
					}
					sample.Server += len(reply.Slots)
				}
				samples[i] = append(samples[i], sample)
			}
		}
	}()
	return func() [][]results.Sample { <-done; return samples }
}
