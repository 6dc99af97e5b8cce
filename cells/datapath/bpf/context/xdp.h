/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packet access of XDP programs: linear, without skb metadata. */
#pragma once

#include <linux/if_ether.h>

#include "lib/bpf.h"

typedef struct xdp_md context_t;

#define VERDICT_PASS XDP_PASS

#define PACKET_DEEPEST 16384 /* limit of offsets for the verifier: enough for all headers */

#include "context/bounds.h"

static __always_inline __u32 packet_length(const context_t *ctx)
{
	return packet_end(ctx) - packet_start(ctx);
}

static __always_inline __u32 packet_segment(const context_t *ctx)
{
	(void)ctx;
	return 0;
}

static __always_inline __u32 packet_ifindex(const context_t *ctx)
{
	return ctx->ingress_ifindex;
}

/* The device may have merged packets, but there is no GSO size in XDP. */
static __always_inline __u32 packet_hash(context_t *ctx)
{
	(void)ctx;
	return 0;
}

static __always_inline bool packet_pull(context_t *ctx, __u32 length)
{
	return packet_length(ctx) >= length;
}

/* Return a pointer to these bytes, or NULL. Alignment is assumed, because headers are read by words elsewhere. */
static __always_inline void *packet_at(const context_t *ctx, __u32 at, __u32 size)
{
	void *found;

	asm volatile("" : "+r"(at)); /* the bounds check must apply to this register */
	if (at > PACKET_DEEPEST)
		return NULL;
	found = packet_start(ctx) + at;
	return found + size <= packet_end(ctx) ? found : NULL;
}

static __always_inline long packet_load(const context_t *ctx, __u32 at, void *to, __u32 size)
{
	const void *found = packet_at(ctx, at, size);

	if (!found)
		return -1;
	__builtin_memcpy(to, __builtin_assume_aligned(found, 4), size);
	return 0;
}

static __always_inline long packet_store(context_t *ctx, __u32 at, const void *from, __u32 size)
{
	void *found = packet_at(ctx, at, size);

	if (!found)
		return -1;
	__builtin_memcpy(__builtin_assume_aligned(found, 4), from, size);
	return 0;
}

/* Update a checksum (RFC 1624, equation 3). `flags`: size of the field, or 0 if `to` is a difference;
 * BPF_F_MARK_MANGLED_0 if a checksum of 0 means none.
 */
VERIFIED_ALONE packet_sum4(context_t *ctx, __u32 at, __u64 from, __u64 to, __u64 flags)
{
	__u16 *field = packet_at(ctx, at, sizeof(*field));
	__u64 sum;

	if (!field)
		return -1;
	if (flags & BPF_F_MARK_MANGLED_0 && !*field)
		return 0;
	sum = (__u16) ~*field;
	switch (flags & BPF_F_HDR_FIELD_MASK) {
	case 0:
		sum += (__u32)to;
		break;
	case 2:
		sum += (__u16)~from + (__u16)to;
		break;
	default:
		sum += (__u64)(__u32)~from + (__u32)to;
	}
	sum = (sum >> 32) + (sum & 0xffffffff);
	sum = (sum >> 16) + (sum & 0xffff);
	sum = (sum >> 16) + (sum & 0xffff);
	sum = (__u16) ~((sum >> 16) + (sum & 0xffff));
	*field = flags & BPF_F_MARK_MANGLED_0 && !sum ? 0xffff : sum;
	return 0;
}

static __always_inline long packet_sum3(context_t *ctx, __u32 at, __u64 from, __u64 to, __u64 size)
{
	return packet_sum4(ctx, at, from, to, size);
}

static __always_inline long packet_make_room(context_t *ctx, __u32 header, __u32 size)
{
	__u16 *to;

	if (bpf_xdp_adjust_head(ctx, -(int)size))
		return -1;
	to = packet_at(ctx, 0, size + ETH_HLEN + header);
	if (!to)
		return -1;
#pragma unroll
	for (__u32 i = 0; i < (ETH_HLEN + header) / sizeof(*to); i++)
		to[i] = to[i + size / sizeof(*to)];
	return 0;
}
