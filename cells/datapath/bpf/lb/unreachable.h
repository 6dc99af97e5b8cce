/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Tells a client that a service has no backend: ICMP (RFC 792) or ICMPv6 (RFC 4443), port unreachable. */
#pragma once

#include "lib/maps.h"
#include "lib/network.h"
#include "lib/rewrite.h"
#include "pod/answer.h"

#define UNREACHABLE_PORT 3
#define UNREACHABLE_PORT6 4
#define UNREACHABLE_HOPS 64

/* The IPv4 header and 8 bytes, of TCP the whole header: see QUOTED. */
static __always_inline int unreachable4(struct __sk_buff *skb, const struct flow *flow, mac_t host_mac, __u32 quoted)
{
	const __u32 inserted = sizeof(struct iphdr) + sizeof(struct icmphdr);
	const __u32 length = ETH_HLEN + inserted + quoted;
	struct icmphdr *message;
	struct ethernet *eth;
	struct iphdr *ip;

	if (skb->len < ETH_HLEN + quoted)
		return DROP(EGRESS, DROP_NO_SERVICE);
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
	ip->ttl = UNREACHABLE_HOPS;
	ip->protocol = IPPROTO_ICMP;
	ip->saddr = flow->daddr.words[0];
	ip->daddr = flow->saddr.words[0];
	ip->check = fold(bpf_csum_diff(NULL, 0, (void *)ip, sizeof(*ip), 0));
	__builtin_memset(message, 0, sizeof(*message));
	message->type = ICMP_DEST_UNREACH;
	message->code = UNREACHABLE_PORT;
	message->checksum = fold(bpf_csum_diff(NULL, 0, (void *)message, sizeof(*message) + quoted, 0));
	return answer_pod(skb);
}

/* It comes from the service, and from where the packet was sent on this link. */
static __always_inline int lb_unreachable(struct __sk_buff *skb, const struct flow *flow, __u8 family)
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
			.too_short = DROP_NO_SERVICE,
		};

		return tcp && flow->l4 == ETH_HLEN + sizeof(struct ipv6hdr)
			       ? icmp6_error_send(skb, &error, host_mac, QUOTED_TCP)
			       : icmp6_error_send(skb, &error, host_mac, QUOTED);
	}
	return tcp && flow->l4 == ETH_HLEN + sizeof(struct iphdr)
		       ? unreachable4(skb, flow, host_mac, sizeof(struct iphdr) + sizeof(struct tcphdr))
		       : unreachable4(skb, flow, host_mac, sizeof(struct iphdr) + 8);
}
