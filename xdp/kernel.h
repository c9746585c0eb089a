// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// The part of the kernel's BPF interface that xagg.bpf.c uses, so that the object depends on the compiler alone and not
// on the headers of the machine that built it. All of it is stable: linux/bpf.h has the numbers.
#pragma once

typedef unsigned char __u8;
typedef signed char __s8;
typedef unsigned short __u16;
typedef signed short __s16;
typedef unsigned int __u32;
typedef signed int __s32;
typedef unsigned long long __u64;
typedef signed long long __s64;

struct xdp_md {
	__u32 data;
	__u32 data_end;
	__u32 data_meta;
	__u32 ingress_ifindex;
	__u32 rx_queue_index;
	__u32 egress_ifindex;
};

enum xdp_action {
	XDP_ABORTED = 0,
	XDP_DROP = 1,
	XDP_PASS = 2,
	XDP_TX = 3,
};

struct bpf_spin_lock {
	__u32 val;
};

enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
};

static void *(*const bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static __u64 (*const bpf_ktime_get_ns)(void) = (void *)5;
static long (*const bpf_xdp_adjust_tail)(struct xdp_md *ctx, int delta) = (void *)65;
static long (*const bpf_spin_lock)(struct bpf_spin_lock *lock) = (void *)93;
static long (*const bpf_spin_unlock)(struct bpf_spin_lock *lock) = (void *)94;

// The members of a map definition in section .maps, as BTF encodes them: numbers as array lengths, types as pointers.
#define __uint(name, value) int (*name)[value]
#define __type(name, type_) __typeof__(type_) *name

#define SEC(name) __attribute__((section(name), used))
#define __always_inline inline __attribute__((always_inline))
#define __noinline __attribute__((noinline))
#define fallthrough __attribute__((fallthrough))

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

// Network order. The object is built for little-endian processors only.
#define swap16(x) ((__u16)__builtin_bswap16(x))
#define swap32(x) __builtin_bswap32(x)
#define swap64(x) __builtin_bswap64(x)
