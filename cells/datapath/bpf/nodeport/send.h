/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* On the way to a backend elsewhere, or back to a client: past the stack, which has seen nothing of the flow. */
#pragma once

#include "lib/fib.h"
#include "lib/mark.h"
#include "overlay/send.h"

/* `node`: the one that has the pod, where only the tunnel leads there; else 0. */
static __always_inline int nodeport_send(struct __sk_buff *skb, struct flow *flow, __be32 node, __u8 family)
{
	const struct tunnel_config *tunnel = node ? tunnel_facts() : NULL;

	mark_write(skb, MARK_SNAT_DONE);
	if (!tunnel) {
		count(skb, REASON_FORWARDED, EGRESS);
		return fib_send(skb, flow, EGRESS, family);
	}
	if (flow->ttl <= 1)
		return DROP(EGRESS, DROP_TTL_EXCEEDED);
	if (!lose_hop(skb, family))
		return DROP(EGRESS, DROP_INVALID);
	return tunnel_send(skb, flow, tunnel, node, TRACE_REASON_UNKNOWN, family);
}

VERIFIED_ALONE nodeport4_send(struct __sk_buff *skb, struct flow *flow, __be32 node)
{
	return flow ? nodeport_send(skb, flow, node, FAMILY_IPV4) : DROP(EGRESS, DROP_INVALID);
}

VERIFIED_ALONE nodeport6_send(struct __sk_buff *skb, struct flow *flow, __be32 node)
{
	return flow ? nodeport_send(skb, flow, node, FAMILY_IPV6) : DROP(EGRESS, DROP_INVALID);
}
