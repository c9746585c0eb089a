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
// Checksums of the question, network order. They stay right: see next_question.
volatile const __u16 bench_ip_check;
volatile const __u16 bench_udp_check;

// How many ranks contribute. Rank 63 never does: no chunk closes, one in 63 contributions is a claim, the others add.
#define BENCH_RANKS 63

static __always_inline void next_question(struct xdp_md *ctx)
{
	const struct frame frame = frame_of(ctx), *f = &frame;
	if ((const void *)f->lanes > f->end)
		return;
	__u32 chunk = swap32(f->x->chunk) + 1;
	if (chunk >= bench_chunks) {
		chunk = 0;
		if (++f->x->rank == BENCH_RANKS) {
			f->x->rank = 0;
			f->x->round = swap32(swap32(f->x->round) + 1);
		}
	}
	f->x->chunk = swap32(chunk);
	f->x->version_type = XAGG_VERSION << 4 | TYPE_GRAD;
	f->x->blocks = MAX_BLOCKS;
	f->x->contributors = swap64(1ULL << (f->x->rank & 63));
	f->ip->total_len = swap16(FRAME_LEN - ETH_LEN + MAX_LANES * 4);
	f->ip->check = bench_ip_check; // source and destination have changed places
	f->udp->len = swap16(FRAME_LEN - ETH_LEN - sizeof(*f->ip) + MAX_LANES * 4);
	f->udp->check = bench_udp_check;
	// A server does not look at a GRAD's spread_us: here it makes up for what has changed in the header.
	f->x->spread_us = 0;
	const __u32 *w = (const void *)f->x;
	__u64 sum = 0;
#pragma unroll
	for (int i = 0; i < (int)sizeof(*f->x) / 4; i++)
		sum += w[i];
	f->x->spread_us = 0xffff ^ fold(sum);
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
	over_lanes(PASS_ADD, MAX_BLOCKS, f, s->lanes);
	f->x->chunk = swap32((chunk + 1) & (bench_chunks - 1));
	return XDP_TX;
}
