package worker_test

import (
	"fmt"
	"sync"
	"testing"

	"xagg/worker"
)

// BenchmarkAllReduce sums a gradient over workers of one process through the in-memory network; a byte is one of a
// worker's vector. Everything is in the figure: the workers, the switch or server model and the frames between them.
func BenchmarkAllReduce(b *testing.B) {
	const size = 1 << 16
	for _, mode := range []string{"switch", "server", "hybrid"} {
		for _, ranks := range []int{2, 4} {
			b.Run(fmt.Sprintf("%s/%d", mode, ranks), func(b *testing.B) {
				cfg := modes(ranks)[mode]
				cfg.chunks, cfg.pool = size/256, 64
				n := newTestnet(b, cfg)
				benchmarkAllReduce(b, n, n.join(b), size)
			})
		}
	}
}

// BenchmarkAllReduceUDP is the same over sockets of the loopback interface, with the switch model at the other end.
func BenchmarkAllReduceUDP(b *testing.B) {
	const size, ranks = 1 << 16, 2
	s := startUDPSwitch(b, ranks)
	n := &testnet{netConfig: netConfig{ranks: ranks}, client: s.client}
	workers := make([]*worker.Worker, ranks)
	n.each(b, func(r int) (err error) {
		workers[r], err = s.join(b.Context(), r)
		return err
	})
	for _, w := range workers {
		b.Cleanup(func() { w.Close() })
	}
	benchmarkAllReduce(b, n, workers, size)
}

func benchmarkAllReduce(b *testing.B, n *testnet, workers []*worker.Worker, size int) {
	data := make([][]float32, len(workers))
	for r := range data {
		data[r] = values(size, r, 1)
	}
	b.SetBytes(int64(4 * size))
	b.ReportAllocs()
	b.ResetTimer()
	var wg sync.WaitGroup
	for r, w := range workers {
		wg.Go(func() {
			work := make([]float32, size)
			for range b.N {
				copy(work, data[r])
				if _, err := w.AllReduce(b.Context(), "w", work); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	if !b.Failed() {
		n.each(b, func(r int) error { return workers[r].Leave(b.Context()) })
	}
	resends := uint64(0)
	for _, w := range workers {
		resends += w.Stats().Resends
	}
	b.ReportMetric(float64(resends)/float64(b.N), "resends/op")
}
