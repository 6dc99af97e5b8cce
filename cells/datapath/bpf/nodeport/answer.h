/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What backends answer to clients outside comes from the service they asked. */
#pragma once

#include "ct/conntrack.h"
#include "lb/error.h"
#include "lb/pod.h"
#include "lib/events.h"
#include "nodeport/dsr.h"
#include "nodeport/output.h"
#include "nodeport/maps.h"

/* What the packet has to come from, which answers the flow of `entry`; false if that was removed. */
static __always_inline bool nodeport_service(const struct flow *flow, const struct ct_entry *entry,
					     struct nat_entry *service, __u8 family)
{
	if (entry->dsr_internal)
		return dsr_service(flow, service, family);
	return lb_frontend_of(entry->rev_nat_index, &service->address, &service->port, family);
}

static __always_inline bool asked_outside(const struct ct_entry *entry)
{
	return entry->node_port || entry->dsr_internal;
}

#define NODEPORT_TRANSLATED 1

/* Have an answer come from the service: NODEPORT_TRANSLATED, 0 if no client outside has asked, or minus the reason to drop.
 */
static __always_inline int nodeport_reply(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	struct nat_entry service = {};
	const struct ct_entry *entry;
	int refused;

	entry = ct_find(flow, INGRESS, true, now, family);
	if (!entry || !asked_outside(entry))
		return 0;
	if (nodeport_service(flow, entry, &service, family)) {
		refused = lb_answer_from(ctx, flow, &service.address, service.port, false, family);
		if (refused)
			return -refused;
	}
	return NODEPORT_TRANSLATED;
}

/* The same of an error about what a client outside has asked, too. */
static __always_inline int nodeport_answer(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	int refused;

	if (!flow->related)
		return nodeport_reply(ctx, flow, now, family);
	refused = lb_error(ctx, flow, family);
	return refused ? -refused : flow->translated;
}

VERIFIED_ALONE nodeport4_reply(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_reply(ctx, flow, now, FAMILY_IPV4) : 0;
}

VERIFIED_ALONE nodeport6_reply(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_reply(ctx, flow, now, FAMILY_IPV6) : 0;
}

/* nodeport_answer() for programs that have no stack left for both of its cases at once. */
static __always_inline int nodeport_answer_apart(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	int refused;

	if (!flow->related)
		return family == FAMILY_IPV4 ? nodeport4_reply(ctx, flow, now) : nodeport6_reply(ctx, flow, now);
	refused = family == FAMILY_IPV4 ? lb4_error(ctx, flow) : lb6_error(ctx, flow);
	return refused ? -refused : flow->translated;
}

/* What answers a client outside goes to it past the stack, as the question came: the verdict, or UNDECIDED. */
static __always_inline int nodeport_returns(context_t *ctx, struct flow *flow, enum direction direction, __u32 now,
					    __u8 family)
{
	int verdict, done = nodeport_answer_apart(ctx, flow, now, family);
	__be32 node;

	if (done < 0)
		return DROP(direction, -done);
	if (!done)
		return UNDECIDED;
	node = nodeport_node(flow, family);
	verdict = family == FAMILY_IPV4 ? nodeport4_send(ctx, flow, node) : nodeport6_send(ctx, flow, node);
	return nodeport_sent(flow, verdict, family);
}
