/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reverse NAT of backends' replies to external clients. */
#pragma once

#include "ct/conntrack.h"
#include "lb/icmp_error.h"
#include "lb/pod.h"
#include "lib/events.h"
#include "nodeport/dsr.h"
#include "nodeport/output.h"
#include "nodeport/maps.h"

/* Look up the frontend for a reply to the flow of `entry`; false if it was removed. */
static __always_inline bool nodeport_lookup_frontend(const struct flow *flow, const struct ct_entry *entry,
						     struct nat_entry *service, __u8 family)
{
	if (entry->dsr_internal)
		return dsr_lookup_frontend(flow, service, family);
	return lb_lookup_rev_nat(entry->rev_nat_index, &service->address, &service->port, family);
}

static __always_inline bool is_nodeport_flow(const struct ct_entry *entry)
{
	return entry->node_port || entry->dsr_internal;
}

#define NODEPORT_TRANSLATED 1

/* Reverse NAT of a reply: returns NODEPORT_TRANSLATED, 0 if it is not one to an external client, or a negative drop reason. */
static __always_inline int nodeport_rev_nat_flow(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	struct nat_entry service = {};
	const struct ct_entry *entry;
	int refused;

	entry = ct_find(flow, INGRESS, true, now, family);
	if (!entry || !is_nodeport_flow(entry))
		return 0;
	if (nodeport_lookup_frontend(flow, entry, &service, family)) {
		refused = lb_apply_rev_nat(ctx, flow, &service.address, service.port, false, family);
		if (refused)
			return -refused;
	}
	return NODEPORT_TRANSLATED;
}

/* Reverse NAT of a reply, or of an ICMP error about an external client's packet; returns like nodeport_rev_nat_flow(). */
static __always_inline int nodeport_rev_nat(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	int refused;

	if (!flow->related)
		return nodeport_rev_nat_flow(ctx, flow, now, family);
	refused = lb_rev_nat_icmp_error(ctx, flow, family);
	return refused ? -refused : flow->translated;
}

VERIFIED_ALONE nodeport4_rev_nat_flow(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_rev_nat_flow(ctx, flow, now, FAMILY_IPV4) : 0;
}

VERIFIED_ALONE nodeport6_rev_nat_flow(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_rev_nat_flow(ctx, flow, now, FAMILY_IPV6) : 0;
}

/* nodeport_rev_nat() as separate subprograms, for programs without enough stack to inline it. */
static __always_inline int nodeport_rev_nat_subprog(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	int refused;

	if (!flow->related)
		return family == FAMILY_IPV4 ? nodeport4_rev_nat_flow(ctx, flow, now)
					     : nodeport6_rev_nat_flow(ctx, flow, now);
	refused = family == FAMILY_IPV4 ? lb4_rev_nat_icmp_error(ctx, flow) : lb6_rev_nat_icmp_error(ctx, flow);
	return refused ? -refused : flow->translated;
}

/* Send a reply to an external client, bypassing the stack; returns the verdict, or UNDECIDED for other packets. */
static __always_inline int nodeport_send_reply(context_t *ctx, struct flow *flow, enum direction direction,
					       __u32 now, __u8 family)
{
	int verdict, done = nodeport_rev_nat_subprog(ctx, flow, now, family);
	__be32 node;

	if (done < 0)
		return DROP(direction, -done);
	if (!done)
		return UNDECIDED;
	node = nodeport_tunnel_endpoint(flow, family);
	verdict = family == FAMILY_IPV4 ? nodeport4_send(ctx, flow, node) : nodeport6_send(ctx, flow, node);
	return nodeport_sent_verdict(flow, verdict, family);
}
