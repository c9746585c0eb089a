package scenario

import (
	"slices"
	"strings"
	"testing"
	"time"

	"xagg/controller"
	"xagg/policy"
	"xagg/policy/adapt"
)

func TestModes(t *testing.T) {
	for _, m := range Modes() {
		if got, err := ParseMode(string(m)); err != nil || got != m {
			t.Errorf("%s is %s, %v", m, got, err)
		}
		// The name says it all.
		name, consistency, _ := strings.Cut(string(m), "/")
		if consistency == "" {
			consistency = "sync"
		}
		if m.Consistency() != controller.Mode(consistency) {
			t.Errorf("%s is %s", m, m.Consistency())
		}
		if name == "auto" {
			if !slices.Contains(adapt.Names(), m.Rule()) || m.Reducer() != XAgg {
				t.Errorf("%s has reducer %q and follows rule %q", m, m.Reducer(), m.Rule())
			}
			continue
		}
		if m.Rule() != "" {
			t.Errorf("%s follows rule %q", m, m.Rule())
		}
		if m.Reducer() == XAgg && m.Policy() != policy.Mode(name) || m.Reducer() != XAgg && (m.Policy() != "" || m.Reducer() != Reducer(name)) {
			t.Errorf("%s has reducer %q and policy %q", m, m.Reducer(), m.Policy())
		}
	}
	for _, m := range DefaultModes {
		if !slices.Contains(Modes(), m) {
			t.Errorf("%s is a default", m)
		}
	}
	for _, name := range []string{"", "udp", "quorum", "switch/quorum", "tcp/async"} {
		if m, err := ParseMode(name); err == nil || !strings.Contains(err.Error(), "want tcp, ring,") {
			t.Errorf("%q is %s, %v", name, m, err)
		}
	}
}

func TestSkip(t *testing.T) {
	s := one(3, Compute{Mean: time.Second})
	s.Jobs = append(s.Jobs, Job{Name: "two", Ranks: 2, Quorum: &Quorum{Ranks: 1}, Async: &Async{}})
	for mode, want := range map[Mode]string{
		"tcp": "", "switch": "", "server": "", "server/quorum": "job train has no quorum", "server/async": "job train is not async",
		"hybrid": "job two has 2 ranks",
	} {
		if got := s.Skip(mode); got != want && (want == "" || !strings.HasPrefix(got, want)) {
			t.Errorf("%s is skipped because %q, want %q", mode, got, want)
		}
	}
	s.Jobs[0].Quorum = &Quorum{Ranks: 2}
	s.Jobs = s.Jobs[:1]
	if got := s.Skip("hybrid/quorum"); got != "" {
		t.Errorf("a job with a quorum is skipped: %s", got)
	}
}

func TestSteered(t *testing.T) {
	s := one(5, Compute{Mean: 100 * time.Millisecond})
	j := &s.Jobs[0]
	for _, c := range []struct {
		change func()
		want   []int
	}{
		{func() {}, []int{4}},
		{func() { j.Links = map[int]Rate{1: 25_000_000, 2: 100_000_000} }, []int{1}},
		{func() { j.Loss = map[int]Share{3: 0.001} }, []int{1, 3}},
		{func() { j.Compute.Slow = map[int]float64{0: 2, 3: 1.5} }, []int{0, 3, 1}},
		{func() { j.Compute.Slow[2], j.Compute.Slow[4] = 3, 4 }, []int{4, 2, 0}},                            // two are left for the switch
		{func() { j.Compute.Episodes = []Episode{{Rank: 3, Factor: 11, From: 0, To: 10}} }, []int{3, 4, 2}}, // 5.5 times as long, on average
		{func() { j.Steer = []int{1} }, []int{1}},
	} {
		c.change()
		if got := s.Steered(0); !slices.Equal(got, c.want) {
			t.Errorf("%v are steered, want %v", got, c.want)
		}
	}
}

func TestHeterogeneous(t *testing.T) {
	for want, change := range map[string]func(*Job){
		"no":        func(*Job) {},
		"no, equal": func(j *Job) { j.Links, j.Compute.Slow = map[int]Rate{0: 50_000_000}, map[int]float64{1: 1} },
		"no, all":   func(j *Job) { j.Loss = map[int]Share{0: 0.1, 1: 0.1, 2: 0.1} },
		"compute":   func(j *Job) { j.Compute.Slow = map[int]float64{2: 1.1} },
		"first":     func(j *Job) { j.Compute.Slow = map[int]float64{0: 1.1} },
		"link":      func(j *Job) { j.Links = map[int]Rate{0: 49_000_000} },
		"loss":      func(j *Job) { j.Loss = map[int]Share{1: 0.001} },
		"jitter":    func(j *Job) { j.Compute.Jitter = 0.1 },
		"no, calm":  func(j *Job) { j.Compute.Episodes = []Episode{{Rank: 1, Factor: 1, From: 0, To: 5}} },
		"episode":   func(j *Job) { j.Compute.Episodes = []Episode{{Rank: 1, Factor: 2, From: 0, To: 5}} },
		"moving":    func(j *Job) { j.Compute.Moving = &Moving{Every: 1, Factor: 2} },
	} {
		s := one(3, Compute{Mean: time.Second})
		change(&s.Jobs[0])
		if got := s.Heterogeneous(); got == strings.HasPrefix(want, "no") {
			t.Errorf("%s: heterogeneous is %v", want, got)
		}
	}
}

// TestDerived: hosts, rates and what the controller is told.
func TestDerived(t *testing.T) {
	s := one(3, Compute{Mean: time.Second})
	s.Jobs[0].Tensors.Sizes = []int{10, 300, 256}
	s.Jobs[0].Links = map[int]Rate{1: 10_000_000}
	s.Jobs[0].Quorum, s.Jobs[0].Async = &Quorum{Ranks: 2, Wait: 3, Rounds: 16}, &Async{Staleness: 5}
	s.Jobs = append(s.Jobs, Job{Name: "two", Ranks: 2})
	if got := s.Host(1, 1); got != 4 {
		t.Errorf("the second rank of the second job is host %d", got)
	}
	if got := s.ServerRate(); got != 110_000_000 {
		t.Errorf("servers have %v", got)
	}
	if s.Links.Server = 5; s.ServerRate() != 5 {
		t.Errorf("servers have %v", s.ServerRate())
	}
	if got := s.MaxElems(0, "switch"); got != 300 {
		t.Errorf("%d lanes", got)
	}
	if got := s.MaxElems(0, "server/async"); got != 4*256 {
		t.Errorf("%d lanes of an async job", got)
	}
	for mode, want := range map[Mode]controller.Consistency{
		"switch":        {Mode: controller.ModeSync},
		"server/quorum": {Mode: controller.ModeQuorum, Quorum: 2, Wait: 3, Rounds: 16},
		"server/async":  {Mode: controller.ModeAsync, Staleness: 5},
	} {
		if got := s.Consistency(0, mode); got != want {
			t.Errorf("%s is %+v, want %+v", mode, got, want)
		}
	}
}
