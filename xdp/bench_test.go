package xdp

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"xagg/tests/require"
	"xagg/wire"
)

// BenchmarkGrad256 measures the server on contributions of 256 lanes, every one of which is accepted: all checks,
// checksums, admission, the clock, the addition under the lock, statistics and the ACK. It runs in the kernel by
// PROG_RUN, on one slot that stays in the cache and on more slots than any cache holds; there nearly all are added to an
// open chunk. In "rounds" four ranks contribute: one in four packets claims its chunk, one closes it and gets the sum.
// The bare unrolled addition, run in turn with it, is what it is compared with:
//
//	ns/packet    median over the rounds of the benchmark
//	bare-ns      the same of the bare addition
//	x-bare       median of the ratios of neighbouring rounds
//
// ns/op has no meaning of its own here: it includes the bare rounds.
func BenchmarkGrad256(b *testing.B) {
	for _, c := range []struct {
		name  string
		slots uint32
		ranks uint32 // that contribute
		plan  uint64 // ranks that the plan waits for
	}{
		{"hot", 1, 63, ^uint64(0)},
		{"cold", 1 << 19, 63, ^uint64(0)}, // 544 MiB
		{"rounds", 64, 4, 0b1111},
	} {
		b.Run(c.name, func(b *testing.B) { benchmarkGrad(b, c.slots, c.ranks, c.plan) })
	}
}

const (
	benchRound  = 200_000 // packets that one system call runs
	benchRounds = 5       // at least
)

func benchmarkGrad(b *testing.B, slots, ranks uint32, plan uint64) {
	require.Have(b, require.XDP)
	next := func(n uint32) []byte { return benchQuestion(n, slots, ranks, plan>>ranks != 0) }
	question := next(0)
	var objects benchObjects
	spec, err := loadBench()
	if err != nil {
		b.Fatal(err)
	}
	spec.Maps[benchMapArena].MaxEntries = slots
	for variable, value := range map[string]any{
		"bench_chunks":    slots,
		"bench_ranks":     ranks,
		"bench_ip_check":  binary.NativeEndian.Uint16(question[24:]),
		"bench_udp_check": binary.NativeEndian.Uint16(question[40:]),
	} {
		if err := spec.Variables[variable].Set(value); err != nil {
			b.Fatal(err)
		}
	}
	if err := spec.LoadAndAssign(&objects, nil); err != nil {
		b.Fatal(err)
	}
	defer objects.Close()
	// One round deep: a slot is claimed by rank 0 of the next round when the last of this one is in.
	entry := benchPlan{Ranks: plan, Chunks: slots, ServiceIp: binary.NativeEndian.Uint32(serviceAddr.IP[:])}
	if err := objects.Plans.Put(planMapKey(1, 1), entry); err != nil {
		b.Fatal(err)
	}

	var packets uint32 // so far
	run := func(prog *ebpf.Program, repeat uint32) float64 {
		verdict, perPacket, err := prog.Benchmark(next(packets), int(repeat), nil)
		if err != nil {
			b.Fatal(err)
		}
		if verdict != verdictTX {
			b.Fatalf("%s: verdict %d", prog, verdict)
		}
		return float64(perPacket.Nanoseconds())
	}
	grad := func(repeat uint32) float64 {
		ns := run(objects.BenchGrad, repeat)
		packets += repeat
		return ns
	}
	grad(max(slots, benchRound)) // the claims, which are cheaper, and the first touch of every page
	var full, bare, ratios []float64
	for len(full) < benchRounds || b.Loop() {
		m, n := run(objects.BenchAdd, benchRound), grad(benchRound)
		full, bare, ratios = append(full, n), append(bare, m), append(ratios, n/m)
	}
	var perCPU []uint64
	var summed uint64
	if err := objects.Reasons.Lookup(uint32(wire.ReasonNone), &perCPU); err != nil {
		b.Fatal(err)
	}
	for _, n := range perCPU {
		summed += n
	}
	if summed != uint64(packets) {
		b.Fatalf("%d of %d contributions were accepted", summed, packets)
	}
	b.ReportMetric(median(full), "ns/packet")
	b.ReportMetric(slices.Min(full), "min-ns/packet")
	b.ReportMetric(median(bare), "bare-ns")
	b.ReportMetric(slices.Min(bare), "min-bare-ns")
	b.ReportMetric(median(ratios), "x-bare")
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

// benchQuestion returns contribution n, as next_question in bench.bpf.c makes them: it walks over the chunks, then over
// the ranks, then over the rounds, and its UDP checksum, if it is to have one, is always the same.
func benchQuestion(n, slots, ranks uint32, checksum bool) []byte {
	rank := n / slots % ranks
	p := wire.Packet{Header: wire.Header{
		Type: wire.TypeGrad, Job: 1, Epoch: 1, Blocks: wire.MaxBlocks, Elems: wire.MaxLanes,
		Chunk: n % slots, Rank: uint8(rank), Contributors: 1 << rank, Round: n / slots / ranks,
	}}
	for i := range p.Lanes {
		p.Lanes[i] = int32(i * 0x01020305)
	}
	p.Seq = ^(p.Round + p.Chunk)
	p.SpreadUs, p.BlockedUs = ^uint32(p.Contributors>>32), ^uint32(p.Contributors)
	p.NextEpoch = ^(uint16(rank) << 8)
	// All ends have one address and port: what an answer has becomes the next question's by changing places.
	return wire.AppendFrame(nil, serviceAddr, serviceAddr, &p, checksum)
}
