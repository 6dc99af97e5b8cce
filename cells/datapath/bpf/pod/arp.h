/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Answers a pod's ARP: every address it asks for is behind the host's end of its link. */
#pragma once

#include <linux/if_packet.h>
#include <linux/pkt_cls.h>

#include "lib/maps.h"
#include "lib/packet.h"
#include "lib/rewrite.h"

#define ARPHRD_ETHER 1 /* RFC 826; linux/if_arp.h needs the C library */
#define ARPOP_REQUEST 1
#define ARPOP_REPLY 2

struct arp_ipv4 {
	struct ethernet eth;
	__be16 hardware;
	__be16 network;
	__u8 hardware_length;
	__u8 network_length;
	__be16 operation;
	__be16 sender_mac[3];
	__be16 sender_ip[2]; /* in halves, for want of alignment */
	__be16 target_mac[3];
	__be16 target_ip[2];
};

_Static_assert(sizeof(struct arp_ipv4) == 42, "RFC 826");

static __always_inline bool ip_equals(const __be16 halves[2], __be32 ipv4)
{
	return halves[0] == (__u16)ipv4 && halves[1] == (__u16)(ipv4 >> 16);
}

static __always_inline void move(__be16 *to, const __be16 *from, int halves)
{
	for (int i = 0; i < halves; i++)
		to[i] = from[i];
}

static __always_inline bool arp_is_request(const struct arp_ipv4 *packet)
{
	return packet->hardware == bpf_htons(ARPHRD_ETHER) && packet->network == bpf_htons(ETH_P_IP) &&
	       packet->hardware_length == ETH_ALEN && packet->network_length == 4 &&
	       packet->operation == bpf_htons(ARPOP_REQUEST);
}

/* Turn a request into the reply, or leave it to the host's stack.
 *
 * A question for the pod's own address stays without answer, or duplicate address detection would
 * find one. The gateway is not asked for by name: a pod may have been set up with an earlier one.
 */
static __always_inline int arp_respond(struct __sk_buff *skb, const struct endpoint_config *self)
{
	struct arp_ipv4 *packet;
	__be16 asker[2];

	if (!packet_pull(skb, sizeof(*packet)))
		return DROP(EGRESS, DROP_INVALID);
	packet = packet_start(skb);
	if ((void *)(packet + 1) > packet_end(skb))
		return DROP(EGRESS, DROP_INVALID);
	if (self->flags & ENDPOINT_PASSES_NEIGHBOURS)
		return TC_ACT_OK;
	if (!arp_is_request(packet) || ip_equals(packet->target_ip, self->ipv4))
		return TC_ACT_OK;
	if (!mac_is_broadcast(packet->eth.destination) && !mac_equals(packet->eth.destination, self->host_mac))
		return TC_ACT_OK;

	packet->operation = bpf_htons(ARPOP_REPLY);
	move(packet->eth.destination, packet->sender_mac, 3);
	move(packet->target_mac, packet->sender_mac, 3);
	mac_write(packet->eth.source, self->host_mac);
	mac_write(packet->sender_mac, self->host_mac);
	move(asker, packet->sender_ip, 2);
	move(packet->sender_ip, packet->target_ip, 2);
	move(packet->target_ip, asker, 2);
	/* Straight to the pod's end: a link that has only just come up has no queue to leave by yet, and a
	 * first ARP that is lost is asked again a second later.
	 */
	bpf_skb_change_type(skb, PACKET_HOST);
	return bpf_redirect_peer(skb->ifindex, 0);
}
