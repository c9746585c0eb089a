// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// The packet format of docs/protocol.md in C: package wire and p4/xagg.p4 spell the same one.
#pragma once

#include "kernel.h"

#define XAGG_PORT 19860
#define XAGG_VERSION 1
#define XAGG_TAG_P 67108859

#define BLOCK_LANES 64
#define MAX_BLOCKS 4
#define MAX_LANES 256
#define MAX_RANKS 64

enum type {
	TYPE_GRAD = 1,
	TYPE_PARTIAL = 2,
	TYPE_RESULT = 3,
	TYPE_ACK = 4,
	TYPE_WAIT = 5,
	TYPE_NACK = 6,
	TYPE_CTRL = 7,
};

enum flag {
	FLAG_LAST = 1,
	FLAG_RESEND = 2,
	FLAG_FORWARDED = 4,
	FLAG_SATURATED = 8,
	FLAG_MODULAR = 16,
	FLAG_LATE = 32,
	FLAG_SERVER = 64,
	FLAG_ASYNC = 128,
};

#define SHAPE_FLAGS (FLAG_LAST | FLAG_MODULAR | FLAG_ASYNC)
#define STICKY_FLAGS FLAG_SATURATED

// The reasons that a server has; wire/reason.go has them all.
enum reason {
	REASON_NONE = 0,
	REASON_SHORT = 1,
	REASON_LENGTH = 2,
	REASON_VERSION = 3,
	REASON_TYPE = 4,
	REASON_CHECKSUM = 5,
	REASON_UNKNOWN_JOB = 6,
	REASON_EPOCH = 7,
	REASON_RANK = 8,
	REASON_MASK = 11,
	REASON_SHAPE = 12,
	REASON_STALE = 13,
	REASON_OVERLAP = 14,
	REASON_RANGE = 15,
	REASON_TAG = 16,
	REASON_DUPLICATE = 17,
	REASON_CLOCK = 23,
	REASON_LATE = 24,
	REASON_HELD = 25,
	NUM_REASONS = 26,
};

struct xagg_header {
	__u8 version_type;
	__u8 flags;
	__u16 job;
	__u16 epoch;
	__u8 rank;
	__u8 blocks;
	__u32 seq;
	__u32 round;
	__u32 chunk;
	__u16 elems;
	__s8 exponent;
	__u8 amax;
	__u64 contributors;
	__u32 tag[2];
	__u32 spread_us;
	__u32 blocked_us;
	__u16 next_epoch;
	__u8 reason;
	__u8 reserved[5];
};

_Static_assert(sizeof(struct xagg_header) == 56, "the header has 56 bytes");

struct mac {
	__u16 part[3];
};

struct eth_header {
	struct mac dst;
	struct mac src;
	__u16 type;
};

struct ipv4_header {
	__u8 version_ihl;
	__u8 tos;
	__u16 total_len;
	__u16 id;
	__u16 fragment;
	__u8 ttl;
	__u8 protocol;
	__u16 check;
	__u32 src;
	__u32 dst;
};

struct udp_header {
	__u16 src;
	__u16 dst;
	__u16 len;
	__u16 check;
};

// The parts of a frame. A structure of the whole frame would have to be packed, and the compiler reads and writes packed
// members byte by byte; packets may be read unaligned on every processor that matters here.
struct frame {
	struct eth_header *eth;
	struct ipv4_header *ip;
	struct udp_header *udp;
	struct xagg_header *x;
	__u32 *lanes;
	const void *end;
};

#define ETH_LEN 14
#define FRAME_LEN 98 // up to the lanes

_Static_assert(ETH_LEN + sizeof(struct ipv4_header) + sizeof(struct udp_header) + sizeof(struct xagg_header) == FRAME_LEN,
	       "the shortest frame has 98 bytes");

static __always_inline struct frame frame_of(const struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	struct frame f = {
		.eth = data,
		.ip = data + ETH_LEN,
		.udp = data + ETH_LEN + sizeof(struct ipv4_header),
		.x = data + ETH_LEN + sizeof(struct ipv4_header) + sizeof(struct udp_header),
		.lanes = data + FRAME_LEN,
		.end = (void *)(long)ctx->data_end,
	};
	return f;
}
