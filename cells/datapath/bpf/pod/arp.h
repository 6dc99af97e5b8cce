/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* ARP replies to a pod: all addresses are reachable through the host side of its link. */
#pragma once

#include <linux/if_packet.h>
#include <linux/pkt_cls.h>

#include "lib/arp.h"
#include "lib/maps.h"

/* Turn an ARP request into its reply, or pass it to the host's stack.
 *
 * Requests for the pod's own address get no reply: duplicate address detection would fail. The gateway's address is not
 * checked: a pod may have been configured with an earlier one.
 */
static __always_inline int arp_respond(struct __sk_buff *skb, const struct endpoint_config *self)
{
	struct arp_ipv4 *packet;

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

	arp_reply(packet, self->host_mac);
	/* Redirect to the peer: a link that has only just come up has no active queue yet, and the pod would repeat a
	 * lost ARP request only a second later.
	 */
	bpf_skb_change_type(skb, PACKET_HOST);
	return bpf_redirect_peer(skb->ifindex, 0);
}
