/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packet access of tc programs. */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/bpf.h"

typedef struct __sk_buff context_t;

#define VERDICT_PASS TC_ACT_OK /* pass to the stack */

#include "context/bounds.h"

static __always_inline __u32 packet_length(const context_t *ctx)
{
	return ctx->len;
}

/* Return the GSO size; 0 if the packet is not GSO. */
static __always_inline __u32 packet_segment(const context_t *ctx)
{
	return ctx->gso_size;
}

/* Return the device of ingress or egress. */
static __always_inline __u32 packet_ifindex(const context_t *ctx)
{
	return ctx->ifindex;
}

static __always_inline __u32 packet_hash(context_t *ctx)
{
	return bpf_get_hash_recalc(ctx);
}

/* Make the first `length` bytes directly readable. May pull: earlier packet pointers become invalid. */
static __always_inline bool packet_pull(context_t *ctx, __u32 length)
{
	if (likely(packet_start(ctx) + length <= packet_end(ctx)))
		return true;
	return ctx->len >= length && !bpf_skb_pull_data(ctx, length);
}

/* Copy bytes from or to the packet; returns 0 or an error. */
static __always_inline long packet_load(const context_t *ctx, __u32 at, void *to, __u32 size)
{
	return bpf_skb_load_bytes(ctx, at, to, size);
}

static __always_inline long packet_store(context_t *ctx, __u32 at, const void *from, __u32 size)
{
	return bpf_skb_store_bytes(ctx, at, from, size, 0);
}

/* Update a checksum incrementally, like bpf_l3_csum_replace() and bpf_l4_csum_replace(). */
static __always_inline long packet_sum3(context_t *ctx, __u32 at, __u64 from, __u64 to, __u64 size)
{
	return bpf_l3_csum_replace(ctx, at, from, to, size);
}

static __always_inline long packet_sum4(context_t *ctx, __u32 at, __u64 from, __u64 to, __u64 flags)
{
	return bpf_l4_csum_replace(ctx, at, from, to, flags);
}

/* Insert `size` bytes after the network header of `header` bytes (without options); returns 0 or an error. Earlier
 * packet pointers become invalid.
 */
static __always_inline long packet_make_room(context_t *ctx, __u32 header, __u32 size)
{
	(void)header;
	return bpf_skb_adjust_room(ctx, size, BPF_ADJ_ROOM_NET,
				   BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET);
}
