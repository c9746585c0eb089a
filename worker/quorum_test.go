package worker_test

import (
	"fmt"
	"reflect"
	"testing"
	"time"

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
