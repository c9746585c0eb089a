package pitfalls

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"xagg/api"
	"xagg/tests/require"
	"xagg/worker"
)

// gradients are what testdata/ddp.py prints.
type gradients struct {
	Own []float32 // of the rank alone
	Sum []float32 // that Gloo makes of all ranks' own
	DDP []float32 // that DistributedDataParallel hands to the optimizer
}

// trainers runs PyTorch's DistributedDataParallel with Gloo on this machine's loopback.
func trainers(t *testing.T, ranks int) []gradients {
	t.Helper()
	all := make([]gradients, ranks)
	store := filepath.Join(t.TempDir(), "store")
	group, ctx := errgroup.WithContext(t.Context())
	for rank := range ranks {
		group.Go(func() error {
			cmd := exec.CommandContext(ctx, "/usr/bin/python3", "testdata/ddp.py", store, strconv.Itoa(rank), strconv.Itoa(ranks))
			cmd.Env = append(os.Environ(), "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1")
			var stderr strings.Builder
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			if err != nil {
				return fmt.Errorf("rank %d: %w\n%s", rank, err, stderr.String())
			}
			return json.Unmarshal(out, &all[rank])
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	return all
}

// TestPitfall39: nobody divides twice, and nobody forgets to. What sync jobs return is the sum that Gloo returns, and what a quorum job
// returns when all were in time the mean that DistributedDataParallel hands on.
func TestPitfall39(t *testing.T) {
	require.Have(t, require.Gloo)
	const ranks = 3
	trained := trainers(t, ranks)
	n := len(trained[0].Own)
	reduce := func(t *testing.T, b *bench, want func(gradients) []float32) {
		t.Helper()
		err := b.run(func(ctx context.Context, w *worker.Worker) error {
			data := slices.Clone(trained[w.Rank()].Own)
			if _, err := w.AllReduce(ctx, "k", data); err != nil {
				return err
			}
			if off := distance(data, want(trained[w.Rank()])); off > 1e-6 {
				return fmt.Errorf("the result is off by %.2g of Gloo's", off)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
	for mode, policy := range policies {
		t.Run(mode, func(t *testing.T) {
			reduce(t, newBench(t, ranks, n, policy), func(g gradients) []float32 { return g.Sum })
		})
	}
	t.Run("quorum", func(t *testing.T) {
		// It waits for all as long as it may take.
		b := newBench(t, ranks, n, policies["server"], &api.Consistency{Mode: "quorum", Quorum: 2, WaitUs: uint32(time.Minute.Microseconds())})
		reduce(t, b, func(g gradients) []float32 { return g.DDP })
	})
}

// distance returns the L2 norm of the difference, relative to that of want.
func distance(have, want []float32) float64 {
	var off, norm float64
	for i := range want {
		d := float64(have[i]) - float64(want[i])
		off += d * d
		norm += float64(want[i]) * float64(want[i])
	}
	return math.Sqrt(off / norm)
}
