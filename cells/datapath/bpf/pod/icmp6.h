/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* ICMPv6 replies to a pod.
 *
 * Neighbour discovery (RFC 4861): all addresses that the node knows are reachable through the host side of the pod's
 * link. Time exceeded (RFC 4443): for packets to local pods, or off the node, with an expired hop limit.
 */
#pragma once

#include <linux/if_packet.h>
#include <linux/pkt_cls.h>

#include "lib/events.h"
#include "lib/identity.h"
#include "lib/maps.h"
#include "pod/answer.h"
#include "pod/neighbours.h"
#include "lib/network.h"
#include "lib/rewrite.h"

#define ND_ROUTER 0x80 /* in the first byte of an advertisement's flags */
#define ND_SOLICITED 0x40
#define ND_OVERRIDE 0x20
#define ND_TARGET_MAC 2 /* target link-layer address option */

struct neighbour_message {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__u8 flags;
	__u8 reserved[3];
	struct address target;
	__u8 option;
	__u8 option_length; /* in units of 8 bytes */
	__be16 mac[3];
};

_Static_assert(sizeof(struct neighbour_message) == 32, "RFC 4861, section 4.4");

#define ND_LENGTH (LINK_HLEN + sizeof(struct ipv6hdr) + sizeof(struct neighbour_message))
#define ND_SHORTEST (ND_LENGTH - 8) /* a solicitation may have no option */

/* Turn a neighbour solicitation into an advertisement with the MAC of the host side. */
static __always_inline int neighbour_advertise(struct __sk_buff *skb, const struct endpoint_config *self,
					       bool router)
{
	const struct node_config *node = node_facts();
	struct neighbour_message *message;
	struct ethernet *eth;
	struct ipv6hdr *ip;
	struct address target;
	bool anonymous;

	if (bpf_skb_change_tail(skb, ND_LENGTH, 0) || bpf_skb_pull_data(skb, ND_LENGTH))
		return DROP(EGRESS, DROP_WRITE_ERROR);
	eth = packet_start(skb);
	if ((void *)eth + ND_LENGTH > packet_end(skb))
		return DROP(EGRESS, DROP_INVALID);
	ip = (void *)(eth + 1);
	message = (void *)(ip + 1);
	address_load(&target, &message->target);
	anonymous = !ip->saddr.s6_addr32[0] && !ip->saddr.s6_addr32[1] && !ip->saddr.s6_addr32[2] &&
		    !ip->saddr.s6_addr32[3]; /* unspecified source: duplicate address detection (RFC 4862) */

	__builtin_memcpy(eth->destination, eth->source, ETH_ALEN);
	mac_write(eth->source, self->host_mac);
	if (anonymous) {
		ip->daddr.s6_addr32[0] = bpf_htonl(0xff020000); /* all-nodes multicast */
		ip->daddr.s6_addr32[1] = 0;
		ip->daddr.s6_addr32[2] = 0;
		ip->daddr.s6_addr32[3] = bpf_htonl(1);
	} else {
		__builtin_memcpy(&ip->daddr, &ip->saddr, sizeof(ip->daddr));
	}
	/* From the router's address, as in Cilium; without one, from the target. */
	if (node && !address_is_zero(&node->router_ip6))
		__builtin_memcpy(&ip->saddr, &node->router_ip6, sizeof(ip->saddr));
	else
		__builtin_memcpy(&ip->saddr, &target, sizeof(ip->saddr));
	ip->payload_len = bpf_htons(sizeof(*message));
	ip->hop_limit = ND_HOP_LIMIT;
	message->type = ND_ADVERT;
	message->code = 0;
	message->checksum = 0;
	message->flags = (router ? ND_ROUTER : 0) | (anonymous ? 0 : ND_SOLICITED) | ND_OVERRIDE;
	message->reserved[0] = 0;
	message->reserved[1] = 0;
	message->reserved[2] = 0;
	message->option = ND_TARGET_MAC;
	message->option_length = 1;
	mac_write(message->mac, self->host_mac);
	message->checksum = icmp6_checksum(ip, message, sizeof(*message));
	return answer_pod(skb);
}

/* Reply to the neighbour solicitation in `flow`; returns the verdict. */
VERIFIED_ALONE neighbour_respond(struct __sk_buff *skb, const struct flow *flow, const struct endpoint_config *self)
{
	if (!flow || !self)
		return DROP(EGRESS, DROP_INVALID);
	const struct node_config *node = node_facts();
	const struct address_info *local;
	struct address target;
	bool own;

	if (flow->ttl != ND_HOP_LIMIT || flow->l4 != LINK_HLEN + sizeof(struct ipv6hdr) || skb->len < ND_SHORTEST)
		return DROP(EGRESS, DROP_INVALID);
	if (bpf_skb_load_bytes(skb, flow->l4 + offsetof(struct neighbour_message, target), &target, sizeof(target)))
		return DROP(EGRESS, DROP_INVALID);
	/* Drop a solicitation that is sent neither to a link-scoped address nor to its target (RFC 4861, 7.2.2): it
	 * would only bypass policy.
	 */
	if (!link_scoped(&flow->daddr) && !address_equals(&flow->daddr, &target))
		return DROP(EGRESS, DROP_INVALID);
	own = neighbours_own_source(&flow->saddr, self);
	/* The stack replies for its own addresses; requests for the pod's own address get no reply. */
	if (self->flags & ENDPOINT_PASSES_NEIGHBOURS || address_equals(&target, &self->ipv6) ||
	    link_scoped(&target))
		return own ? TC_ACT_OK : DROP(EGRESS, DROP_INVALID_SOURCE);
	if (node && address_equals(&target, &node->router_ip6))
		return neighbour_advertise(skb, self, true);
	local = address_lookup(&target, FAMILY_IPV6);
	if (!local)
		return DROP(EGRESS, DROP_UNKNOWN_TARGET);
	if (local->flags & ADDRESS_IS_HOST && own)
		return TC_ACT_OK;
	return neighbour_advertise(skb, self, false);
}

#define EXCEEDED_HOP_LIMIT 1 /* the pod is on this link */

/* Send time exceeded to a pod; returns the verdict. */
VERIFIED_ALONE send_time_exceeded(struct __sk_buff *skb, const struct flow *flow,
				  const struct endpoint_config *self)
{
	const struct node_config *node = node_facts();

	if (!flow || !self || !node)
		return DROP(EGRESS, DROP_TTL_EXCEEDED);
	const struct icmp6_error error = {
		.from = node->router_ip6,
		.to = self->ipv6,
		.type = ICMPV6_TIME_EXCEED,
		.hop_limit = EXCEEDED_HOP_LIMIT,
		.too_short = DROP_TTL_EXCEEDED,
	};

	if (flow->protocol == IPPROTO_TCP && flow->l4 == LINK_HLEN + sizeof(struct ipv6hdr))
		return icmp6_error_send(skb, &error, self->host_mac, QUOTED_TCP);
	return icmp6_error_send(skb, &error, self->host_mac, QUOTED);
}
