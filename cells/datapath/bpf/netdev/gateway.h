/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Egress gateways: packets of selected pods leave the cluster through a gateway node, with a fixed source address.
 *
 * The pod's node sends them to the gateway by tunnel, also with native routing. The gateway does SNAT with the ports
 * and maps of masquerading, and sends replies back by tunnel.
 */
#pragma once

#include "ct/conntrack.h"
#include "lib/forward.h"
#include "lib/identity.h"
#include "lib/mark.h"
#include "nat/icmp_error.h"
#include "nat/snat.h"
#include "netdev/maps.h"
#include "nodeport/conntrack.h"
#include "nodeport/output.h"
#include "overlay/send.h"

/* Look up the packet's policy entry, also of an excluded destination; NULL if no policy selects it. */
static __always_inline const struct egress_value *gateway_entry(const struct flow *flow)
{
	const struct egress_key key = {
		.prefixlen = EGRESS_PREFIX_FULL,
		.saddr = flow->saddr.words[0],
		.daddr = flow->daddr.words[0],
	};

	return bpf_map_lookup_elem(&cilium_egress_gw_policy_v4, &key);
}

/* Look up the packet's policy entry; NULL also if the destination is excluded. */
static __always_inline const struct egress_value *gateway_policy(const struct flow *flow)
{
	const struct egress_value *value = gateway_entry(flow);

	return value && value->gateway_ip != EGRESS_EXCLUDED ? value : NULL;
}

static __always_inline bool gateway_is_local(__be32 ip)
{
	const struct address gateway = { .words = { ip } };
	const struct address_info *local = address_lookup(&gateway, FAMILY_IPV4);

	return local && local->flags & ADDRESS_IS_HOST;
}

/* Return the gateway for a local pod's packet; GATEWAY_NONE if its policy has none; 0 if this node is the gateway, if
 * no policy selects the packet, or if it could be taken for a tunnel packet at the gateway.
 */
static __always_inline __be32 gateway_node(const struct flow *flow)
{
	const struct egress_value *value;

	if (!gateway_tunnel() || !is_outside(flow->destination_identity))
		return 0;
	value = gateway_policy(flow);
	if (likely(!value) || unlikely(imitates_tunnel(flow)))
		return 0;
	if (value->gateway_ip == EGRESS_NO_GATEWAY)
		return GATEWAY_NONE;
	return gateway_is_local(value->gateway_ip) ? 0 : value->gateway_ip;
}

/* Return the tunnel endpoint for a pod's packet: the destination's, see tunnel_node(), or the gateway, see
 * gateway_node(). Replies do not use gateways.
 */
VERIFIED_ALONE pod_node(struct flow *flow, __u32 status, __u32 family)
{
	__be32 node;

	if (!flow)
		return 0;
	node = tunnel_node(flow, family);
	if (node || family != FAMILY_IPV4 || (status != CT_NEW && status != CT_ESTABLISHED))
		return node;
	return gateway_node(flow);
}

/* Check a packet that another node's pod sends through this gateway, and create its conntrack entry, as long as which
 * its NAT entries live. Returns 0, a drop, or UNDECIDED if the policy now excludes the destination or has no gateway.
 */
VERIFIED_ALONE gateway_check(struct flow *flow)
{
	const struct egress_value *value;
	struct ct_entry *entry;
	__u32 now = ct_now();
	int refused = 0;

	if (!flow || !gateway_tunnel() || !is_outside(identity_of(ipcache_lookup(&flow->daddr, FAMILY_IPV4))))
		return DROP(INGRESS, DROP_UNROUTABLE);
	value = gateway_entry(flow);
	if (!value)
		return DROP(INGRESS, DROP_UNROUTABLE);
	if (value->gateway_ip == EGRESS_EXCLUDED || value->gateway_ip == EGRESS_NO_GATEWAY)
		return UNDECIDED;
	if (!value->egress_ip)
		return DROP(INGRESS, DROP_NO_EGRESS_IP);
	if (flow->ttl <= 1)
		return DROP(INGRESS, DROP_TTL_EXCEEDED);
	if (!flow->related && ct_lookup_own(flow, EGRESS, now, FAMILY_IPV4, &entry) == CT_NEW)
		refused = ct_create_translated(flow, flow->source_identity, now, FAMILY_IPV4);
	return refused ? DROP(INGRESS, refused) : 0;
}

/* Get the egress address of the packet's policy. */
static __always_inline void gateway_source(const struct flow *flow, struct address *source)
{
	const struct egress_value *value = gateway_policy(flow);

	*source = (struct address){ .words = { value ? value->egress_ip : 0 } };
}

/* SNAT and forward a packet of another node's pod; returns the verdict, or UNDECIDED, see gateway_check(). */
static __always_inline int gateway_from_overlay(struct __sk_buff *skb, struct flow *flow)
{
	struct address source;
	int verdict, refused = 0;

	verdict = gateway_check(flow);
	if (verdict)
		return verdict;
	switch (nat_kind_of(flow, FAMILY_IPV4)) {
	case NAT_REWRITES:
		gateway_source(flow, &source);
		refused = snat_nat(skb, flow, &source, false, FAMILY_IPV4);
		break;
	case NAT_ERROR:
		refused = snat4_nat_icmp_error(skb, flow);
		break;
	case NAT_PASSES:
		break;
	case NAT_REFUSES:
		refused = DROP_NAT_UNSUPPORTED;
	}
	return refused ? DROP(EGRESS, refused) : nodeport4_send(skb, flow, 0);
}

/* Send a reply to another node's pod, after reverse SNAT, by tunnel; returns the verdict, or UNDECIDED for other
 * packets.
 */
VERIFIED_ALONE gateway_reply(struct __sk_buff *skb, struct flow *flow, __u32 now)
{
	const struct tunnel_config *tunnel = gateway_tunnel();
	const struct ipcache_info *info;

	if (!flow || !tunnel || address_lookup(&flow->daddr, FAMILY_IPV4))
		return UNDECIDED;
	info = ipcache_lookup(&flow->daddr, FAMILY_IPV4);
	if (!info || !info->tunnel_endpoint)
		return UNDECIDED;
	if (!flow->related)
		ct_find(flow, INGRESS, true, now, FAMILY_IPV4);
	if (flow->ttl <= 1)
		return DROP(INGRESS, DROP_TTL_EXCEEDED);
	if (!decrement_hop(skb, FAMILY_IPV4))
		return DROP(INGRESS, DROP_INVALID);
	flow->source_identity = IDENTITY_WORLD;
	return tunnel_send(skb, flow, tunnel, info->tunnel_endpoint, TRACE_REASON_UNKNOWN, FAMILY_IPV4);
}

/* Redirect the packet, after SNAT, to the device of the route from its egress address; returns the verdict. */
VERIFIED_ALONE gateway_redirect(struct __sk_buff *skb, const struct flow *flow)
{
	struct bpf_fib_lookup fib;
	struct ethernet *eth;
	long found;
	bool here;

	if (!flow)
		return DROP(EGRESS, DROP_INVALID);
	found = fib_next_hop(skb, &fib, &flow->saddr, &flow->daddr, FAMILY_IPV4);
	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return DROP(EGRESS, DROP_NO_FIB);
	here = fib.ifindex == skb->ifindex && (!LINK_HLEN || found == BPF_FIB_LKUP_RET_SUCCESS);
	if (here && !LINK_HLEN)
		return TC_ACT_OK;
	if (packet_frame(skb))
		return DROP(EGRESS, DROP_WRITE_ERROR);
	eth = packet_eth(skb);
	if (!eth)
		return DROP(EGRESS, DROP_INVALID);
	mac_write(eth->destination, fib_mac(fib.dmac));
	mac_write(eth->source, fib_mac(fib.smac));
	return here ? TC_ACT_OK : fib_redirect(&fib, found, FAMILY_IPV4);
}

#define GATEWAY_LOCAL 0x20000 /* not a verdict: this node is the packet's gateway */

/* Handle a local pod's packet that the stack sends to a native device; returns the verdict, GATEWAY_LOCAL, or UNDECIDED
 * for replies and packets that no policy selects. The stack has already decremented the hop limit.
 */
VERIFIED_ALONE gateway_from_pod(struct __sk_buff *skb, struct flow *flow)
{
	const struct tunnel_config *tunnel = gateway_tunnel();
	const struct address_info *local;
	const struct egress_value *value;

	if (!flow || !tunnel)
		return UNDECIDED;
	value = gateway_policy(flow);
	if (likely(!value) || !is_outside(identity_of(ipcache_lookup(&flow->daddr, FAMILY_IPV4))))
		return UNDECIDED;
	local = address_lookup(&flow->saddr, FAMILY_IPV4);
	if (!local || local->flags & ADDRESS_IS_HOST || ct_entry_of(flow, EGRESS, true, FAMILY_IPV4))
		return UNDECIDED;
	flow->source = local->endpoint_id;
	flow->source_identity = local->identity;
	if (value->gateway_ip == EGRESS_NO_GATEWAY)
		return DROP(EGRESS, DROP_NO_EGRESS_GATEWAY);
	if (!gateway_is_local(value->gateway_ip))
		return tunnel_send(skb, flow, tunnel, value->gateway_ip, TRACE_REASON_UNKNOWN, FAMILY_IPV4);
	return value->egress_ip ? GATEWAY_LOCAL : DROP(EGRESS, DROP_NO_EGRESS_IP);
}
