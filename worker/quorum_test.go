package worker_test

import (
	"context"
	"fmt"
	"reflect"
	"sync/atomic"
	"testing"
	"time"

	"xagg/api"
	"xagg/worker"
)

// TestQuorum: with a quorum a straggler holds up nobody, all have the same means, and what the straggler gives comes in
// sooner or later.
func TestQuorum(t *testing.T) {
	for mode, cfg := range modes(3) {
		if cfg.servers == 0 {
			continue
		}
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			cfg.quorum, cfg.wait, cfg.loss, cfg.seed, cfg.depth = 2, 2*time.Millisecond, 0.01, 5, 2
			n := newTestnet(t, cfg)
			workers, recorders := n.joinObserved(t)
			const steps, size = 6, 700
			infos := make([][]worker.Info, 3)
			last := make(chan struct{})
			n.each(t, func(r int) error {
				for step := range steps {
					if r == 2 && step == 0 {
						<-last // it begins when the others are through
					}
					data := make([]float32, size)
					for i := range data {
						data[i] = float32(r + 1)
					}
					info, err := workers[r].AllReduce(t.Context(), "w", data)
					if err != nil {
						return err
					}
					infos[r] = append(infos[r], info)
					for i, x := range data {
						if r < 2 && x != 1.5 {
							return fmt.Errorf("step %d: value %d is %g, want the mean of 1 and 2", step, i, x)
						}
					}
				}
				if r == 0 {
					close(last)
				}
				return workers[r].Leave(t.Context())
			})
			if !reflect.DeepEqual(recorders[0].rounds, recorders[1].rounds) || !reflect.DeepEqual(recorders[0].rounds, recorders[2].rounds) {
				t.Error("the ranks saw different rounds")
			}
			for r := range infos {
				for step, i := range infos[r] {
					late := 0
					if r == 2 {
						late = 3
					}
					if i.Mask != 3 || i.Least != 2 || i.Most != 2 || i.Late != late || i.Path != "server" {
						t.Errorf("rank %d, step %d: %+v", r, step, i)
					}
				}
			}
		})
	}
}

// waitController tells workers how long aggregators wait by now, and counts who has asked it again since.
type waitController struct {
	*testController
	waitUS  uint32
	reports [2]atomic.Int32
}

func (c *waitController) Report(_ context.Context, req *api.ReportRequest) (*api.ReportReply, error) {
	if req.Rank < 2 {
		c.reports[req.Rank].Add(1)
	}
	return &api.ReportReply{EveryMs: 20, WaitUs: &c.waitUS}, nil
}

// TestWaitOfAPlan: a worker that was told of an hour asks for its chunks when the plan has them closed.
func TestWaitOfAPlan(t *testing.T) {
	const wait = 50 * time.Millisecond
	n := newTestnet(t, netConfig{ranks: 3, servers: 1, steered: 0b111, quorum: 2, wait: wait})
	told := n.consistency()
	told.WaitUs = uint32(time.Hour.Microseconds())
	ctl := &waitController{testController: newTestController(&api.Ready{
		Job: testJob, Epoch: testEpoch, Ranks: 3, Pool: n.pool, MaxChunks: n.chunks, Consistency: told,
		ServiceIp: "10.77.255.254", ServiceMac: "02:78:61:00:ff:fe",
	}), waitUS: uint32(wait.Microseconds())}
	n.client = serve(t, ctl)
	workers := n.join(t)
	for r := range ctl.reports {
		for ctl.reports[r].Load() < 2 { // the answer to the first was taken
			if t.Context().Err() != nil {
				t.Fatal("no report")
			}
			time.Sleep(time.Millisecond)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	n.each(t, func(r int) error {
		if r == 2 {
			return nil // it is slow
		}
		_, err := workers[r].AllReduce(ctx, "w", make([]float32, 700))
		return err
	})
}
