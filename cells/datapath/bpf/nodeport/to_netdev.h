/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reverse NAT of replies that the host's stack sends to external clients: from backends in the host's network namespace, or
 * from pods with links of another plugin.
 */
#pragma once

#include "lib/fib.h"
#include "lib/mark.h"
#include "netdev/maps.h"
#include "nodeport/rev_nat.h"

/* Redirect a reply to the device of the route from its frontend's address, where it gets reverse NAT. Returns the verdict,
 * or UNDECIDED if this is the device, or without a route.
 */
static __always_inline int nodeport_redirect_reply(context_t *ctx, const struct flow *flow,
						   const struct ct_entry *entry, __u8 family)
{
	struct nat_entry service = {};
	struct bpf_fib_lookup fib;
	struct ethernet *eth;
	long found;

	if (!nodeport_lookup_frontend(flow, entry, &service, family))
		return UNDECIDED;
	found = fib_next_hop(ctx, &fib, &service.address, &flow->daddr, family);
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

/* Handle a packet that leaves through a native device; returns the verdict, or UNDECIDED if it is not a reply to an external
 * client.
 */
static __always_inline int nodeport_to_netdev(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	const struct ct_entry *entry;
	int verdict;

	if (!flow->related) {
		entry = ct_entry_of(flow, INGRESS, true, family);
		if (likely(!entry || !is_nodeport_flow(entry)))
			return UNDECIDED;
		verdict = nodeport_redirect_reply(ctx, flow, entry, family);
		if (verdict != UNDECIDED)
			return verdict;
	}
	verdict = nodeport_rev_nat(ctx, flow, now, family);
	if (verdict < 0)
		return DROP(EGRESS, -verdict);
	if (!verdict)
		return UNDECIDED;
	mark_write(ctx, MARK_SNAT_DONE);
	return TC_ACT_OK;
}

VERIFIED_ALONE nodeport4_to_netdev(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_to_netdev(ctx, flow, now, FAMILY_IPV4) : UNDECIDED;
}

VERIFIED_ALONE nodeport6_to_netdev(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_to_netdev(ctx, flow, now, FAMILY_IPV6) : UNDECIDED;
}
