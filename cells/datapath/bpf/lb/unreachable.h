/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* ICMP (RFC 792) or ICMPv6 (RFC 4443) port unreachable for clients of a service without backends. */
#pragma once

#include "lib/maps.h"
#include "lib/network.h"
#include "lib/rewrite.h"

#ifdef CONTEXT_XDP

enum back {
	BACK_TO_POD,
	BACK_TO_DEVICE,
};

/* XDP passes the packet to the tc program, which replies. */
static __always_inline int lb_send_unreachable(context_t *ctx, const struct flow *flow, enum back back, __u8 family)
{
	(void)ctx, (void)flow, (void)back, (void)family;
	return VERDICT_PASS;
}

#else

#include "pod/answer.h"

#define UNREACHABLE_PORT 3
#define UNREACHABLE_PORT6 4
#define UNREACHABLE_HOPS 64

/* Reply from the service's address, with the MAC that the packet was sent to. Returns the verdict. */
static __always_inline int lb_send_unreachable(struct __sk_buff *skb, const struct flow *flow, enum back back,
					       __u8 family)
{
	bool tcp = flow->protocol == IPPROTO_TCP;
	struct ethernet *eth = packet_eth(skb);
	mac_t host_mac;

	if (!eth)
		return DROP(EGRESS, DROP_INVALID);
	host_mac = mac_read(eth->destination);

	if (family == FAMILY_IPV6) {
		const struct icmp6_error error = {
			.from = flow->daddr,
			.to = flow->saddr,
			.type = ICMPV6_DEST_UNREACH,
			.code = UNREACHABLE_PORT6,
			.hop_limit = UNREACHABLE_HOPS,
			.back = back,
			.too_short = DROP_NO_SERVICE,
		};

		return tcp && flow->l4 == LINK_HLEN + sizeof(struct ipv6hdr)
			       ? icmp6_error_send(skb, &error, host_mac, QUOTED_TCP)
			       : icmp6_error_send(skb, &error, host_mac, QUOTED);
	}
	const struct icmp4_error error = {
		.from = flow->daddr.words[0],
		.to = flow->saddr.words[0],
		.code = UNREACHABLE_PORT,
		.hop_limit = UNREACHABLE_HOPS,
		.back = back,
		.too_short = DROP_NO_SERVICE,
	};

	return tcp && flow->l4 == LINK_HLEN + sizeof(struct iphdr)
		       ? icmp4_error_send(skb, &error, host_mac, QUOTED4_TCP)
		       : icmp4_error_send(skb, &error, host_mac, QUOTED4);
}

#endif
