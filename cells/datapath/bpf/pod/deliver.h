/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The last part of every way to a local pod: its ingress policy, then its link. */
#pragma once

#include <linux/pkt_cls.h>

#include "ct/conntrack.h"
#include "ct/quote.h"
#include "lb/error.h"
#include "lb/pod.h"
#include "lib/events.h"
#include "lib/identity.h"
#include "lib/metrics.h"
#include "lib/rewrite.h"
#include "policy/policy.h"
#include "proxy/redirect.h"

/* Whether the packet is a pod's to itself, by way of a service: policy has no say in that. */
static __always_inline bool own_service(struct flow *flow, const struct ct_entry *entry, enum ct_status status,
					__u8 family)
{
	if (family != FAMILY_IPV4)
		return false;
	if (status == CT_ESTABLISHED)
		return entry->lb_loopback;
	if (likely(flow->saddr.words[0] != config.service_loopback))
		return false;
	entry = ct_entry_of(flow, EGRESS, false, family);
	flow->loopback = entry && entry->lb_loopback;
	return flow->loopback;
}

/* The identity of the flow's client, now: that of its last packet, unless the address has another identity by now.
 * Of what is not the sender's own address (the stack, another node or a proxy has translated it) the entry alone knows.
 */
static __always_inline __u32 asker_of(const struct flow *flow, const struct ct_entry *entry, __u8 family)
{
	__u32 was = entry->source_identity, now;

	if (entry->through_stack)
		return was;
	now = identity_at(&flow->daddr, family);
	if (now < IDENTITY_FIRST) /* reserved */
		return is_cidr(was) ? world_identity(family) : was;
	if (was == IDENTITY_WORLD || was == IDENTITY_WORLD_IPV4 || was == IDENTITY_WORLD_IPV6)
		return is_cidr(now) ? now : was;
	return was < IDENTITY_FIRST ? was : now;
}

/* Whether the flow's own packets are let through under the policy of now, so that what answers them is too. */
static __always_inline bool goes_on(struct ct_entry *entry, const struct flow *flow)
{
	__u32 epochs = epoch_of(flow->destination) + (flow->source ? epoch_of(flow->source) : 0);

	return verdict_holds(entry, verdict_tag(epochs, ct_now()), flow, true, 0);
}

/* 0 if policy still allows the flow that the packet answers, as it began; else the reason to drop the packet, which then
 * does not prolong the flow. The packet travels in `direction`. Not evaluated: what a proxy has, and what a pod sends to
 * itself.
 */
VERIFIED_ALONE reply_check(struct __sk_buff *skb, struct flow *flow, __u32 direction, struct ct_entry *entry,
			   __u32 family)
{
	bool in = direction == INGRESS;
	__u32 peer;
	int refused;

	if (!flow || !entry)
		return DROP_POLICY;
	if (unlikely(entry->lb_loopback || entry->proxy_redirect) || (in && goes_on(entry, flow)))
		return 0;
	peer = in ? identity_at(&flow->saddr, family) : asker_of(flow, entry, family);
	refused = policy_check_answered(skb, flow, in ? EGRESS : INGRESS, peer, family);
	if (unlikely(refused))
		entry->lifetime = flow->lifetime;
	return refused;
}

/* 0 if the pod accepts the packet, else the reason to drop it. `*status` is its conntrack's word on it. */
static __always_inline int ingress_check(struct __sk_buff *skb, struct flow *flow, struct use use, __u32 now,
					 __u8 family, enum ct_status *status)
{
	struct ct_entry *entry;
	int refused;

	*status = ct_lookup(flow, INGRESS, now, family, &entry);
	if (unlikely(flow->related) && !flow->by_proxy && proxy_erred(skb, flow, family)) {
		flow->to_asker = true;
		return 0;
	}
	if (*status == CT_RELATED)
		return family == FAMILY_IPV4 ? lb4_error(skb, flow) : lb6_error(skb, flow);
	if (*status == CT_REPLY) {
		flow->proxied = entry->proxy_redirect;
		if (unlikely(flow->proxied) && !flow->by_proxy && proxy_waits(skb, flow, family)) {
			flow->to_asker = true;
			return 0;
		}
		refused = reply_check(skb, flow, INGRESS, entry, family);
		if (unlikely(refused))
			return refused;
		if (likely(!entry->rev_nat_index))
			return 0;
		return family == FAMILY_IPV4 ? lb4_answer(skb, flow, entry->rev_nat_index, entry->lb_loopback)
					     : lb6_answer(skb, flow, entry->rev_nat_index);
	}
	/* What a proxy started by itself in the pod's name is known by its answers alone. */
	if (*status == CT_NEW && unlikely(answers_begin(flow)) && !flow->by_proxy &&
	    proxy_waits(skb, flow, family)) {
		*status = CT_REPLY;
		flow->proxied = true;
		flow->to_asker = true;
		return flow->tcp_flags & TCP_RST ? 0 : ct_create_answered(flow, now, family);
	}
	if (!own_service(flow, entry, *status, family)) {
		refused = policy_check(skb, flow, INGRESS, *status == CT_NEW, &use, family);
		/* Path MTU discovery is not for policy to break: any router on the way of the pod's packets may say so. */
		if (refused)
			return unlikely(flow->frag_needed) && is_about_flow(skb, flow, INGRESS, now, family)
				       ? 0
				       : refused;
	}
	if (*status == CT_NEW)
		return ct_create(flow, INGRESS, now, family);
	if (unlikely(entry->source_identity != flow->source_identity))
		entry->source_identity = flow->source_identity;
	/* The answers go the way the last packet came. */
	if (unlikely(entry->through_stack != flow->through_stack || entry->node_port != flow->node_port ||
		     entry->dsr_internal != flow->dsr)) {
		entry->through_stack = flow->through_stack;
		entry->node_port = flow->node_port;
		entry->dsr_internal = flow->dsr;
		entry->verdict = 0;
	}
	return 0;
}

/* Whether the answers to what the stack brings have to pass it, too: with host routing it brings what it has translated.
 * Not to what a proxy sends in a pod's name: the stack would find the proxy's socket (early demux), and drop what belongs
 * to a socket of its own and is for the pod.
 */
static __always_inline bool answers_pass_stack(const struct flow *flow)
{
	return host_routing() && !flow->by_proxy;
}

/* A packet that a layer 7 proxy has let in: policy is not evaluated again, and the answers are the proxy's. */
static __always_inline int admit(struct flow *flow, __u32 now, __u8 family)
{
	struct ct_entry *entry;

	flow->from_proxy = true;
	if (ct_lookup(flow, INGRESS, now, family, &entry) == CT_NEW)
		return ct_create(flow, INGRESS, now, family);
	if (unlikely(!entry->proxy_redirect)) {
		entry->proxy_redirect = 1;
		entry->verdict = 0;
	}
	return 0;
}

/* Whether a proxy has the flow that the packet goes on with, or answers. */
static __always_inline bool proxy_has(struct __sk_buff *skb, const struct flow *flow, bool reply, __u32 now,
				      __u8 family)
{
	const struct ct_entry *entry = ct_entry_of(flow, INGRESS, reply, family);

	if (entry && entry->lifetime >= now)
		return entry->proxy_redirect;
	return reply && answers_begin(flow) && proxy_waits(skb, flow, family);
}

/* Bring the packet to the link of a pod that the stack serves, where a program enforces the pod's policy and finds the proxy;
 * the verdict, or UNDECIDED if the stack can. Of a proxy's flow it cannot: it would find the proxy's socket first (early
 * demux), and drop what belongs to a socket of its own and is to be sent on.
 */
static __always_inline int past_stack_to_proxy(struct __sk_buff *skb, const struct flow *flow,
					       const struct address_info *local, bool reply, __u32 now, __u8 family)
{
	if (flow->ttl <= 1 || likely(!proxy_has(skb, flow, reply, now, family)))
		return UNDECIDED;
	if (!hop(skb, local->host_mac, local->pod_mac, family))
		return DROP(INGRESS, DROP_INVALID);
	mark_identity(skb, flow->source_identity);
	return bpf_redirect(local->ifindex, 0);
}

/* How the packet enters the pod. */
enum entrance {
	BY_PEER, /* straight to the pod's end of the link: from a program at ingress only */
	BY_LINK, /* through the host's end */
};

/* Put the packet, which the pod accepts, on the pod's link; the verdict. */
static __always_inline int hand_over(struct __sk_buff *skb, const struct flow *flow, __u32 ifindex, mac_t host_mac,
				     mac_t pod_mac, __u8 status, enum entrance entrance, __u8 family)
{
	if (!hop(skb, host_mac, pod_mac, family))
		return DROP(INGRESS, DROP_INVALID);
	count(skb, REASON_FORWARDED, INGRESS);
	if (unlikely(flow->report))
		send_trace_notify(skb, flow, TRACE_TO_POD, ifindex, TRACED(status, family));
	return entrance == BY_PEER ? bpf_redirect_peer(ifindex, 0) : bpf_redirect(ifindex, 0);
}
