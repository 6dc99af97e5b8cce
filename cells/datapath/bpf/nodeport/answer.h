/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What backends answer to clients outside comes from the service they asked. */
#pragma once

#include "ct/conntrack.h"
#include "lb/error.h"
#include "lb/pod.h"
#include "lib/events.h"
#include "lib/fib.h"
#include "lib/mark.h"
#include "netdev/maps.h"
#include "nodeport/maps.h"
#include "nodeport/send.h"

/* The entry of the client's flow that the packet answers, which notes it; NULL: nobody outside has asked. */
static __always_inline struct ct_entry *nodeport_answered(struct flow *flow, __u32 now, __u8 family)
{
	struct ct_entry *entry = ct_find(flow, INGRESS, true, now, family);

	return entry && entry->node_port ? entry : NULL;
}

#define NODEPORT_TRANSLATED 1

/* Have an answer, or an error about what a client outside has asked, come from the service: NODEPORT_TRANSLATED, 0 if
 * nobody outside has asked, or minus the reason to drop.
 */
static __always_inline int nodeport_answer(struct __sk_buff *skb, struct flow *flow, __u32 now, __u8 family)
{
	const struct ct_entry *entry;
	int refused;

	if (flow->related) {
		refused = lb_error(skb, flow, family);
		return refused ? -refused : flow->translated;
	}
	entry = nodeport_answered(flow, now, family);
	if (!entry)
		return 0;
	refused = lb_answer(skb, flow, entry->rev_nat_index, false, family);
	return refused ? -refused : NODEPORT_TRANSLATED;
}

VERIFIED_ALONE nodeport4_answer(struct __sk_buff *skb, struct flow *flow, __u32 now)
{
	return flow ? nodeport_answer(skb, flow, now, FAMILY_IPV4) : 0;
}

VERIFIED_ALONE nodeport6_answer(struct __sk_buff *skb, struct flow *flow, __u32 now)
{
	return flow ? nodeport_answer(skb, flow, now, FAMILY_IPV6) : 0;
}

/* What answers a client outside goes to it past the stack, as the question came: the verdict, or UNDECIDED. */
static __always_inline int nodeport_returns(struct __sk_buff *skb, struct flow *flow, enum direction direction,
					    __u32 now, __u8 family)
{
	int done = family == FAMILY_IPV4 ? nodeport4_answer(skb, flow, now) : nodeport6_answer(skb, flow, now);
	__be32 node;

	if (done < 0)
		return DROP(direction, -done);
	if (!done)
		return UNDECIDED;
	node = tunnel_node(flow, family);
	return family == FAMILY_IPV4 ? nodeport4_send(skb, flow, node) : nodeport6_send(skb, flow, node);
}

/* The verdict on an answer that routes for its new source, the service, take to another device than this one: it is
 * translated there. UNDECIDED if it is right here, or if routes say nothing.
 */
static __always_inline int nodeport_elsewhere(struct __sk_buff *skb, const struct flow *flow, __be16 index,
					      __u8 family)
{
	struct bpf_fib_lookup fib;
	struct ethernet *eth;
	struct address service;
	__be16 port;

	if (!lb_frontend_of(index, &service, &port, family) ||
	    fib_ask(skb, &fib, &service, &flow->daddr, family) != BPF_FIB_LKUP_RET_SUCCESS ||
	    fib.ifindex == skb->ifindex || !bpf_map_lookup_elem(&hive_devices, &fib.ifindex))
		return UNDECIDED;
	eth = packet_eth(skb);
	if (!eth)
		return DROP(EGRESS, DROP_INVALID);
	mac_write(eth->destination, fib_mac(fib.dmac));
	mac_write(eth->source, fib_mac(fib.smac));
	return bpf_redirect(fib.ifindex, 0);
}

/* What leaves by a native device, from the stack: a backend may be on the node itself, or its pod's links another
 * plugin's. The verdict, or UNDECIDED if it answers nobody outside.
 */
static __always_inline int nodeport_leaves(struct __sk_buff *skb, struct flow *flow, __u32 now, __u8 family)
{
	const struct ct_entry *entry;
	int verdict;

	if (!flow->related) {
		entry = ct_entry_of(flow, INGRESS, true, family);
		if (likely(!entry || !entry->node_port))
			return UNDECIDED;
		verdict = nodeport_elsewhere(skb, flow, entry->rev_nat_index, family);
		if (verdict != UNDECIDED)
			return verdict;
	}
	verdict = nodeport_answer(skb, flow, now, family);
	if (verdict < 0)
		return DROP(EGRESS, -verdict);
	if (!verdict)
		return UNDECIDED;
	mark_write(skb, MARK_SNAT_DONE);
	return TC_ACT_OK;
}

VERIFIED_ALONE nodeport4_leaves(struct __sk_buff *skb, struct flow *flow, __u32 now)
{
	return flow ? nodeport_leaves(skb, flow, now, FAMILY_IPV4) : UNDECIDED;
}

VERIFIED_ALONE nodeport6_leaves(struct __sk_buff *skb, struct flow *flow, __u32 now)
{
	return flow ? nodeport_leaves(skb, flow, now, FAMILY_IPV6) : UNDECIDED;
}
