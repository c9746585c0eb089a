package scenario

import (
	"slices"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
)

// In a slow scenario everything takes as much longer as it says, so that shares stay. It can be written and read again.
func TestSlow(t *testing.T) {
	s := &Scenario{
		Name: "mixed", About: "All kinds.", Servers: 1, Warmup: 1, Rounds: 2, Links: Links{Worker: 40e6},
		Jobs: []Job{
			{Name: "a", Ranks: 4, Depth: 1, Pool: 8, Tensors: Tensors{Sizes: []int{80000, 8001, 3}}, Links: map[int]Rate{3: 10e6},
				Compute: Compute{Mean: 50 * time.Millisecond, Slow: map[int]float64{1: 3}}, Quorum: &Quorum{Ranks: 3, Wait: time.Millisecond}},
			{Name: "b", Ranks: 2, Depth: 1, Tensors: Tensors{Model: "transformer", Divide: 10, Bucket: 100_000},
				Compute: Compute{Mean: 50 * time.Millisecond}},
		},
	}
	before, err := yaml.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	text, err := yaml.Marshal(s.Slow(2))
	if err != nil {
		t.Fatal(err)
	}
	d, err := Parse("slow.yaml", text)
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if d.Name != "mixed-by-4" || d.About != "All kinds. Times are multiplied by 2, sizes divided by 2, and rates divided by 4." {
		t.Errorf("it is called %q: %q", d.Name, d.About)
	}
	if got, want := d.Jobs[0].Tensors.Buckets(), []int{40000, 4001, 2}; !slices.Equal(got, want) {
		t.Errorf("buckets %v, want %v", got, want)
	}
	if got, want := d.Jobs[1].Tensors.Buckets(), s.Jobs[1].Tensors.Buckets(); len(got) != len(want) {
		t.Errorf("%d buckets of a model, want %d", len(got), len(want))
	}
	if d.LinkRate(0, 0) != 10e6 || d.LinkRate(0, 3) != 2.5e6 || d.ServerRate() != s.ServerRate()/4 {
		t.Errorf("links %v and %v, servers' %v", d.LinkRate(0, 0), d.LinkRate(0, 3), d.ServerRate())
	}
	if j := d.Jobs[0]; j.Pool != 8 || d.Jobs[1].Pool != 0 || j.Quorum.Wait != 2*time.Millisecond {
		t.Errorf("pools %d and %d, wait %v", j.Pool, d.Jobs[1].Pool, j.Quorum.Wait)
	}
	for rank := range 4 {
		if got, want := d.Compute(1, 0, rank, 0), 2*s.Compute(1, 0, rank, 0); got != want {
			t.Errorf("rank %d computes %v, want %v", rank, got, want)
		}
	}
	// Sizes are rounded.
	if got, want := d.Ideal(1, 0, "sync").Span(0).Seconds(), 2*s.Ideal(1, 0, "sync").Span(0).Seconds(); got < 0.999*want || got > 1.001*want {
		t.Errorf("the ideal schedule takes %v s, want %v", got, want)
	}
	if after, err := yaml.Marshal(s); err != nil || string(after) != string(before) {
		t.Errorf("the scenario itself has changed: %v\n%s", err, after)
	}
	if s.Slow(1) != s {
		t.Error("made slow once it is another one")
	}
}
