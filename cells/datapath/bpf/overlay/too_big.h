/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Path MTU discovery (RFC 1191, RFC 8201): ICMP errors to a pod if its packet does not fit into the tunnel.
 *
 * Packets that may be fragmented are sent: the kernel fragments the outer packet.
 */
#pragma once

#include "lb/pod.h"
#include "lib/events.h"
#include "lib/network.h"
#include "lib/rewrite.h"
#include "pod/answer.h"

#define IP_DONT_FRAGMENT 0x4000
#define TOO_BIG_HOPS 64

/* Return the length of the transport header that each segment will have. */
static __always_inline __u32 segment_header(struct __sk_buff *skb, const struct flow *flow)
{
	__u8 offset = 0;

	if (flow->protocol != IPPROTO_TCP)
		return sizeof(struct udphdr);
	bpf_skb_load_bytes(skb, flow->l4 + 12, &offset, sizeof(offset)); /* data offset: the upper 4 bits */
	return (offset >> 4) * 4;
}

/* Return whether the packet, or a segment of a GSO packet, exceeds `mtu` and must not be fragmented. */
VERIFIED_ALONE exceeds(struct __sk_buff *skb, const struct flow *flow, __u32 mtu, __u32 family)
{
	const struct iphdr *ip;

	if (!flow)
		return false;
	if (skb->gso_size && flow->l4 - LINK_HLEN + segment_header(skb, flow) + skb->gso_size <= mtu)
		return false;
	if (family == FAMILY_IPV6)
		return true;
	ip = packet_ipv4(skb);
	return ip && ip->frag_off & bpf_htons(IP_DONT_FRAGMENT);
}

/* Restore the service's address of a packet after DNAT, so that the pod recognises the embedded packet; returns 0 or a
 * drop reason.
 */
static __always_inline int as_sent(struct __sk_buff *skb, const struct flow *flow, __u8 family)
{
	struct address service;
	__be16 port;
	int refused;

	if (!flow->translated || !lb_lookup_rev_nat(flow->rev_nat_index, &service, &port, family))
		return 0;
	refused = translate_address(skb, flow, DESTINATION, &flow->daddr, &service, family);
	return refused ? refused : translate_port(skb, flow, DESTINATION, flow->dport, port);
}

/* Send the error from the gateway's address, on the pod's link; returns the verdict. */
VERIFIED_ALONE too_big4(struct __sk_buff *skb, const struct flow *flow, __u32 mtu)
{
	const struct node_config *node = node_facts();
	struct ethernet *eth;
	mac_t host_mac;
	int refused;

	if (!flow || !node)
		return DROP(EGRESS, DROP_INVALID);
	refused = as_sent(skb, flow, FAMILY_IPV4);
	if (refused)
		return DROP(EGRESS, refused);
	eth = packet_eth(skb);
	if (!eth)
		return DROP(EGRESS, DROP_INVALID);
	host_mac = mac_read(eth->destination);
	const struct icmp4_error error = {
		.from = node->router_ip,
		.to = flow->saddr.words[0],
		.code = ICMP_FRAG_NEEDED,
		.hop_limit = TOO_BIG_HOPS,
		.too_short = DROP_INVALID,
		.mtu = mtu,
	};

	if (flow->protocol == IPPROTO_TCP && flow->l4 == LINK_HLEN + sizeof(struct iphdr))
		return icmp4_error_send(skb, &error, host_mac, QUOTED4_TCP);
	return icmp4_error_send(skb, &error, host_mac, QUOTED4);
}

VERIFIED_ALONE too_big6(struct __sk_buff *skb, const struct flow *flow, __u32 mtu)
{
	const struct node_config *node = node_facts();
	struct ethernet *eth;
	mac_t host_mac;
	int refused;

	if (!flow || !node)
		return DROP(EGRESS, DROP_INVALID);
	refused = as_sent(skb, flow, FAMILY_IPV6);
	if (refused)
		return DROP(EGRESS, refused);
	eth = packet_eth(skb);
	if (!eth)
		return DROP(EGRESS, DROP_INVALID);
	host_mac = mac_read(eth->destination);
	const struct icmp6_error error = {
		.from = node->router_ip6,
		.to = flow->saddr,
		.type = ICMPV6_PKT_TOOBIG,
		.hop_limit = TOO_BIG_HOPS,
		.too_short = DROP_INVALID,
		.mtu = mtu,
	};

	if (flow->protocol == IPPROTO_TCP && flow->l4 == LINK_HLEN + sizeof(struct ipv6hdr))
		return icmp6_error_send(skb, &error, host_mac, QUOTED_TCP);
	return icmp6_error_send(skb, &error, host_mac, QUOTED);
}
