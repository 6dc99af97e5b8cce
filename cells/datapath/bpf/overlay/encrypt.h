/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What is to be encrypted by the kernel for another node is marked with the node and the key: see overlay/ipsec.h. */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/identity.h"
#include "lib/mark.h"
#include "lib/metrics.h"
#include "lib/network.h"
#include "overlay/tunnel.h"

#define LAST_KEY 15
#define CB_SENDER 4 /* the word of the control block that the stack leaves alone: the sender's identity */

/* The key to encrypt with: both nodes have the older of their two. Numbers begin anew after the last. */
static __always_inline __u32 shared_key(__u32 theirs)
{
	__u32 zero = 0;
	const __u8 *state = bpf_map_lookup_elem(&cilium_encrypt_state, &zero);
	__u32 own = state ? *state : 0;

	if (theirs == LAST_KEY)
		return own == 1 ? theirs : own;
	if (own == LAST_KEY)
		return theirs == 1 ? own : theirs;
	return own < theirs ? own : theirs;
}

/* The number of the node that has this address; 0: none. */
static __always_inline __u32 node_number(const struct address *ip, __u8 family)
{
	const struct node_key key = { .family = family, .ip = *ip };
	const struct node_value *node = bpf_map_lookup_elem(&cilium_node_map_v2, &key);

	return node ? node->id : 0;
}

/* Whether pods of other nodes have addresses there, whether or not their node is known yet. */
static __always_inline bool in_other_pod_network(const struct address *ip, __u8 family)
{
	const struct ipcache_key key = {
		.prefixlen = family == FAMILY_IPV4 ? IPCACHE_PREFIX_IPV4 : IPCACHE_PREFIX_IPV6,
		.family = family,
		.ip = *ip,
	};
	const __u8 *others = bpf_map_lookup_elem(&hive_pod_networks, &key);

	return others && *others;
}

/* The verdict on what is for a destination that no key is known of, and that a pod, or a proxy for it, sends. UNDECIDED: it
 * may leave in clear text, for no pod of another node can have the address. What nodes get is not encrypted. `to` is what the
 * ipcache has of the destination, `tunnelled`: it would go to a node in the tunnel.
 */
static __always_inline int in_clear(const struct flow *flow, const struct ipcache_info *to, bool tunnelled,
				    __u8 family)
{
	if (to && is_remote_node(to->identity))
		return UNDECIDED;
	if (!tunnelled && !(to && to->key) && !in_other_pod_network(&flow->daddr, family))
		return UNDECIDED;
	return address_lookup(&flow->daddr, family) ? UNDECIDED : DROP(EGRESS, DROP_UNENCRYPTED);
}

/* The verdict on what a pod, or a proxy for it, sends: marked, if a pod of another node gets it. UNDECIDED: it may leave in clear
 * text.
 */
static __always_inline int encrypt_mark(struct __sk_buff *skb, const struct flow *flow, bool tunnelled,
					__u32 family)
{
	const struct ipcache_info *to = ipcache_lookup(&flow->daddr, family);
	struct address node = {};
	__u32 key, number;

	if (!to || !to->key || !to->tunnel_endpoint)
		return in_clear(flow, to, tunnelled, family);
	key = shared_key(to->key);
	if (!key)
		return DROP(EGRESS, DROP_UNENCRYPTED);
	node.words[0] = to->tunnel_endpoint;
	number = node_number(&node, FAMILY_IPV4);
	if (!number)
		return DROP(EGRESS, DROP_NO_NODE_ID);
	skb->cb[CB_SENDER] = flow->source_identity;
	mark_write(skb, MARK_ENCRYPT | (key & LAST_KEY) << MARK_KEY_AT | number << MARK_NODE_AT);
	count(skb, REASON_FORWARDED, EGRESS);
	return TC_ACT_OK;
}
