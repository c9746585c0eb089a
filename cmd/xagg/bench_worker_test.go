package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"xagg/lab/loop"
)

const twoRanks = `
name: test
about: Two ranks.
links: {worker: 1Gbit}
warmup: 1
rounds: 3
jobs:
- name: train
  ranks: 2
  tensors: {sizes: [10, 3000, 5000]}
  compute: {mean: 2ms}
`

// TestBenchWorker: ranks that sum at two parameter servers, and in a ring, as processes of an experiment do.
func TestBenchWorker(t *testing.T) {
	file := filepath.Join(t.TempDir(), "test.yaml")
	if err := os.WriteFile(file, []byte(twoRanks), 0o644); err != nil {
		t.Fatal(err)
	}
	// Loopback addresses of this process's own.
	ip := func(host int) string { return fmt.Sprintf("127.%d.%d.%d", os.Getpid()>>8&0xff, os.Getpid()&0xff, host) }
	for mode, peers := range map[string]string{
		"tcp":  ip(11) + ":19870," + ip(12) + ":19870",
		"ring": ip(1) + ":19871," + ip(2) + ":19871",
	} {
		t.Run(mode, func(t *testing.T) {
			var group errgroup.Group
			start := func(args ...string) *bytes.Buffer {
				var out, errs bytes.Buffer
				group.Go(func() error {
					if code := run(t.Context(), &env{stdin: strings.NewReader(""), stdout: &out, stderr: &errs}, args); code != exitOK {
						return fmt.Errorf("%v: exit code %d: %s", args, code, &errs)
					}
					return nil
				})
				return &out
			}
			if mode == "tcp" {
				for i, addr := range strings.Split(peers, ",") {
					start("bench", "parameter-server", "--scenario", file, "--job", "train", "--listen", addr, "--server", fmt.Sprint(i),
						"--servers", "2")
				}
			}
			var outs []*bytes.Buffer
			for rank := range 2 {
				outs = append(outs, start("bench", "worker", "--scenario", file, "--job", "train", "--rank", fmt.Sprint(rank), "--mode", mode,
					"--ip", ip(rank+1), "--peers", peers))
			}
			if err := group.Wait(); err != nil {
				t.Fatal(err)
			}
			for rank, out := range outs {
				lines := json.NewDecoder(out)
				for round := range 4 {
					var r loop.Round
					if err := lines.Decode(&r); err != nil || r.Round != round || len(r.Done) != 3 || r.Error > 1e-6 {
						t.Errorf("rank %d reports %+v (%v), want round %d", rank, r, err, round)
					}
				}
				if lines.More() {
					t.Errorf("rank %d reports more", rank)
				}
			}
		})
	}
}

func TestBenchWorkerUsage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "test.yaml")
	if err := os.WriteFile(file, []byte(twoRanks), 0o644); err != nil {
		t.Fatal(err)
	}
	worker := []string{"bench", "worker", "--scenario", file, "--job", "train", "--ip", "127.0.0.1"}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"bench", "worker"}, exitUsage, "--scenario is missing"},
		{append(worker, "--rank", "0"), exitUsage, "--mode is missing"},
		{append(worker, "--rank", "0", "--mode", "udp"), exitUsage, `--mode "udp": want tcp, ring,`},
		{append(worker, "--rank", "2", "--mode", "tcp"), exitUsage, "--rank 2: want 0 to 1"},
		{append(worker, "--rank", "0", "--mode", "tcp", "--job", "x"), exitUsage, `--job "x": scenario test has no such job`},
		{append(worker, "--rank", "0", "--mode", "tcp", "--ip", "::1"), exitUsage, `--ip "::1": want`},
		{append(worker, "--rank", "0", "--mode", "tcp"), exitUsage, "--peers is missing"},
		{append(worker, "--rank", "0", "--mode", "ring", "--peers", "127.0.0.1:1"), exitUsage, "--peers: 1 addresses, want those of all 2 ranks"},
		{append(worker, "--rank", "0", "--mode", "switch"), exitUsage, "--controller"},
		{append(worker, "--rank", "0", "--mode", "server/quorum"), exitUsage, "job train has no quorum"},
		{append(worker, "--rank", "0", "--mode", "gloo"), exitUsage, "this program has no workers for gloo"},
		{[]string{"bench", "worker", "--scenario", "none.yaml", "--job", "train", "--ip", "127.0.0.1", "--rank", "0", "--mode", "tcp"},
			exitFailure, "read scenario: open none.yaml"},
		{[]string{"bench", "parameter-server", "--scenario", file, "--job", "train", "--listen", "127.0.0.1:0", "--server", "1"}, exitUsage,
			"there is no server 1 of 1"},
		{[]string{"bench", "parameter-server", "--scenario", file, "--job", "train"}, exitUsage, "--listen is missing"},
	} {
		var out, errs bytes.Buffer
		code := run(t.Context(), &env{stdin: strings.NewReader(""), stdout: &out, stderr: &errs}, c.args)
		if code != c.code || !strings.Contains(errs.String(), c.want) {
			t.Errorf("%v: exit code %d, %q; want %d, %q", c.args, code, &errs, c.code, c.want)
		}
	}
}
