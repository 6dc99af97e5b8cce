/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Replies, at native devices, to packets that a proxy sent with a pod's address: they are passed to the proxy.
 *
 * The stack would find the proxy's socket first (early demux), and drop the packet, because it is to be forwarded to
 * the pod. So the packet is marked for local delivery.
 */
#pragma once

#include <linux/pkt_cls.h>

#include "ct/conntrack.h"
#include "proxy/redirect.h"

static __always_inline int device_reply_to_proxy(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	const struct ct_entry *entry = ct_entry_of(flow, INGRESS, true, family);
	__u32 now = ct_now();
	int refused = 0;

	if (entry && entry->lifetime >= now ? !entry->proxy_redirect : !is_first_reply(flow))
		return TC_ACT_OK;
	if (!proxy_assign_reply(skb, flow, family))
		return TC_ACT_OK; /* it is for the pod */
	if (entry && entry->lifetime >= now)
		ct_find(flow, INGRESS, true, now, family);
	else if (!(flow->tcp_flags & TCP_RST))
		refused = ct_create_from_reply(flow, now, family);
	if (refused)
		return DROP(INGRESS, refused);
	mark_for_proxy(skb, flow);
	return pass_to_proxy(skb, flow, INGRESS, CT_REPLY, family);
}

VERIFIED_ALONE device4_reply_to_proxy(struct __sk_buff *skb, struct flow *flow)
{
	return flow ? device_reply_to_proxy(skb, flow, FAMILY_IPV4) : TC_ACT_OK;
}

VERIFIED_ALONE device6_reply_to_proxy(struct __sk_buff *skb, struct flow *flow)
{
	return flow ? device_reply_to_proxy(skb, flow, FAMILY_IPV6) : TC_ACT_OK;
}

/* Mark a packet to the stack if a proxy waits for it; returns the verdict. */
static __always_inline int pass_reply_to_proxy(struct __sk_buff *skb, struct flow *flow)
{
	if (likely(!flow->for_proxies))
		return TC_ACT_OK;
	if (unlikely(flow->related)) {
		__u32 family = packet_protocol(skb) == bpf_htons(ETH_P_IP) ? FAMILY_IPV4 : FAMILY_IPV6;

		if (is_error_for_proxy(skb, flow, family))
			mark_for_proxy(skb, flow);
		return TC_ACT_OK;
	}
	if (flow->protocol != IPPROTO_TCP)
		return TC_ACT_OK;
	return packet_protocol(skb) == bpf_htons(ETH_P_IP) ? device4_reply_to_proxy(skb, flow)
	       : without(WITHOUT_IPV6)			   ? TC_ACT_OK
							   : device6_reply_to_proxy(skb, flow);
}
