/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The last part of every way to a local pod: its ingress policy, then its link. */
#pragma once

#include <linux/pkt_cls.h>

#include "conntrack.h"
#include "events.h"
#include "metrics.h"
#include "policy.h"
#include "rewrite.h"

/* 0 if the pod accepts the packet, else the reason to drop it. */
static __always_inline int ingress_check(struct __sk_buff *skb, struct flow *flow, struct use use, __u32 now,
					 __u8 family)
{
	struct ct_entry *entry;
	enum ct_status status = ct_lookup(flow, INGRESS, now, family, &entry);
	int refused;

	if (status == CT_REPLY || status == CT_RELATED)
		return 0;
	refused = policy_check(skb, flow, INGRESS, status == CT_NEW, &use, family);
	if (refused)
		return refused;
	return status == CT_NEW ? ct_create(flow, INGRESS, now, family) : 0;
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
		tell_trace(skb, flow, TRACE_TO_POD, ifindex, TRACED(status, family));
	return entrance == BY_PEER ? bpf_redirect_peer(ifindex, 0) : bpf_redirect(ifindex, 0);
}
