package worker_test

import (
	"fmt"
	"testing"
)

// TestAsync: in an async job every result is what was added since the worker's last look, no result waits for a slower
// rank within the staleness, and all of it together is what all have given.
func TestAsync(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 3, servers: 2, steered: 7, async: true, staleness: 2, loss: 0.01, dup: 0.05, seed: 3, depth: 2})
	workers := n.join(t)
	const steps, size = 8, 600
	totals, additions := make([]int64, n.ranks), make([]int, n.ranks)
	n.each(t, func(r int) error {
		for range steps {
			data := make([]int32, size)
			for i := range data {
				data[i] = int32(i + r + 1)
			}
			info, err := workers[r].AllReduceInt32(t.Context(), "k", data)
			if err != nil {
				return err
			}
			if info.Path != "server" || info.Mask>>r&1 == 0 || info.Additions < 1 || info.Late != 0 {
				return fmt.Errorf("%+v", info)
			}
			totals[r] += int64(data[599])
			additions[r] += info.Additions
		}
		return workers[r].Leave(t.Context())
	})
	var most int64
	for r := range n.ranks {
		most = max(most, totals[r])
		if additions[r] < steps || totals[r] < steps*int64(600+r) {
			t.Errorf("rank %d: %d in %d contributions lacks some of its own", r, totals[r], additions[r])
		}
	}
	// Who was last has seen everything.
	if want := int64(steps * (600 + 601 + 602)); most != want {
		t.Errorf("the last result makes it %d in all, want %d", most, want)
	}
}

// TestAsyncFloats: the scale is a scout's, and stays.
func TestAsyncFloats(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 2, servers: 1, steered: 3, async: true, staleness: 1})
	workers := n.join(t)
	totals := make([]float32, n.ranks)
	n.each(t, func(r int) error {
		for step := range 5 {
			data := []float32{float32(int(1) << r), 0}
			info, err := workers[r].AllReduce(t.Context(), "w", data)
			if err != nil {
				return err
			}
			rounds := 1
			if step == 0 {
				rounds = 2
			}
			// The magnitudes are below 4; two ranks of staleness 1 make 10 contributions, which take 4 bits.
			if info.Exponent != 31-2-4-3 || info.Rounds != rounds {
				return fmt.Errorf("step %d: %+v", step, info)
			}
			totals[r] += data[0]
		}
		return workers[r].Leave(t.Context())
	})
	if most := max(totals[0], totals[1]); most != 15 {
		t.Errorf("in all it was %g, want 15", most)
	}
}
