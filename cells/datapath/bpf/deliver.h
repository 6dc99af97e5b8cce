/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The last part of every way to a local pod: its ingress policy, then its link. */
#pragma once

#include <linux/pkt_cls.h>

#include "conntrack.h"
#include "metrics.h"
#include "policy.h"
#include "rewrite.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct address_key);
	__type(value, struct address_info);
	__uint(max_entries, 65535);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} cilium_lxc SEC(".maps");

/* Where `ipv4` lives on this node, or NULL. */
static __always_inline struct address_info *address_lookup(__be32 ipv4)
{
	struct address_key key = { .ipv4 = ipv4, .family = FAMILY_IPV4 };

	return bpf_map_lookup_elem(&cilium_lxc, &key);
}

/* 0 if the pod accepts the packet, else the reason to drop it. */
static __always_inline int ingress_check(struct __sk_buff *skb, const struct flow *flow,
					 const struct address_info *pod, __u32 source_identity, __u32 now)
{
	enum ct_status status = ct_lookup(flow, INGRESS, now);
	int refused;

	if (status == CT_REPLY || status == CT_RELATED)
		return 0;
	refused = policy_check(flow, INGRESS, pod->endpoint_id, source_identity, skb->len);
	if (refused)
		return refused;
	return status == CT_NEW ? ct_create(flow, INGRESS, source_identity, now) : 0;
}

/* How the packet enters the pod. */
enum entrance {
	BY_PEER, /* straight to the pod's end of the link: from a program at ingress only */
	BY_LINK, /* through the host's end */
};

/* Deliver to a pod of this node; the verdict. */
static __always_inline int deliver(struct __sk_buff *skb, const struct flow *flow,
				   const struct address_info *pod, __u32 source_identity, __u32 now,
				   enum direction sender, enum entrance entrance)
{
	int refused;

	if (flow->ttl <= 1)
		return DROP(sender, DROP_TTL_EXCEEDED);
	refused = ingress_check(skb, flow, pod, source_identity, now);
	if (refused)
		return DROP(INGRESS, refused);
	if (!hop(skb, pod->host_mac, pod->pod_mac))
		return DROP(INGRESS, DROP_INVALID);
	count(skb, REASON_FORWARDED, INGRESS);
	return entrance == BY_PEER ? bpf_redirect_peer(pod->ifindex, 0) : bpf_redirect(pod->ifindex, 0);
}
