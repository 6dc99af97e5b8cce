/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Send packets to remote backends or back to clients, bypassing the host's stack. */
#pragma once

#include "lib/forward.h"
#include "lib/identity.h"
#include "lib/mark.h"
#include "lib/metrics.h"
#include "overlay/send.h"

/* Redirect the packet by a FIB lookup of its flow; returns the verdict. */
static __always_inline int fib_send(context_t *ctx, const struct flow *flow, enum direction direction, __u8 family)
{
	struct bpf_fib_lookup fib;
	long found = fib_next_hop(ctx, &fib, &flow->saddr, &flow->daddr, family);

	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return DROP(direction, DROP_NO_FIB);
	if (flow->ttl <= 1)
		return DROP(direction, DROP_TTL_EXCEEDED);
	return fib_rewrite(ctx, &fib, family) ? fib_redirect(&fib, found, family) : DROP(direction, DROP_INVALID);
}

/* Send by tunnel to `node`, or natively if it is 0; returns the verdict. */
static __always_inline int nodeport_send(context_t *ctx, struct flow *flow, __be32 node, __u8 family)
{
	const struct tunnel_config *tunnel = node ? tunnel_facts() : NULL;
	/* Packets to this node and packets from the tunnel are counted as ingress drops. */
	bool came = flow->source_identity == IDENTITY_HOST || flow->from_tunnel;
	int verdict;

	mark_write(ctx, MARK_SNAT_DONE);
	if (!tunnel) {
		verdict = fib_send(ctx, flow, came ? INGRESS : EGRESS, family);
		if (likely(!DROPPED(verdict)))
			count(ctx, REASON_FORWARDED, EGRESS);
		return verdict;
	}
	if (flow->ttl <= 1)
		return DROP(EGRESS, DROP_TTL_EXCEEDED);
	if (!decrement_hop(ctx, family))
		return DROP(EGRESS, DROP_INVALID);
	return tunnel_send(ctx, flow, tunnel, node, TRACE_REASON_UNKNOWN, family);
}

VERIFIED_ALONE nodeport4_send(context_t *ctx, struct flow *flow, __be32 node)
{
	return flow ? nodeport_send(ctx, flow, node, FAMILY_IPV4) : DROP(EGRESS, DROP_INVALID);
}

VERIFIED_ALONE nodeport6_send(context_t *ctx, struct flow *flow, __be32 node)
{
	return flow ? nodeport_send(ctx, flow, node, FAMILY_IPV6) : DROP(EGRESS, DROP_INVALID);
}
