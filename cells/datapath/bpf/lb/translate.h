/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Rewrite addresses and ports of a packet, with incremental checksum updates. */
#pragma once

#include "lib/packet.h"
#include "lib/reasons.h"

/* Which address and port to rewrite. */
enum end {
	SOURCE,
	DESTINATION,
};

#define TCP_CHECKSUM 16 /* offsets of the checksum in the transport header */
#define UDP_CHECKSUM 6
#define ICMP6_CHECKSUM 2

/* Return the offset of the transport checksum that covers a pseudo-header; 0 if there is none. */
static __always_inline __u32 l4_checksum_offset(const struct flow *flow)
{
	if (flow->later_fragment)
		return 0;
	switch (flow->protocol) {
	case IPPROTO_TCP:
		return flow->l4 + TCP_CHECKSUM;
	case IPPROTO_UDP:
		return flow->l4 + UDP_CHECKSUM;
	case IPPROTO_ICMPV6:
		return flow->l4 + ICMP6_CHECKSUM;
	}
	return 0;
}

static __always_inline __u64 checksum_flags(const struct flow *flow)
{
	return flow->protocol == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
}

/* Return the checksum difference of two addresses. The casts drop const: the helper only reads. */
static __always_inline __s64 address6_difference(const struct address *from, const struct address *to)
{
	return bpf_csum_diff((__be32 *)from->words, sizeof(*from), (__be32 *)to->words, sizeof(*to), 0);
}

static __always_inline int translate_address(context_t *ctx, const struct flow *flow, enum end end,
					     const struct address *from, const struct address *to, __u8 family)
{
	__u32 sum_at = l4_checksum_offset(flow), at;
	__u64 flags = checksum_flags(flow) | BPF_F_PSEUDO_HDR;
	__s64 difference;

	if (family == FAMILY_IPV4) {
		__be32 old = from->words[0], new = to->words[0];

		at = LINK_HLEN + (end == SOURCE ? offsetof(struct iphdr, saddr) : offsetof(struct iphdr, daddr));
		if (packet_sum3(ctx, LINK_HLEN + offsetof(struct iphdr, check), old, new, 4) ||
		    packet_store(ctx, at, &new, sizeof(new)))
			return DROP_WRITE_ERROR;
		difference = bpf_csum_diff(&old, sizeof(old), &new, sizeof(new), 0);
	} else {
		at = LINK_HLEN +
		     (end == SOURCE ? offsetof(struct ipv6hdr, saddr) : offsetof(struct ipv6hdr, daddr));
		if (packet_store(ctx, at, to, sizeof(*to)))
			return DROP_WRITE_ERROR;
		difference = address6_difference(from, to);
	}
	if (!sum_at)
		return 0;
	return packet_sum4(ctx, sum_at, 0, difference, flags) ? DROP_L4_CHECKSUM : 0;
}

static __always_inline int translate_port(context_t *ctx, const struct flow *flow, enum end end, __be16 from,
					  __be16 to)
{
	__u32 at = flow->l4 + (end == SOURCE ? 0 : 2), sum_at = l4_checksum_offset(flow);

	if (from == to || flow->later_fragment)
		return 0;
	if (!sum_at)
		return DROP_L4_CHECKSUM; /* SCTP: a CRC32c over the whole packet cannot be updated */
	if (packet_sum4(ctx, sum_at, from, to, checksum_flags(flow) | 2))
		return DROP_L4_CHECKSUM;
	return packet_store(ctx, at, &to, sizeof(to)) ? DROP_WRITE_ERROR : 0;
}
