package scenario

import (
	"slices"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
)

// A divided scenario takes as long: what is sent and what links carry is divided alike. It can be written and read again.
func TestDivide(t *testing.T) {
	s := &Scenario{
		Name: "mixed", About: "All kinds.", Servers: 1, Warmup: 1, Rounds: 2, Links: Links{Worker: 40e6},
		Jobs: []Job{
			{Name: "a", Ranks: 4, Depth: 1, Pool: 10, Tensors: Tensors{Sizes: []int{80000, 8001, 3}}, Links: map[int]Rate{3: 10e6},
				Compute: Compute{Mean: 50 * time.Millisecond}, Quorum: &Quorum{Ranks: 3, Wait: time.Millisecond}},
			{Name: "b", Ranks: 2, Depth: 1, Tensors: Tensors{Model: "transformer", Divide: 10, Bucket: 100_000}, Compute: Compute{Mean: 50 * time.Millisecond}},
		},
	}
	before, err := yaml.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	text, err := yaml.Marshal(s.Divide(8))
	if err != nil {
		t.Fatal(err)
	}
	d, err := Parse("divided.yaml", text)
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if d.Name != "mixed-by-8" || d.About != "All kinds. Rates and sizes are divided by 8." {
		t.Errorf("it is called %q: %q", d.Name, d.About)
	}
	if got, want := d.Jobs[0].Tensors.Buckets(), []int{10000, 1001, 1}; !slices.Equal(got, want) {
		t.Errorf("buckets %v, want %v", got, want)
	}
	if got, want := d.Jobs[1].Tensors.Buckets(), s.Jobs[1].Tensors.Buckets(); len(got) != len(want) {
		t.Errorf("%d buckets of a model, want %d", len(got), len(want))
	}
	if d.LinkRate(0, 0) != 5e6 || d.LinkRate(0, 3) != 1.25e6 || d.ServerRate() != s.ServerRate()/8 || d.Jobs[0].Pool != 2 || d.Jobs[1].Pool != 0 {
		t.Errorf("links %v and %v, servers' %v, pools %d and %d", d.LinkRate(0, 0), d.LinkRate(0, 3), d.ServerRate(), d.Jobs[0].Pool, d.Jobs[1].Pool)
	}
	if after, err := yaml.Marshal(s); err != nil || string(after) != string(before) {
		t.Errorf("the scenario itself has changed: %v\n%s", err, after)
	}
	if s.Divide(1) != s {
		t.Error("divided by 1 it is another one")
	}
}
