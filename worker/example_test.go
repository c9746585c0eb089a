package worker_test

import (
	"context"
	"fmt"
	"sync"

	"xagg/worker"
)

// A training process joins a job, sums its gradients over all workers after every step, and leaves at the end. Here
// four workers share a process, and a switch in memory; on real machines each has [worker.ListenUDP] at its own address
// and the controller's connection.
func Example() {
	const ranks = 4
	n, stop := startTestnet(netConfig{ranks: ranks})
	defer stop()

	train := func(ctx context.Context, rank int) error {
		w, err := worker.Join(ctx, n.client, worker.Config{Job: "train", Rank: rank, Link: n.links[rank]})
		if err != nil {
			return err
		}
		defer w.Close()
		for step := range 3 {
			gradient := []float32{float32(rank), float32(step), 0.5}
			info, err := w.AllReduce(ctx, "layer0.weight", gradient)
			if err != nil {
				return err // it names the ranks that did not come
			}
			if rank == 0 {
				fmt.Printf("step %d: sum %v of mask %#x\n", step, gradient, info.Mask)
			}
		}
		return w.Leave(ctx)
	}

	var wg sync.WaitGroup
	for rank := range ranks {
		wg.Go(func() {
			if err := train(context.Background(), rank); err != nil {
				fmt.Println(err)
			}
		})
	}
	wg.Wait()
	// Output:
	// step 0: sum [6 0 2] of mask 0xf
	// step 1: sum [6 4 2] of mask 0xf
	// step 2: sum [6 8 2] of mask 0xf
}
