/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets from pods: source check, load balancing, policy, and forwarding. */
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

/* Evaluate the pod's egress policy, and create the conntrack entry of a new flow; returns 0 or a drop reason. `status`
 * is the conntrack status.
 */
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

/* Return whether the pod has IPv6; otherwise its IPv6 packets are dropped as an unknown protocol. */
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
	WAY_NETDEV, /* to a native device, bypassing the stack */
	WAY_TUNNEL,
	WAY_POD,
};

/* How an allowed packet is forwarded. */
struct way {
	enum way_kind kind;
	enum ct_status status;
	__u32 ifindex; /* ifindex of the link, or WAY_NETDEV_IFINDEX; 0: the stack decides */
	__be32 node; /* remote tunnel endpoint */
	mac_t host_mac;
	mac_t pod_mac;
};

#define POD_FORWARD 0x200

/* State of a pod's packet, in a per-CPU map, because a chain of calls has only 512 bytes of stack.
 *
 * One per CPU is enough: tc programs run with bottom halves disabled, also in BPF_PROG_TEST_RUN, so none interrupts
 * another. Nor is one called within this one: bpf_redirect() and similar helpers only record the target, and the packet
 * is sent after the program.
 */
struct pod_state {
	struct flow flow;
	struct way way;
	union ct_key key;
	__u64 tag; /* tag of its verdict: see verdict_tag() */
};

_Static_assert(sizeof(struct pod_state) == 176, "hive_passage");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct pod_state);
	__uint(max_entries, 1);
} hive_passage SEC(".maps");

/* Return this CPU's state, with the flow cleared. Other fields are written before they are read. */
static __always_inline struct pod_state *pod_state_begin(void)
{
	__u32 zero = 0;
	struct pod_state *pod_state = bpf_map_lookup_elem(&hive_passage, &zero);

	if (pod_state)
		__builtin_memset(&pod_state->flow, 0, sizeof(pod_state->flow));
	return pod_state;
}

/* Forward the packet; in one place, because the verifier would follow each copy to the end. */
static __always_inline int pod_forward(struct __sk_buff *skb, struct flow *flow, const struct way *way, __u8 family)
{
	switch (way->kind) {
	case WAY_TUNNEL:
		return container_to_overlay(skb, flow, way->node, way->status, family);
	case WAY_NETDEV:
		return pod_to_netdev(skb, flow, way->status, family);
	case WAY_POD:
		return deliver_to_link(skb, flow, way->ifindex, way->host_mac, way->pod_mac, way->status, BY_PEER,
				       family);
	default:
		return ipsec() ? pod_to_xfrm(skb, flow, way->status, family)
			       : to_stack(skb, flow, way->status, family);
	}
}

/* Return POD_FORWARD if the flow has a valid cached verdict, else UNDECIDED. `entry` is the flow's. */
static __always_inline int verdict_fast_path(struct __sk_buff *skb, struct pod_state *pod_state,
					     struct ct_entry *entry, bool reply, __u32 epochs, __u32 now,
					     struct way *way, __u8 family)
{
	struct flow *flow = &pod_state->flow;
	const enum ct_status status = reply ? CT_REPLY : CT_ESTABLISHED;
	const struct tunnel_config *tunnel = NULL;
	const struct known_link *link = NULL;
	bool leaves = host_routing() && entry->ifindex == WAY_NETDEV_IFINDEX;
	__be32 node = 0;

	/* The tag has only 8 bits of the time; the lifetime, set at each evaluation, has the rest. */
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
	if (unlikely(!verdict_is_valid(entry, verdict_tag(epochs, now), flow, reply, skb->len)))
		return UNDECIDED;
	way->kind = tunnel ? WAY_TUNNEL : leaves ? WAY_NETDEV : link ? WAY_POD : WAY_STACK;
	way->status = status;
	way->node = node;
	if (link) {
		way->ifindex = link->ifindex;
		way->host_mac = link->endpoint.host_mac;
		way->pod_mac = link->endpoint.pod_mac;
	}
	return POD_FORWARD;
}

/* Look up the flow's entry and its cached verdict, for one direction. ICMP errors and packets with SYN, FIN or RST are
 * never cached.
 */
static __always_inline int verdict_lookup(struct __sk_buff *skb, struct pod_state *pod_state, bool reply,
					  __u32 epoch, __u32 now, struct way *way, __u8 family)
{
	struct ct_entry *entry;

	if (pod_state->flow.tcp_flags & VERDICT_UNCACHED_FLAGS)
		return UNDECIDED;
	entry = ct_entry_by(&pod_state->key, &pod_state->flow, EGRESS, reply, family);
	return entry ? verdict_fast_path(skb, pod_state, entry, reply, epoch, now, way, family) : UNDECIDED;
}

static __always_inline int verdict_cached(struct __sk_buff *skb, struct pod_state *pod_state, __u32 epoch,
					  __u32 now, struct way *way, __u8 family)
{
	if (unlikely(pod_state->flow.related))
		return UNDECIDED;
	return pod_state->flow.reply_likely ? verdict_lookup(skb, pod_state, true, epoch, now, way, family)
					    : verdict_lookup(skb, pod_state, false, epoch, now, way, family);
}

/* Pass a proxy's packet to the stack, or around another plugin's bridge; returns the verdict. */
static __always_inline int egress_to_proxy(struct __sk_buff *skb, struct flow *flow,
					   const struct endpoint_config *self, enum ct_status status, __u8 family)
{
	if (self->flags & ENDPOINT_ROUTED_BY_HOST)
		return redirect_to_host_ingress(skb, flow);
	return pass_to_proxy(skb, flow, EGRESS, status, family);
}

/* Return whether the packet may bypass the host's stack. */
static __always_inline bool may_bypass_stack(const struct endpoint_config *self, enum ct_status status,
					     const struct ct_entry *entry)
{
	if (self->flags & ENDPOINT_ROUTED_BY_HOST)
		return false;
	/* The stack must reverse its own NAT (kube-proxy, portmap). */
	return !((status == CT_REPLY || status == CT_RELATED) && entry && entry->through_stack);
}

/* Return whether the packet is for a local pod and may bypass the stack. */
static __always_inline bool is_for_local_pod(const struct endpoint_config *self, const struct address_info *local,
					     enum ct_status status, const struct ct_entry *entry)
{
	return local && !(local->flags & ADDRESS_IS_HOST) && may_bypass_stack(self, status, entry);
}

/* DNAT of a packet to a service: returns LB_TRANSLATED, 0 if it is not for a service, or a verdict. */
static __always_inline int pod_load_balance(struct __sk_buff *skb, struct flow *flow,
					    const struct endpoint_config *self, __u32 now, __u8 family)
{
	if (!lb_can_balance(flow))
		return 0;
	return family == FAMILY_IPV4 ? lb4_from_pod(skb, flow, now, self->netns_cookie)
				     : lb6_from_pod(skb, flow, now, self->netns_cookie);
}

/* Return the conntrack status of a packet after load balancing. */
static __always_inline enum ct_status egress_lookup(struct flow *flow, __u32 now, __u8 family,
						    struct ct_entry **entry)
{
	enum ct_status status = flow->translated ? ct_lookup_own(flow, EGRESS, now, family, entry)
						 : ct_lookup(flow, EGRESS, now, family, entry);

	/* The same tuple, once directly to the backend and once by the service, is another flow with other reverse NAT.
	 */
	if (status == CT_ESTABLISHED && unlikely((*entry)->rev_nat_index != flow->rev_nat_index))
		return CT_NEW;
	return status;
}

/* Return whether it leaves through the stack or a native device: not to a local pod, and not into the tunnel. */
static __always_inline bool leaves_through_host(const struct way *way)
{
	return way->kind != WAY_POD && way->kind != WAY_TUNNEL;
}

/* Return whether the program ends the packet's hop limit: it is for a pod, or an IPv6 packet that leaves the node. The
 * stack sends the ICMP errors of IPv4, and none about an error (RFC 4443, section 2.4); a tunnel keeps the hop limit;
 * and other plugins' bridges decrement it.
 */
static __always_inline bool hop_limit_ends(const struct flow *flow, const struct endpoint_config *self,
					   const struct way *way, const struct address_info *local, __u8 family)
{
	if (likely(flow->ttl > 1))
		return false;
	if (way->kind == WAY_POD)
		return true;
	return family == FAMILY_IPV6 && !local && leaves_through_host(way) && !flow->related &&
	       !(self->flags & ENDPOINT_ROUTED_BY_HOST) && !link_scoped(&flow->daddr);
}

/* Evaluate a packet without cached verdict: load balancing, conntrack, policy, and where to forward it. Returns POD_FORWARD
 * or a verdict. `flow` is parsed; `epoch` is the pod's.
 */
static __always_inline int pod_forward_slow_path(struct __sk_buff *skb, struct pod_state *pod_state,
						 const struct endpoint_config *self, __u32 epoch, __u32 now,
						 __u8 family)
{
	struct flow *flow = &pod_state->flow;
	struct way *way = &pod_state->way;
	struct use use = { .packets = 1, .bytes = skb->len };
	const struct tunnel_config *tunnel = NULL;
	const struct address_info *local;
	enum ct_status status, received;
	struct ct_entry *entry;
	int verdict;
	bool proxied;

	verdict = pod_load_balance(skb, flow, self, now, family);
	if (verdict && verdict != LB_TRANSLATED)
		return verdict;
	if (verdict == LB_TRANSLATED) {
		verdict = verdict_lookup(skb, pod_state, false, epoch, now, way, family);
		if (verdict != UNDECIDED)
			return verdict;
	}
	status = egress_lookup(flow, now, family, &entry);
	if (status != CT_NEW && (status == CT_REPLY) != flow->reply_likely &&
	    !flow->related) { /* the direction hint was wrong */
		verdict = verdict_fast_path(skb, pod_state, entry, status == CT_REPLY, epoch, now, way, family);
		if (verdict != UNDECIDED)
			return verdict;
	}
	if (status == CT_REPLY && unlikely(entry->proxy_redirect)) { /* the stack finds the proxy's socket */
		mark_write(skb, MARK_TO_PROXY);
		return egress_to_proxy(skb, flow, self, status, family);
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
		verdict_take_counts(entry, &use);

	/* A pod's reply to itself through a service has the loopback address as destination. */
	local = address_lookup(status == CT_REPLY && entry->lb_loopback ? &flow->saddr : &flow->daddr, family);
	way->kind = WAY_STACK;
	way->status = status;
	way->ifindex = 0;
	flow->destination = 0;
	if (is_for_local_pod(self, local, status, entry)) {
		way->kind = WAY_POD;
		way->ifindex = local->ifindex;
		way->host_mac = local->host_mac;
		way->pod_mac = local->pod_mac;
		flow->destination = local->endpoint_id;
		epoch += epoch_of(flow->destination);
	}
	pod_state->tag = verdict_tag(epoch, now);
	if (local) {
		flow->destination_identity = identity_of_local(local);
	} else {
		way->node = pod_node(flow, status, family);
		tunnel = way->node && may_bypass_stack(self, status, entry) ? tunnel_any() : NULL;
		if (tunnel) {
			way->kind = WAY_TUNNEL;
			way->ifindex = tunnel->ifindex;
		} else if (host_routing() && may_bypass_stack(self, status, entry)) {
			way->kind = WAY_NETDEV;
			way->ifindex = WAY_NETDEV_IFINDEX;
		}
	}
	if (leaves_through_host(way) && unlikely(imitates_tunnel(flow)))
		return DROP(EGRESS, DROP_ENCAP_PROHIBITED);
	verdict = unlikely(status == CT_RELATED) ? error_check(skb, flow, EGRESS, entry, family)
						 : egress_check(skb, flow, status, &use, now, family);
	if (verdict)
		return DROP(EGRESS, verdict);
	proxied = flow->proxy_port;
	if (status == CT_ESTABLISHED && unlikely(entry->proxy_redirect != proxied))
		entry->proxy_redirect = proxied; /* replies follow the policy of the last packet */
	if (unlikely(proxied) && proxy_assign_and_mark(skb, flow, family))
		return egress_to_proxy(skb, flow, self, status, family);
	if (unlikely(flow->only_by_proxy))
		return DROP(EGRESS, DROP_NO_PROXY);
	verdict = leaves_through_host(way) && unlikely(host_endpoint()) ? host_ingress_check(skb, flow, family)
									: NOT_FOR_HOST;
	if (verdict != NOT_FOR_HOST) {
		way->kind = WAY_STACK;
		return verdict ? DROP(INGRESS, verdict) : POD_FORWARD; /* not cached */
	}
	if (unlikely(hop_limit_ends(flow, self, way, local, family)))
		return family == FAMILY_IPV6 ? send_time_exceeded(skb, flow, self)
					     : DROP(EGRESS, DROP_TTL_EXCEEDED);
	if (unlikely(self->flags & ENDPOINT_ROUTED_BY_HOST) && local && !(local->flags & ADDRESS_IS_HOST)) {
		verdict = redirect_proxy_flow(skb, flow, local, status == CT_REPLY, now, family);
		if (verdict != UNDECIDED)
			return verdict;
	}
	received = status;
	if (way->kind == WAY_POD) {
		flow->proxy_port = 0;
		verdict = ingress_check(skb, flow, use, now, family, &received);
		if (verdict)
			return DROP(INGRESS, verdict);
		if (is_for_proxy(flow))
			return ingress_to_proxy(skb, flow, status, family);
	}
	proxied |= flow->proxied;
	/* Cache replies only if they are replies for both pods: policy does not count those. Not while the proxy does
	 * not listen: it must get the flow once it does.
	 */
	if (status == CT_ESTABLISHED ? !flow->loopback && !proxied
				     : status == CT_REPLY && received == CT_REPLY && !flow->translated && !proxied)
		verdict_store(entry, pod_state->tag, way->ifindex, flow);
	if (way->kind == WAY_POD)
		link_endpoint(way->ifindex, &epoch); /* fills the per-CPU link cache for the next packets */
	return POD_FORWARD;
}

VERIFIED_ALONE pod4_forward_slow_path(struct __sk_buff *skb, struct pod_state *pod_state,
				      const struct endpoint_config *self, __u32 epoch, __u32 now)
{
	return pod_state && self ? pod_forward_slow_path(skb, pod_state, self, epoch, now, FAMILY_IPV4)
				 : DROP(EGRESS, DROP_INVALID);
}

VERIFIED_ALONE pod6_forward_slow_path(struct __sk_buff *skb, struct pod_state *pod_state,
				      const struct endpoint_config *self, __u32 epoch, __u32 now)
{
	return pod_state && self ? pod_forward_slow_path(skb, pod_state, self, epoch, now, FAMILY_IPV6)
				 : DROP(EGRESS, DROP_INVALID);
}

static __always_inline int from_container_flow(struct __sk_buff *skb, struct pod_state *pod_state,
					       const struct endpoint_config *self, __u32 epoch, __u8 family)
{
	__u32 now = ct_now();
	struct way way;
	/* A valid cached verdict is of the current second, so conntrack has nothing to update. */
	int verdict = verdict_cached(skb, pod_state, epoch, now, &way, family);

	if (unlikely(verdict == UNDECIDED)) {
		verdict = family == FAMILY_IPV4 ? pod4_forward_slow_path(skb, pod_state, self, epoch, now)
						: pod6_forward_slow_path(skb, pod_state, self, epoch, now);
		way = pod_state->way;
	}
	return verdict == POD_FORWARD ? pod_forward(skb, &pod_state->flow, &way, family) : verdict;
}

static __always_inline int from_container_ip(struct __sk_buff *skb, struct pod_state *pod_state,
					     const struct endpoint_config *self, __u32 epoch, __u8 family)
{
	struct flow *flow = &pod_state->flow;
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
	return from_container_flow(skb, pod_state, self, epoch, family);
}

static __always_inline int from_container(struct __sk_buff *skb, struct pod_state *pod_state)
{
	struct flow *flow = &pod_state->flow;
	__u32 epoch;
	const struct endpoint_config *self = link_endpoint(skb->ifindex, &epoch);
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
		return DROP(EGRESS, DROP_VLAN); /* the host would treat the inner packet as untagged */
	eth = packet_eth(skb);
	if (!eth)
		return DROP(EGRESS, DROP_INVALID);
	if (likely(eth->protocol == bpf_htons(ETH_P_IP) && has_ipv4(self)))
		return from_container_ip(skb, pod_state, self, epoch, FAMILY_IPV4);
	if (eth->protocol == bpf_htons(ETH_P_IPV6) && has_ipv6(self))
		return from_container_ip(skb, pod_state, self, epoch, FAMILY_IPV6);
	if (eth->protocol == bpf_htons(ETH_P_ARP))
		return arp_respond(skb, self);
	if (bpf_ntohs(eth->protocol) < ETH_TYPE_MIN)
		return DROP(EGRESS, DROP_UNSUPPORTED_L2);
	return DROP(EGRESS, DROP_UNKNOWN_L3);
}
