/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The tc programs of a native device, with Ethernet headers (datapath.c) or without (l3.c). */
#pragma once

#include <linux/if_packet.h>

#include "host/policy.h"
#include "lib/finish.h"
#include "netdev/egress.h"
#include "netdev/encrypt.h"
#include "netdev/ingress.h"
#include "netdev/proxied.h"
#include "overlay/ipsec.h"

#define MAX_TAGS 4
#define VLAN_ID 0x0fff
#define TAGGED_ELSEWHERE 1 /* a packet of a VLAN device on top of this one */

static __always_inline bool is_tag(__be16 protocol)
{
	return protocol == bpf_htons(ETH_P_8021Q) || protocol == bpf_htons(ETH_P_8021AD);
}

/* Return whether the removed VLAN tag has a VLAN id: then the packet is for a VLAN device on top of this one. */
static __always_inline bool has_vlan(const struct __sk_buff *skb)
{
	return skb->vlan_present && skb->vlan_tci & VLAN_ID;
}

/* Remove priority tags (IEEE 802.1Q), which have no VLAN id, as the kernel does after this program. The kernel has
 * already moved the outermost tag to the skb; bpf_skb_vlan_pop() replaces it by the next one. Returns 0,
 * TAGGED_ELSEWHERE, or a negative drop reason.
 */
VERIFIED_ALONE device_untag(struct __sk_buff *skb)
{
	for (int i = 0; i < MAX_TAGS; i++) {
		__u32 inner;
		__be16 tag;

		if (!is_tag(packet_protocol(skb)))
			return has_vlan(skb) ? TAGGED_ELSEWHERE : 0;
		if (!LINK_HLEN || packet_load(skb, LINK_HLEN, &tag, sizeof(tag)))
			return -DROP_VLAN;
		inner = bpf_ntohs(tag) & VLAN_ID;
		if (has_vlan(skb))
			return inner ? TAGGED_ELSEWHERE : -DROP_VLAN; /* may bypass the host firewall */
		if (!skb->vlan_present && inner)
			return TAGGED_ELSEWHERE;
		if (bpf_skb_vlan_pop(skb))
			return -DROP_VLAN;
	}
	return -DROP_VLAN;
}

static __always_inline int device_in(struct __sk_buff *skb)
{
	struct flow flow = {};
	int verdict;

	if (unlikely(skb->pkt_type == PACKET_LOOPBACK)) /* the node's own multicast, looped back */
		return TC_ACT_OK;
	if (unlikely(skb->vlan_present || is_tag(packet_protocol(skb)))) {
		verdict = device_untag(skb);
		if (verdict)
			return verdict < 0 ? finish(skb, &flow, DROP(INGRESS, -verdict)) : TC_ACT_OK;
	}
	verdict = ipsec() ? device_decrypt(skb) : UNDECIDED;
	if (verdict != UNDECIDED)
		return finish(skb, &flow, verdict);
	verdict = from_netdev(skb, &flow);
	if (verdict == TC_ACT_OK)
		verdict = pass_reply_to_proxy(skb, &flow);
	if (verdict == TC_ACT_OK && unlikely(host_endpoint()))
		verdict = host_firewall(skb, &flow, INGRESS);
	return finish(skb, &flow, verdict);
}

static __always_inline int device_out(struct __sk_buff *skb)
{
	struct flow flow = {};
	int verdict;

	if (unlikely(host_endpoint())) {
		verdict = host_firewall(skb, &flow, EGRESS);
		if (verdict != TC_ACT_OK)
			return finish(skb, &flow, verdict);
		flow = (struct flow){};
	}
	verdict = ipsec() ? device_check_unencrypted(skb) : device_encrypt(skb);
	if (verdict != UNDECIDED)
		return finish(skb, &flow, verdict);
	return finish(skb, &flow, to_netdev(skb, &flow));
}
