// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* One generation of the datapath: what a pod sends, what the host sends to pods. IPv4 and IPv6.
 *
 * One set of programs serves all pods; what differs between pods is in maps. Reached by tail call
 * from dispatch.c.
 */
#include <linux/pkt_cls.h>

#include "arp.h"
#include "deliver.h"
#include "icmp6.h"
#include "identity.h"
#include "links.h"
#include "neighbours.h"
#include "network.h"

/* Turn a drop into its count, its event and the action. */
static __always_inline int finish(struct __sk_buff *skb, const struct flow *flow, int verdict)
{
	if (likely(!DROPPED(verdict)))
		return verdict;
	count(skb, DROP_REASON(verdict), DROP_DIRECTION(verdict));
	tell_drop(skb, flow, DROP_REASON(verdict), DROP_DIRECTION(verdict));
	return TC_ACT_SHOT;
}

static __always_inline int to_stack(struct __sk_buff *skb, const struct flow *flow, enum ct_status status, __u8 family)
{
	count(skb, REASON_FORWARDED, EGRESS);
	if (unlikely(flow->report))
		tell_trace(skb, flow, TRACE_TO_STACK, 0, TRACED(status, family));
	return TC_ACT_OK;
}

/* 0 if the pod may send the packet, else the reason to drop it. `status` is conntrack's word on it. */
static __always_inline int egress_check(struct __sk_buff *skb, struct flow *flow, enum ct_status status,
					const struct use *use, __u32 now, __u8 family)
{
	int refused = policy_check(skb, flow, EGRESS, status == CT_NEW, use, family);

	if (refused)
		return refused;
	return status == CT_NEW ? ct_create(flow, EGRESS, now, family) : 0;
}

/* On a node without IPv6 it is a protocol nobody speaks, whatever the pods' stacks say by themselves. */
static __always_inline bool has_ipv6(const struct endpoint_config *self)
{
	const struct address *ip = &self->ipv6;

	return ip->words[0] | ip->words[1] | ip->words[2] | ip->words[3];
}

static __always_inline bool own_source(const struct flow *flow, const struct endpoint_config *self, __u8 family)
{
	if (unlikely(self->flags & ENDPOINT_ANY_SOURCE))
		return true;
	if (family == FAMILY_IPV4)
		return flow->saddr.words[0] == self->ipv4;
	return address_equals(&flow->saddr, &self->ipv6);
}

#define UNDECIDED 0x10000 /* neither an action nor a drop */

/* Pass on a packet of a flow that was let through just now, or leave it UNDECIDED. */
static __always_inline int spare(struct __sk_buff *skb, struct flow *flow, struct ct_entry *entry, __u32 epochs,
				 __u32 now, __u8 family)
{
	const struct known_link *link = NULL;

	/* The tag counts seconds to 256 only; the lifetime, set at each evaluation, tells which they are. */
	if (entry->lifetime != now + ct_lifetime(entry, flow))
		return UNDECIDED;
	if (entry->ifindex) {
		link = link_to(entry->ifindex, &flow->daddr, family);
		if (!link || flow->ttl <= 1)
			return UNDECIDED;
		flow->destination = link->endpoint.id;
		flow->destination_identity = link->endpoint.identity;
		epochs += link->epoch;
	}
	if (unlikely(!verdict_holds(entry, verdict_tag(epochs, now), flow, skb->len)))
		return UNDECIDED;
	if (!link)
		return to_stack(skb, flow, CT_ESTABLISHED, family);
	return hand_over(skb, flow, link->ifindex, link->endpoint.host_mac, link->endpoint.pod_mac, CT_ESTABLISHED,
			 BY_PEER, family);
}

/* Where a pod's packet goes, and whether it may. `flow` is read already; `epoch` is the pod's. */
static __always_inline int pod_sends_flow(struct __sk_buff *skb, struct flow *flow, const struct endpoint_config *self,
					  __u32 epoch, __u8 family)
{
	struct use use = { .packets = 1, .bytes = skb->len };
	const struct address_info *local;
	struct ct_entry *entry;
	enum ct_status status;
	__u32 now = ct_now();
	int verdict;
	bool to_pod;
	__u64 tag;

	/* A verdict that holds is of this very second: conntrack has nothing new to note of the packet. */
	if (likely(!flow->reply_likely)) {
		entry = ct_entry_of(flow, EGRESS, false, family);
		verdict = entry ? spare(skb, flow, entry, epoch, now, family) : UNDECIDED;
		if (likely(verdict != UNDECIDED))
			return verdict;
	}
	status = ct_lookup(flow, EGRESS, now, family, &entry);
	if (status == CT_ESTABLISHED) {
		verdict = flow->reply_likely ? spare(skb, flow, entry, epoch, now, family) : UNDECIDED;
		if (verdict != UNDECIDED)
			return verdict; /* the guess was wrong: no answer, though from the lower port */
		verdict_take(entry, &use);
	}

	local = address_lookup(&flow->daddr, family);
	to_pod = local && !(local->flags & ADDRESS_IS_HOST) && !(self->flags & ENDPOINT_UNROUTED);
	flow->destination = to_pod ? local->endpoint_id : 0;
	if (to_pod && unlikely(flow->ttl <= 1))
		return family == FAMILY_IPV6 ? hops_exceeded(skb, self) : DROP(EGRESS, DROP_TTL_EXCEEDED);
	tag = verdict_tag(epoch + (to_pod ? epoch_of(flow->destination) : 0), now);
	flow->destination_identity = local ? identity_of_local(local) : identity_of(&flow->daddr, family);
	if (status == CT_NEW || status == CT_ESTABLISHED) {
		verdict = egress_check(skb, flow, status, &use, now, family);
		if (verdict)
			return DROP(EGRESS, verdict);
	}
	if (to_pod) {
		verdict = ingress_check(skb, flow, use, now, family);
		if (verdict)
			return DROP(INGRESS, verdict);
	}
	if (status == CT_ESTABLISHED)
		verdict_remember(entry, tag, to_pod ? local->ifindex : 0, flow);
	if (!to_pod)
		return to_stack(skb, flow, status, family);
	link_owner(local->ifindex, &epoch); /* remembered, for the packets to come */
	return hand_over(skb, flow, local->ifindex, local->host_mac, local->pod_mac, status, BY_PEER, family);
}

static __always_inline int pod_sends_ip(struct __sk_buff *skb, struct flow *flow, const struct endpoint_config *self,
					__u32 epoch, __u8 family)
{
	int refused = parse(skb, flow, family);

	if (family == FAMILY_IPV6 && !refused && flow->protocol == IPPROTO_ICMPV6 &&
	    flow->policy_port == bpf_htons(ND_SOLICIT))
		return neighbour_respond(skb, flow, self);
	if (family == FAMILY_IPV6 && !refused && unlikely(self->flags & ENDPOINT_PASSES_NEIGHBOURS) &&
	    pod_finds_neighbours(flow))
		return TC_ACT_OK;
	if (refused != DROP_INVALID && !own_source(flow, self, family))
		return DROP(EGRESS, DROP_INVALID_SOURCE);
	if (refused)
		return DROP(EGRESS, refused);
	return pod_sends_flow(skb, flow, self, epoch, family);
}

static __always_inline int pod_sends(struct __sk_buff *skb, struct flow *flow)
{
	__u32 epoch;
	const struct endpoint_config *self = link_owner(skb->ifindex, &epoch);
	struct ethernet *eth;

	if (!self)
		return DROP(EGRESS, DROP_NO_CONFIG);
	flow->source = self->id;
	flow->source_identity = self->identity;
	if (unlikely(tells_all())) {
		flow->report = CT_CAPTURE;
		tell_trace(skb, flow, TRACE_FROM_POD, 0, TRACED(TRACE_REASON_UNKNOWN, FAMILY_IPV4));
	}
	if (skb->vlan_present)
		return DROP(EGRESS, DROP_VLAN); /* the host would take the inner packet for an untagged one */
	eth = packet_eth(skb);
	if (!eth)
		return DROP(EGRESS, DROP_INVALID);
	if (likely(eth->protocol == bpf_htons(ETH_P_IP)))
		return pod_sends_ip(skb, flow, self, epoch, FAMILY_IPV4);
	if (eth->protocol == bpf_htons(ETH_P_IPV6) && has_ipv6(self))
		return pod_sends_ip(skb, flow, self, epoch, FAMILY_IPV6);
	if (eth->protocol == bpf_htons(ETH_P_ARP))
		return arp_respond(skb, self);
	if (bpf_ntohs(eth->protocol) < ETH_TYPE_MIN)
		return DROP(EGRESS, DROP_UNSUPPORTED_L2);
	return DROP(EGRESS, DROP_UNKNOWN_L3);
}

static __always_inline bool own_destination(const struct flow *flow, const struct endpoint_config *self, __u8 family)
{
	if (family == FAMILY_IPV4)
		return flow->daddr.words[0] == self->ipv4;
	return address_equals(&flow->daddr, &self->ipv6);
}

/* What comes to a pod by its link, from the stack or from a bridge: its ingress policy, and nothing else.
 *
 * A bridge also brings what is for others, or for all: that is no connection of this pod's.
 */
static __always_inline int pod_gets_ip(struct __sk_buff *skb, struct flow *flow, const struct endpoint_config *self,
				       __u8 family)
{
	struct use use = { .packets = 1, .bytes = skb->len };
	int refused = parse(skb, flow, family);

	if (family == FAMILY_IPV6 && !refused && finds_neighbours(flow))
		return TC_ACT_OK;
	if (family == FAMILY_IPV6 && !has_ipv6(self))
		return DROP(INGRESS, DROP_UNKNOWN_L3);
	if (refused)
		return DROP(INGRESS, refused);
	flow->source_identity = identity_of(&flow->saddr, family);
	refused = own_destination(flow, self, family) ? ingress_check(skb, flow, use, ct_now(), family)
						      : policy_check(skb, flow, INGRESS, false, &use, family);
	if (refused)
		return DROP(INGRESS, refused);
	count(skb, REASON_FORWARDED, INGRESS);
	if (unlikely(flow->report))
		tell_trace(skb, flow, TRACE_TO_POD, skb->ifindex, TRACED(TRACE_REASON_UNKNOWN, family));
	return TC_ACT_OK;
}

static __always_inline int pod_gets(struct __sk_buff *skb, struct flow *flow)
{
	__u32 epoch;
	const struct endpoint_config *self = link_owner(skb->ifindex, &epoch);
	struct ethernet *eth;

	if (!self)
		return DROP(INGRESS, DROP_NO_CONFIG);
	flow->destination = self->id;
	flow->destination_identity = self->identity;
	if (skb->vlan_present)
		return DROP(INGRESS, DROP_VLAN);
	eth = packet_eth(skb);
	if (!eth)
		return DROP(INGRESS, DROP_INVALID);
	if (likely(eth->protocol == bpf_htons(ETH_P_IP)))
		return pod_gets_ip(skb, flow, self, FAMILY_IPV4);
	if (eth->protocol == bpf_htons(ETH_P_IPV6))
		return pod_gets_ip(skb, flow, self, FAMILY_IPV6);
	if (eth->protocol == bpf_htons(ETH_P_ARP))
		return TC_ACT_OK;
	if (bpf_ntohs(eth->protocol) < ETH_TYPE_MIN)
		return DROP(INGRESS, DROP_UNSUPPORTED_L2);
	return DROP(INGRESS, DROP_UNKNOWN_L3);
}

static __always_inline int host_sends_ip(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	struct use use = { .packets = 1, .bytes = skb->len };
	const struct address_info *local;
	int refused = parse(skb, flow, family);

	if (family == FAMILY_IPV6 && refused != DROP_INVALID && link_scoped(&flow->daddr))
		return TC_ACT_OK;
	if (refused)
		return DROP(INGRESS, refused);
	local = address_lookup(&flow->daddr, family);
	if (!local)
		return DROP(INGRESS, DROP_UNROUTABLE); /* handed back, the stack would send it here again */
	if (local->flags & ADDRESS_IS_HOST)
		return TC_ACT_OK;
	flow->destination = local->endpoint_id;
	flow->destination_identity = local->identity;
	flow->source_identity = identity_of(&flow->saddr, family);
	if (flow->ttl <= 1)
		return DROP(INGRESS, DROP_TTL_EXCEEDED);
	refused = ingress_check(skb, flow, use, ct_now(), family);
	if (refused)
		return DROP(INGRESS, refused);
	return hand_over(skb, flow, local->ifindex, local->host_mac, local->pod_mac, TRACE_REASON_UNKNOWN, BY_LINK,
			 family);
}

/* What passes cilium_host reaches the host again through cilium_net: address it so. */
static __always_inline int pass_to_net(struct __sk_buff *skb)
{
	const struct node_config *node = node_facts();
	struct ethernet *eth = packet_eth(skb);

	if (node && eth)
		mac_write(eth->destination, node->net_mac);
	return TC_ACT_OK;
}

static __always_inline int host_sends(struct __sk_buff *skb, struct flow *flow)
{
	struct ethernet *eth = packet_eth(skb);
	int verdict = TC_ACT_OK;

	if (!eth)
		return DROP(INGRESS, DROP_INVALID);
	if (eth->protocol == bpf_htons(ETH_P_IP))
		verdict = host_sends_ip(skb, flow, FAMILY_IPV4);
	else if (eth->protocol == bpf_htons(ETH_P_IPV6))
		verdict = host_sends_ip(skb, flow, FAMILY_IPV6);
	return verdict == TC_ACT_OK ? pass_to_net(skb) : verdict;
}

SEC("tc")
int hive_from_pod(struct __sk_buff *skb)
{
	struct flow flow = {};

	skb->queue_mapping = 0; /* the pod's choice of queue means nothing to the host's devices */
	return finish(skb, &flow, pod_sends(skb, &flow));
}

SEC("tc")
int hive_from_host(struct __sk_buff *skb)
{
	struct flow flow = {};

	return finish(skb, &flow, host_sends(skb, &flow));
}

SEC("tc")
int hive_to_pod(struct __sk_buff *skb)
{
	struct flow flow = {};

	return finish(skb, &flow, pod_gets(skb, &flow));
}

/* Everything may reach the host: it has no policy of its own. */
SEC("tc")
int hive_to_host(struct __sk_buff *skb)
{
	(void)skb;
	return TC_ACT_OK;
}

char _license[] SEC("license") = "Dual BSD/GPL";
