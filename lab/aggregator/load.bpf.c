// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

//go:build ignore

// The other end of the link that an aggregator is measured on: what sends contributions as XDP frames, what takes the
// answers and compares every number in them, and what finds out how much of the processor the kernel's softirqs take.
#include "wire.h"

static long (*const bpf_xdp_store_bytes)(struct xdp_md *ctx, __u32 at, const void *from, __u32 len) = (void *)190;
static __u32 (*const bpf_get_smp_processor_id)(void) = (void *)8;
static __u64 (*const bpf_get_current_pid_tgid)(void) = (void *)14;

// The part of the kernel's structures that is read here; the loader finds where the running kernel has it.
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct ns_common {
	__u32 inum;
};
struct net {
	struct ns_common ns;
};
typedef struct {
	struct net *net;
} possible_net_t;
struct net_device {
	possible_net_t nd_net;
};
struct sk_buff {
	struct net_device *dev;
};
#pragma clang attribute pop

// Of the tracepoints softirq_entry and softirq_exit.
struct vector_args {
	__u64 vector;
};

// A contribution of a round with that parity, a whole frame. Its seq is the complement of its round, so that all rounds
// have the same checksum.
struct question {
	__u8 frame[FRAME_LEN + MAX_LANES * 4 + 2];
};

// What every answer to the questions of one parity and chunk must be, in network order.
struct answer {
	__u32 tag[2];
	__u64 lanes[MAX_LANES / 2];
};

// By (parity * ranks + rank) * chunks + chunk.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); // set when the object is loaded, and the answers'
	__type(key, __u32);
	__type(value, struct question);
} questions SEC(".maps");

// By parity * chunks + chunk.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct answer);
} answers SEC(".maps");

// By parity * chunks + chunk, the round of the next RESULT. Results of rounds that follow each other may come back by
// different queues, and then in any order; of every other round not, because a sender's queue is not that long.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} rounds SEC(".maps");

volatile const __u32 frame_len; // of a question
volatile const __u32 ranks;
volatile const __u32 chunks; // of a round, a multiple of group
volatile const __u32 group;  // chunks that a rank sends before the next rank's turn

// The rounds up to this one are to be sent.
volatile __u64 until;

// What came back.
struct {
	__u64 results; // that are right
	__u64 acks;
	__u64 wrong;
	__u64 unused[5];
} seen;

// How many frames a queue of a veth holds: more of a sender's are never under way.
#define QUEUE_LENGTH 256

// A sender has one processor and some of the ranks, and its answers come back there. It walks over its ranks' chunks of
// a group, then over the groups, then over the rounds. It begins a group when there are as many results as all groups but
// the last two have chunks. Then all of these are closed on the server, whose results ever are still on their way: a
// chunk of the next group closes only after them, since all queues keep their order. So the slots are free.
struct sender {
	__u32 first, step; // ranks
	__u32 rank;
	__u32 chunk; // in the group
	__u32 at;    // first chunk of the group
	__u32 round;
	__u64 need; // results for the group
	__u64 sent;
	__u64 answered; // of what it sent
};

// By processor.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct sender);
} senders SEC(".maps");

// Run on live frames that are two bytes longer than a question. The kernel does not restore the frames that come back;
// this writes all that is sent, and since it changes the length the kernel looks at that again.
SEC("xdp")
int send_questions(struct xdp_md *ctx)
{
	__u32 cpu = bpf_get_smp_processor_id(); // live frames all come from queue 0
	struct sender *s = bpf_map_lookup_elem(&senders, &cpu);
	if (!s || s->round >= until || *(volatile __u64 *)&seen.results < s->need || s->sent - s->answered >= QUEUE_LENGTH)
		return XDP_DROP;
	__u32 chunk = s->at + s->chunk, round = s->round, rank = s->rank;
	__u32 key = ((round & 1) * ranks + rank) * chunks + chunk, len = frame_len;
	struct question *q = bpf_map_lookup_elem(&questions, &key);
	if (!q || len < FRAME_LEN || len > sizeof(q->frame))
		return XDP_ABORTED;
	if (bpf_xdp_store_bytes(ctx, 0, q->frame, len) || bpf_xdp_adjust_tail(ctx, -2))
		return XDP_ABORTED;
	const struct frame f = frame_of(ctx);
	if ((const void *)f.lanes > f.end)
		return XDP_ABORTED;
	f.x->seq = ~swap32(round);
	f.x->round = swap32(round);

	s->sent++;
	if (++s->chunk < group)
		return XDP_TX;
	s->chunk = 0;
	s->rank += s->step;
	if (s->rank < ranks)
		return XDP_TX;
	s->rank = s->first;
	s->need += s->at || s->round ? group : 0;
	s->at += group;
	if (s->at < chunks)
		return XDP_TX;
	s->at = 0;
	s->round++;
	return XDP_TX;
}

// Whether a RESULT is the sum of what was sent, and the next one of its chunk.
static __always_inline int right(const struct frame *f)
{
	__u32 chunk = swap32(f->x->chunk), round = swap32(f->x->round), blocks = f->x->blocks;
	__u32 key = (round & 1) * chunks + chunk;
	if (chunk >= chunks || blocks == 0 || swap64(f->x->contributors) != ~0ULL >> (64 - ranks))
		return 0;
	struct answer *a = bpf_map_lookup_elem(&answers, &key);
	__u32 *next = bpf_map_lookup_elem(&rounds, &key);
	if (!a || !next || *next != round)
		return 0;
	if (f->x->tag[0] != a->tag[0] || f->x->tag[1] != a->tag[1])
		return 0;
	__u64 differ = 0;
	for (__u32 b = 0; b < MAX_BLOCKS; b++) {
		if (b >= blocks)
			break;
		const __u64 *lanes = (const void *)(f->lanes + b * BLOCK_LANES);
		const __u64 *want = a->lanes + b * BLOCK_LANES / 2;
		if ((const void *)(lanes + BLOCK_LANES / 2) > f->end)
			return 0;
#pragma unroll
		for (int i = 0; i < BLOCK_LANES / 2; i++)
			differ |= lanes[i] ^ want[i];
	}
	if (differ)
		return 0;
	*next = round + 2;
	return 1;
}

// Attached natively to the other end of the link.
SEC("xdp")
int take_answers(struct xdp_md *ctx)
{
	const struct frame frame = frame_of(ctx), *f = &frame;
	if ((const void *)f->lanes > f->end || f->eth->type != swap16(0x0800) || f->ip->protocol != 17 ||
	    f->udp->src != swap16(XAGG_PORT))
		return XDP_PASS;
	__u32 type = f->x->version_type & 0xf, cpu = bpf_get_smp_processor_id();
	struct sender *s = bpf_map_lookup_elem(&senders, &cpu);
	if (s)
		s->answered++;
	if (type == TYPE_ACK)
		__sync_fetch_and_add(&seen.acks, 1);
	else if (type == TYPE_RESULT && right(f))
		__sync_fetch_and_add(&seen.results, 1);
	else
		__sync_fetch_and_add(&seen.wrong, 1);
	return XDP_DROP;
}

// Whose packets a softirq receives: the aggregator's, or the load's and everybody else's.
enum whose { OTHERS, AGGREGATOR, NOBODYS };

#define SOFTIRQ_NET_RX 3
#define SOFTIRQ_TASKLET 6

// Nanoseconds in softirqs of one processor.
struct softirq {
	__u64 start;
	__u32 whose;
	__u32 unused;
	__u64 beside[2], within[2]; // the aggregator's process, by whose packets
	__u64 tasklet;
	__u64 runs; // of the programs below
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct softirq);
} softirqs SEC(".maps");

volatile __u32 process; // the aggregator's
volatile __u32 space;   // the inode of the aggregator's network namespace

static __always_inline struct softirq *mine(void)
{
	__u32 zero = 0;
	return bpf_map_lookup_elem(&softirqs, &zero);
}

static __always_inline void spent(struct softirq *s, __u64 now)
{
	__u64 *to = bpf_get_current_pid_tgid() >> 32 == process ? s->within : s->beside;
	to[s->whose & 1] += now - s->start;
}

SEC("raw_tracepoint/softirq_entry")
int softirq_entry(struct vector_args *ctx)
{
	struct softirq *s = mine();
	if (!s || (ctx->vector != SOFTIRQ_NET_RX && ctx->vector != SOFTIRQ_TASKLET))
		return 0;
	s->runs++;
	s->whose = NOBODYS;
	s->start = bpf_ktime_get_ns();
	return 0;
}

SEC("raw_tracepoint/softirq_exit")
int softirq_exit(struct vector_args *ctx)
{
	struct softirq *s = mine();
	if (!s || !s->start || (ctx->vector != SOFTIRQ_NET_RX && ctx->vector != SOFTIRQ_TASKLET))
		return 0;
	__u64 now = bpf_ktime_get_ns();
	if (ctx->vector == SOFTIRQ_TASKLET)
		s->tasklet += now - s->start;
	else if (s->whose != NOBODYS)
		spent(s, now);
	s->start = 0;
	return 0;
}

// The time up to a softirq's first packet, and from there on, is the packet's receiver's, until a packet comes that is
// for the other. Only then the clock is read.
SEC("tp_btf/netif_receive_skb")
int receive(__u64 *ctx)
{
	const struct sk_buff *skb = (const void *)ctx[0];
	struct softirq *s = mine();
	if (!s || !s->start)
		return 0;
	s->runs++;
	__u32 whose = skb->dev->nd_net.net->ns.inum == space ? AGGREGATOR : OTHERS;
	if (s->whose != NOBODYS && s->whose != whose) {
		__u64 now = bpf_ktime_get_ns();
		spent(s, now);
		s->start = now;
	}
	s->whose = whose;
	return 0;
}

char _license[] SEC("license") = "GPL";
