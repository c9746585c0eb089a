package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/lab"
	"xagg/lab/loop"
	"xagg/lab/reducer"
	"xagg/lab/results"
	"xagg/lab/scenario"
	"xagg/lab/testbed"
	"xagg/xdp"
)

// Ports of the hosts' own programs.
const (
	serverPort = 19870 // of parameter servers; each job's is the next
	ringPort   = 19890 // of ranks that talk to each other
)

// Run implements [Place].
func (b *bed) Run(ctx context.Context, mode scenario.Mode, seed uint64) (*results.Run, error) {
	limit := runLimit(b.s.Estimate(seed, mode))
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it took more than %v", limit))
	defer cancel()
	r := &bedRun{bed: b, mode: mode, seed: seed, record: newRecord(b.s, mode)}
	run, err := r.run(ctx)
	return run, errors.Join(err, b.testbed.Dead())
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
	if err := remove(); err != nil { // which ends what the controller tells of policies
		return nil, err
	}
	run := &results.Run{}
	if run.Jobs, err = r.record.jobs(r.seed); err != nil {
		return nil, err
	}
	for i, l := range jobs {
		j := &run.Jobs[i]
		j.Slots, j.Memory, j.Open = l.slots, l.memory, open[i]
		if l.decided == nil {
			continue
		}
		if err := l.decided.read(j, func(rank int, at time.Duration) int { return r.record.under(i, rank, at) }); err != nil {
			return nil, err
		}
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
	slots   int        // of the switch
	memory  uint64     // bytes on servers
	decided *decisions // nil where the plan stays
}

// createJobs creates the jobs of a mode of this project; in others there are none. remove takes those away that are there.
func (r *bedRun) createJobs(ctx context.Context) (jobs []lease, remove func() error, err error) {
	client := api.NewControllerClient(r.testbed.Controller())
	var names []string
	remove = func() error {
		var errs []error
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		for ; len(names) > 0; names = names[1:] {
			name := names[0]
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
		job, err := client.CreateJob(ctx, reducer.JobRequest(r.s, i, r.mode))
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
		if r.mode.Rule() != "" {
			if l.decided, err = follow(ctx, client, j.Name); err != nil {
				return nil, remove, err
			}
		}
		jobs = append(jobs, l)
		before = after
	}
	return jobs, remove, nil
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
		dir := filepath.Join(r.testbed.Hosts().Dir(), "job-"+r.s.Jobs[job].Name)
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
			err := r.testbed.Run(ctx, p.program, p.line)
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
		if programs, err = peerPrograms(library, dir, r.s, r.seed, job, r.testbed.Hosts(), hosts); err != nil {
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
	others := []string{"--controller", r.testbed.ControllerAddr()}
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

// sampleEvery is how often servers are asked for the slots that are open, at most. An answer costs a server's agent about a
// microsecond for each slot that the job has there; it is to take no more than a thousandth of the time.
const sampleEvery = 250 * time.Millisecond

func samplePeriod(jobs []lease) time.Duration {
	var cost time.Duration
	for _, job := range jobs {
		cost += time.Duration(job.memory/xdp.SlotSize) * time.Microsecond
	}
	return max(sampleEvery, 1000*cost)
}

// sample looks at the open slots of jobs until ctx ends. The function that it returns waits for that, and returns the samples by job.
func (r *bedRun) sample(ctx context.Context, jobs []lease) func() [][]results.Sample {
	samples := make([][]results.Sample, len(jobs))
	done := make(chan struct{})
	began := loop.Now()
	go func() {
		defer close(done)
		tick := time.NewTicker(samplePeriod(jobs))
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
						return // the end of ctx, or the server's, which is noticed elsewhere
					}
					sample.Server += len(reply.Slots)
				}
				samples[i] = append(samples[i], sample)
			}
		}
	}()
	return func() [][]results.Sample { <-done; return samples }
}
