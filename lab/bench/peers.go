package bench

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"time"

	"xagg/lab/netns"
	"xagg/lab/peers"
	"xagg/lab/scenario"
	"xagg/lab/testbed"
)

// peerPlan returns what the ranks of a job do under a seed when a library sums: the same as in all other modes.
func peerPlan(s *scenario.Scenario, seed uint64, job int) (peers.Plan, error) {
	j := &s.Jobs[job]
	values, err := s.NewValues(seed, job)
	if err != nil {
		return peers.Plan{}, err
	}
	p := peers.Plan{Buckets: j.Tensors.Buckets()}
	rounds := s.Warmup + s.Rounds
	for rank := range j.Ranks {
		var ready [][]time.Duration
		for round := range rounds {
			ready = append(ready, s.Ready(job, s.Compute(seed, job, rank, round)))
		}
		p.Ready = append(p.Ready, ready)
	}
	for round := range min(rounds, scenario.ValuesPeriod) {
		var ranks [][]float32
		for rank := range j.Ranks {
			vector := make([]float32, j.Tensors.Values())
			values.Fill(vector, rank, round, 0)
			ranks = append(ranks, vector)
		}
		p.Values = append(p.Values, ranks)
	}
	return p, nil
}

// peerPrograms returns the programs of a job's ranks, whose hosts are named in their order, when a library sums. Their files are in
// dir, which must not exist; it may be removed when all have ended.
func peerPrograms(lib peers.Library, dir string, s *scenario.Scenario, seed uint64, job int, hosts testbed.Hosts, names []string) ([]testbed.Program, error) {
	plan, err := peerPlan(s, seed, job)
	if err != nil {
		return nil, fmt.Errorf("plan job %s: %w", s.Jobs[job].Name, err)
	}
	for _, name := range names {
		i := slices.IndexFunc(hosts.Hosts(), func(h netns.Host) bool { return h.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("plan job %s: no host %s", s.Jobs[job].Name, name)
		}
		plan.Hosts = append(plan.Hosts, peers.Host{Addr: hosts.Hosts()[i].Addr, Interface: hosts.Interface(name)})
	}
	commands, err := lib.Prepare(dir, plan)
	if err != nil {
		return nil, fmt.Errorf("job %s: %w", s.Jobs[job].Name, err)
	}
	var programs []testbed.Program
	for rank, c := range commands {
		cmd := exec.Command(c.Args[0], c.Args[1:]...)
		cmd.Env = append(os.Environ(), c.Env...)
		programs = append(programs, testbed.Program{Name: names[rank], Host: names[rank], Cmd: cmd})
	}
	return programs, nil
}
