// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

//go:build ignore

// The aggregation server: sums contributions in the slots of one arena and answers them before they reach the stack.
// docs/protocol.md has the rules under "Server slots"; agg/server.go states them in Go, and the tests compare the two
// packet by packet.
//
// Numbers in slots and plans are in host order, packets in network order. One lock per slot makes a contribution's bit
// and its lanes one step, so that whoever completes the mask holds the complete sum, whichever processors the other
// contributions arrived at. Answers are read from the slot under the same lock: a closed slot does not change until its
// next owner claims it, but that may happen at any time after. A running sum of an async plan has two slots, the second
// of which is only touched under the lock of the first.
#include "wire.h"

// One epoch of a job. The agent replaces a plan as a whole, and waits until no processor can still use the old one.
struct plan {
	__u64 ranks;       // mask of all ranks
	__u32 base;        // first slot of the rounds: the lease's, or in an async plan that of its scouts
	__u32 chunks;      // per round
	__u32 rounds_mask; // number of rounds, a power of two, less one
	__u32 index;       // of the job's statistics
	__u32 service_ip;  // network order
	struct mac service_mac;
	__u16 next_epoch; // armed, or 0
	__u32 quorum;     // ranks that are enough to close a chunk; 0: all have to be in
	__u64 wait_ns;    // ... when its first arrival is so long ago
	__u32 async;      // whether there are running sums
	__u32 sums;       // ... in the slots from here on, one a chunk; their clocks follow, one slot a chunk
	__u32 staleness;  // ... contributions that a rank may be ahead of the slowest
	__u32 unused;
};

// A chunk of a round, or a running sum, or (in its lanes, by rank) the clocks of a running sum.
struct slot {
	struct bpf_spin_lock lock;
	__u16 job;
	__u16 epoch; // 0: never used
	__u32 round; // of a running sum: how many contributions were added, modulo 2^32
	__u16 elems;
	__u8 blocks;
	__s8 exponent;
	__u8 shape;  // of SHAPE_FLAGS
	__u8 sticky; // of STICKY_FLAGS
	__u8 amax;
	__u8 rank; // of the last contributor
	__u16 next_epoch;
	__u8 closed; // stays until the slot is claimed
	__u8 unused;
	__u64 mask; // not of a running sum
	__u32 tag[2];
	__u64 first_ns, previous_ns, last_ns; // arrivals: the first, the last but one, the last
	__u32 lanes[MAX_LANES]; // a chunk's and a sum's swapped in pairs: 1, 0, 3, 2, ...
};

_Static_assert(sizeof(struct slot) == 1088, "SlotSize in size.go");

#define LAG_BUCKETS 32
#define CACHE_LINE 64 // bytes
#define MAX_JOBS 64

struct rank_stats {
	__u64 packets;
	__u64 lag_sum_us;
	__u64 lag_max_us;
	__u64 lag_log2[LAG_BUCKETS];
	__u64 partials; // of which the rank was the last contributor
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); // set when the object is loaded
	__type(key, __u32);
	__type(value, struct slot);
} arena SEC(".maps");

// By job << 16 | epoch. (A structure of the two would be written in halves and read as a whole, for which a processor
// has to wait.)
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4 * MAX_JOBS);
	__type(key, __u32);
	__type(value, struct plan);
} plans SEC(".maps");

// The jobs that have a plan, to tell an unknown job from an unknown epoch.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_JOBS);
	__type(key, __u32);
	__type(value, __u8);
} jobs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, NUM_REASONS);
	__type(key, __u32);
	__type(value, __u64);
} reasons SEC(".maps");

// By index of the job's plan x 64 + rank.
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MAX_JOBS * MAX_RANKS);
	__type(key, __u32);
	__type(value, struct rank_stats);
} ranks SEC(".maps");

static __always_inline void count(__u32 reason)
{
	__u64 *n = bpf_map_lookup_elem(&reasons, &reason);
	if (n)
		++*n;
}

// Microseconds of a span of nanoseconds, saturated. Up to 4 s without the processor's slow division.
static __always_inline __u32 microseconds(__u64 ns)
{
	if (likely(ns >> 32 == 0))
		return (__u32)ns * 274877907ULL >> 38;
	ns /= 1000;
	return ns >> 32 ? ~0U : ns;
}

static __always_inline __u32 log2_of(__u32 x)
{
	__u32 n = 0;
	if (x >> 16)
		x >>= 16, n += 16;
	if (x >> 8)
		x >>= 8, n += 8;
	if (x >> 4)
		x >>= 4, n += 4;
	if (x >> 2)
		x >>= 2, n += 2;
	return n + (x >> 1);
}

// Counts what was summed. A PARTIAL has no lag: it does not say when its contributors came.
static __always_inline void count_summed(const struct plan *plan, __u32 type, __u32 rank, __u32 lag_us)
{
	__u32 key = plan->index * MAX_RANKS + rank;
	struct rank_stats *s = bpf_map_lookup_elem(&ranks, &key);
	if (!s)
		return;
	if (unlikely(type != TYPE_GRAD)) {
		s->partials++;
		return;
	}
	s->packets++;
	s->lag_sum_us += lag_us;
	if (lag_us > s->lag_max_us)
		s->lag_max_us = lag_us;
	s->lag_log2[log2_of(lag_us) & (LAG_BUCKETS - 1)]++;
}

// A one's complement sum of 32-bit words, folded to 16 bits with all carries. Its byte order is that of the words
// (RFC 1071). Adding a number to itself with the halves swapped leaves the carry of one half in the other.
static __always_inline __u16 fold(__u64 sum)
{
	sum += sum >> 32 | sum << 32;
	__u32 word = sum >> 32;
	word += word >> 16 | word << 16;
	return word >> 16;
}

// What is to be done with the lanes of a packet, by the pass over them.
enum pass {
	PASS_SUM,   // nothing
	PASS_CLAIM, // slot = packet
	PASS_ADD,   // slot += packet
	PASS_UNDO,  // slot -= packet
	PASS_READ,  // packet = slot
};

// One pass over the lanes, which have the order of the packet there, and are swapped in pairs in the slot: two lanes are
// one number in host order there, so that a pass that adds nothing moves both at once. A pass that judges the packet
// (PASS_SUM, PASS_ADD) returns the lanes' sum for the UDP checksum, as they are in the packet.
//
// The loop over the blocks stays a loop, the lanes of a block are unrolled: rolled, they take twice the time. The
// verifier wants to see each block's end compared with the packet's.
static __always_inline __u64 over_lanes(enum pass pass, __u32 blocks, const struct frame *f, __u32 *slot)
{
	__u64 even = 0, odd = 0; // two sums, of which neither waits for the other
	for (__u32 b = 0; b < MAX_BLOCKS; b++) {
		if (b >= blocks)
			break;
		__u32 *lane = f->lanes + b * BLOCK_LANES, *at = slot + b * BLOCK_LANES;
		if ((const void *)(lane + BLOCK_LANES) > f->end)
			break;
#pragma unroll
		for (int i = 0; i < BLOCK_LANES; i++) {
			__u64 *pair = (void *)(lane + i), *pair_at = (void *)(at + i);
			if (pass == PASS_CLAIM) {
				if (i % 2 == 0)
					*pair_at = swap64(*pair);
			} else if (pass == PASS_READ) {
				if (i % 2 == 0)
					*pair = swap64(*pair_at);
			} else if (pass == PASS_UNDO) {
				at[i ^ 1] -= swap32(lane[i]);
			} else {
				__u32 word = lane[i];
				*(i % 2 ? &odd : &even) += word;
				if (pass == PASS_ADD)
					at[i ^ 1] += swap32(word);
				// Without this the compiler gathers words to add them up in a tree, and runs out of registers.
				asm volatile("" : "+r"(even), "+r"(odd) : : "memory");
			}
		}
	}
	return even + odd;
}

// Has the processor fetch all lanes at once, while the header is looked at. They may be in another processor's cache, and
// a pass asks for no more than a few lines ahead.
static __always_inline void fetch_lanes(const struct frame *f)
{
	for (__u32 b = 0; b < MAX_BLOCKS; b++) {
		const __u32 *lane = f->lanes + b * BLOCK_LANES;
		if ((const void *)(lane + BLOCK_LANES) > f->end)
			break;
#pragma unroll
		for (int i = 0; i < BLOCK_LANES; i += CACHE_LINE / 4)
			asm volatile("" : : "r"(lane[i]));
	}
}

// Zeroes n lanes, an even number. (A plain loop would become a call of memset, which there is not.)
static __always_inline void clear(__u32 *lanes, int n)
{
	for (int i = 0; i < n; i += 2)
		*(volatile __u64 *)(lanes + i) = 0;
}

static __always_inline int ipv4_ok(const struct ipv4_header *ip)
{
	const __u32 *w = (const void *)ip;
	return fold((__u64)w[0] + w[1] + w[2] + w[3] + w[4]) == 0xffff;
}

// The sum of what a UDP checksum covers before the lanes.
static __always_inline __u64 udp_sum(const struct frame *f)
{
	const __u32 *w = (const void *)f->udp;
	__u64 sum = (__u64)f->ip->src + f->ip->dst + swap16(17) + f->udp->len;
#pragma unroll
	for (int i = 0; i < (int)(sizeof(*f->udp) + sizeof(*f->x)) / 4; i++)
		sum += w[i];
	return sum;
}

// Whether the checksum that a packet carries, if it does, fits the sum over all that it covers.
static __always_inline int udp_ok(const struct frame *f, __u64 sum)
{
	return f->udp->check == 0 || fold(sum) == 0xffff;
}

static __always_inline void copy_mac(void *to, const void *from)
{
	*(__u32 *)to = *(const __u32 *)from;
	*(__u16 *)(to + 4) = *(const __u16 *)(from + 4);
}

#ifndef XAGG_SHRINK
#define XAGG_SHRINK(ctx, bytes) bpf_xdp_adjust_tail(ctx, -(int)(bytes))
#endif

// What an answer has of its own, besides the fields that come from a slot and are written under its lock.
struct answer {
	__u32 type;
	__u32 flags;
	__u32 blocks;
	__u32 tag0, tag1;
	__u32 spread_us, blocked_us;
	__u32 next_epoch;
	__u32 reason;
	const struct plan *service; // where it goes; 0: to the sender
};

// Turns a question into its answer and sends it back out, cut to the answer's blocks. Addresses and ports are swapped.
static __always_inline int reply(struct xdp_md *ctx, const struct frame *f, const struct answer *a)
{
	const struct plan *service = a->service;
	__u32 blocks = a->blocks;
	__u32 surplus = (f->x->blocks - blocks) * BLOCK_LANES * 4;
	__u32 len = sizeof(*f->udp) + sizeof(*f->x) + blocks * BLOCK_LANES * 4;
	__u32 src = f->ip->dst, dst = f->ip->src;
	__u32 *ip = (void *)f->ip, *udp = (void *)f->udp;
	struct mac mac;

	f->x->version_type = XAGG_VERSION << 4 | a->type;
	f->x->flags = a->flags;
	f->x->blocks = blocks;
	f->x->tag[0] = swap32(a->tag0);
	f->x->tag[1] = swap32(a->tag1);
	f->x->spread_us = swap32(a->spread_us);
	f->x->blocked_us = swap32(a->blocked_us);
	f->x->next_epoch = swap16(a->next_epoch);
	f->x->reason = a->reason;
	udp[0] = udp[0] << 16 | udp[0] >> 16;
	udp[1] = swap16(len); // and no checksum
	copy_mac(&mac, &f->eth->src);
	if (service) {
		mac = service->service_mac;
		dst = service->service_ip;
		f->udp->dst = swap16(XAGG_PORT);
	}
	copy_mac(&f->eth->src, &f->eth->dst);
	copy_mac(&f->eth->dst, &mac);

	// The IPv4 header is made anew, in words: identification 0, don't fragment, a time to live of 64.
	__u32 w0 = swap32(0x45000000 | (sizeof(*f->ip) + len)), w1 = swap32(0x00004000), w2 = swap32(64 << 24 | 17 << 16);
	ip[0] = w0;
	ip[1] = w1;
	ip[2] = w2 | (__u32)(__u16)~fold((__u64)w0 + w1 + w2 + src + dst) << 16;
	ip[3] = src;
	ip[4] = dst;

	// Never seen to fail. If it does, the answer is lost like any other packet, and the kernel's tracepoint
	// xdp:xdp_exception tells.
	if (surplus && XAGG_SHRINK(ctx, surplus))
		return XDP_ABORTED;
	return XDP_TX;
}

// Whether a frame for the aggregator's port has the protocol's form, or why not, in the protocol's order.
static __always_inline __u32 check_form(const struct frame *f)
{
	if ((const void *)f->lanes > f->end)
		return REASON_SHORT;
	__u32 version = f->x->version_type >> 4, type = f->x->version_type & 0xf;
	__u32 blocks = f->x->blocks, elems = swap16(f->x->elems);
	__u32 len = f->end - (const void *)f->eth, want = FRAME_LEN + blocks * BLOCK_LANES * 4;
	if (version == XAGG_VERSION && blocks <= MAX_BLOCKS && len < want)
		return REASON_SHORT;
	if (len != ETH_LEN + (__u32)swap16(f->ip->total_len) || len != ETH_LEN + (__u32)sizeof(*f->ip) + swap16(f->udp->len))
		return REASON_LENGTH;
	if (version != XAGG_VERSION)
		return REASON_VERSION;
	if (type < TYPE_GRAD || type > TYPE_CTRL)
		return REASON_TYPE;
	if (blocks > MAX_BLOCKS || len != want)
		return REASON_LENGTH;
	if (type <= TYPE_RESULT && (elems > MAX_LANES || blocks != (elems + BLOCK_LANES - 1) / BLOCK_LANES))
		return REASON_LENGTH;
	if (*(const __u64 *)&f->x->next_epoch >> 24) // the reserved bytes are the last five of these eight
		return REASON_LENGTH;
	return ipv4_ok(f->ip) ? REASON_NONE : REASON_CHECKSUM;
}

// Whether a packet may come to a slot of the plan, or why not.
static __always_inline __u32 admit(const struct frame *f, __u32 job, const struct plan *plan, __u64 bits,
				   __u32 tag0, __u32 tag1)
{
	__u32 type = f->x->version_type & 0xf, rank = f->x->rank;
	if (type != TYPE_GRAD && type != TYPE_PARTIAL)
		return REASON_TYPE;
	if (!plan)
		return bpf_map_lookup_elem(&jobs, &job) ? REASON_EPOCH : REASON_UNKNOWN_JOB;
	if (rank >= MAX_RANKS || !(plan->ranks >> rank & 1))
		return REASON_RANK;
	if (type == TYPE_GRAD ? bits != 1ULL << rank : !bits || bits & ~plan->ranks)
		return REASON_MASK;
	if (type == TYPE_GRAD && (tag0 >= XAGG_TAG_P || tag1 >= XAGG_TAG_P))
		return REASON_TAG;
	if (swap32(f->x->chunk) >= plan->chunks)
		return REASON_RANGE;
	if (f->x->flags & FLAG_ASYNC && (type != TYPE_GRAD || !plan->async))
		return REASON_SHAPE;
	return REASON_NONE;
}

// Whether a packet has the shape of the slot that it belongs to.
static __always_inline int fits(const struct slot *s, const struct xagg_header *x, __u32 shape)
{
	return s->elems == swap16(x->elems) && s->blocks == x->blocks && s->exponent == x->exponent && s->shape == shape;
}

// What a packet is to a slot: the rows of the protocol's table.
enum step { CLAIM, ADD, CLOSED, KNOWN, REFUSED };

static __always_inline enum step step_of(const struct plan *plan, const struct slot *s, __u32 job, __u32 epoch, __u32 round,
					 __u32 shape, const struct xagg_header *x, __u64 bits, __u32 *reason)
{
	__s32 order = s->round - round;
	if (!order)
		order = (__s16)(s->epoch - epoch);
	if (s->epoch == 0 || s->job != job || order < 0)
		return CLAIM;
	if (order > 0) {
		*reason = REASON_STALE;
		return REFUSED;
	}
	if (!fits(s, x, shape)) {
		*reason = REASON_SHAPE;
		return REFUSED;
	}
	if (s->closed) {
		*reason = bits & ~s->mask ? REASON_LATE : REASON_DUPLICATE;
		return CLOSED;
	}
	if (!(s->mask & bits))
		return ADD;
	// In quorum a rank that came after a flush may claim the switch's slot while the PARTIAL is still on its way; then the
	// PARTIAL's ranks come by themselves.
	if (bits & ~s->mask && !plan->quorum) {
		*reason = REASON_OVERLAP;
		return REFUSED;
	}
	*reason = REASON_DUPLICATE;
	return KNOWN;
}

static __always_inline __u32 ones(__u64 x)
{
	x -= x >> 1 & 0x5555555555555555;
	x = (x & 0x3333333333333333) + (x >> 2 & 0x3333333333333333);
	x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0f;
	return x * 0x0101010101010101 >> 56;
}

// Whether an open slot closes now.
static __always_inline int closes(const struct plan *plan, const struct slot *s, __u64 now)
{
	if (s->mask == plan->ranks)
		return 1;
	return unlikely(plan->quorum) && now - s->first_ns >= plan->wait_ns && ones(s->mask) >= plan->quorum;
}

// The rows of the protocol's section "Async", for a contribution that may come to the plan's running sums. It is a
// function of its own so that it takes no registers and no stack away from the ordinary ones.
static __noinline int add_to_running_sum(struct xdp_md *ctx, const struct plan *plan)
{
	const struct frame frame = frame_of(ctx), *f = &frame;
	struct xagg_header *x = f->x;
	if ((const void *)f->lanes > f->end) // the caller has looked, but the verifier wants to see it
		return XDP_ABORTED;
	if (!udp_ok(f, udp_sum(f) + over_lanes(PASS_SUM, x->blocks, f, 0))) {
		count(REASON_CHECKSUM);
		return XDP_DROP;
	}
	__u32 key = swap32(*(const __u32 *)&x->job), job = key >> 16, epoch = key & 0xffff;
	__u32 rank = x->rank & (MAX_RANKS - 1), blocks = x->blocks, round = swap32(x->round), chunk = swap32(x->chunk);
	__u32 shape = x->flags & SHAPE_FLAGS;
	__u32 tag0 = swap32(x->tag[0]), tag1 = swap32(x->tag[1]);
	__u32 reason = REASON_NONE;
	struct answer a = {.type = TYPE_RESULT, .flags = shape, .blocks = blocks};
	__u64 near = 0, ahead = 0; // ranks with clock + staleness >= round, and with clock > round, in serial-number order
	__u64 now = bpf_ktime_get_ns(); // no helper may be called under the lock

	__u32 index = plan->sums + chunk, second = index + plan->chunks;
	struct slot *s = bpf_map_lookup_elem(&arena, &index), *clocks = bpf_map_lookup_elem(&arena, &second);
	if (!s || !clocks) { // a plan beyond the arena: the agent does not install it
		count(REASON_RANGE);
		return XDP_DROP;
	}

	bpf_spin_lock(&s->lock);
	if (s->job != job || s->epoch != epoch) {
		s->job = job;
		s->epoch = epoch;
		s->round = 0;
		s->elems = swap16(x->elems);
		s->blocks = blocks;
		s->exponent = x->exponent;
		s->shape = shape;
		s->sticky = s->amax = s->rank = 0;
		s->next_epoch = s->closed = 0;
		s->mask = 0;
		s->tag[0] = s->tag[1] = 0;
		s->first_ns = s->previous_ns = s->last_ns = now;
		clear(s->lanes, MAX_LANES);
		clear(clocks->lanes, MAX_RANKS);
	}
	for (__u32 r = 0; r < MAX_RANKS; r++) {
		__s64 behind = (__s32)(round - clocks->lanes[r]);
		near |= (__u64)(behind <= plan->staleness) << r;
		ahead |= (__u64)(behind < 0) << r;
	}
	__s32 early = round - clocks->lanes[rank];
	if (!fits(s, x, shape))
		reason = REASON_SHAPE;
	else if (early)
		reason = early == -1 ? REASON_DUPLICATE : early < -1 ? REASON_STALE : REASON_CLOCK;
	else if (plan->ranks & ~near)
		reason = REASON_HELD;
	if (reason == REASON_NONE) {
		clocks->lanes[rank] = round + 1;
		ahead |= 1ULL << rank;
		s->round++;
		s->sticky |= x->flags & STICKY_FLAGS;
		if (s->amax < x->amax)
			s->amax = x->amax;
		s->rank = rank;
		tag0 += s->tag[0];
		tag1 += s->tag[1];
		s->tag[0] = tag0 >= XAGG_TAG_P ? tag0 - XAGG_TAG_P : tag0;
		s->tag[1] = tag1 >= XAGG_TAG_P ? tag1 - XAGG_TAG_P : tag1;
		s->previous_ns = s->last_ns;
		if (s->last_ns < now) // processors may take the lock in another order than the time
			s->last_ns = now;
		over_lanes(PASS_ADD, blocks, f, s->lanes);
		over_lanes(PASS_READ, blocks, f, s->lanes);
	} else if (reason == REASON_DUPLICATE) {
		over_lanes(PASS_READ, blocks, f, s->lanes);
	}
	if (reason == REASON_NONE || reason == REASON_DUPLICATE) {
		x->seq = swap32(s->round);
		x->rank = s->rank;
		x->amax = s->amax;
		x->contributors = swap64(ahead & plan->ranks);
		a.flags |= s->sticky | FLAG_SERVER;
		a.tag0 = s->tag[0];
		a.tag1 = s->tag[1];
	} else if (reason == REASON_HELD) {
		x->amax = s->amax;
		x->contributors = swap64(near & plan->ranks);
	}
	bpf_spin_unlock(&s->lock);

	count(reason);
	switch (reason) {
	case REASON_NONE:
		count_summed(plan, TYPE_GRAD, rank, 0); // a running sum has no first arrival to be behind
		fallthrough;
	case REASON_DUPLICATE:
		a.next_epoch = chunk ? 0 : plan->next_epoch;
		break;
	case REASON_HELD:
		a.type = TYPE_WAIT;
		a.blocks = 0;
		break;
	case REASON_STALE:
		return XDP_DROP;
	default:
		a.type = TYPE_NACK;
		a.blocks = 0;
		a.tag0 = tag0;
		a.tag1 = tag1;
		a.reason = reason;
	}
	return reply(ctx, f, &a);
}

static __always_inline int aggregate(struct xdp_md *ctx)
{
	const struct frame frame = frame_of(ctx), *f = &frame;

	// Whatever is not for the aggregator's port is the stack's.
	if ((const void *)f->x > f->end)
		return XDP_PASS;
	if (f->eth->type != swap16(0x0800) || f->ip->version_ihl != 0x45 || f->ip->protocol != 17 ||
	    f->ip->fragment & swap16(0x3fff) || f->udp->dst != swap16(XAGG_PORT))
		return XDP_PASS;
	fetch_lanes(f);
	__u32 reason = check_form(f);
	if (reason || (const void *)f->lanes > f->end) {
		count(reason);
		return XDP_DROP;
	}

	struct xagg_header *x = f->x;
	__u32 key = swap32(*(const __u32 *)&x->job), job = key >> 16, epoch = key & 0xffff;
	__u32 type = x->version_type & 0xf, blocks = x->blocks, rank = x->rank;
	__u32 round = swap32(x->round), chunk = swap32(x->chunk);
	__u32 tag0 = swap32(x->tag[0]), tag1 = swap32(x->tag[1]);
	__u64 bits = swap64(x->contributors);
	__u32 shape = x->flags & SHAPE_FLAGS, sticky = x->flags & STICKY_FLAGS;
	__u64 sum = udp_sum(f); // the lanes' part is added by the first pass over them
	int good;

	struct answer a = {.type = TYPE_ACK, .flags = shape};
	const struct plan *plan = bpf_map_lookup_elem(&plans, &key);
	struct slot *s = 0;
	enum step step = REFUSED;
	reason = admit(f, job, plan, bits, tag0, tag1);
	if (!reason && plan) {
		if (unlikely(shape & FLAG_ASYNC))
			return add_to_running_sum(ctx, plan);
		__u32 index = plan->base + (round & plan->rounds_mask) * plan->chunks + chunk;
		s = bpf_map_lookup_elem(&arena, &index);
		if (!s) // a plan beyond the arena: the agent does not install it
			reason = REASON_RANGE;
	}
	if (s && plan) {
		__u64 now = bpf_ktime_get_ns(), first; // no helper may be called under the lock

		bpf_spin_lock(&s->lock);
		step = step_of(plan, s, job, epoch, round, shape, x, bits, &reason);
		if (step != CLAIM && now < s->last_ns) // processors may take the lock in another order than the time
			now = s->last_ns;
		// Most packets are added, and the lanes are read only once for it: a contribution whose checksum turns out to
		// be wrong is taken out again before anybody can see it.
		if (likely(step == ADD)) {
			good = udp_ok(f, sum + over_lanes(PASS_ADD, blocks, f, s->lanes));
			if (unlikely(!good))
				over_lanes(PASS_UNDO, blocks, f, s->lanes);
		} else {
			good = udp_ok(f, sum + over_lanes(PASS_SUM, blocks, f, 0));
		}
		if (unlikely(!good))
			step = REFUSED;
		if (step == ADD) {
			s->sticky |= sticky;
			if (s->amax < x->amax)
				s->amax = x->amax;
			s->rank = rank;
			s->mask |= bits;
			s->tag[0] += tag0;
			s->tag[1] += tag1;
			s->previous_ns = s->last_ns;
			s->last_ns = now;
		} else if (step == CLAIM) {
			s->job = job;
			s->epoch = epoch;
			s->round = round;
			s->elems = swap16(x->elems);
			s->blocks = blocks;
			s->exponent = x->exponent;
			s->shape = shape;
			s->sticky = sticky;
			s->amax = x->amax;
			s->rank = rank;
			s->closed = 0;
			s->mask = bits;
			s->tag[0] = tag0;
			s->tag[1] = tag1;
			s->first_ns = s->previous_ns = s->last_ns = now;
			over_lanes(PASS_CLAIM, blocks, f, s->lanes);
		}
		first = s->first_ns;
		if (step != REFUSED) {
			if (step != CLOSED && closes(plan, s, now)) {
				s->closed = 1;
				s->next_epoch = chunk ? 0 : plan->next_epoch;
				a.service = plan;
			}
			x->contributors = swap64(s->mask);
			x->amax = s->amax;
			tag0 = tag1 = 0;
			if (s->closed) {
				now = s->last_ns;
				x->rank = s->rank;
				tag0 = s->tag[0];
				tag1 = s->tag[1];
				a.type = TYPE_RESULT;
				a.flags |= s->sticky | FLAG_SERVER;
				a.blocks = blocks;
				a.next_epoch = s->next_epoch;
				a.blocked_us = microseconds(now - s->previous_ns);
				over_lanes(PASS_READ, blocks, f, s->lanes);
			}
		}
		bpf_spin_unlock(&s->lock);

		if (step != REFUSED)
			a.spread_us = microseconds(now - first);
		if (reason == REASON_LATE)
			a.flags |= FLAG_LATE;
		if (good && !reason) {
			if (type != TYPE_GRAD)
				a.service = plan;
			count_summed(plan, type, rank, a.spread_us);
		}
	} else {
		good = udp_ok(f, sum + over_lanes(PASS_SUM, blocks, f, 0));
	}
	if (!good)
		reason = REASON_CHECKSUM;
	count(reason);
	if (!good || reason == REASON_TYPE)
		return XDP_DROP;
	if (step == REFUSED) {
		a.type = TYPE_NACK;
		a.reason = reason;
	}
	a.tag0 = tag0;
	a.tag1 = tag1;
	return reply(ctx, f, &a);
}

SEC("xdp")
int xagg(struct xdp_md *ctx)
{
	return aggregate(ctx);
}

// The kernel takes programs under the GPL to the helpers that ask for it; this file may be used under either licence.
char _license[] SEC("license") = "GPL";
