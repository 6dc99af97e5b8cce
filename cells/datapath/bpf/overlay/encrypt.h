/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Marks packets for XFRM with the destination's node id and the key: see overlay/ipsec.h. */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/identity.h"
#include "lib/mark.h"
#include "lib/metrics.h"
#include "lib/network.h"
#include "overlay/tunnel.h"

#define LAST_KEY 15
#define CB_SENDER 4 /* a word of skb->cb that the stack preserves: the sender's identity */

/* Return the key to encrypt with: the older of both nodes' keys, which both have. Key numbers wrap around. */
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

/* Return the id of the node with this address; 0: none. */
static __always_inline __u32 node_number(const struct address *ip, __u8 family)
{
	const struct node_key key = { .family = family, .ip = *ip };
	const struct node_value *node = bpf_map_lookup_elem(&cilium_node_map_v2, &key);

	return node ? node->id : 0;
}

/* Return whether the address is in other nodes' pod networks, even if its node is not known yet. */
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

/* Check a packet of a pod, or of a proxy for it, to a destination without key. Returns UNDECIDED if it may leave
 * unencrypted, because no pod of another node can have the address (packets to nodes are not encrypted), or a drop.
 * `to` is the destination's ipcache entry; `tunnelled`: the packet would use the tunnel.
 */
static __always_inline int check_unencrypted(const struct flow *flow, const struct ipcache_info *to, bool tunnelled,
					     __u8 family)
{
	if (to && is_remote_node(to->identity))
		return UNDECIDED;
	if (!tunnelled && !(to && to->key) && !in_other_pod_network(&flow->daddr, family))
		return UNDECIDED;
	return address_lookup(&flow->daddr, family) ? UNDECIDED : DROP(EGRESS, DROP_UNENCRYPTED);
}

/* Mark a packet of a pod, or of a proxy for it, to a pod of another node; returns the verdict, or UNDECIDED if it may
 * leave unencrypted.
 */
static __always_inline int encrypt_mark(struct __sk_buff *skb, const struct flow *flow, bool tunnelled,
					__u32 family)
{
	const struct ipcache_info *to = ipcache_lookup(&flow->daddr, family);
	struct address node = {};
	__u32 key, number;

	if (!to || !to->key || !to->tunnel_endpoint)
		return check_unencrypted(flow, to, tunnelled, family);
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
