// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

//go:build ignore

// For BenchmarkGrad256: the server of xagg.bpf.c, fed with contributions that are all accepted, and the bare addition
// that it is compared with. BPF_PROG_TEST_RUN repeats a program on one packet buffer without restoring it, so that
// these programs make the next question out of the last answer themselves; that is part of what is measured. The
// answer is cut to its length as always, but by 0 bytes: the lanes are needed again.
#define XAGG_SHRINK(ctx, bytes) bpf_xdp_adjust_tail(ctx, 0)
#include "xagg.bpf.c"

// Chunks of a round, a power of two: the slots that are worked on.
volatile const __u32 bench_chunks;
// How many ranks contribute. Whether the last of them closes a chunk is the plan's to say.
volatile const __u32 bench_ranks;
// Checksums of all questions, network order. Where chunks close the lanes are not always the same, and the UDP checksum
// is 0, none: the server has then summed all that it would cover, and only does not look at what came of it.
volatile const __u16 bench_ip_check;
volatile const __u16 bench_udp_check;

#define BENCH_JOB 1
#define BENCH_EPOCH 1

// Turns an answer into the next question: the next chunk, after the last one of the next rank, then of the next round.
// A server does not look at a GRAD's seq, spread_us, blocked_us and next_epoch: here they are the complements of what
// changes, so that the header's one's complement sum, and with it the UDP checksum, is the same for all.
static __always_inline void next_question(struct xdp_md *ctx)
{
	const struct frame frame = frame_of(ctx), *f = &frame;
	if ((const void *)f->lanes > f->end)
		return;
	__u32 chunk = swap32(f->x->chunk) + 1, rank = f->x->rank, round = swap32(f->x->round);
	if (chunk >= bench_chunks) {
		chunk = 0;
		if (++rank == bench_ranks) {
			rank = 0;
			round++;
		}
	}
	// In wide words: what was written in parts stalls the processor when it is read as a whole soon after.
	// Source and destination have changed places, which no checksum minds; all have one address, RESULTs' too.
	__u64 contributors = swap64(1ULL << (rank & 63));
	__u32 *ip = (void *)f->ip, *udp = (void *)f->udp;
	__u64 *x = (void *)f->x;
	ip[0] = swap32(0x45000000 | (FRAME_LEN - ETH_LEN + MAX_LANES * 4));
	ip[2] = swap32(64 << 24 | 17 << 16) | bench_ip_check << 16;
	udp[0] = swap32(XAGG_PORT << 16 | XAGG_PORT);
	udp[1] = swap16(FRAME_LEN - ETH_LEN - sizeof(*f->ip) + MAX_LANES * 4) | bench_udp_check << 16;
	x[0] = swap64((__u64)(XAGG_VERSION << 4 | TYPE_GRAD) << 56 | (__u64)BENCH_JOB << 32 | BENCH_EPOCH << 16 | rank << 8 |
		      MAX_BLOCKS);
	x[1] = swap64((__u64)~(round + chunk) << 32 | round);
	x[2] = swap64((__u64)chunk << 32 | MAX_LANES << 16);
	x[3] = contributors;
	x[4] = 0;
	x[5] = ~contributors;
	x[6] = 0xffff ^ rank;
}

SEC("xdp")
int bench_grad(struct xdp_md *ctx)
{
	int verdict = aggregate(ctx);
	next_question(ctx);
	return verdict;
}

SEC("xdp")
int bench_add(struct xdp_md *ctx)
{
	const struct frame frame = frame_of(ctx), *f = &frame;
	if ((const void *)f->lanes > f->end)
		return XDP_DROP;
	__u32 chunk = swap32(f->x->chunk);
	struct slot *s = bpf_map_lookup_elem(&arena, &chunk);
	if (!s)
		return XDP_DROP;
	for (int b = 0; b < MAX_BLOCKS; b++) {
		const __u32 *lane = f->lanes + b * BLOCK_LANES;
		__u32 *at = s->lanes + b * BLOCK_LANES;
		if ((const void *)(lane + BLOCK_LANES) > f->end)
			break;
#pragma unroll
		for (int i = 0; i < BLOCK_LANES; i++)
			at[i] += swap32(lane[i]);
	}
	f->x->chunk = swap32((chunk + 1) & (bench_chunks - 1));
	return XDP_TX;
}
