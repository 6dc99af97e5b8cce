/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The two programs of a native device, whether it has Ethernet headers (datapath.c) or none (l3.c). */
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
#define TAGGED_ELSEWHERE 1 /* a packet of a device on top of this one */

static __always_inline bool is_tag(__be16 protocol)
{
	return protocol == bpf_htons(ETH_P_8021Q) || protocol == bpf_htons(ETH_P_8021AD);
}

/* Whether the tag that the kernel has taken off names a VLAN: then the packet is for a device on top of this one. */
static __always_inline bool has_vlan(const struct __sk_buff *skb)
{
	return skb->vlan_present && skb->vlan_tci & VLAN_ID;
}

/* Take off the tags in the frame that the kernel takes off behind this program: priority tags (IEEE 802.1Q), which name no
 * VLAN. The first of all it has taken off before; bpf_skb_vlan_pop() puts the next one in its place. 0, TAGGED_ELSEWHERE, or minus the reason to drop.
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
			return inner ? TAGGED_ELSEWHERE : -DROP_VLAN; /* that device might not be guarded */
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

	if (unlikely(skb->pkt_type == PACKET_LOOPBACK)) /* what the node itself has sent to a group that it is in */
		return TC_ACT_OK;
	if (unlikely(skb->vlan_present || is_tag(packet_protocol(skb)))) {
		verdict = device_untag(skb);
		if (verdict)
			return verdict < 0 ? finish(skb, &flow, DROP(INGRESS, -verdict)) : TC_ACT_OK;
	}
	verdict = ipsec() ? device_decrypts(skb) : UNDECIDED;
	if (verdict != UNDECIDED)
		return finish(skb, &flow, verdict);
	verdict = from_netdev(skb, &flow);
	if (verdict == TC_ACT_OK)
		verdict = pass_to_asking_proxy(skb, &flow);
	if (verdict == TC_ACT_OK && unlikely(host_endpoint()))
		verdict = host_guard(skb, &flow, INGRESS);
	return finish(skb, &flow, verdict);
}

static __always_inline int device_out(struct __sk_buff *skb)
{
	struct flow flow = {};
	int verdict;

	if (unlikely(host_endpoint())) {
		verdict = host_guard(skb, &flow, EGRESS);
		if (verdict != TC_ACT_OK)
			return finish(skb, &flow, verdict);
		flow = (struct flow){};
	}
	verdict = ipsec() ? device_meets_xfrm(skb) : device_encrypts(skb);
	if (verdict != UNDECIDED)
		return finish(skb, &flow, verdict);
	return finish(skb, &flow, to_netdev(skb, &flow));
}
