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
#include "nodeport/dsr.h"
#include "nodeport/maps.h"
#include "nodeport/send.h"

/* What the packet has to come from, which answers the flow of `entry`; false if that is gone. */
static __always_inline bool nodeport_service(const struct flow *flow, const struct ct_entry *entry,
					     struct nat_entry *service, __u8 family)
{
	if (entry->dsr_internal)
		return dsr_service(flow, service, family);
	return lb_frontend_of(entry->rev_nat_index, &service->address, &service->port, family);
}

static __always_inline bool asked_outside(const struct ct_entry *entry)
{
	return entry->node_port || entry->dsr_internal;
}

#define NODEPORT_TRANSLATED 1

/* Have an answer, or an error about what a client outside has asked, come from the service: NODEPORT_TRANSLATED, 0 if
 * nobody outside has asked, or minus the reason to drop.
 */
static __always_inline int nodeport_answer(struct __sk_buff *skb, struct flow *flow, __u32 now, __u8 family)
{
	struct nat_entry service = {};
	const struct ct_entry *entry;
	int refused;

	if (flow->related) {
		refused = lb_error(skb, flow, family);
		return refused ? -refused : flow->translated;
	}
	entry = ct_find(flow, INGRESS, true, now, family);
	if (!entry || !asked_outside(entry))
		return 0;
	if (nodeport_service(flow, entry, &service, family)) {
		refused = lb_answer_from(skb, flow, &service.address, service.port, false, family);
		if (refused)
			return -refused;
	}
	return NODEPORT_TRANSLATED;
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
static __always_inline int nodeport_elsewhere(struct __sk_buff *skb, const struct flow *flow,
					      const struct ct_entry *entry, __u8 family)
{
	struct nat_entry service = {};
	struct bpf_fib_lookup fib;
	struct ethernet *eth;

	if (!nodeport_service(flow, entry, &service, family) ||
	    fib_ask(skb, &fib, &service.address, &flow->daddr, family) != BPF_FIB_LKUP_RET_SUCCESS ||
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
		if (likely(!entry || !asked_outside(entry)))
			return UNDECIDED;
		verdict = nodeport_elsewhere(skb, flow, entry, family);
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
