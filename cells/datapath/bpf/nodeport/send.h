/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* On the way to a backend elsewhere, or back to a client: past the stack, which has seen nothing of the flow. */
#pragma once

#include "lib/fib.h"
#include "lib/mark.h"
#include "lib/metrics.h"
#include "overlay/send.h"

/* Put the packet on the device that a route leads to, which has answered `found`. */
static __always_inline int fib_redirect(const struct bpf_fib_lookup *fib, long found, __u8 family)
{
	struct bpf_redir_neigh next = { .nh_family = fib->family };

	if (likely(found == BPF_FIB_LKUP_RET_SUCCESS))
		return bpf_redirect(fib->ifindex, 0);
	if (family == FAMILY_IPV4)
		next.ipv4_nh = fib->ipv4_dst;
	else
		__builtin_memcpy(next.ipv6_nh, fib->ipv6_dst, sizeof(next.ipv6_nh));
	return bpf_redirect_neigh(fib->ifindex, &next, sizeof(next), 0);
}

/* Send the packet on from one end of its flow to the other, by its next hop; the verdict. */
static __always_inline int fib_send(context_t *ctx, const struct flow *flow, enum direction direction,
				    __u8 family)
{
	struct bpf_fib_lookup fib;
	long found = fib_ask(ctx, &fib, &flow->saddr, &flow->daddr, family);

	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return DROP(direction, DROP_NO_FIB);
	if (flow->ttl <= 1)
		return DROP(direction, DROP_TTL_EXCEEDED);
	if (!hop(ctx, fib_mac(fib.smac), fib_mac(fib.dmac), family))
		return DROP(direction, DROP_INVALID);
	return fib_redirect(&fib, found, family);
}

/* `node`: the one that has the pod, where only the tunnel leads there; else 0. */
static __always_inline int nodeport_send(context_t *ctx, struct flow *flow, __be32 node, __u8 family)
{
	const struct tunnel_config *tunnel = node ? tunnel_facts() : NULL;

	mark_write(ctx, MARK_SNAT_DONE);
	if (!tunnel) {
		count(ctx, REASON_FORWARDED, EGRESS);
		return fib_send(ctx, flow, EGRESS, family);
	}
	if (flow->ttl <= 1)
		return DROP(EGRESS, DROP_TTL_EXCEEDED);
	if (!lose_hop(ctx, family))
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
