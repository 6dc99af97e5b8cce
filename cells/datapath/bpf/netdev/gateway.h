/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Egress gateways: what pods send out of the cluster leaves by one node, and from one address, where a policy asks for it.
 *
 * The pod's node sends it there in the tunnel, also where other pods' packets are routed. The gateway translates it, by
 * the same ports and entries as what is masqueraded, and sends the answers back in the tunnel.
 */
#pragma once

#include "ct/conntrack.h"
#include "lib/forward.h"
#include "lib/identity.h"
#include "lib/mark.h"
#include "nat/error.h"
#include "nat/flow.h"
#include "netdev/maps.h"
#include "nodeport/conntrack.h"
#include "nodeport/output.h"
#include "overlay/send.h"

/* The entry of the packet, also one that excludes its destination; NULL if no policy selects it. */
static __always_inline const struct egress_value *gateway_entry(const struct flow *flow)
{
	const struct egress_key key = {
		.prefixlen = EGRESS_PREFIX_FULL,
		.saddr = flow->saddr.words[0],
		.daddr = flow->daddr.words[0],
	};

	return bpf_map_lookup_elem(&cilium_egress_gw_policy_v4, &key);
}

/* The same, NULL also if the destination is excluded. */
static __always_inline const struct egress_value *gateway_policy(const struct flow *flow)
{
	const struct egress_value *value = gateway_entry(flow);

	return value && value->gateway_ip != EGRESS_EXCLUDED ? value : NULL;
}

static __always_inline bool gateway_is_here(__be32 ip)
{
	const struct address gateway = { .words = { ip } };
	const struct address_info *local = address_lookup(&gateway, FAMILY_IPV4);

	return local && local->flags & ADDRESS_IS_HOST;
}

/* The node that what a pod of this one sends out of the cluster leaves by, GATEWAY_NOWHERE, or 0: by this node, or as without a
 * policy. Not what would forge the tunnel where it arrives.
 */
static __always_inline __be32 gateway_node(const struct flow *flow)
{
	const struct egress_value *value;

	if (!gateway_tunnel() || !is_outside(flow->destination_identity))
		return 0;
	value = gateway_policy(flow);
	if (likely(!value) || unlikely(forges_tunnel(flow)))
		return 0;
	if (value->gateway_ip == EGRESS_NO_GATEWAY)
		return GATEWAY_NOWHERE;
	return gateway_is_here(value->gateway_ip) ? 0 : value->gateway_ip;
}

/* The node that a pod's packet is sent to in the tunnel, for its destination or as its gateway: as tunnel_node(), or
 * GATEWAY_NOWHERE. What answers goes back by itself.
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

/* Whether what another node's pod has sent here may leave the cluster by this node: 0, or a drop. UNDECIDED: its policy
 * excludes the destination by now, or has no gateway. Its flow is entered here, too: that determines how long its
 * translation is needed.
 */
VERIFIED_ALONE gateway_admits(struct flow *flow)
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

/* The address that the packet leaves from. */
static __always_inline void gateway_source(const struct flow *flow, struct address *source)
{
	const struct egress_value *value = gateway_policy(flow);

	*source = (struct address){ .words = { value ? value->egress_ip : 0 } };
}

/* Send on what another node's pod has sent here to leave the cluster; the verdict, or UNDECIDED: see gateway_admits(). */
static __always_inline int gateway_takes(struct __sk_buff *skb, struct flow *flow)
{
	struct address source;
	int verdict = gateway_admits(flow), refused;

	if (verdict)
		return verdict;
	gateway_source(flow, &source);
	refused = flow->related ? nat4_error_leave(skb, flow) : nat_leave(skb, flow, &source, false, FAMILY_IPV4);
	return refused ? DROP(EGRESS, refused) : nodeport4_send(skb, flow, 0);
}

/* What answers another node's pod, once it is addressed to that: to its node, in the tunnel. The verdict, or UNDECIDED. */
VERIFIED_ALONE gateway_returns(struct __sk_buff *skb, struct flow *flow, __u32 now)
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
	if (!lose_hop(skb, FAMILY_IPV4))
		return DROP(INGRESS, DROP_INVALID);
	flow->source_identity = IDENTITY_WORLD;
	return tunnel_send(skb, flow, tunnel, info->tunnel_endpoint, TRACE_REASON_UNKNOWN, FAMILY_IPV4);
}

/* Out by the device that routes lead to from the packet's new source; the verdict. */
VERIFIED_ALONE gateway_leaves(struct __sk_buff *skb, const struct flow *flow)
{
	struct bpf_fib_lookup fib;
	struct ethernet *eth;
	long found;
	bool here;

	if (!flow)
		return DROP(EGRESS, DROP_INVALID);
	found = fib_ask(skb, &fib, &flow->saddr, &flow->daddr, FAMILY_IPV4);
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

#define GATEWAY_HERE 0x20000 /* neither a verdict: the packet leaves by this node, from the policy's address */

/* What becomes of what a pod of this node sends by a native device: the verdict, GATEWAY_HERE, or UNDECIDED if no policy has
 * it, or it answers who has asked for the pod itself. It has come by the host's stack, so its hop is lost.
 */
VERIFIED_ALONE gateway_device(struct __sk_buff *skb, struct flow *flow)
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
	if (!gateway_is_here(value->gateway_ip))
		return tunnel_send(skb, flow, tunnel, value->gateway_ip, TRACE_REASON_UNKNOWN, FAMILY_IPV4);
	return value->egress_ip ? GATEWAY_HERE : DROP(EGRESS, DROP_NO_EGRESS_IP);
}
