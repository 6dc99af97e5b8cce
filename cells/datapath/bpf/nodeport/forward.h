/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What clients outside ask of services, once it is addressed to a backend: into a pod of this node, to the node
 * itself, or to another node, then from this one's address, so that the answer comes back here.
 */
#pragma once

#include "nat/error.h"
#include "nodeport/maps.h"
#include "nodeport/send.h"
#include "pod/deliver.h"
#include "pod/links.h"

/* Who the client is, to policies: what the ipcache says, but no address outside is the node itself. */
static __always_inline __u32 nodeport_client_identity(const struct flow *flow, __u8 family)
{
	__u32 identity = identity_of(ipcache_lookup(&flow->saddr, family));

	return identity == IDENTITY_HOST || identity == IDENTITY_WORLD ? world_identity(family) : identity;
}

/* Whether the stack, or another plugin's bridge, has to bring what is for the pod. */
static __always_inline bool is_routed(const struct address_info *local)
{
	__u32 epoch;
	const struct endpoint_config *pod = link_owner(local->ifindex, &epoch);

	return pod && pod->flags & ENDPOINT_ROUTED_BY_HOST;
}

static __always_inline int nodeport_deliver(struct __sk_buff *skb, struct flow *flow, const struct address_info *local,
					    __u32 now, __u8 family)
{
	struct use use = { .packets = 1, .bytes = skb->len };
	enum ct_status status;
	int refused;

	if (local->flags & ADDRESS_IS_HOST || is_routed(local))
		return TC_ACT_OK;
	flow->destination = local->endpoint_id;
	flow->destination_identity = local->identity;
	flow->source_identity = nodeport_client_identity(flow, family);
	if (flow->ttl <= 1)
		return DROP(INGRESS, DROP_TTL_EXCEEDED);
	refused = ingress_check(skb, flow, use, now, family, &status);
	if (refused)
		return DROP(INGRESS, refused);
	if (unlikely(flow->proxy_port)) /* a proxy's answers would not leave as the service's */
		return DROP(INGRESS, DROP_NO_PROXY);
	return hand_over(skb, flow, local->ifindex, local->host_mac, local->pod_mac, status, BY_PEER, family);
}

VERIFIED_ALONE nodeport4_deliver(struct __sk_buff *skb, struct flow *flow, const struct address_info *local, __u32 now)
{
	return flow && local ? nodeport_deliver(skb, flow, local, now, FAMILY_IPV4) : DROP(INGRESS, DROP_INVALID);
}

VERIFIED_ALONE nodeport6_deliver(struct __sk_buff *skb, struct flow *flow, const struct address_info *local, __u32 now)
{
	return flow && local ? nodeport_deliver(skb, flow, local, now, FAMILY_IPV6) : DROP(INGRESS, DROP_INVALID);
}

/* What packets to a backend elsewhere come from: where its answers come back to. */
static __always_inline void nodeport_source(const struct nodeport_config *own, bool tunnelled, struct address *source,
					    __u8 family)
{
	const struct node_config *node = node_facts();

	if (family == FAMILY_IPV4)
		*source = (struct address){ .words = { tunnelled && node ? node->router_ip : own->ipv4 } };
	else
		*source = tunnelled && node ? node->router_ip6 : own->ipv6;
}

static __always_inline int nodeport_forward(struct __sk_buff *skb, struct flow *flow, const struct nodeport_config *own,
					    __u8 family)
{
	__be32 node = tunnel_node(flow, family);
	struct address source;
	int refused;

	nodeport_source(own, node, &source, family);
	flow->source_identity = world_identity(family);
	if (flow->related)
		refused = family == FAMILY_IPV4 ? nat4_error_leave(skb, flow) : nat6_error_leave(skb, flow);
	else
		refused = nat_leave(skb, flow, &source, false, family);
	if (refused)
		return DROP(EGRESS, refused);
	return family == FAMILY_IPV4 ? nodeport4_send(skb, flow, node) : nodeport6_send(skb, flow, node);
}

/* Bring the packet, which is addressed to a backend now, to it; the verdict. */
static __always_inline int nodeport_go_on(struct __sk_buff *skb, struct flow *flow, const struct nodeport_config *own,
					  __u32 now, __u8 family)
{
	const struct address_info *local = address_lookup(&flow->daddr, family);

	if (local)
		return family == FAMILY_IPV4 ? nodeport4_deliver(skb, flow, local, now)
					     : nodeport6_deliver(skb, flow, local, now);
	return flow->local_only ? DROP(INGRESS, DROP_INVALID) : nodeport_forward(skb, flow, own, family);
}
