package policy

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"xagg/internal/strictyaml"
)

// parse reads a rule as the controller reads its configuration.
func parse(name string, src []byte) (Static, error) {
	var s Static
	if err := strictyaml.Decode(name, src, &s); err != nil {
		return s, err
	}
	if err := s.Validate(); err != nil {
		return s, strictyaml.Locate(name, src, FieldOf(err), err)
	}
	return s, nil
}

func TestGoodFiles(t *testing.T) {
	want := map[string]Static{
		"switch": {Rule: "static", Mode: ModeSwitch},
		"empty":  {},
		"server": {Mode: ModeServer, Servers: []string{"s1", "s0"}, Pool: 64},
		"hybrid": {Rule: "static", Mode: ModeHybrid, Steer: []int{3, 0}},
		"quorum": {Mode: ModeServer, Quorum: 3, Wait: new(250 * time.Microsecond)},
	}
	files, err := filepath.Glob("testdata/*.good.yaml")
	if err != nil || len(files) != len(want) {
		t.Fatalf("%d files, %v; want %d", len(files), err, len(want))
	}
	for _, file := range files {
		src, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		got, err := parse(filepath.Base(file), src)
		if err != nil {
			t.Errorf("%s: %v", file, err)
		}
		if diff := cmp.Diff(want[strings.TrimSuffix(filepath.Base(file), ".good.yaml")], got); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", file, diff)
		}
	}
}

// TestBadFiles compares errors with the first line of each file, a comment.
func TestBadFiles(t *testing.T) {
	files, err := filepath.Glob("testdata/*.bad.yaml")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		src, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		first, _, _ := strings.Cut(string(src), "\n")
		want := strings.TrimPrefix(first, "# ")
		_, err = parse(filepath.Base(file), src)
		if err == nil || err.Error() != filepath.Base(file)+want {
			t.Errorf("\ngot  %v\nwant %s%s", err, filepath.Base(file), want)
		}
	}
}

func TestDecide(t *testing.T) {
	place := Input{Job: "train", Ranks: 4, Servers: []string{"s0", "s1"}, Slots: 4096}
	quorum := place
	quorum.Quorum, quorum.Wait = 2, time.Millisecond
	quota := place
	quota.MaxPool = 8
	for _, tt := range []struct {
		name string
		rule Static
		in   Input
		plan Plan
		why  string
	}{
		{"zero value", Static{}, place, Plan{Cohort: 0b1111, Pool: 32},
			`rule static, mode switch: of the 4 ranks of job "train" the switch sums all (0-3); pool 32 takes 128 of 4096 free slots`},
		{"one rank", Static{Mode: ModeSwitch}, Input{Job: "a", Ranks: 1, Slots: 128}, Plan{Cohort: 1, Pool: 32},
			`rule static, mode switch: of the 1 ranks of job "a" the switch sums all (0); pool 32 takes 128 of 128 free slots`},
		{"64 ranks", Static{Pool: 1}, Input{Job: "a", Ranks: 64, Slots: 4}, Plan{Cohort: 1<<64 - 1, Pool: 1},
			`rule static, mode switch: of the 64 ranks of job "a" the switch sums all (0-63); pool 1 takes 4 of 4 free slots`},
		{"server", Static{Mode: ModeServer}, place, Plan{Steered: 0b1111, Servers: []string{"s0", "s1"}, Pool: 32},
			`rule static, mode server: of the 4 ranks of job "train" all (0-3) are steered to servers s0, s1; pool 32 takes 128 of 4096 free slots`},
		{"servers in the rule's order", Static{Mode: ModeServer, Servers: []string{"s1", "s0"}}, place,
			Plan{Steered: 0b1111, Servers: []string{"s1", "s0"}, Pool: 32},
			`rule static, mode server: of the 4 ranks of job "train" all (0-3) are steered to servers s1, s0; pool 32 takes 128 of 4096 free slots`},
		{"hybrid", Static{Mode: ModeHybrid, Steer: []int{3, 0}, Servers: []string{"s1"}, Pool: 64}, place,
			Plan{Cohort: 0b0110, Steered: 0b1001, Servers: []string{"s1"}, Pool: 64},
			`rule static, mode hybrid: of the 4 ranks of job "train" the switch sums 1-2 and 0,3 are steered to server s1, which closes chunks; pool 64 takes 256 of 4096 free slots`},
		{"a quorum, the job's own", Static{Mode: ModeServer}, quorum, Plan{Steered: 0b1111, Servers: []string{"s0", "s1"}, Pool: 32, Quorum: 2, Wait: time.Millisecond},
			`rule static, mode server: of the 4 ranks of job "train" all (0-3) are steered to servers s0, s1; 2 of them are enough for a result, 1ms after the first; pool 32 takes 128 of 4096 free slots`},
		{"a larger quorum", Static{Mode: ModeServer, Servers: []string{"s0"}, Pool: 1, Quorum: 4}, quorum,
			Plan{Steered: 0b1111, Servers: []string{"s0"}, Pool: 1, Quorum: 4, Wait: time.Millisecond},
			`rule static, mode server: of the 4 ranks of job "train" all (0-3) are steered to server s0; 4 of them are enough for a result, 1ms after the first; pool 1 takes 4 of 4096 free slots`},
		{"no wait", Static{Mode: ModeServer, Servers: []string{"s0"}, Pool: 1, Wait: new(time.Duration(0))}, quorum,
			Plan{Steered: 0b1111, Servers: []string{"s0"}, Pool: 1, Quorum: 2},
			`rule static, mode server: of the 4 ranks of job "train" all (0-3) are steered to server s0; 2 of them are enough for a result, 0s after the first; pool 1 takes 4 of 4096 free slots`},
		{"a quota", Static{}, quota, Plan{Cohort: 0b1111, Pool: 8},
			`rule static, mode switch: of the 4 ranks of job "train" the switch sums all (0-3); pool 8 takes 32 of 4096 free slots`},
		{"more than the quota", Static{Pool: 16}, quota, Plan{Cohort: 0b1111, Pool: 16},
			`rule static, mode switch: of the 4 ranks of job "train" the switch sums all (0-3); pool 16 takes 64 of 4096 free slots`},
	} {
		got, err := tt.rule.Decide(tt.in)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if diff := cmp.Diff(Decision{tt.plan, tt.why}, got); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", tt.name, diff)
		}
	}
}

func TestDecideRefuses(t *testing.T) {
	place := Input{Job: "train", Ranks: 4, Servers: []string{"s0", "s1"}, Slots: 4096}
	with := func(change func(*Input)) Input {
		in := place
		change(&in)
		return in
	}
	for _, tt := range []struct {
		rule Static
		in   Input
		want string
	}{
		{Static{}, with(func(in *Input) { in.Ranks = 0 }), "ranks: 0 ranks, want 1..64"},
		{Static{}, with(func(in *Input) { in.Ranks = 65 }), "ranks: 65 ranks, want 1..64"},
		{Static{Mode: ModeHybrid}, place, `steer: mode "hybrid" needs at least one rank that goes to a server`},
		{Static{Mode: ModeServer}, with(func(in *Input) { in.Servers = nil }), `mode: mode "server" needs an aggregation server, and there is none`},
		{Static{Mode: ModeServer, Servers: []string{"s0", "s7"}}, place, `servers[1]: no server "s7"; there are s0, s1`},
		{Static{Mode: ModeHybrid, Steer: []int{1, 4}}, place, "steer[1]: rank 4 is beyond the job's ranks 0..3"},
		{Static{Mode: ModeHybrid, Steer: []int{0, 1, 2}}, place,
			`steer: 3 of 4 ranks are steered, which leaves the switch 1 to sum; a cohort has at least 2, otherwise use mode "server"`},
		{Static{Pool: 1024}, with(func(in *Input) { in.Slots = 4095 }),
			"a pool of 1024 needs 4096 slots and 4095 are free; choose a smaller pool or remove a job"},
		{Static{Quorum: 4}, place, `quorum: 4, but the results of job "train" are not made by a quorum; leave it out, or create the job with one`},
		{Static{Wait: new(time.Duration(0))}, place, `wait: 0s, but the results of job "train" are not made by a quorum; leave it out, or create the job with one`},
		{Static{Quorum: 1}, with(func(in *Input) { in.Quorum = 2 }),
			"quorum: 1 is outside 2..4, from what the job was created with, the least that its ranks take, to all of them"},
		{Static{Quorum: 5}, with(func(in *Input) { in.Quorum = 2 }),
			"quorum: 5 is outside 2..4, from what the job was created with, the least that its ranks take, to all of them"},
	} {
		_, err := tt.rule.Decide(tt.in)
		if err == nil || err.Error() != tt.want {
			t.Errorf("got  %v\nwant %s", err, tt.want)
		}
		var fieldErr *FieldError
		var slotsErr *SlotsError
		if !errors.As(err, &fieldErr) && !errors.As(err, &slotsErr) {
			t.Errorf("%v is of type %T", err, err)
		}
	}
}

// TestPoolStays: a job that runs keeps its pool, whatever its next plan, and is told when that is too large for it.
func TestPoolStays(t *testing.T) {
	place := Input{Job: "train", Ranks: 4, Servers: []string{"s0", "s1"}, Pool: 32}
	for _, tt := range []struct {
		rule Static
		why  string // the end of the explanation
	}{
		{Static{}, "the switch sums all (0-3); pool 32 stays"},
		{Static{Pool: 32}, "the switch sums all (0-3); pool 32 stays"},
		{Static{Mode: ModeServer}, "are steered to servers s0, s1; pool 32 stays"},
		{Static{Mode: ModeServer, Servers: []string{"s1"}},
			"are steered to server s1; pool 32 stays, though with more than 16 a port's queue may overflow under this plan"},
	} {
		d, err := tt.rule.Decide(place)
		if err != nil || d.Pool != 32 || !strings.HasSuffix(d.Explanation, tt.why) {
			t.Errorf("%+v: pool %d, %q, %v", tt.rule, d.Pool, d.Explanation, err)
		}
	}
	_, err := Static{Pool: 16}.Decide(place)
	if want := "pool: 16, but the job was created with a pool of 32, which stays; leave it out"; err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

// TestSteerablePool: it is no larger than the default pool of any plan.
func TestSteerablePool(t *testing.T) {
	for ranks, want := range map[int]int{1: 32, 2: 32, 4: 16, 5: 8, 16: 4, 64: 1} {
		if got := SteerablePool(ranks); got != want {
			t.Errorf("%d ranks: %d, want %d", ranks, got, want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		in := Input{Job: "j", Ranks: rapid.IntRange(1, 64).Draw(t, "ranks"), Servers: []string{"s0", "s1"}, Slots: 4096}
		rule := Static{
			Mode:  rapid.SampledFrom([]Mode{ModeSwitch, ModeServer, ModeHybrid}).Draw(t, "mode"),
			Steer: rapid.SliceOfNDistinct(rapid.IntRange(0, 63), 0, 5, rapid.ID).Draw(t, "steer"),
		}
		if d, err := rule.Decide(in); err == nil && d.Pool < SteerablePool(in.Ranks) {
			t.Fatalf("%s has a pool of %d, less than %d", d.Explanation, d.Pool, SteerablePool(in.Ranks))
		}
	})
}

// TestPlanCoversTheRanks: whatever is asked for, a plan that is given is one that the data plane can run.
func TestPlanCoversTheRanks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := []string{"s0", "s1", "s2"}
		rule := Static{
			Mode:    rapid.SampledFrom([]Mode{"", ModeSwitch, ModeServer, ModeHybrid}).Draw(t, "mode"),
			Steer:   rapid.SliceOfN(rapid.IntRange(-1, 64), 0, 5).Draw(t, "steer"),
			Servers: rapid.SliceOfN(rapid.SampledFrom(names), 0, 2).Draw(t, "servers"),
			Pool:    rapid.SampledFrom([]int{-1, 0, 1, 2, 3, 64, 1 << 20}).Draw(t, "pool"),
			Quorum:  rapid.SampledFrom([]int{-1, 0, 1, 4, 8, 66}).Draw(t, "quorum"),
			Wait:    rapid.SampledFrom([]*time.Duration{nil, new(time.Duration(0)), new(time.Millisecond), new(2 * time.Hour)}).Draw(t, "wait"),
		}
		in := Input{
			Job: "j", Ranks: rapid.IntRange(-1, 66).Draw(t, "ranks"),
			Servers: names[:rapid.IntRange(0, 3).Draw(t, "there")], Slots: rapid.IntRange(0, 4096).Draw(t, "slots"),
			Quorum: rapid.SampledFrom([]int{0, 1, 3, 8}).Draw(t, "own quorum"),
		}
		d, err := rule.Decide(in)
		if err != nil {
			return
		}
		switch {
		case d.Cohort&d.Steered != 0 || d.Cohort|d.Steered != allRanks(in.Ranks):
			t.Fatalf("cohort %b and steered %b do not part %d ranks", d.Cohort, d.Steered, in.Ranks)
		case d.Steered != 0 && len(d.Servers) == 0:
			t.Fatal("ranks are steered to nobody")
		case d.Steered == 0 && len(d.Servers) != 0:
			t.Fatal("servers without anything to do")
		case d.Pool < 1 || d.Pool&(d.Pool-1) != 0 || SlotsPerPool*d.Pool > in.Slots:
			t.Fatalf("pool %d with %d slots", d.Pool, in.Slots)
		case (d.Quorum == 0) != (in.Quorum == 0) || d.Quorum < in.Quorum || d.Quorum > in.Ranks || d.Wait < 0 || d.Wait > MaxWait:
			t.Fatalf("a quorum of %d within %s", d.Quorum, d.Wait)
		case d.Explanation == "":
			t.Fatal("no explanation")
		}
		for _, s := range d.Servers {
			if !slices.Contains(in.Servers, s) {
				t.Fatalf("server %q is not there", s)
			}
		}
		again, _ := rule.Decide(in)
		if !again.Plan.Equal(d.Plan) {
			t.Fatal("the same question has two answers")
		}
	})
}

func TestEqual(t *testing.T) {
	rules := []Static{
		{}, {Mode: ModeServer}, {Pool: 2}, {Steer: []int{1}}, {Servers: []string{"s0"}}, {Quorum: 3}, {Wait: new(time.Duration(0))}, {Wait: new(time.Second)},
	}
	for i, a := range rules {
		for k, b := range rules {
			if b.Wait != nil {
				b.Wait = new(*b.Wait)
			}
			if a.Equal(b) != (i == k) {
				t.Errorf("%+v equals %+v: %v", a, b, i != k)
			}
		}
	}
}

// TestRule: a plan's rule decides the same plan, also where what is left open would be another by now.
func TestRule(t *testing.T) {
	in := Input{Job: "train", Ranks: 4, Servers: []string{"s0", "s1"}, Pool: 32, Quorum: 2, Wait: time.Second}
	for _, rule := range []Static{
		{}, {Mode: ModeServer, Servers: []string{"s1"}}, {Mode: ModeHybrid, Steer: []int{0, 3}, Servers: []string{"s1", "s0"}, Quorum: 3, Wait: new(time.Minute)},
	} {
		d, err := rule.Decide(in)
		if err != nil {
			t.Fatal(err)
		}
		in := in
		in.Quorum, in.Wait = 1, time.Hour
		again, err := d.Rule().Decide(in)
		if err != nil || !again.Plan.Equal(d.Plan) {
			t.Errorf("of %+v: %+v, %v", d.Plan, again.Plan, err)
		}
	}
}

func TestFormatMask(t *testing.T) {
	for mask, want := range map[uint64]string{
		0: "none", 1: "0", 0b1111: "0-3", 0b1101: "0,2-3", 1 << 63: "63", 1<<64 - 1: "0-63", 0b101 | 7<<61: "0,2,61-63",
	} {
		if got := FormatMask(mask); got != want {
			t.Errorf("FormatMask(%b) = %q, want %q", mask, got, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.yaml")
	for _, file := range files {
		src, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(src)
	}
	f.Fuzz(func(t *testing.T, src []byte) {
		rule, err := parse("f.yaml", src)
		if err == nil && rule.Validate() != nil {
			t.Error("a rule that is not valid was taken")
		}
	})
}
