/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What clients outside ask of services, once it is addressed to a backend: into a pod of this node, to the node
 * itself, or to another node, then from this one's address, so that the answer comes back here.
 */
#pragma once

#include "nat/error.h"
#include "nodeport/output.h"
#include "nodeport/maps.h"

/* What packets to a backend elsewhere come from: where its answers come back to. */
static __always_inline void nodeport_source(const struct nodeport_config *own, bool tunnelled,
					    struct address *source, __u8 family)
{
	const struct node_config *node = node_facts();

	if (family == FAMILY_IPV4)
		*source = (struct address){ .words = { tunnelled && node ? node->router_ip : own->ipv4 } };
	else
		*source = tunnelled && node ? node->router_ip6 : own->ipv6;
}

static __always_inline int nodeport_forward(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
					    __u8 family)
{
	__be32 node = nodeport_node(flow, family);
	struct address source;
	int refused, verdict;

	nodeport_source(own, node, &source, family);
	flow->source_identity = world_identity(family);
	if (flow->related) {
		refused = family == FAMILY_IPV4 ? nat4_error_leave(ctx, flow) : nat6_error_leave(ctx, flow);
		/* A backend that answers by itself knows the client, and so what is quoted. */
		if (refused == DROP_NAT_NO_MAPPING && own->flags & (NODEPORT_DSR_TCP | NODEPORT_DSR_OTHER))
			refused = 0;
	} else {
		refused = nat_leave(ctx, flow, &source, false, family);
	}
	if (refused)
		return nodeport_sent(flow, DROP(EGRESS, refused), family);
	verdict = family == FAMILY_IPV4 ? nodeport4_send(ctx, flow, node) : nodeport6_send(ctx, flow, node);
	return nodeport_sent(flow, verdict, family);
}

/* Bring the packet, which is addressed to a backend now, to it; the verdict. */
static __always_inline int nodeport_go_on(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
					  __u32 now, __u8 family)
{
	const struct address_info *local = address_lookup(&flow->daddr, family);

	if (local)
		return family == FAMILY_IPV4 ? nodeport4_deliver(ctx, flow, local, now)
					     : nodeport6_deliver(ctx, flow, local, now);
	return flow->local_only ? DROP(INGRESS, DROP_INVALID) : nodeport_forward(ctx, flow, own, family);
}
