/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Policy: may this endpoint talk to that identity, on this protocol and port?
 *
 * Two lookups, by the peer's identity and by any identity. The more specific of the two entries
 * decides, allow or deny: identity+port, port, identity+protocol, protocol, identity, all.
 *
 * Where networks select pods, too, a third one asks by the network around the pod's address: what denies wins, else the
 * more specific entry.
 */
#pragma once

#include "lib/events.h"
#include "lib/identity.h"
#include "lib/maps.h"
#include "lib/packet.h"
#include "policy/verdict.h"

struct policy_map {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(key_size, sizeof(struct policy_key)); /* sizes: clang leaves the types of an inner map out */
	__uint(value_size, sizeof(struct policy_entry));
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, 4096);
	__array(values, struct policy_map);
} hive_policies SEC(".maps");

/* Networks that policies name, and the number that policy maps know each by. Empty unless they select pods. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct ipcache_key);
	__type(value, __u32);
	__uint(max_entries, 512000);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} hive_policy_prefixes SEC(".maps");

/* Whether an identity is an endpoint's, here or elsewhere: no node's, and not of what is outside. */
static __always_inline bool is_endpoint_identity(__u32 identity)
{
	return !(identity >> 24) && identity && identity != IDENTITY_HOST && !is_remote_node(identity) &&
	       !is_world(identity);
}

/* The number of the nearest network around a pod's address; 0 if policies name none, or networks select no pods. */
VERIFIED_ALONE network_around(const struct address *ip, __u32 identity, __u32 family)
{
	const struct node_config *node = node_facts();
	struct ipcache_key key = {};
	__u32 *found;

	if (!ip || !node || !(node->flags & NODE_CIDR_MATCHES_PODS) || !is_endpoint_identity(identity))
		return 0;
	key.prefixlen = family == FAMILY_IPV4 ? IPCACHE_PREFIX_IPV4 : IPCACHE_PREFIX_IPV6;
	key.family = family;
	key.ip = *ip;
	found = bpf_map_lookup_elem(&hive_policy_prefixes, &key);
	return found ? *found : 0;
}

/* How closely an entry names the port: 2 by number, 1 by protocol, 0 not at all. */
static __always_inline int port_specificity(const struct policy_entry *entry)
{
	if (!(entry->bits & POLICY_ANY_PORT))
		return 2;
	return entry->bits & POLICY_ANY_PROTOCOL ? 0 : 1;
}

/* The entry that decides, or NULL; `*match` is how it matched, as events count it. Leaves another identity in the key, which
 * is the peer's: of the stack there is not room for a key of each.
 */
static __always_inline struct policy_entry *policy_choose(void *map, struct policy_key *key,
							  enum policy_match *match)
{
	struct policy_entry *peer = bpf_map_lookup_elem(map, key), *any = NULL, *chosen;

	if (!peer || port_specificity(peer) != 2) {
		key->identity = 0;
		any = bpf_map_lookup_elem(map, key);
	}
	chosen = !peer || (any && port_specificity(any) > port_specificity(peer)) ? any : peer;
	if (!chosen)
		return NULL;
	switch (port_specificity(chosen)) {
	case 2:
		*match = chosen == peer ? MATCH_L3_L4 : MATCH_L4;
		break;
	case 1:
		*match = chosen == peer ? MATCH_L3_PROTOCOL : MATCH_PROTOCOL;
		break;
	default:
		*match = chosen == peer ? MATCH_L3 : MATCH_ALL;
	}
	return chosen;
}

/* The same, with what the network around the peer's address adds to the entry that decides without it. */
static __always_inline struct policy_entry *policy_choose_also(void *map, struct policy_key *key, __u32 network,
							       struct policy_entry *chosen,
							       enum policy_match *match)
{
	struct policy_entry *found;
	int more;

	key->identity = network;
	found = bpf_map_lookup_elem(map, key);
	if (!found || (chosen && chosen->bits & POLICY_DENY))
		return chosen;
	if (chosen && !(found->bits & POLICY_DENY)) {
		more = port_specificity(found) - port_specificity(chosen);
		if (more < 0)
			return chosen;
		/* As closely: before what holds for everybody, and of two for this peer the one with a proxy. */
		if (!more && *match != MATCH_L4 && *match != MATCH_PROTOCOL && *match != MATCH_ALL &&
		    (!found->proxy_port || chosen->proxy_port))
			return chosen;
	}
	more = port_specificity(found);
	*match = more == 2 ? MATCH_L3_L4 : more ? MATCH_L3_PROTOCOL : MATCH_L3;
	return found;
}

/* Policy's result: the reason to drop or 0, how the deciding entry matched, and the port of the proxy that is to
 * take the packet.
 */
#define REFUSED(answer) ((answer)&0xff)
#define MATCH_OF(answer) ((answer) >> 8 & 0x7f)
#define ONLY_BY_PROXY 0x8000
#define PROXY_OF(answer) ((__be16)((__u32)(answer) >> 16))

/* Ask the policy of the flow's endpoint on this side. `network` is that of network_around(). Counts the entry's use. */
VERIFIED_ALONE policy_ask(const struct flow *flow, enum direction direction, const struct use *use, __u32 network)
{
	enum policy_match match = MATCH_NONE;
	struct policy_entry *entry;
	__u32 endpoint;
	void *map;

	if (!flow || !use)
		return DROP_POLICY;
	struct policy_key key __attribute__((aligned(8))) = {
		.prefixlen = POLICY_PREFIX_FULL,
		.identity = direction == EGRESS ? flow->destination_identity : flow->source_identity,
		.egress = direction == EGRESS,
		.protocol = flow->protocol,
		.port = flow->policy_port,
	};

	endpoint = direction == EGRESS ? flow->source : flow->destination;
	map = bpf_map_lookup_elem(&hive_policies, &endpoint);
	if (!map)
		return DROP_ENDPOINT_NOT_READY;
	entry = policy_choose(map, &key, &match);
	if (unlikely(network))
		entry = policy_choose_also(map, &key, network, entry, &match);
	if (!entry)
		return DROP_POLICY;
	__sync_fetch_and_add(&entry->packets, use->packets);
	__sync_fetch_and_add(&entry->bytes, use->bytes);
	if (entry->bits & POLICY_DENY)
		return DROP_POLICY_DENY | match << 8;
	/* Authentication is for a later version. */
	return (entry->auth_type ? DROP_AUTH_REQUIRED : 0) | match << 8 |
	       (entry->bits & POLICY_ONLY_BY_PROXY ? ONLY_BY_PROXY : 0) | (__u32)entry->proxy_port << 16;
}

/* Whether what the endpoint's policy refuses is let through. */
static __always_inline bool is_audited(__u32 endpoint)
{
	const struct node_config *node = node_facts();

	return node && (node->flags & NODE_AUDITS_POLICY ||
			(node->flags & NODE_AUDITS_HOST && endpoint == node->host_endpoint));
}

/* 0 if policy lets the packet pass, or is only audited; else the reason to drop it. The peer is at the other end of the
 * flow's `sent` direction, which is that of the packet. Sends a notification of what is new, and stores in `flow` the
 * proxy that is to take it.
 */
static __always_inline int policy_check_sent(struct __sk_buff *skb, struct flow *flow, enum direction direction,
					     enum direction sent, bool new, const struct use *use, __u8 family)
{
	__u32 peer = direction == EGRESS ? flow->destination_identity : flow->source_identity;
	__u32 network = sent == EGRESS ? network_around(&flow->daddr, peer, family)
				       : network_around(&flow->saddr, peer, family);
	int answer = policy_ask(flow, direction, use, network), refused = REFUSED(answer);
	__u32 how = MATCHED(MATCH_OF(answer), family);

	if (unlikely(refused && refused != DROP_ENDPOINT_NOT_READY &&
		     is_audited(direction == EGRESS ? flow->source : flow->destination))) {
		send_policy_verdict_notify(skb, flow, direction, 0, how | AUDITED);
		return 0;
	}
	flow->proxy_port = refused ? 0 : PROXY_OF(answer);
	flow->only_by_proxy = flow->proxy_port && answer & ONLY_BY_PROXY;
	if (unlikely(refused || new))
		send_policy_verdict_notify(skb, flow, direction, refused ? -refused : bpf_ntohs(flow->proxy_port),
					   how);
	return refused;
}

/* The same for a packet of the direction that is evaluated. */
static __always_inline int policy_check(struct __sk_buff *skb, struct flow *flow, enum direction direction,
					bool new, const struct use *use, __u8 family)
{
	return policy_check_sent(skb, flow, direction, direction, new, use, family);
}

/* The port, or for ICMP the type, that the first packet of the flow was for which this packet answers. Other replies than an
 * echo's come next to their requests.
 */
static __always_inline __be16 asked_port(const struct flow *flow)
{
	__u16 type = bpf_ntohs(flow->policy_port);

	if (flow->protocol == IPPROTO_ICMP)
		return bpf_htons(type == ICMP_ECHOREPLY ? ICMP_ECHO : type - 1);
	return flow->protocol == IPPROTO_ICMPV6 ? bpf_htons(ICMPV6_ECHO_REQUEST) : flow->sport;
}

/* Evaluate the flow that the packet answers as it began, in its own `direction`, with `peer` at the other end: 0, or the
 * reason to drop the reply. Policy counts no replies, and a proxy gets none by this.
 */
static __always_inline int policy_check_answered(struct __sk_buff *skb, struct flow *flow, enum direction direction,
						 __u32 peer, __u8 family)
{
	const __u32 source_identity = flow->source_identity, destination_identity = flow->destination_identity;
	const __u16 source = flow->source, destination = flow->destination;
	const __be16 policy_port = flow->policy_port;
	struct use use = {};
	int refused;

	flow->policy_port = asked_port(flow);
	if (direction == EGRESS) {
		flow->source = destination;
		flow->destination_identity = peer;
	} else {
		flow->destination = source;
		flow->source_identity = peer;
	}
	refused = policy_check_sent(skb, flow, direction, direction == EGRESS ? INGRESS : EGRESS, false, &use,
				    family);
	flow->policy_port = policy_port;
	flow->source = source;
	flow->destination = destination;
	flow->source_identity = source_identity;
	flow->destination_identity = destination_identity;
	flow->proxy_port = 0;
	flow->only_by_proxy = false;
	return refused;
}
