/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Host policies: what the node itself may get and send, by the policy of its host endpoint.
 *
 * Asked where packets come to the node or leave it: at native devices, and between it and pods. What goes on with a
 * flow that was let through the other way passes, and so does what makes the node a host of its network, such as
 * neighbour discovery. Without a host endpoint no policy is evaluated.
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

/* The endpoint with the node's policy; 0: the node may do everything. */
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

/* Whether an address belongs to no node alone, and no router passes on what is sent to it: a link-local address, a group,
 * all nodes of the link (RFC 919, RFC 4291). Who gets it here is the node.
 */
static __always_inline bool stays_here(const struct address *ip, __u8 family)
{
	__u32 first = bpf_ntohl(ip->words[0]);

	if (family == FAMILY_IPV6)
		return link_scoped(ip);
	return first >> 28 == 0xe || first == 0xffffffff || !first;
}

/* Whether the node's stack takes the packet for itself: it is for an address of the node, or for one of those above, or
 * routes lead nowhere else, as of broadcast and anycast addresses. `flow` is read.
 */
VERIFIED_ALONE host_takes(struct __sk_buff *skb, const struct flow *flow, __u32 family)
{
	const struct address_info *local;
	struct bpf_fib_lookup fib;
	long found;

	if (!flow)
		return true;
	local = address_lookup(&flow->daddr, family);
	if (local)
		return local->flags & ADDRESS_IS_HOST;
	if (stays_here(&flow->daddr, family))
		return true;
	found = fib_ask_for(skb, &fib, &flow->saddr, &flow->daddr, 0, family);
	return found < 0 || found == BPF_FIB_LKUP_RET_NOT_FWDED || found == BPF_FIB_LKUP_RET_FWD_DISABLED;
}

#define DHCP_SERVER 67
#define DHCP_CLIENT 68
#define DHCP6_CLIENT 546
#define DHCP6_SERVER 547

/* Whether the node needs the packet to be one, whatever its policy: to find neighbours and routers, to have groups
 * brought, and to get an address (RFC 2131, RFC 8415). Of addresses that it has renewals are answers of flows.
 */
static __always_inline bool configures_host(const struct flow *flow, enum direction direction, bool readable,
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
	if (direction == EGRESS) { /* the client's */
		__u16 client = from;

		from = to;
		to = client;
	}
	if (family == FAMILY_IPV4)
		return flow->daddr.words[0] == 0xffffffff && from == DHCP_SERVER && to == DHCP_CLIENT;
	return link_scoped(&flow->daddr) && from == DHCP6_SERVER && to == DHCP6_CLIENT;
}

/* 0 if the packet, which is read, may pass; else the reason to drop it. Of a protocol that conntrack does not know
 * (`tracked`) every packet is evaluated by itself, and so is an ICMP error, unless it is about a
 * flow of the node. A node without its policy map stays reachable.
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

/* The same for what a pod, or another node by the tunnel, sends to the node. `flow` identifies the sender. */
VERIFIED_ALONE host_asks(struct __sk_buff *skb, struct flow *flow, __u32 family)
{
	if (!flow)
		return DROP_INVALID;
	flow->destination = host_endpoint();
	flow->destination_identity = IDENTITY_HOST;
	return host_policy_verdict(skb, flow, INGRESS, true, family);
}

VERIFIED_ALONE host_reached(struct __sk_buff *skb, struct flow *flow, __u32 family)
{
	return flow && host_takes(skb, flow, family);
}

#define NOT_THE_HOSTS 0x100

/* The same; NOT_THE_HOSTS if the node does not take it. */
static __always_inline int host_guards(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	if (!host_reached(skb, flow, family))
		return NOT_THE_HOSTS;
	if (unlikely(flow->related) && is_about_flow(skb, flow, INGRESS, ct_now(), family))
		return 0;
	return host_asks(skb, flow, family);
}

/* For what a device brings: 0 too if the node does not take it. What cannot be read is the stack's to refuse. */
static __always_inline int to_host(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	int refused = parse_network(skb, flow, family);

	if (refused || !host_takes(skb, flow, family))
		return 0;
	refused = parse_payload(skb, flow, true, family);
	if (refused && refused != DROP_CT_UNKNOWN_PROTOCOL)
		return refused;
	if (configures_host(flow, INGRESS, !refused, family))
		return 0;
	if (unlikely(flow->related) && is_about_flow(skb, flow, INGRESS, ct_now(), family))
		return 0;
	flow->source_identity = nodeport_client_identity(flow, family);
	flow->destination = host_endpoint();
	flow->destination_identity = IDENTITY_HOST;
	return host_policy_verdict(skb, flow, INGRESS, !refused, family);
}

/* Whether others than the node itself have sent it, and so were evaluated: pods, proxies for them, clients outside
 * that are passed on; or it is a tunnel's, of which the packet inside counts.
 */
static __always_inline bool is_others(__u32 mark)
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

/* For what leaves by a device, or to a pod: 0 too if the node has not sent it. */
static __always_inline int host_leaves(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	int refused;

	if (is_others(mark_read(skb)))
		return 0;
	refused = parse_network(skb, flow, family);
	if (refused || is_host(&flow->daddr, family))
		return 0;
	if (!is_host(&flow->saddr, family) && !(family == FAMILY_IPV6 && link_scoped(&flow->saddr)))
		return 0;
	refused = parse_payload(skb, flow, true, family);
	if (refused && refused != DROP_CT_UNKNOWN_PROTOCOL)
		return refused;
	if (configures_host(flow, EGRESS, !refused, family))
		return 0;
	if (unlikely(flow->related) && is_about_flow(skb, flow, EGRESS, ct_now(), family))
		return 0;
	flow->source = host_endpoint();
	flow->source_identity = IDENTITY_HOST;
	flow->destination_identity = identity_of(ipcache_lookup(&flow->daddr, family));
	if (flow->destination_identity == IDENTITY_WORLD)
		flow->destination_identity = world_identity(family);
	return host_policy_verdict(skb, flow, EGRESS, !refused, family);
}

VERIFIED_ALONE host4_gets(struct __sk_buff *skb, struct flow *flow)
{
	return flow ? to_host(skb, flow, FAMILY_IPV4) : DROP_INVALID;
}

VERIFIED_ALONE host6_gets(struct __sk_buff *skb, struct flow *flow)
{
	return flow ? to_host(skb, flow, FAMILY_IPV6) : DROP_INVALID;
}

VERIFIED_ALONE host4_leaves(struct __sk_buff *skb, struct flow *flow)
{
	return flow ? host_leaves(skb, flow, FAMILY_IPV4) : DROP_INVALID;
}

VERIFIED_ALONE host6_leaves(struct __sk_buff *skb, struct flow *flow)
{
	return flow ? host_leaves(skb, flow, FAMILY_IPV6) : DROP_INVALID;
}

/* Let the packet go on, or not, by the node's policy; the verdict. `flow` is the packet's as it leaves here. */
static __always_inline int host_guard(struct __sk_buff *skb, struct flow *flow, enum direction direction)
{
	__be16 protocol = packet_protocol(skb);
	int refused = 0;

	*flow = (struct flow){};
	if (protocol == bpf_htons(ETH_P_IP))
		refused = direction == INGRESS ? host4_gets(skb, flow) : host4_leaves(skb, flow);
	else if (protocol == bpf_htons(ETH_P_IPV6))
		refused = direction == INGRESS ? host6_gets(skb, flow) : host6_leaves(skb, flow);
	else if (direction == INGRESS && protocol != bpf_htons(ETH_P_ARP)) /* the stack may find IP in it */
		refused = bpf_ntohs(protocol) < ETH_TYPE_MIN ? DROP_UNSUPPORTED_L2 : DROP_UNKNOWN_L3;
	return refused ? DROP(direction, refused) : TC_ACT_OK;
}
