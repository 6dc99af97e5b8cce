/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What ICMP errors quote (RFC 792, RFC 4443): the packet that they are about, and the flow that it belongs to. */
#pragma once

#include "ct/maps.h"
#include "lib/network.h"

#define ICMP_CHECKSUM 2
#define ICMP_ID 4

/* What an error quotes. */
struct quote {
	struct flow about;
	__u32 checksum_at; /* of the transport, 0 if it is not in the packet */
	__u32 ports_at; /* of the source's port or the identifier */
};

/* Where the quoted packet begins. */
static __always_inline __u32 quote_at(const struct flow *flow)
{
	return flow->l4 + sizeof(struct icmphdr);
}

static __always_inline bool quotes_echo(const struct quote *quote)
{
	return quote->about.protocol == IPPROTO_ICMP || quote->about.protocol == IPPROTO_ICMPV6;
}

static __always_inline bool quote_echo(context_t *ctx, struct quote *quote, __u8 family)
{
	struct icmphdr icmp;

	if (packet_load(ctx, quote->about.l4, &icmp, sizeof(icmp)))
		return false;
	quote->checksum_at = quote->about.l4 + ICMP_CHECKSUM;
	quote->ports_at = quote->about.l4 + ICMP_ID;
	if (icmp.type == (family == FAMILY_IPV4 ? ICMP_ECHO : ICMPV6_ECHO_REQUEST)) {
		quote->about.sport = icmp.id;
		return true;
	}
	quote->about.dport = icmp.id;
	return icmp.type == (family == FAMILY_IPV4 ? ICMP_ECHOREPLY : ICMPV6_ECHO_REPLY);
}

static __always_inline bool quote_ports(context_t *ctx, struct quote *quote)
{
	__u32 at = quote->about.l4;
	__be16 ports[2], checksum;

	if (packet_load(ctx, at, ports, sizeof(ports)))
		return false;
	quote->about.sport = ports[0];
	quote->about.dport = ports[1];
	quote->ports_at = at;
	switch (quote->about.protocol) {
	case IPPROTO_TCP:
		at += offsetof(struct tcphdr, check);
		break;
	case IPPROTO_UDP:
		at += offsetof(struct udphdr, check);
		break;
	default:
		return quote->about.protocol == IPPROTO_SCTP;
	}
	/* Of TCP most quote 8 bytes only. A zero of UDP's is none. */
	if (!packet_load(ctx, at, &checksum, sizeof(checksum)) &&
	    (checksum || quote->about.protocol == IPPROTO_TCP))
		quote->checksum_at = at;
	return true;
}

/* Read it; false if it does not identify a flow. */
static __always_inline bool quote_read(context_t *ctx, const struct flow *flow, struct quote *quote, __u8 family)
{
	struct flow *about = &quote->about;
	const __u32 at = quote_at(flow);

	if (family == FAMILY_IPV4) {
		struct iphdr ip;

		if (packet_load(ctx, at, &ip, sizeof(ip)) || ip.ihl < 5)
			return false;
		about->saddr.words[0] = ip.saddr;
		about->daddr.words[0] = ip.daddr;
		about->protocol = ip.protocol;
		about->l4 = at + ip.ihl * 4;
		if (ip.frag_off & bpf_htons(IP_FRAGMENT_OFFSET))
			return false;
	} else {
		/* Field by field: callers have little stack to spare. */
		if (packet_load(ctx, at + offsetof(struct ipv6hdr, nexthdr), &about->protocol, 1) ||
		    packet_load(ctx, at + offsetof(struct ipv6hdr, saddr), &about->saddr, 16) ||
		    packet_load(ctx, at + offsetof(struct ipv6hdr, daddr), &about->daddr, 16))
			return false;
		about->l4 = at + sizeof(struct ipv6hdr);
		if (about->protocol == IPPROTO_DSTOPTS) { /* of a node that has forwarded it: nodeport/dsr.h */
			__u8 option[2]; /* next header, and length in 8 bytes without the first */

			if (packet_load(ctx, about->l4, option, sizeof(option)))
				return false;
			about->protocol = option[0];
			about->l4 += (option[1] + 1) * 8;
		}
	}
	if (about->protocol == (family == FAMILY_IPV4 ? IPPROTO_ICMP : IPPROTO_ICMPV6))
		return quote_echo(ctx, quote, family);
	return quote_ports(ctx, quote);
}

/* Which flow an error quotes a packet of, of the endpoint in the `direction` of the error: who gets one has sent the
 * packet, and who sends one has got it. NULL if that has none; `*reply`: the packet went the other way than the flow's first.
 */
static __always_inline struct ct_entry *quoted_flow(context_t *ctx, const struct flow *flow,
						    enum direction direction, __u32 now, struct quote *quote,
						    bool *reply, __u8 family)
{
	const enum direction quoted = direction == INGRESS ? EGRESS : INGRESS;
	struct ct_entry *entry;

	if (!quote_read(ctx, flow, quote, family))
		return NULL;
	if (!(direction == INGRESS ? address_equals(&quote->about.saddr, &flow->daddr)
				   : address_equals(&quote->about.daddr, &flow->saddr)))
		return NULL;
	*reply = false;
	entry = ct_entry_of(&quote->about, quoted, false, family);
	if (entry && entry->lifetime >= now)
		return entry;
	*reply = true;
	entry = ct_entry_of(&quote->about, quoted, true, family);
	return entry && entry->lifetime >= now ? entry : NULL;
}

static __always_inline bool quotes_flow(context_t *ctx, const struct flow *flow, enum direction direction,
					__u32 now, __u8 family)
{
	struct quote quote = {};
	bool reply;

	return quoted_flow(ctx, flow, direction, now, &quote, &reply, family);
}

VERIFIED_ALONE quotes_flow4(context_t *ctx, const struct flow *flow, enum direction direction, __u32 now)
{
	return flow ? quotes_flow(ctx, flow, direction, now, FAMILY_IPV4) : false;
}

VERIFIED_ALONE quotes_flow6(context_t *ctx, const struct flow *flow, enum direction direction, __u32 now)
{
	return flow ? quotes_flow(ctx, flow, direction, now, FAMILY_IPV6) : false;
}

/* Whether the packet is an error about such a flow. */
static __always_inline bool is_about_flow(context_t *ctx, const struct flow *flow, enum direction direction,
					  __u32 now, __u8 family)
{
	return family == FAMILY_IPV4 ? quotes_flow4(ctx, flow, direction, now)
				     : quotes_flow6(ctx, flow, direction, now);
}
