package main

import (
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/spf13/cobra"

	"xagg/api"
	"xagg/internal/endpoint"
	"xagg/lab/data"
	"xagg/wire"
	"xagg/worker"
	"xagg/worker/grads"
	"xagg/worker/replay"
)

func newWorkerCommand(env *env) *cobra.Command {
	var (
		controller, job, ip, spec, dump string
		rank, rounds, buckets, settle   int
		port                            uint16
		timeout, delay                  time.Duration
		noChecksum                      bool
	)
	cmd := &cobra.Command{
		Use:   "worker --controller ADDRESS --job NAME --rank R --ip ADDRESS",
		Short: "Take part in a job: all-reduce recorded gradients as a training process would",
		Long: `Join a job, all-reduce the gradient vectors of one rank step by step, and leave when all ranks have finished.

Writes one JSON object per all-reduce to stdout: its place (index, step), the scale (value = integer * 2^-exponent), the
contributors' mask, packets, resends, clipped values, who came last, and the seconds that it took. With --dump the
integers that the network summed are written to roundIII-rankR.i32 (little-endian int32) before; with --buckets to
roundIII-bucketB-rankR.i32.`,
		Example: `  xagg worker --controller unix:/run/xagg.sock --job train --rank 0 --ip 10.77.0.1 --grads /data/gradients
  xagg worker --controller 10.0.0.1:19860 --job train --rank 1 --ip 10.77.0.2 --grads synthetic:1000000 --rounds 10`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, name := range []string{"controller", "job", "rank", "ip"} {
				if !cmd.Flags().Changed(name) {
					return usagef("--%s is missing; see 'xagg worker --help'", name)
				}
			}
			addr, err := netip.ParseAddr(ip)
			bad := endpoint.Check(controller)
			switch {
			case bad != nil:
				return usagef("--controller %w", bad)
			case err != nil || !addr.Is4() || addr.IsUnspecified():
				return usagef("--ip %q: want the IPv4 address that this worker sends from", ip)
			case rank < 0 || rank >= wire.MaxRanks:
				return usagef("--rank %d: want 0 to %d", rank, wire.MaxRanks-1)
			case rounds < 0 || rounds > grads.MaxRounds:
				return usagef("--rounds %d: want a number of all-reduces up to %d, or 0 for each step %d times", rounds, grads.MaxRounds,
					grads.RepeatsPerStep)
			case buckets < 1 || buckets > replay.MaxBuckets:
				return usagef("--buckets %d: want 1 to %d", buckets, replay.MaxBuckets)
			case settle < 0 || settle > grads.MaxRounds:
				return usagef("--settle %d: want 0 to %d", settle, grads.MaxRounds)
			case timeout <= 0:
				return usagef("--timeout %v: want a positive duration", timeout)
			}
			set, err := openGradients(spec)
			if err != nil {
				return err
			}
			if rank >= set.Ranks() {
				return usagef("--rank %d: --grads has gradients of %d ranks, from 0", rank, set.Ranks())
			}
			if dump != "" {
				if err := os.MkdirAll(dump, 0o755); err != nil {
					return fmt.Errorf("make --dump directory: %w", err)
				}
			}
			conn, err := endpoint.Dial(controller)
			if err != nil {
				return err
			}
			defer conn.Close()
			link, err := worker.ListenUDP(netip.AddrPortFrom(addr, port), !noChecksum)
			if err != nil {
				return err
			}
			begin, count := time.Now(), 0
			write := replay.Writer(env.stdout, dump, set, rank)
			err = replay.Run(cmd.Context(), api.NewControllerClient(conn), replay.Config{
				Worker:  worker.Config{Job: job, Rank: rank, Link: link},
				Set:     set,
				Rounds:  rounds,
				Buckets: buckets,
				Settle:  settle,
				Delay:   delay,
			}, func(r replay.Reduced) error {
				count++
				return write(r)
			}, worker.WithTimeout(timeout), worker.WithLogger(env.log))
			if err != nil {
				return err
			}
			fmt.Fprintf(env.stderr, "rank %d of job %s: %d all-reduces in %v\n", rank, job, count,
				time.Since(begin).Round(time.Millisecond))
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&controller, "controller", "", "address of the controller: unix:PATH or HOST:PORT")
	f.StringVar(&job, "job", "", "name of the job")
	f.IntVar(&rank, "rank", 0, "this worker's rank in the job, from 0")
	f.StringVar(&ip, "ip", "", "IPv4 address of this machine that packets are sent from")
	f.Uint16Var(&port, "port", wire.Port, "UDP port that packets are sent from; 0 takes a free one")
	f.StringVar(&spec, "grads", "", "directory with *rank{R}.npy, or synthetic:N for N values (default: the embedded gradients)")
	f.IntVar(&rounds, "rounds", 0, fmt.Sprintf("number of vectors to all-reduce (default: each step %d times)", grads.RepeatsPerStep))
	f.IntVar(&buckets, "buckets", 1, "pieces that each vector is cut into, all-reduced at the same time as far as the job's depth goes")
	f.IntVar(&settle, "settle", 0, "vectors of zeros to all-reduce at the end; in an async job one more than its staleness tells each rank of everything")
	f.StringVar(&dump, "dump", "", "directory for the integers of every all-reduce")
	f.DurationVar(&timeout, "timeout", worker.DefaultTimeout, "how long an all-reduce may take")
	f.DurationVar(&delay, "delay", 0, "be a straggler: compute this much longer before every all-reduce")
	f.BoolVar(&noChecksum, "no-checksum", false, "send without UDP checksums; damaged packets then show in the results' tags")
	return cmd
}

// openGradients opens what --grads names.
func openGradients(spec string) (*grads.Set, error) {
	if spec == "" {
		return grads.Open(data.Gradients)
	}
	return grads.Parse(spec, wire.MaxRanks)
}
