/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Answers to clients outside that the stack sends: a backend may be on the node itself, or its pod's links another
 * plugin's.
 */
#pragma once

#include "lib/fib.h"
#include "lib/mark.h"
#include "netdev/maps.h"
#include "nodeport/answer.h"

/* The verdict on an answer that routes for its new source, the service, take to another device than this one: it is
 * translated there. UNDECIDED if it is right here, or if routes say nothing.
 */
static __always_inline int nodeport_elsewhere(context_t *ctx, const struct flow *flow, const struct ct_entry *entry,
					      __u8 family)
{
	struct nat_entry service = {};
	struct bpf_fib_lookup fib;
	struct ethernet *eth;
	long found;

	if (!nodeport_service(flow, entry, &service, family))
		return UNDECIDED;
	found = fib_ask(ctx, &fib, &service.address, &flow->daddr, family);
	if ((found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH) ||
	    fib.ifindex == packet_ifindex(ctx) || !bpf_map_lookup_elem(&hive_devices, &fib.ifindex))
		return UNDECIDED;
	if (packet_frame(ctx))
		return DROP(EGRESS, DROP_WRITE_ERROR);
	eth = packet_eth(ctx);
	if (!eth)
		return DROP(EGRESS, DROP_INVALID);
	mac_write(eth->destination, fib_mac(fib.dmac));
	mac_write(eth->source, fib_mac(fib.smac));
	return fib_redirect(&fib, found, family);
}

/* What leaves by a native device, from the stack: a backend may be on the node itself, or its pod's links another
 * plugin's. The verdict, or UNDECIDED if it answers no client outside.
 */
static __always_inline int nodeport_leaves(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	const struct ct_entry *entry;
	int verdict;

	if (!flow->related) {
		entry = ct_entry_of(flow, INGRESS, true, family);
		if (likely(!entry || !asked_outside(entry)))
			return UNDECIDED;
		verdict = nodeport_elsewhere(ctx, flow, entry, family);
		if (verdict != UNDECIDED)
			return verdict;
	}
	verdict = nodeport_answer(ctx, flow, now, family);
	if (verdict < 0)
		return DROP(EGRESS, -verdict);
	if (!verdict)
		return UNDECIDED;
	mark_write(ctx, MARK_SNAT_DONE);
	return TC_ACT_OK;
}

VERIFIED_ALONE nodeport4_leaves(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_leaves(ctx, flow, now, FAMILY_IPV4) : UNDECIDED;
}

VERIFIED_ALONE nodeport6_leaves(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_leaves(ctx, flow, now, FAMILY_IPV6) : UNDECIDED;
}
