/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Egress of cilium_host: the host's packets to pods, and those that its stack forwards to pods. */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/identity.h"
#include "lib/mark.h"
#include "lib/network.h"
#include "netdev/maps.h"
#include "overlay/ipsec.h"
#include "overlay/send.h"
#include "pod/deliver.h"
#include "pod/links.h"
#include "proxy/redirect.h"

#define LOOPBACK_IFINDEX 1

/* Return whether a program checks the source addresses of packets from the device, or only the node itself sends by it.
 */
static __always_inline bool device_checks_sources(__u32 ifindex)
{
	const struct node_config *node = node_facts();

	if (bpf_map_lookup_elem(&hive_devices, &ifindex) || bpf_map_lookup_elem(&hive_endpoints, &ifindex))
		return true;
	return ifindex == LOOPBACK_IFINDEX || !node || ifindex == node->host_ifindex ||
	       ifindex == node->net_ifindex;
}

/* Check the source of a packet that the stack forwards from another device, such as another runtime's bridge; returns 0
 * or a drop reason. A local pod sends by its own link, unless a bridge forwards its packets. An IPv6 packet with the
 * node's address is not from the host; for IPv4 the kernel drops those (RFC 1812, 5.3.7), unless the stack did SNAT.
 */
static __always_inline int check_source(struct flow *flow, __u8 family)
{
	const struct address_info *source = address_lookup(&flow->saddr, family);
	const struct endpoint_config *pod;

	if (likely(!source))
		return 0;
	if (source->flags & ADDRESS_IS_HOST) {
		if (family == FAMILY_IPV6)
			flow->source_identity = world_identity(family);
		return 0;
	}
	pod = bpf_map_lookup_elem(&hive_endpoints, &source->ifindex);
	return pod && pod->flags & ENDPOINT_ROUTED_BY_HOST ? 0 : DROP_INVALID_SOURCE;
}

/* Get the sender's identity. A local pod's packet arrives here only if the stack did DNAT: our mark shows it, unless
 * another program replaced the mark; the host's own packets have no mark. Returns 0 or a drop reason.
 */
static __always_inline int get_sender_identity(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	const struct address_info *source;
	__u32 mark = mark_read(skb), device = skb->ingress_ifindex;

	if ((mark & MARK_KIND) == MARK_TRANSLATED) {
		mark &= ~MARK_KIND;
		mark_write(skb, mark);
		flow->dnat = true;
	}
	if ((mark & MARK_KIND) == MARK_IDENTITY) {
		mark_write(skb, 0); /* routing rules would match it again */
		flow->source_identity = marked_identity(mark);
		flow->through_stack = true;
		return 0;
	}
	if ((mark & MARK_KIND) == MARK_INGRESS_PROXY) { /* a local proxy, with the client's address */
		mark_write(skb, 0);
		flow->source_identity = identity_of(ipcache_lookup(&flow->saddr, family));
		return 0;
	}
	if ((mark & MARK_KIND) == MARK_EGRESS_PROXY) { /* a local proxy, with a pod's address or to a pod */
		mark_write(skb, 0);
		flow->by_proxy = true;
		flow->source_identity = marked_identity(mark) ?: identity_of(ipcache_lookup(&flow->saddr, family));
		return 0;
	}
	flow->source_identity = identity_of(ipcache_lookup(&flow->saddr, family));
	if (unlikely(device) && !device_checks_sources(device))
		return check_source(flow, family);
	if (likely(!mark))
		return 0;
	source = address_lookup(&flow->saddr, family);
	flow->through_stack = source && !(source->flags & ADDRESS_IS_HOST);
	return 0;
}

static __always_inline int from_host_ip(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	struct use use = { .packets = 1, .bytes = skb->len };
	const struct address_info *local;
	bool by_proxy = (mark_read(skb) & MARK_KIND) == MARK_INGRESS_PROXY;
	int refused = parse_network(skb, flow, family);
	enum ct_status status;

	if (!refused)
		refused = parse_payload_here(skb, flow, true, family);
	if (family == FAMILY_IPV6 && refused != DROP_INVALID && link_scoped(&flow->daddr))
		return TC_ACT_OK;
	if (refused)
		return DROP(INGRESS, refused);
	if (family == FAMILY_IPV6 && without(WITHOUT_IPV6))
		return DROP(INGRESS, DROP_UNROUTABLE);
	local = address_lookup(&flow->daddr, family);
	if (!local) {
		refused = get_sender_identity(skb, flow, family);
		return refused ? DROP(INGRESS, refused) : host_to_overlay(skb, flow, family);
	}
	if (local->flags & ADDRESS_IS_HOST)
		return TC_ACT_OK;
	flow->destination = local->endpoint_id;
	flow->destination_identity = local->identity;
	refused = get_sender_identity(skb, flow, family);
	if (refused)
		return DROP(INGRESS, refused);
	if (replies_need_stack(flow))
		flow->through_stack = true;
	if (flow->ttl <= 1)
		return DROP(INGRESS, DROP_TTL_EXCEEDED);
	refused = by_proxy ? accept_from_proxy(flow, ct_now(), family)
			   : ingress_check(skb, flow, use, ct_now(), family, &status);
	if (refused)
		return DROP(INGRESS, refused);
	if (must_pass_to_proxy(skb, flow, family))
		return redirect_to_host_ingress(skb, flow);
	return deliver_to_link(skb, flow, local->ifindex, local->host_mac, local->pod_mac, TRACE_REASON_UNKNOWN,
			       BY_LINK, family);
}

/* Set the MAC of cilium_net: packets that pass cilium_host enter the host there. */
static __always_inline int pass_to_net(struct __sk_buff *skb)
{
	const struct node_config *node = node_facts();
	struct ethernet *eth = packet_eth(skb);

	if (node && eth)
		mac_write(eth->destination, node->net_mac);
	return TC_ACT_OK;
}

static __always_inline int from_host(struct __sk_buff *skb, struct flow *flow)
{
	bool encrypted = ipsec() && (mark_read(skb) & MARK_KIND) == MARK_ENCRYPT;
	struct ethernet *eth = packet_eth(skb);
	int verdict = TC_ACT_OK;

	if (!eth)
		return DROP(INGRESS, DROP_INVALID);
	if (eth->protocol == bpf_htons(ETH_P_IP))
		verdict = encrypted ? from_host_encrypted(skb, flow, FAMILY_IPV4)
				    : from_host_ip(skb, flow, FAMILY_IPV4);
	else if (eth->protocol == bpf_htons(ETH_P_IPV6))
		verdict = encrypted ? from_host_encrypted(skb, flow, FAMILY_IPV6)
				    : from_host_ip(skb, flow, FAMILY_IPV6);
	return verdict == TC_ACT_OK ? pass_to_net(skb) : verdict;
}
