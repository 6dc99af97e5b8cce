/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Path MTU of DSR: packets that exceed the MTU with the DSR option. The stack fragments them if that is allowed; else the
 * client gets an ICMP error with the smaller MTU (RFC 1191, RFC 8201).
 */
#pragma once

#include "lb/pod.h"
#include "lib/fib.h"
#include "lib/network.h"
#ifndef CONTEXT_XDP
#include "pod/answer.h"
#endif

#define IP_DF 0x4000
#define FRAG_NEEDED_HOP_LIMIT 64
#define IPV4_MIN_REASSEMBLY 576 /* RFC 791 */

/* Return the next hop's MTU if the packet plus `more` bytes exceeds it, else 0. */
static __always_inline __u32 exceeded_mtu(context_t *ctx, const struct flow *flow, __u32 more, __u8 family)
{
	__u32 segment = packet_segment(ctx), length = packet_length(ctx) - LINK_HLEN + more;
	struct bpf_fib_lookup fib;

	if (likely(length <= (family == FAMILY_IPV4 ? IPV4_MIN_REASSEMBLY : IPV6_MIN_MTU)))
		return 0;
	if (segment)
		length = flow->l4 - LINK_HLEN + sizeof(struct udphdr) + segment + more;
	if (fib_next_hop_for_length(ctx, &fib, &flow->saddr, &flow->daddr, length, family) !=
	    BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return 0;
	return fib.mtu_result;
}

static __always_inline bool may_be_fragmented(context_t *ctx, __u8 family)
{
	const struct iphdr *ip = packet_ipv4(ctx);

	return family == FAMILY_IPV4 && ip && !(ip->frag_off & bpf_htons(IP_DF));
}

#ifdef CONTEXT_XDP

/* XDP passes the packet to the tc program, which replies. */
static __always_inline int send_frag_needed(context_t *ctx, struct flow *flow, const struct address *service,
					    __be16 port, __u32 mtu, __u8 family)
{
	(void)service, (void)port, (void)mtu, (void)family;
	return hand_over_to_stack(ctx, HANDED_DSR | (__u32)flow->rev_nat_index << 16);
}

#else

/* Send an ICMP error from the frontend that embeds the client's original packet; returns the verdict. */
static __always_inline int send_frag_needed(context_t *ctx, struct flow *flow, const struct address *service,
					    __be16 port, __u32 mtu, __u8 family)
{
	struct ethernet *eth;
	mac_t own_mac;

	if (translate_address(ctx, flow, DESTINATION, &flow->daddr, service, family) ||
	    translate_port(ctx, flow, DESTINATION, flow->dport, port))
		return DROP(EGRESS, DROP_WRITE_ERROR);
	eth = packet_eth(ctx);
	if (!eth)
		return DROP(EGRESS, DROP_INVALID);
	own_mac = mac_read(eth->destination);
	if (family == FAMILY_IPV4) {
		const struct icmp4_error error = {
			.from = service->words[0],
			.to = flow->saddr.words[0],
			.code = ICMP_FRAG_NEEDED,
			.hop_limit = FRAG_NEEDED_HOP_LIMIT,
			.back = BACK_TO_DEVICE,
			.too_short = DROP_INVALID,
			.mtu = mtu,
		};

		return icmp4_error_send(ctx, &error, own_mac, QUOTED4);
	} else {
		const struct icmp6_error error = {
			.from = *service,
			.to = flow->saddr,
			.type = ICMPV6_PKT_TOOBIG,
			.hop_limit = FRAG_NEEDED_HOP_LIMIT,
			.back = BACK_TO_DEVICE,
			.too_short = DROP_INVALID,
			.mtu = mtu,
		};

		return icmp6_error_send(ctx, &error, own_mac, QUOTED);
	}
}

#endif
