/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Sends packets from the driver, by the device that they came in by or another one with an XDP program. The tc program sends
 * those that need the tunnel, or a neighbour that is not known yet.
 */
#pragma once

#include "lib/fib.h"
#include "lib/identity.h"
#include "lib/metrics.h"
#include "netdev/maps.h"
#include "nodeport/maps.h"
#include "overlay/tunnel.h"
#include "xdp/handover.h"

static __always_inline int hand_over_to_stack(context_t *ctx, __u32 what)
{
	__u32 *meta;

	if (bpf_xdp_adjust_meta(ctx, -(int)sizeof(*meta)))
		return DROP(INGRESS, DROP_WRITE_ERROR);
	meta = packet_meta(ctx);
	if ((void *)(meta + 1) > packet_start(ctx))
		return DROP(INGRESS, DROP_WRITE_ERROR);
	*meta = what;
	return XDP_PASS;
}

/* Whether a packet can be sent by the device from here. */
static __always_inline bool device_takes(context_t *ctx, __u32 ifindex)
{
	const struct device_config *device;

	if (likely(ifindex == packet_ifindex(ctx)))
		return true;
	device = bpf_map_lookup_elem(&hive_devices, &ifindex);
	return device && device->flags & DEVICE_XDP;
}

/* The MAC that the client's packets came from, if the kernel has no neighbour entry for the next hop; 0: not known. */
static __always_inline mac_t client_mac(const struct flow *flow, __u8 family)
{
	const struct nodeport_neighbour *known =
		family == FAMILY_IPV4 ? bpf_map_lookup_elem(&cilium_nodeport_neigh4, &flow->daddr.words[0])
				      : bpf_map_lookup_elem(&cilium_nodeport_neigh6, &flow->daddr);

	return known ? mac_read(known->mac) : 0;
}

static __always_inline int xdp_send(context_t *ctx, const struct flow *flow, enum direction direction, __u32 what,
				    __u8 family)
{
	const struct device_config *device;
	struct bpf_fib_lookup fib;
	mac_t from, to = 0;
	long found = fib_next_hop(ctx, &fib, &flow->saddr, &flow->daddr, family);
	__u32 ifindex = fib.ifindex;

	if (likely(found == BPF_FIB_LKUP_RET_SUCCESS && device_takes(ctx, ifindex))) {
		from = fib_mac(fib.smac);
		to = fib_mac(fib.dmac);
	} else if (found == BPF_FIB_LKUP_RET_NO_NEIGH && what == HANDED_RETURN && ifindex == packet_ifindex(ctx)) {
		device = bpf_map_lookup_elem(&hive_devices, &ifindex);
		from = device ? device->mac : 0;
		to = from ? client_mac(flow, family) : 0;
	}
	if (!to)
		return hand_over_to_stack(ctx, what);
	if (flow->ttl <= 1)
		return DROP(direction, DROP_TTL_EXCEEDED);
	if (!hop(ctx, from, to, family))
		return DROP(direction, DROP_INVALID);
	return ifindex == packet_ifindex(ctx) ? XDP_TX : bpf_redirect(ifindex, 0);
}

static __always_inline int fib_send(context_t *ctx, const struct flow *flow, enum direction direction, __u8 family)
{
	return xdp_send(ctx, flow, direction, HANDED_FORWARD, family);
}

/* `node`: see nodeport/send.h. */
static __always_inline int nodeport_send(context_t *ctx, const struct flow *flow, __be32 node, __u8 family)
{
	__u32 what = flow->source_identity == IDENTITY_HOST ? HANDED_RETURN : HANDED_FORWARD;
	int verdict;

	if (node && tunnel_facts())
		return hand_over_to_stack(ctx, what);
	verdict = xdp_send(ctx, flow, what == HANDED_RETURN ? INGRESS : EGRESS, what, family);
	if (verdict == XDP_TX || verdict == XDP_REDIRECT)
		count(ctx, REASON_FORWARDED, EGRESS);
	return verdict;
}

VERIFIED_ALONE nodeport4_send(context_t *ctx, struct flow *flow, __be32 node)
{
	return flow ? nodeport_send(ctx, flow, node, FAMILY_IPV4) : DROP(EGRESS, DROP_INVALID);
}

VERIFIED_ALONE nodeport6_send(context_t *ctx, struct flow *flow, __be32 node)
{
	return flow ? nodeport_send(ctx, flow, node, FAMILY_IPV6) : DROP(EGRESS, DROP_INVALID);
}

/* For a local backend: the tc program evaluates policy and delivers. */
static __always_inline int nodeport4_deliver(context_t *ctx, struct flow *flow, const struct address_info *local,
					     __u32 now)
{
	(void)flow, (void)local, (void)now;
	return hand_over_to_stack(ctx, HANDED_LOCAL);
}

static __always_inline int nodeport6_deliver(context_t *ctx, struct flow *flow, const struct address_info *local,
					     __u32 now)
{
	(void)flow, (void)local, (void)now;
	return hand_over_to_stack(ctx, HANDED_LOCAL);
}
