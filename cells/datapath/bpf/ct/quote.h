/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets embedded in ICMP errors (RFC 792, RFC 4443), and the flows that they belong to. */
#pragma once

#include "ct/maps.h"
#include "lib/network.h"

#define ICMP_CHECKSUM 2
#define ICMP_ID 4

/* The embedded packet of an error. */
struct quote {
	struct flow about;
	__u32 checksum_at; /* offset of the transport checksum; 0 if it is not embedded */
	__u32 ports_at; /* offset of the source port or the identifier */
};

/* Return the offset of the embedded packet. */
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
	/* Most hosts embed only 8 bytes of TCP. A UDP checksum of 0 means none. */
	if (!packet_load(ctx, at, &checksum, sizeof(checksum)) &&
	    (checksum || quote->about.protocol == IPPROTO_TCP))
		quote->checksum_at = at;
	return true;
}

/* Parse the embedded packet; false if it does not identify a flow. */
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
		/* Field by field, because callers have little stack left. */
		if (packet_load(ctx, at + offsetof(struct ipv6hdr, nexthdr), &about->protocol, 1) ||
		    packet_load(ctx, at + offsetof(struct ipv6hdr, saddr), &about->saddr, 16) ||
		    packet_load(ctx, at + offsetof(struct ipv6hdr, daddr), &about->daddr, 16))
			return false;
		about->l4 = at + sizeof(struct ipv6hdr);
		if (about->protocol == IPPROTO_DSTOPTS) { /* the DSR option: nodeport/dsr.h */
			__u8 option[2]; /* next header, and length in units of 8 bytes without the first */

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

/* Look up the flow of the embedded packet, for the endpoint at this end of the error: the receiver of an error sent the
 * embedded packet, the sender received it. Returns NULL if there is none; `*reply`: the embedded packet is a reply.
 */
static __always_inline struct ct_entry *embedded_ct_entry(context_t *ctx, const struct flow *flow,
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

static __always_inline bool is_embedded_flow(context_t *ctx, const struct flow *flow, enum direction direction,
					     __u32 now, __u8 family)
{
	struct quote quote = {};
	bool reply;

	return embedded_ct_entry(ctx, flow, direction, now, &quote, &reply, family);
}

VERIFIED_ALONE is_embedded_flow4(context_t *ctx, const struct flow *flow, enum direction direction, __u32 now)
{
	return flow ? is_embedded_flow(ctx, flow, direction, now, FAMILY_IPV4) : false;
}

VERIFIED_ALONE is_embedded_flow6(context_t *ctx, const struct flow *flow, enum direction direction, __u32 now)
{
	return flow ? is_embedded_flow(ctx, flow, direction, now, FAMILY_IPV6) : false;
}

/* Return whether the error is about a flow of the endpoint. */
static __always_inline bool is_error_about_flow(context_t *ctx, const struct flow *flow, enum direction direction,
						__u32 now, __u8 family)
{
	return family == FAMILY_IPV4 ? is_embedded_flow4(ctx, flow, direction, now)
				     : is_embedded_flow6(ctx, flow, direction, now);
}
