/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Ingress of cilium_host and cilium_net: packets to the host. Policy was enforced at their source.
 *
 * Packets for a proxy that were found at egress of the stack arrive here again: sk_assign is allowed only at ingress.
 */
#pragma once

#include "lib/network.h"
#include "proxy/redirect.h"

static __always_inline int proxy_gets(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	int refused = parse(skb, flow, family);

	if (refused)
		return DROP(INGRESS, refused);
	flow->proxy_port = mark_read(skb) >> 16;
	flow->dnat = mark_read(skb) & MARK_PORT_CHANGED;
	flow->to_proxy_client = !flow->proxy_port;
	return ingress_to_proxy(skb, flow, TRACE_REASON_UNKNOWN, family);
}

static __always_inline int host_receives(struct __sk_buff *skb, struct flow *flow)
{
	struct ethernet *eth;

	if (likely((mark_read(skb) & MARK_KIND) != MARK_TO_PROXY))
		return TC_ACT_OK;
	eth = packet_eth(skb);
	if (!eth)
		return DROP(INGRESS, DROP_INVALID);
	if (eth->protocol == bpf_htons(ETH_P_IP))
		return proxy_gets(skb, flow, FAMILY_IPV4);
	return eth->protocol == bpf_htons(ETH_P_IPV6) ? proxy_gets(skb, flow, FAMILY_IPV6) : TC_ACT_OK;
}
