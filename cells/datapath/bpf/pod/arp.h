/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Answers a pod's ARP: every address it asks for is behind the host's end of its link. */
#pragma once

#include <linux/if_packet.h>
#include <linux/pkt_cls.h>

#include "lib/arp.h"
#include "lib/maps.h"

/* Turn a request into the reply, or leave it to the host's stack.
 *
 * A question for the pod's own address stays without answer, or duplicate address detection would
 * find one. The gateway is not asked for by name: a pod may have been set up with an earlier one.
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
	/* Straight to the pod's end: a link that has only just come up has no queue to leave by yet, and a
	 * first ARP that is lost is asked again a second later.
	 */
	bpf_skb_change_type(skb, PACKET_HOST);
	return bpf_redirect_peer(skb->ifindex, 0);
}
