/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Ingress of a native device, parts of the tc program only: delivery to pods, and packets that the XDP program
 * translated and handed over.
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

/* Handle a packet that another node forwarded with DSR to a local backend; returns the verdict, or UNDECIDED. */
static __always_inline int from_netdev_dsr(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
					   __u32 now, __u8 family)
{
	const struct address_info *local;
	int done;

	if (likely(!dsr_is_enabled(own, flow)))
		return UNDECIDED;
	local = address_lookup(&flow->daddr, family);
	if (!local)
		return UNDECIDED;
	done = family == FAMILY_IPV4 ? dsr4_track(ctx, flow, now) : dsr6_track(ctx, flow, now);
	if (done < 0)
		return DROP(INGRESS, -done);
	if (!done)
		return UNDECIDED;
	return family == FAMILY_IPV4 ? nodeport4_deliver(ctx, flow, local, now)
				     : nodeport6_deliver(ctx, flow, local, now);
}

/* Return whether a local pod sent the packet, and another plugin's bridge, which is a native device, forwarded it: then
 * the program at the pod's link marked it. Packets from outside have no mark.
 */
static __always_inline bool is_from_own_pod(const context_t *ctx, const struct address_info *source)
{
	__u32 mark = mark_read(ctx);

	return (mark & MARK_KIND) == MARK_IDENTITY && marked_identity(mark) == source->identity;
}

/* Check a packet with a source address of this node. Returns UNDECIDED if a local pod sent it, else a drop; but
 * messages of duplicate address detection (RFC 4862, 5.4.4) pass to the stack.
 */
static __always_inline int check_local_source(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
					      __u32 now, __u8 family)
{
	const struct address_info *source = address_lookup(&flow->saddr, family);
	bool pods = source && !(source->flags & ADDRESS_IS_HOST);

	if (pods && is_from_own_pod(ctx, source))
		return UNDECIDED;
	if (parse_payload(ctx, flow, false, family))
		return DROP(INGRESS, DROP_INVALID_SOURCE);
	if (family == FAMILY_IPV6 && finds_neighbours(flow) && link_scoped(&flow->daddr))
		return TC_ACT_OK;
	if (pods && own && dsr_is_enabled(own, flow) &&
	    (family == FAMILY_IPV4 ? dsr4_is_hairpin(ctx, flow, now) : dsr6_is_hairpin(ctx, flow, now)))
		return UNDECIDED;
	return DROP(INGRESS, DROP_INVALID_SOURCE);
}

/* Return whether a proxy has the connection of an external client. The stack would find the proxy's socket first (early
 * demux), and drop the packet, because it is to be forwarded to the pod.
 */
static __always_inline bool device_has_proxy(const struct flow *flow, __u8 family)
{
	const struct ct_entry *entry;

	if (likely(!flow->for_proxies) || flow->protocol != IPPROTO_TCP)
		return false;
	entry = ct_entry_of(flow, INGRESS, false, family);
	return entry && entry->proxy_redirect;
}

/* Return whether packets from this address may be forwarded: not if it is link-local or unspecified (RFC 4291, 2.5). */
static __always_inline bool is_routable(const struct address *source, __u8 family)
{
	return family == FAMILY_IPV4 || !(link_scoped(source) || address_is_zero(source));
}

/* Deliver a packet to a local pod, bypassing the stack; returns the verdict, or UNDECIDED if it is not for a pod, or if
 * the stack must drop it. Frames to other MACs are dropped by the pod's own stack.
 */
static __always_inline int deliver_to_pod(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	const struct address_info *local;

	if (flow->ttl <= 1 || (!host_routing() && !device_has_proxy(flow, family)))
		return UNDECIDED;
	local = address_lookup(&flow->daddr, family);
	if (!local || local->flags & ADDRESS_IS_HOST || unlikely(!is_routable(&flow->saddr, family)))
		return UNDECIDED;
	return family == FAMILY_IPV4 ? nodeport4_deliver(ctx, flow, local, now)
				     : nodeport6_deliver(ctx, flow, local, now);
}

/* Send a reply, after reverse SNAT, to another node's pod that used this gateway, or pass it to the stack; returns the
 * verdict.
 */
static __always_inline int pass_gateway_reply(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	int verdict = family == FAMILY_IPV4 ? gateway_reply(ctx, flow, now) : UNDECIDED;

	return verdict == UNDECIDED ? TC_ACT_OK : verdict;
}

/* pass_gateway_reply() with delivery to local pods. */
static __always_inline int deliver_translated(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	int verdict = family == FAMILY_IPV4 ? gateway_reply(ctx, flow, now) : UNDECIDED;

	if (verdict == UNDECIDED)
		verdict = deliver_to_pod(ctx, flow, now, family);

	return verdict == UNDECIDED ? TC_ACT_OK : verdict;
}

/* Return the metadata that the XDP program passed with the packet (HANDED_*); 0: none. */
static __always_inline __u32 xdp_handover(const struct __sk_buff *skb)
{
	const __u32 *handed = packet_meta(skb);

	return (void *)(handed + 1) <= packet_start(skb) ? *handed : 0;
}

/* Continue with a packet that the XDP program translated; returns the verdict. */
static __always_inline int resume_xdp(struct __sk_buff *skb, struct flow *flow, const struct nodeport_config *own,
				      __u32 handed, __u32 now, __u8 family)
{
	__be32 node;

	if (handed & HANDED_DONE)
		return deliver_translated(skb, flow, now, family);
	if (handed & HANDED_LOCAL) {
		flow->node_port = !flow->related;
		return nodeport_to_backend(skb, flow, own, now, family);
	}
	if (handed & HANDED_DSR) {
		flow->rev_nat_index = handed >> 16;
		return family == FAMILY_IPV4 ? dsr4_forward(skb, flow) : dsr6_forward(skb, flow);
	}
	flow->source_identity = handed & HANDED_RETURN ? IDENTITY_HOST : world_identity(family);
	node = tunnel_node(flow, family);
	return family == FAMILY_IPV4 ? nodeport4_send(skb, flow, node) : nodeport6_send(skb, flow, node);
}
