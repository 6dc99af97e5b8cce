/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Forward external clients' packets after DNAT: to a local pod, to the node itself, or to a remote backend with SNAT, so that
 * replies return here.
 */
#pragma once

#include "nat/icmp_error.h"
#include "nodeport/output.h"
#include "nodeport/maps.h"

/* Get the SNAT address for remote backends: the router's for tunnels, else the node's. */
static __always_inline void nodeport_snat_address(const struct nodeport_config *own, bool tunnelled,
						  struct address *source, __u8 family)
{
	const struct node_config *node = node_facts();

	if (family == FAMILY_IPV4)
		*source = (struct address){ .words = { tunnelled && node ? node->router_ip : own->ipv4 } };
	else
		*source = tunnelled && node ? node->router_ip6 : own->ipv6;
}

static __always_inline int nodeport_to_remote(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
					      __u8 family)
{
	__be32 node = nodeport_tunnel_endpoint(flow, family);
	struct address source;
	int refused, verdict;

	nodeport_snat_address(own, node, &source, family);
	flow->source_identity = world_identity(family);
	if (flow->related) {
		refused = family == FAMILY_IPV4 ? snat4_nat_icmp_error(ctx, flow) : snat6_nat_icmp_error(ctx, flow);
		/* With DSR there is no SNAT: the embedded packet already has the client's address. */
		if (refused == DROP_NAT_NO_MAPPING && own->flags & (NODEPORT_DSR_TCP | NODEPORT_DSR_OTHER))
			refused = 0;
	} else {
		refused = snat_nat(ctx, flow, &source, false, family);
	}
	if (refused)
		return nodeport_sent_verdict(flow, DROP(EGRESS, refused), family);
	verdict = family == FAMILY_IPV4 ? nodeport4_send(ctx, flow, node) : nodeport6_send(ctx, flow, node);
	return nodeport_sent_verdict(flow, verdict, family);
}

/* Forward the packet to its backend; returns the verdict. */
static __always_inline int nodeport_to_backend(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
					       __u32 now, __u8 family)
{
	const struct address_info *local = address_lookup(&flow->daddr, family);

	if (local)
		return family == FAMILY_IPV4 ? nodeport4_deliver(ctx, flow, local, now)
					     : nodeport6_deliver(ctx, flow, local, now);
	return flow->local_only ? DROP(INGRESS, DROP_INVALID) : nodeport_to_remote(ctx, flow, own, family);
}
