/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Ingress of the tunnel device: packets from other nodes, with the sender's identity as VNI.
 *
 * The identity is trusted because a node set it: packets with an outer source address of no node are dropped. The
 * network between the nodes must prevent forged source addresses. Pods cannot send such packets: their source address
 * is checked (132), and so is the tunnel's port (170).
 */
#pragma once

#include <linux/if_packet.h>
#include <linux/pkt_cls.h>

#include "host/policy.h"
#include "lib/mark.h"
#include "lib/network.h"
#include "nat/icmp_error.h"
#include "netdev/gateway.h"
#include "nodeport/rev_nat.h"
#include "overlay/ipsec.h"
#include "overlay/tunnel.h"
#include "pod/deliver.h"
#include "proxy/redirect.h"

/* Return whether the identity is unknown here: nodes that allocate identities by themselves share only reserved ones.
 */
static __always_inline bool is_unknown_identity(__u32 identity)
{
	const struct tunnel_config *tunnel = tunnel_any();

	return identity >= IDENTITY_FIRST && (!tunnel || tunnel->flags & TUNNEL_OWN_IDENTITIES);
}

/* Return the sender's identity, as this node knows it. */
static __always_inline __u32 tunnel_sender_identity(const struct flow *flow, __u32 identity, __u8 family)
{
	const struct ipcache_info *info;
	bool unknown = identity == IDENTITY_BY_ADDRESS || is_unknown_identity(identity);

	if (unknown)
		identity = IDENTITY_WORLD;
	/* This node may know a more specific identity of a node, such as kube-apiserver. */
	if (unknown || identity == IDENTITY_REMOTE_NODE) {
		info = ipcache_lookup(&flow->saddr, family);
		if (info && info->identity != IDENTITY_HOST && !is_world(info->identity))
			return info->identity;
	}
	return identity == IDENTITY_WORLD ? world_identity(family) : identity;
}

/* Redirect to the node's stack, by ingress of cilium_host, like packets of local pods; returns the verdict. */
static __always_inline int overlay_to_host(struct __sk_buff *skb, const struct flow *flow, __u8 family)
{
	const struct node_config *node = node_facts();
	struct ethernet *eth = packet_eth(skb);

	if (!node || !eth)
		return DROP(INGRESS, DROP_NO_CONFIG);
	mac_write(eth->destination, node->host_mac);
	mac_write(eth->source, node->net_mac);
	count(skb, REASON_FORWARDED, INGRESS);
	if (unlikely(flow->report))
		send_trace_notify(skb, flow, TRACE_TO_STACK, node->host_ifindex,
				  TRACED(TRACE_REASON_UNKNOWN, family));
	return bpf_redirect(node->host_ifindex, BPF_F_INGRESS);
}

/* Handle a remote backend's reply to an external client of this node; returns the verdict, or UNDECIDED for other
 * packets.
 */
static __always_inline int overlay_nodeport_reply(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	int done;

	if (!nodeport_facts())
		return UNDECIDED;
	done = family == FAMILY_IPV4 ? snat4_rev_nat(skb, flow) : snat6_rev_nat(skb, flow);
	if (done < 0)
		return DROP(INGRESS, -done);
	if (!done)
		return UNDECIDED;
	flow->source_identity = IDENTITY_HOST; /* its outer destination was this node */
	return nodeport_send_reply(skb, flow, INGRESS, ct_now(), family);
}

static __always_inline int from_overlay_ip(struct __sk_buff *skb, struct flow *flow, __u32 identity, __u8 family)
{
	struct use use = { .packets = 1, .bytes = skb->len };
	const struct address_info *local;
	int refused = parse_network(skb, flow, family), verdict;
	enum ct_status status;

	if (refused)
		return DROP(INGRESS, refused);
	if (unlikely(is_local_source(&flow->saddr, family)))
		return DROP(INGRESS, DROP_INVALID_SOURCE);
	refused = parse_payload(skb, flow, true, family);
	if (refused)
		return DROP(INGRESS, refused);
	flow->source_identity = tunnel_sender_identity(flow, identity, family);
	if (family == FAMILY_IPV6 && without(WITHOUT_IPV6))
		return DROP(INGRESS, DROP_UNROUTABLE);
	local = address_lookup(&flow->daddr, family);
	if (!local && family == FAMILY_IPV4) {
		verdict = gateway_from_overlay(skb, flow);
		if (verdict != UNDECIDED)
			return verdict;
		mark_identity(skb, flow->source_identity);
		return overlay_to_host(skb, flow, family);
	}
	if (!local)
		return DROP(INGRESS, DROP_UNROUTABLE); /* removed or never existed: the stack might route it back */
	if (local->flags & ADDRESS_IS_HOST) {
		verdict = overlay_nodeport_reply(skb, flow, family);
		if (verdict != UNDECIDED)
			return verdict;
		refused = unlikely(host_endpoint()) ? host_ingress_check(skb, flow, family) : 0;
		return refused ? DROP(INGRESS, refused) : overlay_to_host(skb, flow, family);
	}
	flow->destination = local->endpoint_id;
	flow->destination_identity = local->identity;
	if (flow->ttl <= 1)
		return DROP(INGRESS, DROP_TTL_EXCEEDED);
	refused = ingress_check(skb, flow, use, ct_now(), family, &status);
	if (refused)
		return DROP(INGRESS, refused);
	bpf_skb_change_type(skb, PACKET_HOST); /* its destination MAC is one of the other node's */
	if (is_for_proxy(flow))
		return ingress_to_proxy(skb, flow, status, family);
	return deliver_to_link(skb, flow, local->ifindex, local->host_mac, local->pod_mac, status, BY_PEER, family);
}

/* Return the identity in the tunnel header, or a negative drop reason. */
VERIFIED_ALONE tunnel_key_identity(struct __sk_buff *skb)
{
	struct bpf_tunnel_key key = {};
	struct node_key sender = {};

	if (tunnel_read_key(skb, &key, &sender))
		return -DROP_NO_TUNNEL_KEY;
	if (!bpf_map_lookup_elem(&cilium_node_map_v2, &sender))
		return -DROP_UNKNOWN_SENDER;
	return key.tunnel_id == IDENTITY_HOST ? -DROP_INVALID_IDENTITY : (int)key.tunnel_id; /* 24 bits */
}

static __always_inline int from_overlay(struct __sk_buff *skb, struct flow *flow)
{
	__u32 identity = IDENTITY_BY_ADDRESS;
	bool decrypted = ipsec() && is_decrypted(skb);
	struct ethernet *eth;

	mark_write(skb, 0); /* the outer packet's mark */
	if (!decrypted) {
		int given = tunnel_key_identity(skb);

		if (given < 0)
			return DROP(INGRESS, -given);
		flow->source_identity = identity = given;
	}
	if (ipsec() && !decrypted) {
		int verdict = mark_for_decryption(skb);

		if (verdict != UNDECIDED)
			return verdict;
	}
	flow->from_tunnel = true;
	if (unlikely(traces_every_packet())) {
		flow->report = CT_CAPTURE;
		send_trace_notify(skb, flow, TRACE_FROM_OVERLAY, 0, TRACED(TRACE_REASON_UNKNOWN, FAMILY_IPV4));
	}
	if (skb->vlan_present)
		return DROP(INGRESS, DROP_VLAN);
	eth = packet_eth(skb);
	if (!eth)
		return DROP(INGRESS, DROP_INVALID);
	if (eth->protocol == bpf_htons(ETH_P_IP))
		return from_overlay_ip(skb, flow, identity, FAMILY_IPV4);
	if (eth->protocol == bpf_htons(ETH_P_IPV6))
		return from_overlay_ip(skb, flow, identity, FAMILY_IPV6);
	return DROP(INGRESS, DROP_UNKNOWN_L3);
}
