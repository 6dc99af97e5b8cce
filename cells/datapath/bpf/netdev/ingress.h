/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What comes to the node by a native device: answers to masqueraded pods find back. The rest is the stack's. */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/network.h"
#include "nat/error.h"
#include "netdev/maps.h"

static __always_inline int device_gets_ip(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	int translated;

	/* What cannot be read, or is a fragment before its first, is not ours to judge. */
	if (parse(skb, flow, family))
		return TC_ACT_OK;
	translated = family == FAMILY_IPV4 ? nat4_return(skb, flow) : nat6_return(skb, flow);
	return translated < 0 ? DROP(INGRESS, -translated) : TC_ACT_OK;
}

static __always_inline int device_gets(struct __sk_buff *skb, struct flow *flow)
{
	__u32 ifindex = skb->ifindex;
	struct ethernet *eth;

	if (!bpf_map_lookup_elem(&hive_devices, &ifindex))
		return TC_ACT_OK;
	eth = packet_eth(skb);
	if (!eth)
		return TC_ACT_OK;
	if (eth->protocol == bpf_htons(ETH_P_IP))
		return device_gets_ip(skb, flow, FAMILY_IPV4);
	if (eth->protocol == bpf_htons(ETH_P_IPV6))
		return device_gets_ip(skb, flow, FAMILY_IPV6);
	return TC_ACT_OK;
}
