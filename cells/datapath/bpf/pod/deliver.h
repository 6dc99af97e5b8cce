/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Delivery to a local pod: ingress policy, then its link. */
#pragma once

#include <linux/pkt_cls.h>

#include "ct/conntrack.h"
#include "ct/quote.h"
#include "lb/icmp_error.h"
#include "lb/pod.h"
#include "lib/events.h"
#include "lib/identity.h"
#include "lib/metrics.h"
#include "lib/rewrite.h"
#include "policy/policy.h"
#include "proxy/redirect.h"

/* Return whether the pod sent the packet to itself through a service: policy does not apply. */
static __always_inline bool is_own_service(struct flow *flow, const struct ct_entry *entry, enum ct_status status,
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

/* Return the current identity of the flow's client: that of its last packet, unless the identity of its address changed
 * since. If the stack, another node or a proxy translated the source address, only the entry has the identity.
 */
static __always_inline __u32 client_identity_now(const struct address *asker, __u32 was, bool through_stack,
						 __u8 family)
{
	__u32 now;

	if (through_stack)
		return was;
	now = identity_at(asker, family);
	if (now < IDENTITY_FIRST) /* reserved */
		return is_cidr(was) ? world_identity(family) : was;
	if (was == IDENTITY_WORLD || was == IDENTITY_WORLD_IPV4 || was == IDENTITY_WORLD_IPV6)
		return is_cidr(now) ? now : was;
	return was < IDENTITY_FIRST ? was : now;
}

/* Return whether the flow has a valid cached verdict, so that replies pass, too. */
static __always_inline bool has_valid_verdict(struct ct_entry *entry, const struct flow *flow, __u32 now)
{
	__u32 epochs = epoch_of(flow->destination) + (unlikely(flow->source) ? epoch_of(flow->source) : 0);

	return verdict_is_valid(entry, verdict_tag(epochs, now), flow, true, 0);
}

/* Evaluate current policy for the flow that the packet replies to; returns 0 or a drop reason, and then the packet does
 * not extend the flow. `direction` is the packet's. Flows of proxies and of a pod with itself are not evaluated.
 */
VERIFIED_ALONE reply_check(struct __sk_buff *skb, struct flow *flow, __u32 direction, struct ct_entry *entry,
			   __u32 family)
{
	bool in = direction == INGRESS;
	__u32 peer;
	int refused;

	if (!flow || !entry)
		return DROP_POLICY;
	if (unlikely(entry->lb_loopback || entry->proxy_redirect))
		return 0;
	peer = in ? identity_at(&flow->saddr, family)
		  : client_identity_now(&flow->daddr, entry->source_identity, entry->through_stack, family);
	refused = policy_check_reply(skb, flow, in ? EGRESS : INGRESS, peer, family);
	if (unlikely(refused))
		entry->lifetime = flow->lifetime;
	return refused;
}

/* The flow of an ICMP error's embedded packet, packed into 64 bits: its source identity, destination port (ICMP: type)
 * and protocol. Lookup and evaluation are separate subprograms, because callers do not have enough stack for both.
 */
#define ABOUT(asker, port, protocol) ((__u64)(asker) | (__u64)(port) << 32 | (__u64)(protocol) << 48)
#define ABOUT_CLIENT(about) ((__u32)(about))
#define ABOUT_PORT(about) ((__be16)((about) >> 32))
#define ABOUT_PROTOCOL(about) ((__u8)((about) >> 48))
#define ABOUT_OWN (1ULL << 56) /* the pod started the flow */
#define ABOUT_FLOW (1ULL << 57) /* the pod has a flow with the address at the error's other end */
#define ABOUT_EXEMPT (1ULL << 58) /* policy does not apply: a proxy's flow, or of a pod with itself */
#define ABOUT_THROUGH_STACK (1ULL << 59) /* the stack translated the address: see client_identity_now() */

static __always_inline __u64 embedded_flow(struct __sk_buff *skb, const struct flow *flow, enum direction direction,
					   __u8 family)
{
	struct quote quote = {};
	struct flow *about = &quote.about;
	struct ct_entry *entry;
	__be16 port;
	bool reply;

	entry = embedded_ct_entry(skb, flow, direction, ct_now(), &quote, &reply, family);
	if (!entry || !address_equals(&about->saddr, &flow->daddr) || !address_equals(&about->daddr, &flow->saddr))
		return 0;
	if (unlikely(entry->lb_loopback || entry->proxy_redirect))
		return ABOUT_FLOW | ABOUT_EXEMPT;
	port = reply ? about->sport : about->dport;
	if (quotes_echo(&quote))
		port = bpf_htons(family == FAMILY_IPV4 ? ICMP_ECHO : ICMPV6_ECHO_REQUEST);
	return ABOUT_FLOW | ((direction == INGRESS) != reply ? ABOUT_OWN : 0) |
	       (entry->through_stack ? ABOUT_THROUGH_STACK : 0) |
	       ABOUT(entry->source_identity, port, about->protocol);
}

VERIFIED_ALONE_U64 embedded_flow4(struct __sk_buff *skb, const struct flow *flow, enum direction direction)
{
	return flow ? embedded_flow(skb, flow, direction, FAMILY_IPV4) : 0;
}

VERIFIED_ALONE_U64 embedded_flow6(struct __sk_buff *skb, const struct flow *flow, enum direction direction)
{
	return flow ? embedded_flow(skb, flow, direction, FAMILY_IPV6) : 0;
}

/* Return whether policy allows the flow of the embedded packet of an error in this `direction`. Restores `flow`, the
 * error's.
 */
static __always_inline bool embedded_flow_allowed(struct flow *flow, enum direction direction, __u64 about,
						  __u8 family)
{
	const __u32 source_identity = flow->source_identity, destination_identity = flow->destination_identity;
	const __u16 source = flow->source, destination = flow->destination;
	const __u16 pod = direction == EGRESS ? source : destination;
	const __be16 policy_port = flow->policy_port;
	const __u8 protocol = flow->protocol;
	const struct address *other = direction == EGRESS ? &flow->daddr : &flow->saddr;
	const bool own = about & ABOUT_OWN;
	struct use use = {};
	__u32 peer;
	int answer;

	peer = own ? identity_at(other, family)
		   : client_identity_now(other, ABOUT_CLIENT(about), about & ABOUT_THROUGH_STACK, family);
	flow->source = pod;
	flow->destination = pod;
	flow->source_identity = peer;
	flow->destination_identity = peer;
	flow->policy_port = ABOUT_PORT(about);
	flow->protocol = ABOUT_PROTOCOL(about);
	answer = policy_evaluate(flow, own ? EGRESS : INGRESS, &use, policy_cidr_identity(other, peer, family));
	flow->source = source;
	flow->destination = destination;
	flow->source_identity = source_identity;
	flow->destination_identity = destination_identity;
	flow->policy_port = policy_port;
	flow->protocol = protocol;
	return !REFUSED(answer) || in_audit_mode(pod);
}

/* Return 0 if policy allows the error, or the flow of its embedded packet; else a drop reason. */
VERIFIED_ALONE error_allowed(struct __sk_buff *skb, struct flow *flow, enum direction direction, __u64 about,
			     __u32 family)
{
	struct use use = {};

	if (!flow)
		return DROP_POLICY;
	if (about & ABOUT_FLOW && embedded_flow_allowed(flow, direction, about, family))
		return 0;
	use.packets = 1;
	use.bytes = skb->len;
	return policy_check(skb, flow, direction, false, &use, family);
}

/* Evaluate an ICMP error between two addresses that have a flow; returns 0 or a drop reason, and then it does not
 * extend the RELATED entry. If it is not about such a flow, or if policy denies that flow, the error itself is
 * evaluated.
 */
static __always_inline int error_check(struct __sk_buff *skb, struct flow *flow, enum direction direction,
				       struct ct_entry *entry, __u8 family)
{
	__u64 about =
		family == FAMILY_IPV4 ? embedded_flow4(skb, flow, direction) : embedded_flow6(skb, flow, direction);
	int refused;

	if (about & ABOUT_EXEMPT)
		return 0;
	refused = error_allowed(skb, flow, direction, about, family);
	if (refused)
		entry->lifetime = flow->lifetime;
	return refused;
}

/* Evaluate ingress policy of a local pod, with conntrack and reverse NAT; returns 0 or a drop reason. `*status` is the
 * conntrack status.
 */
static __always_inline int ingress_check(struct __sk_buff *skb, struct flow *flow, struct use use, __u32 now,
					 __u8 family, enum ct_status *status)
{
	struct ct_entry *entry;
	int refused;

	*status = ct_lookup(flow, INGRESS, now, family, &entry);
	if (unlikely(flow->related) && !flow->by_proxy && is_error_for_proxy(skb, flow, family)) {
		flow->to_proxy_client = true;
		return 0;
	}
	if (*status == CT_RELATED) {
		refused = error_check(skb, flow, INGRESS, entry, family);
		if (unlikely(refused))
			return refused;
		return family == FAMILY_IPV4 ? lb4_rev_nat_icmp_error(skb, flow)
					     : lb6_rev_nat_icmp_error(skb, flow);
	}
	if (*status == CT_REPLY) {
		flow->proxied = entry->proxy_redirect;
		if (unlikely(flow->proxied) && !flow->by_proxy && proxy_has_socket(skb, flow, family)) {
			flow->to_proxy_client = true;
			return 0;
		}
		refused = likely(has_valid_verdict(entry, flow, now))
				  ? 0
				  : reply_check(skb, flow, INGRESS, entry, family);
		if (unlikely(refused))
			return refused;
		if (likely(!entry->rev_nat_index))
			return 0;
		return family == FAMILY_IPV4 ? lb4_rev_nat(skb, flow, entry->rev_nat_index, entry->lb_loopback)
					     : lb6_rev_nat(skb, flow, entry->rev_nat_index);
	}
	/* Connections that a proxy starts with the pod's address are only seen by their replies. */
	if (*status == CT_NEW && unlikely(is_first_reply(flow)) && !flow->by_proxy &&
	    proxy_has_socket(skb, flow, family)) {
		*status = CT_REPLY;
		flow->proxied = true;
		flow->to_proxy_client = true;
		return flow->tcp_flags & TCP_RST ? 0 : ct_create_from_reply(flow, now, family);
	}
	if (!is_own_service(flow, entry, *status, family)) {
		refused = policy_check(skb, flow, INGRESS, *status == CT_NEW, &use, family);
		/* Policy must not break path MTU discovery: any router on the path may send these errors. */
		if (refused)
			return unlikely(flow->frag_needed) && is_error_about_flow(skb, flow, INGRESS, now, family)
				       ? 0
				       : refused;
		/* The ports may be reused from a connection under an earlier policy. */
		if (*status == CT_ESTABLISHED && unlikely(entry->proxy_redirect != !!flow->proxy_port))
			entry->proxy_redirect = !!flow->proxy_port;
	}
	if (*status == CT_NEW)
		return ct_create(flow, INGRESS, now, family);
	if (unlikely(entry->source_identity != flow->source_identity))
		entry->source_identity = flow->source_identity;
	/* Replies take the path of the last packet. */
	if (unlikely(entry->through_stack != flow->through_stack || entry->node_port != flow->node_port ||
		     entry->dsr_internal != flow->dsr)) {
		entry->through_stack = flow->through_stack;
		entry->node_port = flow->node_port;
		entry->dsr_internal = flow->dsr;
		entry->verdict = 0;
	}
	return 0;
}

/* Return whether replies to a packet from the stack must pass it, too: with host routing, the stack delivers only
 * packets that it translated. Not for packets of a proxy with a pod's address: the stack would find the proxy's socket
 * (early demux), and drop the packet, because it is not for the host.
 */
static __always_inline bool replies_need_stack(const struct flow *flow)
{
	return host_routing() && !flow->by_proxy;
}

/* Accept a packet from an L7 proxy: policy is not evaluated again, and replies go to the proxy. Returns 0 or a drop
 * reason.
 */
static __always_inline int accept_from_proxy(struct flow *flow, __u32 now, __u8 family)
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

/* Return whether the packet, or the flow that it replies to, belongs to a proxy. */
static __always_inline bool is_proxy_flow(struct __sk_buff *skb, const struct flow *flow, bool reply, __u32 now,
					  __u8 family)
{
	const struct ct_entry *entry = ct_entry_of(flow, INGRESS, reply, family);

	if (entry && entry->lifetime >= now)
		return entry->proxy_redirect;
	return reply && is_first_reply(flow) && proxy_has_socket(skb, flow, family);
}

/* Redirect a packet of a proxy's flow to the link of a pod that the stack routes to, where cil_to_container enforces
 * policy and finds the proxy. Returns the verdict, or UNDECIDED for other flows, which the stack delivers. For a
 * proxy's flow it would find the proxy's socket first (early demux), and drop the packet, because it is to be
 * forwarded.
 */
static __always_inline int redirect_proxy_flow(struct __sk_buff *skb, const struct flow *flow,
					       const struct address_info *local, bool reply, __u32 now, __u8 family)
{
	if (flow->ttl <= 1 || likely(!is_proxy_flow(skb, flow, reply, now, family)))
		return UNDECIDED;
	if (!hop(skb, local->host_mac, local->pod_mac, family))
		return DROP(INGRESS, DROP_INVALID);
	mark_identity(skb, flow->source_identity);
	return bpf_redirect(local->ifindex, 0);
}

/* How the packet is delivered. */
enum delivery_mode {
	BY_PEER, /* bpf_redirect_peer(): into the pod's namespace; only from ingress programs */
	BY_LINK, /* bpf_redirect(): through the host side of the link */
};

/* Send the packet to the pod's link, with a trace event; returns the verdict. */
static __always_inline int deliver_to_link(struct __sk_buff *skb, const struct flow *flow, __u32 ifindex,
					   mac_t host_mac, mac_t pod_mac, __u8 status, enum delivery_mode delivery,
					   __u8 family)
{
	if (!hop(skb, host_mac, pod_mac, family))
		return DROP(INGRESS, DROP_INVALID);
	count(skb, REASON_FORWARDED, INGRESS);
	if (unlikely(flow->report))
		send_trace_notify(skb, flow, TRACE_TO_POD, ifindex, TRACED(status, family));
	return delivery == BY_PEER ? bpf_redirect_peer(ifindex, 0) : bpf_redirect(ifindex, 0);
}
