package demo

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"xagg/controller"
	"xagg/worker/grads"
)

// TestKiller: parts of one round die together, once, when all workers have come so far; what is measured ends with the last
// worker's first result that was begun after it, however late its line is read.
func TestKiller(t *testing.T) {
	opts := &Options{Workers: 2, Buckets: 2, Kills: []Kill{{PartSwitch, 1}, {PartServer, 2}, {PartController, 1}}, Progress: t.Logf}
	died := make(chan []string, 2)
	k := newKiller(opts, "hybrid", func(_ context.Context, killed func(), parts []string) error {
		killed()
		died <- parts
		return nil
	})
	ended := make(chan error, 1)
	go func() { ended <- k.run(t.Context()) }()
	long := time.Now().Add(-time.Hour)
	next := []int{0, 0}
	vector := func(rank int, began, finished time.Time) {
		for range opts.Buckets {
			k.took(rank, next[rank], began, finished)
			next[rank]++
		}
	}
	vector(0, long, long)
	vector(0, long, long)
	vector(1, long, long)
	if parts := <-died; strings.Join(parts, " ") != "switch controller" {
		t.Errorf("%v died first", parts)
	}
	vector(1, long, long) // read late: both have two now
	if parts := <-died; strings.Join(parts, " ") != "server" {
		t.Errorf("%v died then", parts)
	}
	if _, err := k.killed(); err == nil || !strings.Contains(err.Error(), "switch and controller when 1 all-reduces were done: the job was over before") {
		t.Errorf("error %v, want that nothing was seen", err)
	}
	soon := time.Now()
	vector(0, soon, soon.Add(time.Minute))
	vector(0, soon.Add(time.Hour), soon.Add(2*time.Hour)) // its first counts
	vector(1, soon, soon.Add(2*time.Minute))
	k.ended()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	list, err := k.killed()
	if err != nil || len(list) != 2 {
		t.Fatalf("%v, %v, want two deaths", list, err)
	}
	for _, d := range list {
		if d.Seconds < 119 || d.Seconds > 121 {
			t.Errorf("%s, want two minutes", d)
		}
	}
}

// TestKillerFails: what cannot be started again is an error of the run.
func TestKillerFails(t *testing.T) {
	opts := &Options{Workers: 1, Buckets: 1, Kills: []Kill{{PartSwitch, 1}}, Progress: t.Logf}
	want := errors.New("it has rained in")
	k := newKiller(opts, "switch", func(context.Context, func(), []string) error { return want })
	k.took(0, 0, time.Now(), time.Now())
	k.ended()
	if err := k.run(t.Context()); !errors.Is(err, want) {
		t.Errorf("error %v, want the one of the start", err)
	}
}

func TestCheckKills(t *testing.T) {
	set := grads.Synthetic(100, 3, 3)
	for _, c := range []struct{ kills, lab, mode, consistency, want string }{
		{"switch@1 server@1 controller@7", LabNetns, "switch", "sync", ""},
		{"switch@3", LabMemory, "switch", "sync", "which needs root"},
		{"switch@3", LabNetns, ModeTCP, "sync", "mode tcp has none of the parts"},
		{"switch@3", LabNetns, ModeSteered, "sync", "leave out one of them"},
		{"spine@3", LabNetns, "switch", "sync", "want switch, server, controller, or worker0 to worker2"},
		{"switch@0", LabNetns, "switch", "sync", "a round from 1 to 7"},
		{"switch@8", LabNetns, "switch", "sync", "a round from 1 to 7"},
		{"server@3", LabNetns, "server", "async", "it would end"},
		{"controller@3", LabNetns, "server", "async", ""},
		{"switch@3 switch@3", LabNetns, "switch", "sync", "twice"},
		{"worker1@3", LabNetns, "server", "sync", "ends a job, unless"},
		{"worker1@3 worker1@5", LabNetns, "server", "quorum", ""},
		{"worker3@3", LabNetns, "server", "quorum", "or worker0 to worker2"},
		{"switch", LabNetns, "switch", "sync", "want PART@ROUND"},
		{"switch@many", LabNetns, "switch", "sync", "want PART@ROUND"},
	} {
		o := &Options{Set: set, Workers: 3, Rounds: 10, Lab: c.lab, Modes: []string{c.mode}, Consistency: controller.Consistency{Mode: controller.Mode(c.consistency), Quorum: 2}}
		err := error(nil)
		for _, s := range strings.Fields(c.kills) {
			var k Kill
			if k, err = ParseKill(s); err != nil {
				break
			}
			o.Kills = append(o.Kills, k)
		}
		if err == nil {
			err = o.checkKills()
		}
		_, usage := errors.AsType[*UsageError](err)
		if (err == nil) != (c.want == "") || err != nil && (!usage || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s in %s, %s, %s: %v, want %q", c.kills, c.lab, c.mode, c.consistency, err, c.want)
		}
	}
}
