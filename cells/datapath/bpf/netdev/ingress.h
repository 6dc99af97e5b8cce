/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What comes to the node by a native device: clients outside find services and get to them, and answers to
 * masqueraded pods and to those clients find back. The rest is the stack's.
 */
#pragma once

#include <linux/pkt_cls.h>

#include "lb/outside.h"
#include "lib/network.h"
#include "nat/error.h"
#include "netdev/announce.h"
#include "netdev/maps.h"
#include "nodeport/answer.h"
#include "nodeport/conntrack.h"
#include "nodeport/dsr.h"
#include "nodeport/error.h"
#include "nodeport/forward.h"
#include "overlay/tunnel.h"

/* What another node has passed on to a backend here, which answers by itself: the verdict, or UNDECIDED. */
static __always_inline int device_brings(struct __sk_buff *skb, struct flow *flow, const struct nodeport_config *own,
					 __u32 now, __u8 family)
{
	const struct address_info *local;
	int done;

	if (likely(!dsr_serves(own, flow)))
		return UNDECIDED;
	local = address_lookup(&flow->daddr, family);
	if (!local)
		return UNDECIDED;
	done = family == FAMILY_IPV4 ? dsr4_note(skb, flow, now) : dsr6_note(skb, flow, now);
	if (done < 0)
		return DROP(INGRESS, -done);
	if (!done)
		return UNDECIDED;
	return family == FAMILY_IPV4 ? nodeport4_deliver(skb, flow, local, now)
				     : nodeport6_deliver(skb, flow, local, now);
}

/* What is for a service, and errors on their way to a backend of one: the verdict, or UNDECIDED. */
static __always_inline int device_serves(struct __sk_buff *skb, struct flow *flow, const struct nodeport_config *own,
					 __u32 now, __u8 family)
{
	int verdict, refused;

	if (flow->related) {
		verdict = family == FAMILY_IPV4 ? nodeport4_error(skb, flow, now) : nodeport6_error(skb, flow, now);
		if (verdict < 0)
			return DROP(INGRESS, -verdict);
		return verdict ? nodeport_go_on(skb, flow, own, now, family) : UNDECIDED;
	}
	if (!lb_balances(flow))
		return UNDECIDED;
	if (unlikely(answers_into_tunnel(flow)))
		return UNDECIDED;
	verdict = family == FAMILY_IPV4 ? lb4_outside(skb, flow, now) : lb6_outside(skb, flow, now);
	if (!verdict)
		return device_brings(skb, flow, own, now, family);
	if (verdict != LB_TRANSLATED)
		return verdict;
	if (dsr_serves(own, flow) && !flow->local_only && !address_lookup(&flow->daddr, family))
		return family == FAMILY_IPV4 ? dsr4_forward(skb, flow) : dsr6_forward(skb, flow);
	refused = family == FAMILY_IPV4 ? nodeport4_note(skb, flow, now) : nodeport6_note(skb, flow, now);
	return refused ? DROP(INGRESS, refused) : nodeport_go_on(skb, flow, own, now, family);
}

/* Whether it is a packet of the tunnel's for this node: the kernel takes it out, and no pod was given its port. */
static __always_inline bool brings_tunnel(const struct flow *flow)
{
	const struct tunnel_config *tunnel;

	if (flow->protocol != IPPROTO_UDP)
		return false;
	tunnel = tunnel_facts();
	return tunnel && flow->dport == tunnel->port && flow->daddr.words[0] == tunnel->source &&
	       !nat_in_range(bpf_ntohs(tunnel->port));
}

static __always_inline int device_gets_ip(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	const struct nodeport_config *own = nodeport_facts();
	__u32 now = ct_now();
	int verdict;

	/* What cannot be read, or is a fragment before its first, is not ours to judge. */
	if (parse(skb, flow, family))
		return TC_ACT_OK;
	if (family == FAMILY_IPV4 && brings_tunnel(flow))
		return TC_ACT_OK;
	if (own) {
		verdict = device_serves(skb, flow, own, now, family);
		if (verdict != UNDECIDED)
			return verdict;
	}
	verdict = family == FAMILY_IPV4 ? nat4_return(skb, flow) : nat6_return(skb, flow);
	if (verdict < 0)
		return DROP(INGRESS, -verdict);
	if (!verdict || !own)
		return TC_ACT_OK;
	flow->source_identity = IDENTITY_HOST; /* it has come here for this node */
	verdict = nodeport_returns(skb, flow, INGRESS, now, family);
	return verdict == UNDECIDED ? TC_ACT_OK : verdict;
}

static __always_inline int device_gets(struct __sk_buff *skb, struct flow *flow)
{
	const struct device_config *device;
	__u32 ifindex = skb->ifindex;
	struct ethernet *eth;

	device = bpf_map_lookup_elem(&hive_devices, &ifindex);
	if (!device)
		return TC_ACT_OK;
	eth = packet_eth(skb);
	if (!eth)
		return TC_ACT_OK;
	if (eth->protocol == bpf_htons(ETH_P_IP))
		return device_gets_ip(skb, flow, FAMILY_IPV4);
	if (eth->protocol == bpf_htons(ETH_P_IPV6))
		return device_gets_ip(skb, flow, FAMILY_IPV6);
	if (eth->protocol == bpf_htons(ETH_P_ARP))
		return device_gets_arp(skb, device);
	return TC_ACT_OK;
}
