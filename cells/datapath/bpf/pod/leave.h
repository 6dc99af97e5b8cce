/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Forwarding of a pod's packets outside the node, without tunnel: to the host's stack, or with host routing directly to
 * a native device.
 *
 * The stack gets packets without a route through a native device, those that need an ICMP error (hop limit, MTU), and
 * those that it translated before.
 */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/events.h"
#include "lib/forward.h"
#include "lib/identity.h"
#include "lib/mark.h"
#include "lib/metrics.h"
#include "netdev/maps.h"

#define WAY_NETDEV_IFINDEX 0xffff /* ifindex in a flow's entry: directly to a native device */

static __always_inline int give_to_stack(struct __sk_buff *skb, const struct flow *flow)
{
	mark_identity(skb, flow->source_identity);
	count(skb, REASON_FORWARDED, EGRESS);
	return TC_ACT_OK;
}

static __always_inline int to_stack(struct __sk_buff *skb, const struct flow *flow, enum ct_status status,
				    __u8 family)
{
	if (unlikely(flow->report))
		send_trace_notify(skb, flow, TRACE_TO_STACK, 0, TRACED(status, family));
	return give_to_stack(skb, flow);
}

/* Return whether addresses of this kind are valid on one link only, and therefore not routable. */
static __always_inline bool stays_on_link(const struct flow *flow, __u8 family)
{
	return family == FAMILY_IPV6 && link_scoped(&flow->daddr);
}

/* Send the packet to a native device if possible, else to the stack; returns the verdict. Sends no event: before Linux
 * 6.8 each call on the chain counts 32 bytes, of 512 in total.
 */
VERIFIED_ALONE pod_routes(struct __sk_buff *skb, struct flow *flow, __u32 family)
{
	struct bpf_fib_lookup fib;
	long found;

	if (!flow)
		return DROP(EGRESS, DROP_INVALID);
	if (unlikely(flow->ttl <= 1 || stays_on_link(flow, family)))
		return give_to_stack(skb, flow);
	found = fib_next_hop(skb, &fib, &flow->saddr, &flow->daddr, family);
	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return give_to_stack(skb, flow);
	if (!bpf_map_lookup_elem(&hive_devices, &fib.ifindex))
		return give_to_stack(skb, flow);
	mark_identity(skb, flow->source_identity); /* for the device's program: policy was enforced already */
	if (!fib_rewrite(skb, &fib, family))
		return DROP(EGRESS, DROP_INVALID);
	flow->device = fib.ifindex;
	count(skb, REASON_FORWARDED, EGRESS);
	return fib_redirect(&fib, found, family);
}

static __always_inline int pod_to_netdev(struct __sk_buff *skb, struct flow *flow, enum ct_status status,
					 __u8 family)
{
	int verdict = pod_routes(skb, flow, family);

	if (unlikely(flow->report) && verdict >= 0)
		send_trace_notify(skb, flow, flow->device ? TRACE_TO_NETWORK : TRACE_TO_STACK, flow->device,
				  TRACED(status, family));
	return verdict;
}
