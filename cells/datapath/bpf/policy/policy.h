/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Policy verdict of an endpoint for a peer's identity, protocol and port.
 *
 * Two lookups in the endpoint's policy map: with the peer's identity and with any identity. The more specific entry
 * decides, allow or deny: identity+port, port, identity+protocol, protocol, identity, all.
 *
 * If CIDRs also select pods, a third lookup uses the identity of the CIDR that contains the pod's address: a deny wins,
 * else the more specific entry.
 */
#pragma once

#include "lib/events.h"
#include "lib/identity.h"
#include "lib/maps.h"
#include "lib/packet.h"
#include "policy/verdict.h"

struct policy_map {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(key_size, sizeof(struct policy_key)); /* sizes, because clang emits no BTF types of an inner map */
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

/* CIDRs in policies and their identities. Empty unless CIDRs also select pods. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct ipcache_key);
	__type(value, __u32);
	__uint(max_entries, 512000);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} hive_policy_prefixes SEC(".maps");

/* Return whether an identity is an endpoint's, of any node: not a node's, and not outside the cluster. */
static __always_inline bool is_endpoint_identity(__u32 identity)
{
	return !(identity >> 24) && identity && identity != IDENTITY_HOST && !is_remote_node(identity) &&
	       !is_world(identity);
}

/* Return the identity of the longest prefix that contains a pod's address; 0 if there is none, or if CIDRs do not
 * select pods.
 */
VERIFIED_ALONE policy_cidr_identity(const struct address *ip, __u32 identity, __u32 family)
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

/* Return how specific an entry is: 2 with a port, 1 with a protocol, 0 with neither. */
static __always_inline int port_specificity(const struct policy_entry *entry)
{
	if (!(entry->bits & POLICY_ANY_PORT))
		return 2;
	return entry->bits & POLICY_ANY_PROTOCOL ? 0 : 1;
}

/* Return the entry that decides, or NULL; `*match` is its match type in events. Overwrites the identity in the key,
 * because the stack has no room for two keys.
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

/* Return the entry that decides, including the identity of the CIDR around the peer's address. */
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
		/* Equally specific: prefer it to an entry for any identity; of two for this peer, prefer the one with a
		 * proxy.
		 */
		if (!more && *match != MATCH_L4 && *match != MATCH_PROTOCOL && *match != MATCH_ALL &&
		    (!found->proxy_port || chosen->proxy_port))
			return chosen;
	}
	more = port_specificity(found);
	*match = more == 2 ? MATCH_L3_L4 : more ? MATCH_L3_PROTOCOL : MATCH_L3;
	return found;
}

/* Packed policy result: drop reason or 0, match type, and proxy port of a redirect. */
#define REFUSED(answer) ((answer)&0xff)
#define MATCH_OF(answer) ((answer) >> 8 & 0x7f)
#define ONLY_BY_PROXY 0x8000
#define PROXY_OF(answer) ((__be16)((__u32)(answer) >> 16))

/* Evaluate the policy of the endpoint on this side of the flow, and count the packet at the entry. `network` is the
 * result of policy_cidr_identity().
 */
VERIFIED_ALONE policy_evaluate(const struct flow *flow, enum direction direction, const struct use *use,
			       __u32 network)
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
	/* Authentication is not supported yet. */
	return (entry->auth_type ? DROP_AUTH_REQUIRED : 0) | match << 8 |
	       (entry->bits & POLICY_ONLY_BY_PROXY ? ONLY_BY_PROXY : 0) | (__u32)entry->proxy_port << 16;
}

/* Return whether the endpoint is in audit mode. */
static __always_inline bool in_audit_mode(__u32 endpoint)
{
	const struct node_config *node = node_facts();

	return node && (node->flags & NODE_AUDITS_POLICY ||
			(node->flags & NODE_AUDITS_HOST && endpoint == node->host_endpoint));
}

/* Evaluate policy for a packet; returns 0 (also in audit mode) or a drop reason. The peer is the other end of the flow
 * in the `sent` direction, the packet's. Sends a policy verdict event for new flows, and stores the proxy port in
 * `flow`.
 */
static __always_inline int policy_check_sent(struct __sk_buff *skb, struct flow *flow, enum direction direction,
					     enum direction sent, bool new, const struct use *use, __u8 family)
{
	__u32 peer = direction == EGRESS ? flow->destination_identity : flow->source_identity;
	__u32 network = sent == EGRESS ? policy_cidr_identity(&flow->daddr, peer, family)
				       : policy_cidr_identity(&flow->saddr, peer, family);
	int answer = policy_evaluate(flow, direction, use, network), refused = REFUSED(answer);
	__u32 how = MATCHED(MATCH_OF(answer), family);

	if (unlikely(refused && refused != DROP_ENDPOINT_NOT_READY &&
		     in_audit_mode(direction == EGRESS ? flow->source : flow->destination))) {
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

/* policy_check() for a packet of the direction that is evaluated. */
static __always_inline int policy_check(struct __sk_buff *skb, struct flow *flow, enum direction direction,
					bool new, const struct use *use, __u8 family)
{
	return policy_check_sent(skb, flow, direction, direction, new, use, family);
}

/* Return the destination port, or ICMP type, of the first packet of the flow that this packet replies to. ICMP types of
 * replies other than echo's follow those of their requests.
 */
static __always_inline __be16 asked_port(const struct flow *flow)
{
	__u16 type = bpf_ntohs(flow->policy_port);

	if (flow->protocol == IPPROTO_ICMP)
		return bpf_htons(type == ICMP_ECHOREPLY ? ICMP_ECHO : type - 1);
	return flow->protocol == IPPROTO_ICMPV6 ? bpf_htons(ICMPV6_ECHO_REQUEST) : flow->sport;
}

/* Evaluate policy for the flow that the packet replies to, in the flow's own `direction`, with `peer` at the other end;
 * returns 0 or a drop reason for the reply. Replies are not counted, and not redirected to a proxy by this.
 */
static __always_inline int policy_check_reply(struct __sk_buff *skb, struct flow *flow, enum direction direction,
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
