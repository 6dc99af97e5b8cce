/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Parse the transport header: ports, or the ICMP type and identifier. */
#pragma once

#include "lib/config.h"
#include "lib/packet.h"

#define MAX_HEADERS 16384 /* limit of the offset for the verifier: more than any extensions need */

static __always_inline int parse_tcp(const void *l4, const void *end, struct flow *flow)
{
	const struct tcphdr *tcp = l4;

	if ((void *)(tcp + 1) > end)
		return DROP_CT_INVALID_HEADER;
	flow->sport = tcp->source;
	flow->dport = tcp->dest;
	flow->policy_port = tcp->dest;
	flow->tcp_flags = ((const __u8 *)tcp)[13];
	flow->reply_likely = bpf_ntohs(tcp->source) < bpf_ntohs(tcp->dest);
	return 0;
}

static __always_inline int parse_udp(const void *l4, const void *end, struct flow *flow)
{
	const struct udphdr *udp = l4;

	if ((void *)(udp + 1) > end)
		return DROP_CT_INVALID_HEADER;
	flow->sport = udp->source;
	flow->dport = udp->dest;
	flow->policy_port = udp->dest;
	flow->reply_likely = bpf_ntohs(udp->source) < bpf_ntohs(udp->dest);
	return 0;
}

/* RFC 9260, section 3.1: ports at the same offsets as UDP's. */
struct sctphdr {
	__be16 source;
	__be16 dest;
	__be32 verification_tag;
	__be32 checksum;
};

static __always_inline int parse_sctp(const void *l4, const void *end, struct flow *flow)
{
	const struct sctphdr *sctp = l4;

	if ((void *)(sctp + 1) > end)
		return DROP_CT_INVALID_HEADER;
	flow->sport = sctp->source;
	flow->dport = sctp->dest;
	flow->policy_port = sctp->dest;
	flow->reply_likely = bpf_ntohs(sctp->source) < bpf_ntohs(sctp->dest);
	return 0;
}

static __always_inline int parse_icmp(const void *l4, const void *end, struct flow *flow)
{
	const struct icmphdr *icmp = l4;

	if ((void *)(icmp + 1) > end)
		return DROP_CT_INVALID_HEADER;
	flow->policy_port = bpf_htons(icmp->type);
	switch (icmp->type) {
	case ICMP_ECHO:
	case ICMP_TIMESTAMP:
	case ICMP_INFO_REQUEST:
	case ICMP_ADDRESS:
		flow->sport = icmp->id;
		break;
	case ICMP_ECHOREPLY:
	case ICMP_TIMESTAMPREPLY:
	case ICMP_INFO_REPLY:
	case ICMP_ADDRESSREPLY:
		flow->dport = icmp->id;
		flow->reply_likely = true;
		break;
	case ICMP_DEST_UNREACH:
		flow->frag_needed = icmp->code == ICMP_FRAG_NEEDED;
		/* fall through */
	case ICMP_TIME_EXCEEDED:
	case ICMP_PARAMETERPROB:
		flow->related = true;
		flow->reply_likely = true;
		break;
	}
	return 0;
}

static __always_inline int parse_icmp6(const void *l4, const void *end, struct flow *flow)
{
	const struct icmphdr *icmp = l4;

	if ((void *)(icmp + 1) > end)
		return DROP_CT_INVALID_HEADER;
	flow->policy_port = bpf_htons(icmp->type);
	switch (icmp->type) {
	case ICMPV6_ECHO_REQUEST:
		flow->sport = icmp->id;
		break;
	case ICMPV6_ECHO_REPLY:
		flow->dport = icmp->id;
		flow->reply_likely = true;
		break;
	case ICMPV6_PKT_TOOBIG:
		flow->frag_needed = true;
		/* fall through */
	case ICMPV6_DEST_UNREACH:
	case ICMPV6_TIME_EXCEED:
	case ICMPV6_PARAMPROB:
		flow->related = true;
		flow->reply_likely = true;
		break;
	}
	return 0;
}

/* Fill `flow` from the transport header; returns 0 or a drop reason. May pull: earlier packet pointers become invalid.
 */
static __always_inline int parse_transport_here(context_t *ctx, struct flow *flow, __u8 family)
{
	const void *l4, *end;
	__u32 offset = flow->l4;

	if (offset > MAX_HEADERS)
		return DROP_INVALID;
	/* First try the longest header, TCP's, which most packets have room for; shorter packets may end before. */
	if (packet_length(ctx) >= offset + sizeof(struct tcphdr))
		packet_pull(ctx, offset + sizeof(struct tcphdr));
	else
		packet_pull(ctx, packet_length(ctx));
	l4 = packet_start(ctx) + offset;
	end = packet_end(ctx);
	switch (flow->protocol) {
	case IPPROTO_TCP:
		return parse_tcp(l4, end, flow);
	case IPPROTO_UDP:
		return parse_udp(l4, end, flow);
	case IPPROTO_SCTP:
		if (config.features & FEATURE_SCTP)
			return parse_sctp(l4, end, flow);
		break;
	case IPPROTO_ICMP:
		if (family == FAMILY_IPV4)
			return parse_icmp(l4, end, flow);
		break;
	case IPPROTO_ICMPV6:
		if (family == FAMILY_IPV6)
			return parse_icmp6(l4, end, flow);
		break;
	}
	return DROP_CT_UNKNOWN_PROTOCOL;
}

VERIFIED_ALONE parse_transport(context_t *ctx, struct flow *flow, __u32 family)
{
	return flow ? parse_transport_here(ctx, flow, family) : DROP_INVALID;
}
