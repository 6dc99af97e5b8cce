/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Who is behind an address: a pod of this node, the node itself, an identity. */
#pragma once

#include "lib/events.h"
#include "lib/maps.h"
#include "lib/packet.h"

#define IDENTITY_HOST 1
#define IDENTITY_WORLD 2
#define IDENTITY_REMOTE_NODE 6
#define IDENTITY_KUBE_APISERVER 7 /* which is a node */
#define IDENTITY_WORLD_IPV4 9
#define IDENTITY_WORLD_IPV6 10
#define IDENTITY_FIRST 256 /* that labels have; those below mean the same everywhere */

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct ipcache_key);
	__type(value, struct ipcache_info);
	__uint(max_entries, 512000);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} cilium_ipcache SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct address_key);
	__type(value, struct address_info);
	__uint(max_entries, 65535);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} cilium_lxc SEC(".maps");

/* Where the address lives on this node, or NULL. */
static __always_inline struct address_info *address_lookup(const struct address *ip, __u8 family)
{
	struct address_key key = { .ip = *ip, .family = family };

	return bpf_map_lookup_elem(&cilium_lxc, &key);
}

/* Whether only this node sends from the address, and none of its devices brings that: it is the node's, one of its pods',
 * or loopback's.
 */
static __always_inline bool is_local_source(const struct address *ip, __u8 family)
{
	if (family == FAMILY_IPV4) {
		if (unlikely((ip->words[0] & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000)))
			return true;
	} else if (unlikely(!(ip->words[0] | ip->words[1] | ip->words[2]) && ip->words[3] == bpf_htonl(1))) {
		return true;
	}
	return address_lookup(ip, family);
}

/* An address or prefix outside the cluster that policies or names mention. */
static __always_inline bool is_cidr(__u32 identity)
{
	return identity >> 24 == 1;
}

static __always_inline bool is_world(__u32 identity)
{
	return identity == IDENTITY_WORLD || identity == IDENTITY_WORLD_IPV4 || identity == IDENTITY_WORLD_IPV6;
}

/* Whether it is outside the cluster, known by its address or a name of it at most. */
static __always_inline bool is_outside(__u32 identity)
{
	return is_world(identity) || is_cidr(identity);
}

/* Whether it is another node: 6, 7, or a number of its own, where labels of nodes count. */
static __always_inline bool is_remote_node(__u32 identity)
{
	return identity == IDENTITY_REMOTE_NODE || identity == IDENTITY_KUBE_APISERVER || identity >> 24 == 2;
}

/* What the ipcache has of an address, or NULL: then it belongs to the world. */
static __always_inline const struct ipcache_info *ipcache_lookup(const struct address *ip, __u8 family)
{
	struct ipcache_key key = {
		.prefixlen = family == FAMILY_IPV4 ? IPCACHE_PREFIX_IPV4 : IPCACHE_PREFIX_IPV6,
		.family = family,
		.ip = *ip,
	};

	return bpf_map_lookup_elem(&cilium_ipcache, &key);
}

static __always_inline __u32 identity_of(const struct ipcache_info *info)
{
	return info ? info->identity : IDENTITY_WORLD;
}

/* The same for an address of this node, from the entry at hand: its own record saves the search. */
static __always_inline __u32 identity_of_local(const struct address_info *local)
{
	return local->flags & ADDRESS_IS_HOST ? IDENTITY_HOST : local->identity;
}

/* The world's identity: by family on a node of both families, one for all on a node of a single family. */
static __always_inline __u32 world_identity(__u8 family)
{
	const struct node_config *node = node_facts();

	if (node && node->router_ip && !address_is_zero(&node->router_ip6))
		return family == FAMILY_IPV4 ? IDENTITY_WORLD_IPV4 : IDENTITY_WORLD_IPV6;
	return IDENTITY_WORLD;
}

/* Who lives at the address, to a pod that sends there. */
static __always_inline __u32 identity_at(const struct address *ip, __u8 family)
{
	const struct address_info *local = address_lookup(ip, family);

	return local ? identity_of_local(local) : identity_of(ipcache_lookup(ip, family));
}
