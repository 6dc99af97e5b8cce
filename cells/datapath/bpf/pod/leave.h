/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Where what a pod sends leaves it, if to no pod of this node and into no tunnel: to the host's stack, or past it to
 * the device that routes lead to (host routing). Of what only the stack can do nothing is lost: it gets what routes do
 * not lead out by a native device, what its answers are about (the hop limit, a packet too large for the device), and
 * what it has translated before.
 */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/events.h"
#include "lib/forward.h"
#include "lib/identity.h"
#include "lib/mark.h"
#include "lib/metrics.h"
#include "netdev/maps.h"

#define WAY_OUT 0xffff /* in a flow's entry, where others have a link: past the stack, and by a native device */

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

/* Whether addresses of this kind mean something on one link only, of which routes do not know. */
static __always_inline bool stays_on_link(const struct flow *flow, __u8 family)
{
	return family == FAMILY_IPV6 && link_scoped(&flow->daddr);
}

/* Send the packet out past the stack if that will do, else to it; the verdict. No event is sent from here: of a chain
 * of calls kernels before 6.8 count 32 bytes of stack for each that is open, and 512 are all there are.
 */
VERIFIED_ALONE pod_routes(struct __sk_buff *skb, struct flow *flow, __u32 family)
{
	struct bpf_fib_lookup fib;
	long found;

	if (!flow)
		return DROP(EGRESS, DROP_INVALID);
	if (unlikely(flow->ttl <= 1 || stays_on_link(flow, family)))
		return give_to_stack(skb, flow);
	found = fib_ask(skb, &fib, &flow->saddr, &flow->daddr, family);
	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return give_to_stack(skb, flow);
	if (!bpf_map_lookup_elem(&hive_devices, &fib.ifindex))
		return give_to_stack(skb, flow);
	mark_identity(skb, flow->source_identity); /* for the device's program: the sender is evaluated already */
	if (!fib_hop(skb, &fib, family))
		return DROP(EGRESS, DROP_INVALID);
	flow->device = fib.ifindex;
	count(skb, REASON_FORWARDED, EGRESS);
	return fib_redirect(&fib, found, family);
}

static __always_inline int pod_leaves(struct __sk_buff *skb, struct flow *flow, enum ct_status status, __u8 family)
{
	int verdict = pod_routes(skb, flow, family);

	if (unlikely(flow->report) && verdict >= 0)
		send_trace_notify(skb, flow, flow->device ? TRACE_TO_NETWORK : TRACE_TO_STACK, flow->device,
				  TRACED(status, family));
	return verdict;
}
