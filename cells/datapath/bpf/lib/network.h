/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Parse the IPv4 or IPv6 header, with extension headers. */
#pragma once

#include "lib/fragments.h"
#include "lib/packet.h"
#include "lib/transport.h"

#define IP_MORE_FRAGMENTS 0x2000
#define IP_FRAGMENT_OFFSET 0x1fff
#define IP6_FRAGMENT_OFFSET 0xfff8
#define MAX_EXTENSIONS 6 /* extension headers to parse */

/* Return whether the header's lengths fit the packet. A total length of 0 marks a GSO packet over 64 KiB. */
static __always_inline bool lengths_fit(const struct iphdr *ip, __u32 header, __u32 packet)
{
	__u32 total = bpf_ntohs(ip->tot_len);

	if (unlikely(!total))
		return packet > 0xffff;
	return total >= header && total + LINK_HLEN <= packet;
}

static __always_inline int parse_ipv4(context_t *ctx, struct flow *flow)
{
	struct iphdr *ip;
	__be16 fragment;
	__u32 header;

	if (!packet_pull(ctx, LINK_HLEN + sizeof(*ip)))
		return DROP_INVALID;
	ip = packet_ipv4(ctx);
	if (!ip)
		return DROP_INVALID;
	header = ip->ihl * 4;
	if (ip->version != 4 || header < sizeof(*ip) || !lengths_fit(ip, header, packet_length(ctx)))
		return DROP_INVALID;
	flow->saddr.words[0] = ip->saddr;
	flow->daddr.words[0] = ip->daddr;
	flow->protocol = ip->protocol;
	flow->ttl = ip->ttl;
	flow->l4 = LINK_HLEN + header;
	fragment = ip->frag_off & bpf_htons(IP_MORE_FRAGMENTS | IP_FRAGMENT_OFFSET);
	if (unlikely(fragment)) {
		flow->fragmented = true;
		flow->later_fragment = !!(fragment & bpf_htons(IP_FRAGMENT_OFFSET));
		flow->fragment_id = ip->id;
	}
	return 0;
}

/* First bytes of an extension header (RFC 8200). */
struct extension {
	__u8 next;
	__u8 length; /* in units of 8 bytes, without the first */
	__be16 fragment;
	__be32 id;
};

/* Result of parsing extension headers. In: the first header; out: the header after the last one. */
struct extensions {
	__u32 at;
	__u32 protocol;
	__u32 fragmented;
	__u32 later; /* a later fragment: the transport header is not in this packet */
	__be32 id;
};

static __always_inline bool is_extension(__u32 protocol)
{
	return protocol == IPPROTO_HOPOPTS || protocol == IPPROTO_ROUTING || protocol == IPPROTO_DSTOPTS ||
	       protocol == IPPROTO_AH || protocol == IPPROTO_FRAGMENT || protocol == IPPROTO_NONE;
}

/* Parse the extension headers; returns 0 or a drop reason. */
VERIFIED_ALONE follow_extensions(context_t *ctx, struct extensions *found)
{
	struct extension header;

	if (!found)
		return DROP_INVALID;
	for (int i = 0; i < MAX_EXTENSIONS; i++) {
		__u32 kind = found->protocol;

		if (!is_extension(kind))
			return 0;
		if (kind == IPPROTO_NONE || packet_load(ctx, found->at, &header, sizeof(header)))
			return DROP_INVALID_EXTENSION;
		if (kind == IPPROTO_FRAGMENT) {
			if (found->fragmented)
				return DROP_INVALID_EXTENSION;
			found->fragmented = true;
			found->later = !!(header.fragment & bpf_htons(IP6_FRAGMENT_OFFSET));
			found->id = header.id;
			found->at += sizeof(header);
		} else if (kind == IPPROTO_AH) {
			found->at += (header.length + 2) * 4; /* RFC 4302 */
		} else {
			found->at += (header.length + 1) * 8;
		}
		found->protocol = header.next;
		if (found->later)
			return 0;
	}
	return is_extension(found->protocol) ? DROP_INVALID_EXTENSION : 0;
}

static __always_inline int parse_ipv6(context_t *ctx, struct flow *flow)
{
	struct ipv6hdr *ip;

	if (!packet_pull(ctx, LINK_HLEN + sizeof(*ip)))
		return DROP_INVALID;
	ip = packet_ipv6(ctx);
	if (!ip || ip->version != 6)
		return DROP_INVALID;
	/* A length of 0 marks a packet without payload, or a GSO packet over 64 KiB. */
	if (bpf_ntohs(ip->payload_len) + LINK_HLEN + sizeof(*ip) > packet_length(ctx))
		return DROP_INVALID;
	address_load_aligned(&flow->saddr, &ip->saddr);
	address_load_aligned(&flow->daddr, &ip->daddr);
	flow->ttl = ip->hop_limit;
	flow->protocol = ip->nexthdr;
	flow->l4 = LINK_HLEN + sizeof(*ip);
	return 0;
}

/* Fill `flow` from the network header; returns 0 or a drop reason. Writes no maps. */
static __always_inline int parse_network(context_t *ctx, struct flow *flow, __u8 family)
{
	return family == FAMILY_IPV4 ? parse_ipv4(ctx, flow) : parse_ipv6(ctx, flow);
}

static __always_inline int skip_extensions(context_t *ctx, struct flow *flow)
{
	struct extensions extensions = { .at = flow->l4, .protocol = flow->protocol };
	int refused = follow_extensions(ctx, &extensions);

	if (refused)
		return refused;
	flow->l4 = extensions.at;
	flow->protocol = extensions.protocol;
	flow->fragmented = extensions.fragmented;
	flow->later_fragment = extensions.later;
	flow->fragment_id = extensions.id;
	return 0;
}

/* Fill `flow` from the transport header; returns 0 or a drop reason. The ports of a first fragment are stored only if
 * its source is `trusted`. May pull: earlier packet pointers become invalid.
 */
static __always_inline int parse_payload(context_t *ctx, struct flow *flow, bool trusted, __u8 family)
{
	int refused;

	if (family == FAMILY_IPV6 && unlikely(is_extension(flow->protocol))) {
		refused = skip_extensions(ctx, flow);
		if (refused)
			return refused;
	}
	if (likely(!flow->fragmented))
		return parse_transport(ctx, flow, family);
	if (!trusted)
		return DROP_INVALID_SOURCE;
	return family == FAMILY_IPV4 ? fragment4_transport(ctx, flow) : fragment6_transport(ctx, flow);
}

/* parse_payload() with the common cases inlined, because a call costs some nanoseconds. */
static __always_inline int parse_payload_here(context_t *ctx, struct flow *flow, bool trusted, __u8 family)
{
	if (likely(!flow->fragmented && (family == FAMILY_IPV4 || !is_extension(flow->protocol))))
		return parse_transport_here(ctx, flow, family);
	return parse_payload(ctx, flow, trusted, family);
}

/* Read both headers. */
static __always_inline int parse(context_t *ctx, struct flow *flow, __u8 family)
{
	int refused = parse_network(ctx, flow, family);

	return refused ? refused : parse_payload(ctx, flow, true, family);
}
