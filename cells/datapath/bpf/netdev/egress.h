/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Egress of a native device: masquerading of pods' packets (RFC 3022), reverse NAT of replies to external clients, and
 * egress gateways.
 */
#pragma once

#include <linux/pkt_cls.h>

#include "ct/conntrack.h"
#include "lib/events.h"
#include "lib/identity.h"
#include "lib/mark.h"
#include "lib/metrics.h"
#include "lib/network.h"
#include "nat/icmp_error.h"
#include "netdev/gateway.h"
#include "netdev/maps.h"
#include "nodeport/to_netdev.h"

enum masquerade {
	MASQUERADE_NONE,
	MASQUERADE_POD,
	MASQUERADE_NODE, /* the node's own, if a pod's flow uses its port */
};

/* Get the device's masquerade address; false if pods are not masqueraded there. */
static __always_inline bool device_address(const struct device_config *device, struct address *address, __u8 family)
{
	if (family == FAMILY_IPV4)
		*address = (struct address){ .words = { device->ipv4 } };
	else
		*address = device->ipv6;
	return device->flags & (family == FAMILY_IPV4 ? DEVICE_MASQUERADE_IPV4 : DEVICE_MASQUERADE_IPV6);
}

/* Return the mask of one word of an address for this prefix length. */
static __always_inline __be32 prefix_mask(__u32 length)
{
	return length >= 32 ? 0xffffffff : length ? bpf_htonl(~0U << (32 - length)) : 0;
}

/* Return whether the destination is in the native routing CIDR. */
static __always_inline bool is_native(const struct device_config *device, const struct address *ip, __u8 family)
{
	__u32 left = device->native6_prefix;

	if (family == FAMILY_IPV4)
		return device->native4_mask && (ip->words[0] & device->native4_mask) == device->native4;
	if (!left)
		return false;
#pragma unroll
	for (int i = 0; i < 4; i++) {
		if ((ip->words[i] & prefix_mask(left)) != device->native6.words[i])
			return false;
		left = left > 32 ? left - 32 : 0;
	}
	return true;
}

/* Return whether ip-masq-agent excludes the destination (cilium_ipmasq_v4, v6). */
static __always_inline bool is_exempt(const struct device_config *device, const struct address *ip, __u8 family)
{
	if (!(device->flags & DEVICE_IP_MASQ))
		return false;
	if (family == FAMILY_IPV4) {
		const struct ipmasq4_key key = { .prefixlen = 32, .network = ip->words[0] };

		return bpf_map_lookup_elem(&cilium_ipmasq_v4, &key);
	} else {
		const struct ipmasq6_key key = { .prefixlen = 128, .network = *ip };

		return bpf_map_lookup_elem(&cilium_ipmasq_v6, &key);
	}
}

/* Return whether the destination is another node, or a pod of one: those have routes to pods. */
static __always_inline bool in_cluster(const struct device_config *device, const struct address *ip, __u8 family)
{
	const struct ipcache_info *info = ipcache_lookup(ip, family);

	if (!info)
		return false;
	if (is_remote_node(info->identity))
		return !(device->flags & DEVICE_REMOTE_NODES) || info->flags & IPCACHE_SKIP_TUNNEL;
	return info->tunnel_endpoint;
}

static __always_inline enum masquerade masquerade_of(struct flow *flow, const struct device_config *device,
						     const struct address *own, __u8 family)
{
	const struct address_info *local;

	if (address_equals(&flow->saddr, own))
		return MASQUERADE_NODE;
	if (family == FAMILY_IPV6 && link_scoped(&flow->daddr))
		return MASQUERADE_NONE;
	if (is_native(device, &flow->daddr, family))
		return MASQUERADE_NONE;
	local = address_lookup(&flow->saddr, family);
	if (!local || local->flags & ADDRESS_IS_HOST || address_lookup(&flow->daddr, family))
		return MASQUERADE_NONE;
	if (is_exempt(device, &flow->daddr, family) || in_cluster(device, &flow->daddr, family))
		return MASQUERADE_NONE;
	flow->source = local->endpoint_id;
	flow->source_identity = local->identity;
	return MASQUERADE_POD;
}

/* Return whether a pod's flow uses the source port of this flow of the node. */
static __always_inline bool node_port_collides(const struct flow *flow, __u8 family)
{
	struct nat_entry entry;
	union nat_key key;

	nat_fill_key(&key, &flow->saddr, flow->sport, &flow->daddr, flow->dport, flow->protocol, NAT_KEY_OUT,
		     family);
	if (nat_lookup(&key, &entry, family))
		return true;
	nat_fill_key(&key, &flow->daddr, flow->dport, &flow->saddr, flow->sport, flow->protocol, NAT_KEY_IN,
		     family);
	return nat_lookup(&key, &entry, family);
}

static __always_inline int masquerade(struct __sk_buff *skb, struct flow *flow, struct address *own, bool node,
				      __u8 family)
{
	struct ct_entry *entry;
	__u32 now = ct_now();
	int refused;

	if (node) {
		/* The NAT entries live as long as this conntrack entry. */
		if (ct_lookup_own(flow, EGRESS, now, family, &entry) == CT_NEW) {
			refused = ct_create_translated(flow, flow->source_identity, now, family);
			if (refused)
				return refused;
		}
	} else if (ct_entry_of(flow, EGRESS, true, family)) {
		return 0; /* a reply to a client that connected to the pod directly */
	}
	switch (nat_kind_of(flow, family)) {
	case NAT_REWRITES:
		break;
	case NAT_ERROR:
		return family == FAMILY_IPV4 ? snat4_nat_icmp_error(skb, flow) : snat6_nat_icmp_error(skb, flow);
	case NAT_PASSES:
		return 0;
	case NAT_REFUSES:
		return DROP_NAT_UNSUPPORTED;
	}
	refused = snat_nat(skb, flow, own, node, family);
	if (!refused)
		mark_write(skb, MARK_SNAT_DONE);
	return refused;
}

/* Masquerade a packet if required; returns the verdict. `parsed`: the transport header was parsed, with the result
 * `refused`. `gateway`: this node is the packet's egress gateway.
 */
static __always_inline int device_masquerade(struct __sk_buff *skb, struct flow *flow,
					     const struct device_config *device, bool parsed, bool gateway,
					     int refused, __u8 family)
{
	enum masquerade kind = MASQUERADE_POD;
	struct address own;

	if (gateway) {
		gateway_source(flow, &own);
	} else {
		if (!device_address(device, &own, family))
			return TC_ACT_OK;
		kind = masquerade_of(flow, device, &own, family);
		if (kind == MASQUERADE_NONE)
			return TC_ACT_OK;
	}
	if (!parsed)
		refused = parse_payload(skb, flow, true, family);
	if (kind == MASQUERADE_NODE) {
		/* Packets of the node that cannot be parsed, and other ICMP than queries, collide with no pod's flow. */
		if (refused || nat_kind_of(flow, family) != NAT_REWRITES || !node_port_collides(flow, family))
			return TC_ACT_OK;
		flow->source_identity = IDENTITY_HOST;
	}
	if (!refused)
		refused = masquerade(skb, flow, &own, kind == MASQUERADE_NODE, family);
	return refused ? DROP(EGRESS, refused) : TC_ACT_OK;
}

static __always_inline int to_netdev_ip(struct __sk_buff *skb, struct flow *flow,
					const struct device_config *device, __u8 family)
{
	bool serves = nodeport_facts(), gateway = false;
	int verdict, refused = 0;

	if (parse_network(skb, flow, family))
		return TC_ACT_OK;
	if (serves) {
		refused = parse_payload(skb, flow, true, family);
		if (!refused && (lb_can_balance(flow) || flow->related)) {
			verdict = family == FAMILY_IPV4 ? nodeport4_to_netdev(skb, flow, ct_now())
							: nodeport6_to_netdev(skb, flow, ct_now());
			if (verdict != UNDECIDED)
				return verdict;
		}
	}
	if (family == FAMILY_IPV4 && unlikely(gateway_tunnel())) {
		if (!serves)
			refused = parse_payload(skb, flow, true, family);
		serves = true; /* parsed above */
		verdict = gateway_from_pod(skb, flow);
		if (verdict != UNDECIDED && verdict != GATEWAY_LOCAL)
			return verdict;
		gateway = verdict == GATEWAY_LOCAL;
	}
	verdict = device_masquerade(skb, flow, device, serves, gateway, refused, family);
	return gateway && verdict == TC_ACT_OK ? gateway_redirect(skb, flow) : verdict;
}

/* Return whether the packet is already translated or encapsulated. */
static __always_inline bool is_translated_or_encapsulated(__u32 mark)
{
	return (mark & MARK_KIND) == MARK_SNAT_DONE || (mark & MARK_KIND) == MARK_OVERLAY;
}

static __always_inline int to_netdev(struct __sk_buff *skb, struct flow *flow)
{
	const struct device_config *device;
	__u32 ifindex = skb->ifindex;
	__be16 protocol;

	if (is_translated_or_encapsulated(mark_read(skb)))
		return TC_ACT_OK;
	device = bpf_map_lookup_elem(&hive_devices, &ifindex);
	if (!device)
		return TC_ACT_OK;
	protocol = packet_protocol(skb);
	if (protocol == bpf_htons(ETH_P_IP))
		return to_netdev_ip(skb, flow, device, FAMILY_IPV4);
	if (protocol == bpf_htons(ETH_P_IPV6) && !without(WITHOUT_IPV6))
		return to_netdev_ip(skb, flow, device, FAMILY_IPV6);
	return TC_ACT_OK;
}
