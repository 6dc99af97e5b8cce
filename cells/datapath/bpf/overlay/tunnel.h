/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The tunnel: its configuration, remote endpoints, and identities in the VNI.
 *
 * One device in collect-metadata mode serves all nodes (ip-link(8), "external"): node and identity are set per packet.
 * The VXLAN network identifier (RFC 7348) is the sender's identity.
 */
#pragma once

#include "lib/config.h"
#include "lib/events.h"
#include "lib/identity.h"
#include "lib/packet.h"
#include "overlay/maps.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct tunnel_config);
	__uint(max_entries, 1);
} hive_tunnel SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct tunnel_key);
	__type(value, struct tunnel_value);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} cilium_tunnel_map SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct node_key);
	__type(value, struct node_value);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} cilium_node_map_v2 SEC(".maps");

/* cilium_encrypt_state: the key with which this node encrypts; 0: none yet. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u8);
	__uint(max_entries, 1);
} cilium_encrypt_state SEC(".maps");

/* hive_pod_networks: pod CIDRs, with IPsec only; 0: of this node, else of others. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct ipcache_key);
	__type(value, __u8);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} hive_pod_networks SEC(".maps");

/* Size of struct bpf_tunnel_key without the local address, so that routing chooses it. */
#define TUNNEL_KEY_SIZE offsetof(struct bpf_tunnel_key, local_ipv4)
#define TUNNEL_TTL 64

/* Return the tunnel's configuration, or NULL without a tunnel. */
static __always_inline const struct tunnel_config *tunnel_any(void)
{
	__u32 zero = 0;
	const struct tunnel_config *tunnel = NULL;

	if (!without(WITHOUT_TUNNEL))
		tunnel = bpf_map_lookup_elem(&hive_tunnel, &zero);
	return tunnel && tunnel->ifindex ? tunnel : NULL;
}

/* Return it if packets to other nodes' pods use the tunnel, else NULL. */
static __always_inline const struct tunnel_config *tunnel_facts(void)
{
	const struct tunnel_config *tunnel = tunnel_any();

	return tunnel && !(tunnel->flags & TUNNEL_NOT_FOR_PODS) ? tunnel : NULL;
}

/* Return it if packets to egress gateways use the tunnel, else NULL. */
static __always_inline const struct tunnel_config *gateway_tunnel(void)
{
	const struct tunnel_config *tunnel = without(WITHOUT_GATEWAYS) ? NULL : tunnel_any();

	return tunnel && tunnel->flags & TUNNEL_GATEWAYS ? tunnel : NULL;
}

/* Return it if these are the low bits of the tunnel device's ifindex, as in a flow's conntrack entry; else NULL. */
static __always_inline const struct tunnel_config *tunnel_at(__u16 ifindex)
{
	const struct tunnel_config *tunnel = tunnel_any();

	return tunnel && (__u16)tunnel->ifindex == ifindex ? tunnel : NULL;
}

/* Mask the address by the prefix length of our own pod CIDR: all nodes of a cluster have the same. */
static __always_inline void mask_pod_network(struct address *ip, __u8 family)
{
	const struct node_config *node = node_facts();
	__u32 bits;

	if (!node)
		return;
	if (family == FAMILY_IPV4) {
		ip->words[0] &= node->pod_mask;
		return;
	}
	bits = node->pod_prefix6;
	for (int i = 0; i < 4; i++) {
		if (bits >= 32) {
			bits -= 32;
			continue;
		}
		ip->words[i] &= bits ? bpf_htonl(0xffffffffU << (32 - bits)) : 0;
		bits = 0;
	}
}

/* Return the node with the pod CIDR of `ip`, if its address is of the family `outside`; else NULL. `key` is scratch
 * memory.
 */
static __always_inline const struct address *tunnel_lookup_node(struct tunnel_key *key, const struct address *ip,
								__u8 family, __u8 outside)
{
	const struct tunnel_value *value;

	*key = (struct tunnel_key){ .network = *ip, .family = family };
	mask_pod_network(&key->network, family);
	value = bpf_map_lookup_elem(&cilium_tunnel_map, key);
	return value && value->family == outside ? &value->node : NULL;
}

static __always_inline const struct address *tunnel_lookup_node_of(const struct address *ip, __u8 family,
								   __u8 outside)
{
	struct tunnel_key key;

	return tunnel_lookup_node(&key, ip, family, outside);
}

#define IPCACHE_SKIP_TUNNEL 1 /* the address is natively routable */

/* Instead of a node's IPv4 address: send over IPv6 to the node with the destination's pod CIDR. ipcache entries have
 * room for IPv4 addresses only.
 */
#define TUNNEL_IPV6_NODE bpf_htonl(1)

/* Return the tunnel endpoint for this address, or 0 for none. `info` is its ipcache entry. */
static __always_inline __be32 tunnel_node_of(const struct tunnel_config *tunnel, const struct address *ip,
					     const struct ipcache_info *info, __u8 family)
{
	const struct address *node;

	/* Nodes that have only IPv4 endpoints are still reached over IPv4, so that the underlay can be changed node by
	 * node.
	 */
	if (tunnel->flags & TUNNEL_OVER_IPV6 && !(info && info->flags & IPCACHE_SKIP_TUNNEL) &&
	    tunnel_lookup_node_of(ip, family, FAMILY_IPV6))
		return TUNNEL_IPV6_NODE;
	if (info && info->tunnel_endpoint)
		return info->flags & IPCACHE_SKIP_TUNNEL ? 0 : info->tunnel_endpoint;
	/* An identity without a tunnel endpoint: not reached by tunnel, like a node itself. */
	if (info && info->identity != IDENTITY_WORLD && info->identity != IDENTITY_WORLD_IPV4 &&
	    info->identity != IDENTITY_WORLD_IPV6)
		return 0;
	node = tunnel_lookup_node_of(ip, family, FAMILY_IPV4);
	return node ? node->words[0] : 0;
}

/* Return the tunnel endpoint of a flow's destination; 0 without a tunnel. Sets the flow's destination identity. */
VERIFIED_ALONE tunnel_node(struct flow *flow, __u32 family)
{
	const struct tunnel_config *tunnel = tunnel_facts();
	const struct ipcache_info *info;

	if (!flow)
		return 0;
	info = ipcache_lookup(&flow->daddr, family);
	flow->destination_identity = identity_of(info);
	return tunnel ? tunnel_node_of(tunnel, &flow->daddr, info, family) : 0;
}

/* Read the tunnel key of a received packet, and the remote endpoint's address of either family; returns 0 or a negative
 * errno.
 */
static __always_inline long tunnel_read_key(struct __sk_buff *skb, struct bpf_tunnel_key *key,
					    struct node_key *sender)
{
	long refused = bpf_skb_get_tunnel_key(skb, key, TUNNEL_KEY_SIZE, 0);

	if (!refused) {
		sender->family = FAMILY_IPV4;
		sender->ip.words[0] = bpf_htonl(key->remote_ipv4);
		return 0;
	}
	refused = bpf_skb_get_tunnel_key(skb, key, TUNNEL_KEY_SIZE, BPF_F_TUNINFO_IPV6);
	if (!refused) {
		sender->family = FAMILY_IPV6;
		__builtin_memcpy(&sender->ip, key->remote_ipv6, sizeof(sender->ip));
	}
	return refused;
}

/* Return whether the address is the configured source of outer packets; false if routing chooses it. */
static __always_inline bool is_tunnel_source(const struct tunnel_config *tunnel, const struct address *ip)
{
	return ip->words[0] == tunnel->source && ip->words[1] == tunnel->source_rest[0] &&
	       ip->words[2] == tunnel->source_rest[1] && ip->words[3] == tunnel->source_rest[2];
}

/* Return the identity for the VNI: "host" and node-local ones mean something else on other nodes, or exceed 24 bits.
 * The world identities of both families become one; the packet shows the family.
 */
static __always_inline __u32 tunnel_identity(__u32 identity)
{
	if (identity == IDENTITY_HOST || identity >> 24 == 2)
		return IDENTITY_REMOTE_NODE;
	if (identity == IDENTITY_WORLD_IPV4 || identity == IDENTITY_WORLD_IPV6 || identity >> 24)
		return IDENTITY_WORLD;
	return identity;
}

/* Return whether a reply to the packet would look like a tunnel packet: to the tunnel's port, from the node. */
static __always_inline bool reply_imitates_tunnel(const struct flow *flow)
{
	const struct tunnel_config *tunnel;

	if (flow->protocol != IPPROTO_UDP)
		return false;
	tunnel = tunnel_any();
	return tunnel && flow->sport == tunnel->port;
}
