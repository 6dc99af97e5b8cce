/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Egress of a host-side link (cil_to_container): ingress policy for packets that the stack or a bridge delivers.
 *
 * A bridge may also flood packets to other or all hosts: those belong to no connection of this pod.
 */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/identity.h"
#include "lib/mark.h"
#include "lib/network.h"
#include "pod/deliver.h"
#include "pod/egress.h"
#include "pod/links.h"
#include "pod/neighbours.h"
#include "proxy/redirect.h"

static __always_inline bool own_destination(const struct flow *flow, const struct endpoint_config *self,
					    __u8 family)
{
	if (family == FAMILY_IPV4)
		return flow->daddr.words[0] == self->ipv4;
	return address_equals(&flow->daddr, &self->ipv6);
}

/* Get the sender's identity: from the mark, else of the source address. */
static __always_inline __u32 sender_of(const struct flow *flow, __u32 mark, __u8 family)
{
	switch (mark & MARK_KIND) {
	case MARK_IDENTITY:
	case MARK_INGRESS_PROXY:
		return marked_identity(mark);
	case MARK_EGRESS_PROXY:
		if (marked_identity(mark))
			return marked_identity(mark);
	}
	return identity_of(ipcache_lookup(&flow->saddr, family));
}

static __always_inline int to_container_ip(struct __sk_buff *skb, struct flow *flow,
					   const struct endpoint_config *self, __u8 family)
{
	struct use use = { .packets = 1, .bytes = skb->len };
	int refused = parse(skb, flow, family);
	enum ct_status status;
	__u32 mark = mark_read(skb);

	if (family == FAMILY_IPV6 && !refused && finds_neighbours(flow))
		return TC_ACT_OK;
	if (family == FAMILY_IPV6 ? !has_ipv6(self) : !has_ipv4(self))
		return DROP(INGRESS, DROP_UNKNOWN_L3);
	if (refused)
		return DROP(INGRESS, refused);
	flow->source_identity = sender_of(flow, mark, family);
	flow->by_proxy = (mark & MARK_KIND) == MARK_EGRESS_PROXY;
	flow->dnat = (mark & MARK_KIND) == MARK_TRANSLATED;
	flow->through_stack = replies_need_stack(flow);
	mark_write(skb, 0);
	if ((mark & MARK_KIND) == MARK_INGRESS_PROXY)
		refused = accept_from_proxy(flow, ct_now(), family);
	else if (own_destination(flow, self, family))
		refused = ingress_check(skb, flow, use, ct_now(), family, &status);
	else
		refused = policy_check(skb, flow, INGRESS, false, &use, family);
	if (refused)
		return DROP(INGRESS, refused);
	if (must_pass_to_proxy(skb, flow, family))
		return redirect_to_host_ingress(skb, flow);
	count(skb, REASON_FORWARDED, INGRESS);
	if (unlikely(flow->report))
		send_trace_notify(skb, flow, TRACE_TO_POD, skb->ifindex, TRACED(TRACE_REASON_UNKNOWN, family));
	return TC_ACT_OK;
}

static __always_inline int to_container(struct __sk_buff *skb, struct flow *flow)
{
	__u32 epoch;
	const struct endpoint_config *self = link_endpoint(skb->ifindex, &epoch);
	struct ethernet *eth;

	if (!self)
		return DROP(INGRESS, DROP_NO_CONFIG);
	flow->destination = self->id;
	flow->destination_identity = self->identity;
	if (skb->vlan_present)
		return DROP(INGRESS, DROP_VLAN);
	eth = packet_eth(skb);
	if (!eth)
		return DROP(INGRESS, DROP_INVALID);
	if (likely(eth->protocol == bpf_htons(ETH_P_IP)))
		return to_container_ip(skb, flow, self, FAMILY_IPV4);
	if (eth->protocol == bpf_htons(ETH_P_IPV6))
		return to_container_ip(skb, flow, self, FAMILY_IPV6);
	if (eth->protocol == bpf_htons(ETH_P_ARP))
		return TC_ACT_OK;
	if (bpf_ntohs(eth->protocol) < ETH_TYPE_MIN)
		return DROP(INGRESS, DROP_UNSUPPORTED_L2);
	return DROP(INGRESS, DROP_UNKNOWN_L3);
}
