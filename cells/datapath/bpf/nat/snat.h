/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* SNAT of egress packets, and reverse SNAT of replies. */
#pragma once

#include "ct/quote.h"
#include "lb/translate.h"
#include "nat/ports.h"
#include "pod/neighbours.h"

static __always_inline bool nat_is_echo(const struct flow *flow)
{
	return flow->protocol == IPPROTO_ICMP || flow->protocol == IPPROTO_ICMPV6;
}

/* How SNAT handles a packet, by its protocol and ICMP type (snat_v4_nat() and snat_v6_nat() in Cilium's nat.h). */
enum nat_kind {
	NAT_REWRITES,
	NAT_ERROR, /* an ICMP error: by its embedded packet */
	NAT_PASSES, /* unchanged: ICMP replies, which no NAT entry matches, and neighbour discovery */
	NAT_REFUSES, /* other ICMP messages have no identifier to rewrite (RFC 5508, section 3) */
};

static __always_inline enum nat_kind nat_kind_of(const struct flow *flow, __u8 family)
{
	__u16 type = bpf_ntohs(flow->policy_port);

	if (unlikely(flow->related))
		return NAT_ERROR;
	if (!nat_is_echo(flow))
		return NAT_REWRITES;
	if (family == FAMILY_IPV6) {
		switch (type) {
		case ICMPV6_ECHO_REQUEST:
			return NAT_REWRITES;
		case ICMPV6_ECHO_REPLY:
		case ND_SOLICIT:
		case ND_ADVERT:
			return NAT_PASSES;
		}
		return NAT_REFUSES;
	}
	switch (type) {
	case ICMP_ECHO:
	case ICMP_TIMESTAMP:
	case ICMP_INFO_REQUEST:
	case ICMP_ADDRESS:
		return NAT_REWRITES;
	case ICMP_ECHOREPLY:
	case ICMP_TIMESTAMPREPLY:
	case ICMP_INFO_REPLY:
	case ICMP_ADDRESSREPLY:
		return NAT_PASSES;
	}
	return NAT_REFUSES;
}

/* Rewrite the port, or the identifier of an ICMP echo; returns 0 or a drop reason. */
static __always_inline int nat_rewrite_port(context_t *ctx, const struct flow *flow, enum end end, __be16 from,
					    __be16 to)
{
	if (!nat_is_echo(flow))
		return translate_port(ctx, flow, end, from, to);
	if (from == to || flow->later_fragment)
		return 0;
	if (packet_sum4(ctx, flow->l4 + ICMP_CHECKSUM, from, to, 2))
		return DROP_L4_CHECKSUM;
	return packet_store(ctx, flow->l4 + ICMP_ID, &to, sizeof(to)) ? DROP_WRITE_ERROR : 0;
}

static __always_inline int nat_rewrite(context_t *ctx, struct flow *flow, enum end end,
				       const struct address *address, __be16 port, __u8 family)
{
	struct address *own = end == SOURCE ? &flow->saddr : &flow->daddr;
	__be16 *own_port = end == SOURCE ? &flow->sport : &flow->dport;
	int refused = 0;

	if (!address_equals(own, address))
		refused = translate_address(ctx, flow, end, own, address, family);
	if (!refused)
		refused = nat_rewrite_port(ctx, flow, end, *own_port, port);
	*own = *address;
	*own_port = port;
	return refused;
}

/* Return whether the reverse entry of a flow exists and matches: the LRU map may have evicted it. */
static __always_inline bool nat_has_reverse_entry(const struct flow *flow, const struct nat_entry *out, __u8 family)
{
	struct nat_entry in;
	union nat_key key;

	nat_fill_key(&key, &flow->daddr, flow->dport, &out->address, out->port, flow->protocol, NAT_KEY_IN, family);
	return nat_lookup(&key, &in, family) && address_equals(&in.address, &flow->saddr) && in.port == flow->sport;
}

/* Return the flow's SNAT port at address `target` in host byte order; 0 without valid NAT entries. */
static __always_inline __u32 nat_lookup_port(const struct flow *flow, const struct address *target, __u8 family)
{
	struct nat_entry entry;
	union nat_key key;

	nat_fill_key(&key, &flow->saddr, flow->sport, &flow->daddr, flow->dport, flow->protocol, NAT_KEY_OUT,
		     family);
	if (!nat_lookup(&key, &entry, family) || !address_equals(&entry.address, target) ||
	    !nat_has_reverse_entry(flow, &entry, family))
		return 0;
	return bpf_ntohs(entry.port);
}

VERIFIED_ALONE nat4_lookup_port(struct flow *flow, struct address *target)
{
	return flow && target ? nat_lookup_port(flow, target, FAMILY_IPV4) : 0;
}

VERIFIED_ALONE nat6_lookup_port(struct flow *flow, struct address *target)
{
	return flow && target ? nat_lookup_port(flow, target, FAMILY_IPV6) : 0;
}

VERIFIED_ALONE snat4_rewrite(context_t *ctx, struct flow *flow, struct address *target, __u32 port)
{
	return flow && target ? nat_rewrite(ctx, flow, SOURCE, target, bpf_htons((__u16)port), FAMILY_IPV4)
			      : DROP_INVALID;
}

VERIFIED_ALONE snat6_rewrite(context_t *ctx, struct flow *flow, struct address *target, __u32 port)
{
	return flow && target ? nat_rewrite(ctx, flow, SOURCE, target, bpf_htons((__u16)port), FAMILY_IPV6)
			      : DROP_INVALID;
}

/* SNAT to address `target`; returns 0 or a drop reason. `needs_ct`: the node itself is the source. */
static __always_inline int snat_nat(context_t *ctx, struct flow *flow, struct address *target, bool needs_ct,
				    __u8 family)
{
	bool v4 = family == FAMILY_IPV4;
	__u32 port = v4 ? nat4_lookup_port(flow, target) : nat6_lookup_port(flow, target);

	if (!port)
		port = v4 ? nat4_allocate_port(ctx, flow, target, needs_ct)
			  : nat6_allocate_port(ctx, flow, target, needs_ct);
	if (!port)
		return DROP_NAT_NO_MAPPING;
	return v4 ? snat4_rewrite(ctx, flow, target, port) : snat6_rewrite(ctx, flow, target, port);
}

#define NAT_TRANSLATED 1

/* Reverse SNAT of a reply: returns NAT_TRANSLATED, 0 without a NAT entry, or a negative drop reason. */
static __always_inline int snat_rev_nat(context_t *ctx, struct flow *flow, __u8 family)
{
	struct nat_entry entry;
	union nat_key key;
	int refused;

	nat_fill_key(&key, &flow->saddr, flow->sport, &flow->daddr, flow->dport, flow->protocol, NAT_KEY_IN,
		     family);
	if (!nat_lookup(&key, &entry, family))
		return 0;
	refused = nat_rewrite(ctx, flow, DESTINATION, &entry.address, entry.port, family);
	return refused ? -refused : NAT_TRANSLATED;
}
