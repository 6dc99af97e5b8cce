/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What only the tc program does with what a device brings: it delivers, and goes on where the one in the
 * driver has left off.
 */
#pragma once

#include "lib/mark.h"
#include "netdev/announce.h"
#include "netdev/gateway.h"
#include "nodeport/dsr.h"
#include "nodeport/forward.h"
#include "overlay/tunnel.h"
#include "pod/neighbours.h"
#include "xdp/handover.h"

/* A packet that another node forwards with DSR to a backend here: the verdict, or UNDECIDED. */
static __always_inline int from_netdev_dsr(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
					   __u32 now, __u8 family)
{
	const struct address_info *local;
	int done;

	if (likely(!dsr_serves(own, flow)))
		return UNDECIDED;
	local = address_lookup(&flow->daddr, family);
	if (!local)
		return UNDECIDED;
	done = family == FAMILY_IPV4 ? dsr4_note(ctx, flow, now) : dsr6_note(ctx, flow, now);
	if (done < 0)
		return DROP(INGRESS, -done);
	if (!done)
		return UNDECIDED;
	return family == FAMILY_IPV4 ? nodeport4_deliver(ctx, flow, local, now)
				     : nodeport6_deliver(ctx, flow, local, now);
}

/* Whether another plugin's bridge, itself a native device, brings what a pod of this node has sent: the program at the pod's
 * link has marked it, which nothing from outside is.
 */
static __always_inline bool pod_sent(const context_t *ctx, const struct address_info *source)
{
	__u32 mark = mark_read(ctx);

	return (mark & MARK_KIND) == MARK_IDENTITY && marked_identity(mark) == source->identity;
}

/* The verdict on what seems to come from this node, or UNDECIDED if it does. Only the stack hears who else claims its address
 * (RFC 4862, 5.4.4), and that on the link alone.
 */
static __always_inline int device_gets_local(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
					     __u32 now, __u8 family)
{
	const struct address_info *source = address_lookup(&flow->saddr, family);
	bool pods = source && !(source->flags & ADDRESS_IS_HOST);

	if (pods && pod_sent(ctx, source))
		return UNDECIDED;
	if (parse_payload(ctx, flow, false, family))
		return DROP(INGRESS, DROP_INVALID_SOURCE);
	if (family == FAMILY_IPV6 && finds_neighbours(flow) && link_scoped(&flow->daddr))
		return TC_ACT_OK;
	if (pods && own && dsr_serves(own, flow) &&
	    (family == FAMILY_IPV4 ? dsr4_comes_back(ctx, flow, now) : dsr6_comes_back(ctx, flow, now)))
		return UNDECIDED;
	return DROP(INGRESS, DROP_INVALID_SOURCE);
}

/* Whether it goes on with a connection from outside that a proxy has. The stack would find the proxy's socket first (early
 * demux), and drop what belongs to a socket of its own and is to be sent on to the pod.
 */
static __always_inline bool device_proxied(const struct flow *flow, __u8 family)
{
	const struct ct_entry *entry;

	if (likely(!flow->for_proxies) || flow->protocol != IPPROTO_TCP)
		return false;
	entry = ct_entry_of(flow, INGRESS, false, family);
	return entry && entry->proxy_redirect;
}

/* Whether a router may pass on what comes from there (RFC 4291, 2.5): only neighbours of a link know each other by such. */
static __always_inline bool is_routable(const struct address *source, __u8 family)
{
	return family == FAMILY_IPV4 || !(link_scoped(source) || address_is_zero(source));
}

/* Bring what is for a pod of this node into it, past the stack: the verdict. UNDECIDED: it is for none, or the stack's to
 * refuse. What is addressed to another machine's MAC the pod's own stack will not take.
 */
static __always_inline int device_delivers(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	const struct address_info *local;

	if (flow->ttl <= 1 || (!host_routing() && !device_proxied(flow, family)))
		return UNDECIDED;
	local = address_lookup(&flow->daddr, family);
	if (!local || local->flags & ADDRESS_IS_HOST || unlikely(!is_routable(&flow->saddr, family)))
		return UNDECIDED;
	return family == FAMILY_IPV4 ? nodeport4_deliver(ctx, flow, local, now)
				     : nodeport6_deliver(ctx, flow, local, now);
}

/* What was for this node is translated, and may be another node's pod's now: the verdict. */
static __always_inline int device_answers_gateway(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	int verdict = family == FAMILY_IPV4 ? gateway_returns(ctx, flow, now) : UNDECIDED;

	return verdict == UNDECIDED ? TC_ACT_OK : verdict;
}

/* The same, or a pod's of this one. */
static __always_inline int device_done(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	int verdict = family == FAMILY_IPV4 ? gateway_returns(ctx, flow, now) : UNDECIDED;

	if (verdict == UNDECIDED)
		verdict = device_delivers(ctx, flow, now, family);

	return verdict == UNDECIDED ? TC_ACT_OK : verdict;
}

/* What the program in the driver handed over with the packet, 0 if nothing. */
static __always_inline __u32 device_handed(const struct __sk_buff *skb)
{
	const __u32 *handed = packet_meta(skb);

	return (void *)(handed + 1) <= packet_start(skb) ? *handed : 0;
}

/* Go on with what that has translated. */
static __always_inline int device_goes_on(struct __sk_buff *skb, struct flow *flow,
					  const struct nodeport_config *own, __u32 handed, __u32 now, __u8 family)
{
	__be32 node;

	if (handed & HANDED_DONE)
		return device_done(skb, flow, now, family);
	if (handed & HANDED_LOCAL) {
		flow->node_port = !flow->related;
		return nodeport_go_on(skb, flow, own, now, family);
	}
	if (handed & HANDED_DSR) {
		flow->rev_nat_index = handed >> 16;
		return family == FAMILY_IPV4 ? dsr4_forward(skb, flow) : dsr6_forward(skb, flow);
	}
	flow->source_identity = handed & HANDED_RETURN ? IDENTITY_HOST : world_identity(family);
	node = tunnel_node(flow, family);
	return family == FAMILY_IPV4 ? nodeport4_send(skb, flow, node) : nodeport6_send(skb, flow, node);
}
