/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Path MTU discovery (RFC 1191, RFC 8201): tells a pod that its packet does not fit into the tunnel.
 *
 * What is larger than the tunnel's packets and may be fragmented, goes: then the kernel fragments what is outside.
 */
#pragma once

#include "lib/events.h"
#include "lib/network.h"
#include "lib/rewrite.h"
#include "pod/answer.h"

#define IP_DONT_FRAGMENT 0x4000
#define TOO_BIG_HOPS 64

/* Bytes of transport header that each segment of the packet will have. */
static __always_inline __u32 segment_header(struct __sk_buff *skb, const struct flow *flow)
{
	__u8 offset = 0;

	if (flow->protocol != IPPROTO_TCP)
		return sizeof(struct udphdr);
	bpf_skb_load_bytes(skb, flow->l4 + 12, &offset, sizeof(offset)); /* its upper half, in 4 bytes */
	return (offset >> 4) * 4;
}

/* Whether the packet, or a segment the kernel will make of it, is longer than `mtu` and must not be fragmented. */
VERIFIED_ALONE exceeds(struct __sk_buff *skb, const struct flow *flow, __u32 mtu, __u32 family)
{
	const struct iphdr *ip;

	if (!flow)
		return false;
	if (skb->gso_size && flow->l4 - ETH_HLEN + segment_header(skb, flow) + skb->gso_size <= mtu)
		return false;
	if (family == FAMILY_IPV6)
		return true;
	ip = packet_ipv4(skb);
	return ip && ip->frag_off & bpf_htons(IP_DONT_FRAGMENT);
}

#define QUOTED4 (sizeof(struct iphdr) + 8) /* RFC 792 */
#define QUOTED4_TCP (sizeof(struct iphdr) + sizeof(struct tcphdr)) /* see QUOTED_TCP */

static __always_inline int frag_needed_send(struct __sk_buff *skb, const struct flow *flow, __be32 router, __u32 mtu,
					    mac_t host_mac, __u32 quoted)
{
	const __u32 inserted = sizeof(struct iphdr) + sizeof(struct icmphdr);
	const __u32 length = ETH_HLEN + inserted + quoted;
	struct icmphdr *message;
	struct ethernet *eth;
	struct iphdr *ip;

	if (bpf_skb_change_tail(skb, ETH_HLEN + quoted, 0) ||
	    bpf_skb_adjust_room(skb, inserted, BPF_ADJ_ROOM_MAC, 0) || bpf_skb_pull_data(skb, length))
		return DROP(EGRESS, DROP_WRITE_ERROR);
	eth = packet_start(skb);
	if ((void *)eth + length > packet_end(skb))
		return DROP(EGRESS, DROP_INVALID);
	ip = (void *)(eth + 1);
	message = (void *)(ip + 1);
	__builtin_memcpy(eth->destination, eth->source, ETH_ALEN);
	mac_write(eth->source, host_mac);
	__builtin_memset(ip, 0, sizeof(*ip));
	ip->version = 4;
	ip->ihl = 5;
	ip->tot_len = bpf_htons(inserted + quoted);
	ip->ttl = TOO_BIG_HOPS;
	ip->protocol = IPPROTO_ICMP;
	ip->saddr = router;
	ip->daddr = flow->saddr.words[0];
	ip->check = fold(bpf_csum_diff(NULL, 0, (void *)ip, sizeof(*ip), 0));
	__builtin_memset(message, 0, sizeof(*message));
	message->type = ICMP_DEST_UNREACH;
	message->code = ICMP_FRAG_NEEDED;
	message->sequence = bpf_htons(mtu); /* where an echo has it: RFC 1191, section 4 */
	message->checksum = fold(bpf_csum_diff(NULL, 0, (void *)message, sizeof(*message) + quoted, 0));
	return answer_pod(skb);
}

/* From the pod's gateway, on the link the packet came by. */
VERIFIED_ALONE too_big4(struct __sk_buff *skb, const struct flow *flow, __u32 mtu)
{
	const struct node_config *node = node_facts();
	struct ethernet *eth = packet_eth(skb);
	mac_t host_mac;

	if (!flow || !node || !eth)
		return DROP(EGRESS, DROP_INVALID);
	host_mac = mac_read(eth->destination);
	if (flow->protocol == IPPROTO_TCP && flow->l4 == ETH_HLEN + sizeof(struct iphdr))
		return frag_needed_send(skb, flow, node->router_ip, mtu, host_mac, QUOTED4_TCP);
	return frag_needed_send(skb, flow, node->router_ip, mtu, host_mac, QUOTED4);
}

VERIFIED_ALONE too_big6(struct __sk_buff *skb, const struct flow *flow, __u32 mtu)
{
	const struct node_config *node = node_facts();
	struct ethernet *eth = packet_eth(skb);
	mac_t host_mac;

	if (!flow || !node || !eth)
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

	if (flow->protocol == IPPROTO_TCP && flow->l4 == ETH_HLEN + sizeof(struct ipv6hdr))
		return icmp6_error_send(skb, &error, host_mac, QUOTED_TCP);
	return icmp6_error_send(skb, &error, host_mac, QUOTED);
}
