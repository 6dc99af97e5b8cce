/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What a pod sends: may it, and where does it go? */
#pragma once

#include <linux/pkt_cls.h>

#include "host/policy.h"
#include "lib/identity.h"
#include "lib/mark.h"
#include "lib/network.h"
#include "netdev/gateway.h"
#include "nodeport/rev_nat.h"
#include "overlay/ipsec.h"
#include "overlay/send.h"
#include "pod/arp.h"
#include "pod/deliver.h"
#include "pod/icmp6.h"
#include "pod/leave.h"
#include "pod/links.h"
#include "pod/neighbours.h"
#include "proxy/redirect.h"

/* 0 if the pod may send the packet, else the reason to drop it. `status` is conntrack's word on it. */
static __always_inline int egress_check(struct __sk_buff *skb, struct flow *flow, enum ct_status status,
					const struct use *use, __u32 now, __u8 family)
{
	int refused;

	if (status == CT_REPLY)
		return 0;
	refused = flow->loopback ? 0 : policy_check(skb, flow, EGRESS, status == CT_NEW, use, family);
	if (refused)
		return refused;
	return status == CT_NEW ? ct_create(flow, EGRESS, now, family) : 0;
}

/* On a node without a family it is an unknown protocol, whatever the pods' stacks send by themselves. */
static __always_inline bool has_ipv6(const struct endpoint_config *self)
{
	return !without(WITHOUT_IPV6) && !address_is_zero(&self->ipv6);
}

static __always_inline bool has_ipv4(const struct endpoint_config *self)
{
	return self->ipv4;
}

static __always_inline bool own_source(const struct flow *flow, const struct endpoint_config *self, __u8 family)
{
	if (unlikely(self->flags & ENDPOINT_ANY_SOURCE))
		return true;
	if (family == FAMILY_IPV4)
		return flow->saddr.words[0] == self->ipv4;
	return address_equals_aligned(&flow->saddr, &self->ipv6);
}

enum way_kind {
	WAY_STACK,
	WAY_OUTSIDE, /* past the stack */
	WAY_TUNNEL,
	WAY_POD,
};

/* How what a pod may send goes on. */
struct way {
	enum way_kind kind;
	enum ct_status status;
	__u32 ifindex; /* of the link, or WAY_OUT; 0: the stack knows */
	__be32 node; /* at the tunnel's other end */
	mac_t host_mac;
	mac_t pod_mac;
};

#define GOES_ON 0x200

/* A pod's packet and what is known of it, beside the stack: a chain of calls has 512 bytes of that.
 *
 * One for each processor is enough. Programs of the traffic control run with bottom halves off, and so in
 * BPF_PROG_TEST_RUN, so none interrupts another; and none runs within this one, which calls no helper that sends a packet
 * there and then: bpf_redirect() and its like note where it is to go, once the program is over.
 */
struct passage {
	struct flow flow;
	struct way way;
	union ct_key key;
	__u64 tag; /* that its verdict will have: see verdict_tag() */
};

_Static_assert(sizeof(struct passage) == 176, "hive_passage");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct passage);
	__uint(max_entries, 1);
} hive_passage SEC(".maps");

/* The processor's, of a packet of which nothing is known. What is beside the flow is written before it is read. */
static __always_inline struct passage *passage_begin(void)
{
	__u32 zero = 0;
	struct passage *passage = bpf_map_lookup_elem(&hive_passage, &zero);

	if (passage)
		__builtin_memset(&passage->flow, 0, sizeof(passage->flow));
	return passage;
}

/* Send the packet its way: in one place for all that decide it, or the verifier would follow each to the end. */
static __always_inline int go_on(struct __sk_buff *skb, struct flow *flow, const struct way *way, __u8 family)
{
	switch (way->kind) {
	case WAY_TUNNEL:
		return container_to_overlay(skb, flow, way->node, way->status, family);
	case WAY_OUTSIDE:
		return pod_leaves(skb, flow, way->status, family);
	case WAY_POD:
		return hand_over(skb, flow, way->ifindex, way->host_mac, way->pod_mac, way->status, BY_PEER,
				 family);
	default:
		return ipsec() ? pod_meets_xfrm(skb, flow, way->status, family)
			       : to_stack(skb, flow, way->status, family);
	}
}

/* GOES_ON if the packet is of a flow that was let through just now, else UNDECIDED. `entry` is the flow's. */
static __always_inline int verdict_fast_path(struct __sk_buff *skb, struct passage *passage, struct ct_entry *entry,
					     bool reply, __u32 epochs, __u32 now, struct way *way, __u8 family)
{
	struct flow *flow = &passage->flow;
	const enum ct_status status = reply ? CT_REPLY : CT_ESTABLISHED;
	const struct tunnel_config *tunnel = NULL;
	const struct known_link *link = NULL;
	bool leaves = host_routing() && entry->ifindex == WAY_OUT;
	__be32 node = 0;

	/* The tag counts seconds to 256 only; the lifetime, set at each evaluation, decides which they are. */
	if (entry->lifetime != now + ct_lifetime(entry, flow) || entry->rev_nat_index != flow->rev_nat_index)
		return UNDECIDED;
	if (entry->ifindex && !leaves) {
		link = link_to(entry->ifindex, &flow->daddr, family);
		if (!link)
			tunnel = tunnel_at(entry->ifindex);
		if (link) {
			if (flow->ttl <= 1)
				return UNDECIDED;
			flow->destination = link->endpoint.id;
			flow->destination_identity = link->endpoint.identity;
			epochs += link->epoch;
		} else {
			node = tunnel ? pod_node(flow, status, family) : 0;
			if (!node)
				return UNDECIDED;
		}
	}
	if (unlikely(!verdict_holds(entry, verdict_tag(epochs, now), flow, reply, skb->len)))
		return UNDECIDED;
	way->kind = tunnel ? WAY_TUNNEL : leaves ? WAY_OUTSIDE : link ? WAY_POD : WAY_STACK;
	way->status = status;
	way->node = node;
	if (link) {
		way->ifindex = link->ifindex;
		way->host_mac = link->endpoint.host_mac;
		way->pod_mac = link->endpoint.pod_mac;
	}
	return GOES_ON;
}

/* The same by the flow's entry in either direction, the likely one first. ICMP errors are rare, and not cached; of what
 * begins or ends a connection no verdict holds, so its entry is not looked for.
 */
static __always_inline int verdict_known(struct __sk_buff *skb, struct passage *passage, bool reply, __u32 epoch,
					 __u32 now, struct way *way, __u8 family)
{
	struct ct_entry *entry;

	if (passage->flow.tcp_flags & VERDICT_UNCACHED_FLAGS)
		return UNDECIDED;
	entry = ct_entry_by(&passage->key, &passage->flow, EGRESS, reply, family);
	return entry ? verdict_fast_path(skb, passage, entry, reply, epoch, now, way, family) : UNDECIDED;
}

static __always_inline int verdict_cached(struct __sk_buff *skb, struct passage *passage, __u32 epoch, __u32 now,
					  struct way *way, __u8 family)
{
	if (unlikely(passage->flow.related))
		return UNDECIDED;
	return passage->flow.reply_likely ? verdict_known(skb, passage, true, epoch, now, way, family)
					  : verdict_known(skb, passage, false, epoch, now, way, family);
}

/* What a proxy has: the stack gets it, unless another plugin's bridge stands between. */
static __always_inline int egress_proxied(struct __sk_buff *skb, struct flow *flow,
					  const struct endpoint_config *self, enum ct_status status, __u8 family)
{
	if (self->flags & ENDPOINT_ROUTED_BY_HOST)
		return proxied_again(skb, flow);
	return pass_to_proxy(skb, flow, EGRESS, status, family);
}

/* Whether the packet may pass by the host's stack. */
static __always_inline bool takes_short_cuts(const struct endpoint_config *self, enum ct_status status,
					     const struct ct_entry *entry)
{
	if (self->flags & ENDPOINT_ROUTED_BY_HOST)
		return false;
	/* What the stack has translated on its way here it has to translate back (kube-proxy, portmap). */
	return !((status == CT_REPLY || status == CT_RELATED) && entry && entry->through_stack);
}

/* Whether the packet is for a pod of this node, and on the short cut. */
static __always_inline bool for_local_pod(const struct endpoint_config *self, const struct address_info *local,
					  enum ct_status status, const struct ct_entry *entry)
{
	return local && !(local->flags & ADDRESS_IS_HOST) && takes_short_cuts(self, status, entry);
}

/* Send what is for a service on to a backend: LB_TRANSLATED, 0 if it is for none, else the verdict. */
static __always_inline int balance(struct __sk_buff *skb, struct flow *flow, const struct endpoint_config *self,
				   __u32 now, __u8 family)
{
	if (!lb_can_balance(flow))
		return 0;
	return family == FAMILY_IPV4 ? lb4_from_pod(skb, flow, now, self->netns_cookie)
				     : lb6_from_pod(skb, flow, now, self->netns_cookie);
}

/* Conntrack's word on a packet that is on its way to its last destination. */
static __always_inline enum ct_status egress_lookup(struct flow *flow, __u32 now, __u8 family,
						    struct ct_entry **entry)
{
	enum ct_status status = flow->translated ? ct_lookup_own(flow, EGRESS, now, family, entry)
						 : ct_lookup(flow, EGRESS, now, family, entry);

	/* The same ports, once to the backend and once to the service: another flow, with other answers. */
	if (status == CT_ESTABLISHED && unlikely((*entry)->rev_nat_index != flow->rev_nat_index))
		return CT_NEW;
	return status;
}

/* Whether it goes to the stack or past it: to no pod of this node, and into no tunnel. */
static __always_inline bool leaves_by_host(const struct way *way)
{
	return way->kind != WAY_POD && way->kind != WAY_TUNNEL;
}

/* Where a pod's packet goes, and whether it may: GOES_ON, or the verdict. `flow` is read already; `epoch` is the pod's. */
static __always_inline int pod_decides(struct __sk_buff *skb, struct passage *passage,
				       const struct endpoint_config *self, __u32 epoch, __u32 now, __u8 family)
{
	struct flow *flow = &passage->flow;
	struct way *way = &passage->way;
	struct use use = { .packets = 1, .bytes = skb->len };
	const struct tunnel_config *tunnel = NULL;
	const struct address_info *local;
	enum ct_status status, received;
	struct ct_entry *entry;
	int verdict;
	bool proxied;

	verdict = balance(skb, flow, self, now, family);
	if (verdict && verdict != LB_TRANSLATED)
		return verdict;
	if (verdict == LB_TRANSLATED) {
		verdict = verdict_known(skb, passage, false, epoch, now, way, family);
		if (verdict != UNDECIDED)
			return verdict;
	}
	status = egress_lookup(flow, now, family, &entry);
	if (status != CT_NEW && (status == CT_REPLY) != flow->reply_likely &&
	    !flow->related) { /* the guess was wrong */
		verdict = verdict_fast_path(skb, passage, entry, status == CT_REPLY, epoch, now, way, family);
		if (verdict != UNDECIDED)
			return verdict;
	}
	if (status == CT_REPLY && unlikely(entry->proxy_redirect)) { /* the stack knows the proxy's socket */
		mark_write(skb, MARK_TO_PROXY);
		return egress_proxied(skb, flow, self, status, family);
	}
	if (status == CT_REPLY) {
		verdict = reply_check(skb, flow, EGRESS, entry, family);
		if (unlikely(verdict))
			return DROP(EGRESS, verdict);
	}
	if (status == CT_REPLY && unlikely(entry->node_port || entry->dsr_internal)) {
		verdict = nodeport_send_reply(skb, flow, EGRESS, now, family);
		if (verdict != UNDECIDED)
			return verdict;
	}
	if (status == CT_ESTABLISHED)
		verdict_take(entry, &use);

	/* An answer to itself, by way of a service, is for an address without an owner. */
	local = address_lookup(status == CT_REPLY && entry->lb_loopback ? &flow->saddr : &flow->daddr, family);
	way->kind = WAY_STACK;
	way->status = status;
	way->ifindex = 0;
	flow->destination = 0;
	if (for_local_pod(self, local, status, entry)) {
		way->kind = WAY_POD;
		way->ifindex = local->ifindex;
		way->host_mac = local->host_mac;
		way->pod_mac = local->pod_mac;
		flow->destination = local->endpoint_id;
		epoch += epoch_of(flow->destination);
	}
	passage->tag = verdict_tag(epoch, now);
	if (local) {
		flow->destination_identity = identity_of_local(local);
	} else {
		way->node = pod_node(flow, status, family);
		tunnel = way->node && takes_short_cuts(self, status, entry) ? tunnel_any() : NULL;
		if (tunnel) {
			way->kind = WAY_TUNNEL;
			way->ifindex = tunnel->ifindex;
		} else if (host_routing() && takes_short_cuts(self, status, entry)) {
			way->kind = WAY_OUTSIDE;
			way->ifindex = WAY_OUT;
		}
	}
	if (leaves_by_host(way) && unlikely(forges_tunnel(flow)))
		return DROP(EGRESS, DROP_ENCAP_PROHIBITED);
	verdict = unlikely(status == CT_RELATED) ? error_check(skb, flow, EGRESS, entry, family)
						 : egress_check(skb, flow, status, &use, now, family);
	if (verdict)
		return DROP(EGRESS, verdict);
	proxied = flow->proxy_port;
	if (status == CT_ESTABLISHED && unlikely(entry->proxy_redirect != proxied))
		entry->proxy_redirect = proxied; /* the answers follow what the last packet's policy was */
	if (unlikely(proxied) && proxy_takes(skb, flow, family))
		return egress_proxied(skb, flow, self, status, family);
	if (unlikely(flow->only_by_proxy))
		return DROP(EGRESS, DROP_NO_PROXY);
	verdict = leaves_by_host(way) && unlikely(host_endpoint()) ? host_guards(skb, flow, family) : NOT_THE_HOSTS;
	if (verdict != NOT_THE_HOSTS) {
		way->kind = WAY_STACK;
		return verdict ? DROP(INGRESS, verdict) : GOES_ON; /* asked every time */
	}
	if (way->kind == WAY_POD && unlikely(flow->ttl <= 1))
		return family == FAMILY_IPV6 ? hops_exceeded(skb, flow, self) : DROP(EGRESS, DROP_TTL_EXCEEDED);
	if (unlikely(self->flags & ENDPOINT_ROUTED_BY_HOST) && local && !(local->flags & ADDRESS_IS_HOST)) {
		verdict = past_stack_to_proxy(skb, flow, local, status == CT_REPLY, now, family);
		if (verdict != UNDECIDED)
			return verdict;
	}
	received = status;
	if (way->kind == WAY_POD) {
		flow->proxy_port = 0;
		verdict = ingress_check(skb, flow, use, now, family, &received);
		if (verdict)
			return DROP(INGRESS, verdict);
		if (is_proxys(flow))
			return ingress_proxied(skb, flow, status, family);
	}
	proxied |= flow->proxied;
	/* Of replies only what is one to both sides: no policy counts those. Not while a proxy is away: it is to
	 * have the flow as soon as it is back.
	 */
	if (status == CT_ESTABLISHED ? !flow->loopback && !proxied
				     : status == CT_REPLY && received == CT_REPLY && !flow->translated && !proxied)
		verdict_remember(entry, passage->tag, way->ifindex, flow);
	if (way->kind == WAY_POD)
		link_owner(way->ifindex, &epoch); /* remembered, for the packets to come */
	return GOES_ON;
}

VERIFIED_ALONE pod4_decides(struct __sk_buff *skb, struct passage *passage, const struct endpoint_config *self,
			    __u32 epoch, __u32 now)
{
	return passage && self ? pod_decides(skb, passage, self, epoch, now, FAMILY_IPV4)
			       : DROP(EGRESS, DROP_INVALID);
}

VERIFIED_ALONE pod6_decides(struct __sk_buff *skb, struct passage *passage, const struct endpoint_config *self,
			    __u32 epoch, __u32 now)
{
	return passage && self ? pod_decides(skb, passage, self, epoch, now, FAMILY_IPV6)
			       : DROP(EGRESS, DROP_INVALID);
}

static __always_inline int from_container_flow(struct __sk_buff *skb, struct passage *passage,
					       const struct endpoint_config *self, __u32 epoch, __u8 family)
{
	__u32 now = ct_now();
	struct way way;
	/* A verdict that holds is of this very second: conntrack has nothing new to note of the packet. */
	int verdict = verdict_cached(skb, passage, epoch, now, &way, family);

	if (unlikely(verdict == UNDECIDED)) {
		verdict = family == FAMILY_IPV4 ? pod4_decides(skb, passage, self, epoch, now)
						: pod6_decides(skb, passage, self, epoch, now);
		way = passage->way;
	}
	return verdict == GOES_ON ? go_on(skb, &passage->flow, &way, family) : verdict;
}

static __always_inline int from_container_ip(struct __sk_buff *skb, struct passage *passage,
					     const struct endpoint_config *self, __u32 epoch, __u8 family)
{
	struct flow *flow = &passage->flow;
	int refused = parse_network(skb, flow, family);
	bool own;

	if (refused)
		return DROP(EGRESS, refused);
	own = own_source(flow, self, family);
	if (unlikely(!own) && !(family == FAMILY_IPV6 && neighbours_source(&flow->saddr)))
		return DROP(EGRESS, DROP_INVALID_SOURCE);
	refused = parse_payload_here(skb, flow, own, family);
	if (family == FAMILY_IPV6 && !refused && flow->protocol == IPPROTO_ICMPV6) {
		if (flow->policy_port == bpf_htons(ND_SOLICIT))
			return neighbour_respond(skb, flow, self);
		if (unlikely(self->flags & (ENDPOINT_PASSES_NEIGHBOURS | ENDPOINT_ROUTED_BY_HOST)) &&
		    pod_finds_neighbours(flow) && neighbours_own_source(&flow->saddr, self))
			return TC_ACT_OK;
	}
	if (unlikely(!own))
		return DROP(EGRESS, DROP_INVALID_SOURCE);
	if (refused)
		return DROP(EGRESS, refused);
	return from_container_flow(skb, passage, self, epoch, family);
}

static __always_inline int from_container(struct __sk_buff *skb, struct passage *passage)
{
	struct flow *flow = &passage->flow;
	__u32 epoch;
	const struct endpoint_config *self = link_owner(skb->ifindex, &epoch);
	struct ethernet *eth;

	if (!self)
		return DROP(EGRESS, DROP_NO_CONFIG);
	flow->source = self->id;
	flow->source_identity = self->identity;
	if (unlikely(traces_every_packet())) {
		flow->report = CT_CAPTURE;
		send_trace_notify(skb, flow, TRACE_FROM_POD, 0, TRACED(TRACE_REASON_UNKNOWN, FAMILY_IPV4));
	}
	if (skb->vlan_present)
		return DROP(EGRESS, DROP_VLAN); /* the host would take the inner packet for an untagged one */
	eth = packet_eth(skb);
	if (!eth)
		return DROP(EGRESS, DROP_INVALID);
	if (likely(eth->protocol == bpf_htons(ETH_P_IP) && has_ipv4(self)))
		return from_container_ip(skb, passage, self, epoch, FAMILY_IPV4);
	if (eth->protocol == bpf_htons(ETH_P_IPV6) && has_ipv6(self))
		return from_container_ip(skb, passage, self, epoch, FAMILY_IPV6);
	if (eth->protocol == bpf_htons(ETH_P_ARP))
		return arp_respond(skb, self);
	if (bpf_ntohs(eth->protocol) < ETH_TYPE_MIN)
		return DROP(EGRESS, DROP_UNSUPPORTED_L2);
	return DROP(EGRESS, DROP_UNKNOWN_L3);
}
