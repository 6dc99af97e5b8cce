/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Host firewall: policy of the host endpoint for packets to and from the node itself.
 *
 * Evaluated at native devices, and between the node and pods. Replies of allowed flows pass, and so do messages that
 * the node needs for its network, such as neighbour discovery. Without a host endpoint no policy is evaluated.
 */
#pragma once

#include <linux/pkt_cls.h>

#include "ct/conntrack.h"
#include "ct/quote.h"
#include "lib/fib.h"
#include "lib/identity.h"
#include "lib/mark.h"
#include "lib/network.h"
#include "nodeport/forward.h"
#include "pod/neighbours.h"
#include "policy/policy.h"

/* Return the host endpoint; 0 without a host policy. */
static __always_inline __u32 host_endpoint(void)
{
	const struct node_config *node = without(WITHOUT_HOST_POLICY) ? NULL : node_facts();

	return node ? node->host_endpoint : 0;
}

static __always_inline bool is_host(const struct address *ip, __u8 family)
{
	const struct address_info *local = address_lookup(ip, family);

	return local && local->flags & ADDRESS_IS_HOST;
}

/* Return whether an address is link-local, multicast or broadcast (RFC 919, RFC 4291): packets to it are not routed,
 * and here the node receives them.
 */
static __always_inline bool is_link_local_destination(const struct address *ip, __u8 family)
{
	__u32 first = bpf_ntohl(ip->words[0]);

	if (family == FAMILY_IPV6)
		return link_scoped(ip);
	return first >> 28 == 0xe || first == 0xffffffff || !first;
}

/* Return whether the node itself receives the packet: its destination is the node's, or one of those above, or the FIB
 * does not forward it (broadcast, anycast). `flow` has the network header.
 */
VERIFIED_ALONE host_receives_locally(struct __sk_buff *skb, const struct flow *flow, __u32 family)
{
	const struct address_info *local;
	struct bpf_fib_lookup fib;
	long found;

	if (!flow)
		return true;
	local = address_lookup(&flow->daddr, family);
	if (local)
		return local->flags & ADDRESS_IS_HOST;
	if (is_link_local_destination(&flow->daddr, family))
		return true;
	found = fib_next_hop_for_length(skb, &fib, &flow->saddr, &flow->daddr, 0, family);
	return found < 0 || found == BPF_FIB_LKUP_RET_NOT_FWDED || found == BPF_FIB_LKUP_RET_FWD_DISABLED;
}

#define DHCP_SERVER 67
#define DHCP_CLIENT 68
#define DHCP6_CLIENT 546
#define DHCP6_SERVER 547

/* Return whether the node needs the packet regardless of policy: neighbour discovery, multicast membership, and DHCP
 * (RFC 2131, RFC 8415). DHCP renewals with existing addresses are replies of flows.
 */
static __always_inline bool is_host_configuration(const struct flow *flow, enum direction direction, bool readable,
						  __u8 family)
{
	__u16 from = bpf_ntohs(flow->sport), to = bpf_ntohs(flow->dport);

	if (family == FAMILY_IPV4 && flow->protocol == IPPROTO_IGMP)
		return flow->ttl == 1 && bpf_ntohl(flow->daddr.words[0]) >> 28 == 0xe;
	if (!readable)
		return false;
	if (family == FAMILY_IPV6 && finds_neighbours(flow))
		return true;
	if (flow->protocol != IPPROTO_UDP)
		return false;
	if (direction == EGRESS) { /* client and server are swapped */
		__u16 client = from;

		from = to;
		to = client;
	}
	if (family == FAMILY_IPV4)
		return flow->daddr.words[0] == 0xffffffff && from == DHCP_SERVER && to == DHCP_CLIENT;
	return link_scoped(&flow->daddr) && from == DHCP6_SERVER && to == DHCP6_CLIENT;
}

/* Evaluate the host policy for a parsed packet; returns 0 or a drop reason. Packets of protocols without conntrack (not
 * `tracked`) are evaluated one by one, and so are ICMP errors, unless they are about a flow of the node. Without its
 * policy map the node stays reachable.
 */
static __always_inline int host_policy_verdict(struct __sk_buff *skb, struct flow *flow, enum direction direction,
					       bool tracked, __u8 family)
{
	struct use use = { .packets = 1, .bytes = skb->len };
	enum ct_status status = CT_ESTABLISHED;
	__u32 now = ct_now();
	struct ct_entry *entry;
	int refused;

	if (tracked && likely(!flow->related)) {
		status = ct_lookup(flow, direction, now, family, &entry);
		if (status == CT_REPLY)
			return 0;
	}
	refused = policy_check(skb, flow, direction, status == CT_NEW, &use, family);
	if (refused)
		return refused == DROP_ENDPOINT_NOT_READY ? 0 : refused;
	return status == CT_NEW ? ct_create(flow, direction, now, family) : 0;
}

/* Evaluate a packet to the node from a pod, or from another node by tunnel. `flow` has the sender's identity. */
VERIFIED_ALONE host_ingress_policy(struct __sk_buff *skb, struct flow *flow, __u32 family)
{
	if (!flow)
		return DROP_INVALID;
	flow->destination = host_endpoint();
	flow->destination_identity = IDENTITY_HOST;
	return host_policy_verdict(skb, flow, INGRESS, true, family);
}

VERIFIED_ALONE host_is_destination(struct __sk_buff *skb, struct flow *flow, __u32 family)
{
	return flow && host_receives_locally(skb, flow, family);
}

#define NOT_FOR_HOST 0x100

/* Evaluate a packet to the node; NOT_FOR_HOST if it is not for the node. */
static __always_inline int host_ingress_check(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	if (!host_is_destination(skb, flow, family))
		return NOT_FOR_HOST;
	if (unlikely(flow->related) && is_error_about_flow(skb, flow, INGRESS, ct_now(), family))
		return 0;
	return host_ingress_policy(skb, flow, family);
}

/* Evaluate a packet from a native device; 0 also if it is not for the node. Packets that cannot be parsed are left to
 * the stack.
 */
static __always_inline int host_device_check(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	int refused = parse_network(skb, flow, family);

	if (refused || !host_receives_locally(skb, flow, family))
		return 0;
	refused = parse_payload(skb, flow, true, family);
	if (refused && refused != DROP_CT_UNKNOWN_PROTOCOL)
		return refused;
	if (is_host_configuration(flow, INGRESS, !refused, family))
		return 0;
	if (unlikely(flow->related) && is_error_about_flow(skb, flow, INGRESS, ct_now(), family))
		return 0;
	flow->source_identity = nodeport_client_identity(flow, family);
	flow->destination = host_endpoint();
	flow->destination_identity = IDENTITY_HOST;
	return host_policy_verdict(skb, flow, INGRESS, !refused, family);
}

/* Return whether the mark shows that the node is not the sender, so that policy was enforced already: pods, proxies,
 * forwarded NodePort packets; or tunnel packets, of which the inner packet counts.
 */
static __always_inline bool is_from_others(__u32 mark)
{
	switch (mark & MARK_KIND) {
	case MARK_TO_PROXY:
	case MARK_SNAT_DONE:
	case MARK_OVERLAY:
	case MARK_INGRESS_PROXY:
	case MARK_EGRESS_PROXY:
	case MARK_IDENTITY:
		return true;
	}
	return false;
}

/* Evaluate a packet to a native device or a pod; 0 also if the node is not the sender. */
static __always_inline int host_egress_check(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	int refused;

	if (is_from_others(mark_read(skb)))
		return 0;
	refused = parse_network(skb, flow, family);
	if (refused || is_host(&flow->daddr, family))
		return 0;
	if (!is_host(&flow->saddr, family) && !(family == FAMILY_IPV6 && link_scoped(&flow->saddr)))
		return 0;
	refused = parse_payload(skb, flow, true, family);
	if (refused && refused != DROP_CT_UNKNOWN_PROTOCOL)
		return refused;
	if (is_host_configuration(flow, EGRESS, !refused, family))
		return 0;
	if (unlikely(flow->related) && is_error_about_flow(skb, flow, EGRESS, ct_now(), family))
		return 0;
	flow->source = host_endpoint();
	flow->source_identity = IDENTITY_HOST;
	flow->destination_identity = identity_of(ipcache_lookup(&flow->daddr, family));
	if (flow->destination_identity == IDENTITY_WORLD)
		flow->destination_identity = world_identity(family);
	return host_policy_verdict(skb, flow, EGRESS, !refused, family);
}

VERIFIED_ALONE host4_device_check(struct __sk_buff *skb, struct flow *flow)
{
	return flow ? host_device_check(skb, flow, FAMILY_IPV4) : DROP_INVALID;
}

VERIFIED_ALONE host6_device_check(struct __sk_buff *skb, struct flow *flow)
{
	return flow ? host_device_check(skb, flow, FAMILY_IPV6) : DROP_INVALID;
}

VERIFIED_ALONE host4_egress_check(struct __sk_buff *skb, struct flow *flow)
{
	return flow ? host_egress_check(skb, flow, FAMILY_IPV4) : DROP_INVALID;
}

VERIFIED_ALONE host6_egress_check(struct __sk_buff *skb, struct flow *flow)
{
	return flow ? host_egress_check(skb, flow, FAMILY_IPV6) : DROP_INVALID;
}

/* Enforce the host policy; returns the verdict. `flow` is an output. */
static __always_inline int host_firewall(struct __sk_buff *skb, struct flow *flow, enum direction direction)
{
	__be16 protocol = packet_protocol(skb);
	int refused = 0;

	*flow = (struct flow){};
	if (protocol == bpf_htons(ETH_P_IP))
		refused = direction == INGRESS ? host4_device_check(skb, flow) : host4_egress_check(skb, flow);
	else if (protocol == bpf_htons(ETH_P_IPV6))
		refused = direction == INGRESS ? host6_device_check(skb, flow) : host6_egress_check(skb, flow);
	else if (direction == INGRESS && protocol != bpf_htons(ETH_P_ARP)) /* may contain IP */
		refused = bpf_ntohs(protocol) < ETH_TYPE_MIN ? DROP_UNSUPPORTED_L2 : DROP_UNKNOWN_L3;
	return refused ? DROP(direction, refused) : TC_ACT_OK;
}
