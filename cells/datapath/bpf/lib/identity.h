/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Identities of addresses: local endpoints (cilium_lxc) and the ipcache. */
#pragma once

#include "lib/events.h"
#include "lib/maps.h"
#include "lib/packet.h"

#define IDENTITY_HOST 1
#define IDENTITY_WORLD 2
#define IDENTITY_REMOTE_NODE 6
#define IDENTITY_KUBE_APISERVER 7 /* a node with kube-apiserver */
#define IDENTITY_WORLD_IPV4 9
#define IDENTITY_WORLD_IPV6 10
#define IDENTITY_FIRST 256 /* first identity of labels; smaller ones are reserved */

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

/* Look up a local address in cilium_lxc; NULL for others. */
static __always_inline struct address_info *address_lookup(const struct address *ip, __u8 family)
{
	struct address_key key = { .ip = *ip, .family = family };

	return bpf_map_lookup_elem(&cilium_lxc, &key);
}

/* Return whether only this node may send from the address: its own, one of its pods', or a loopback address. Packets
 * from it do not arrive at native devices.
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

/* Identities of CIDRs and FQDNs outside the cluster. */
static __always_inline bool is_cidr(__u32 identity)
{
	return identity >> 24 == 1;
}

static __always_inline bool is_world(__u32 identity)
{
	return identity == IDENTITY_WORLD || identity == IDENTITY_WORLD_IPV4 || identity == IDENTITY_WORLD_IPV6;
}

/* Return whether the identity is outside the cluster: world, or local to this node for CIDRs and FQDNs. */
static __always_inline bool is_outside(__u32 identity)
{
	return is_world(identity) || is_cidr(identity);
}

/* Return whether the identity is another node: 6, 7, or a node-local identity of nodes with labels. */
static __always_inline bool is_remote_node(__u32 identity)
{
	return identity == IDENTITY_REMOTE_NODE || identity == IDENTITY_KUBE_APISERVER || identity >> 24 == 2;
}

/* Look up an address in the ipcache; NULL means world. */
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

/* Return the identity of a local address from its cilium_lxc entry, which saves the ipcache lookup. */
static __always_inline __u32 identity_of_local(const struct address_info *local)
{
	return local->flags & ADDRESS_IS_HOST ? IDENTITY_HOST : local->identity;
}

/* Return the world identity: per family on dual-stack nodes, else a single one. */
static __always_inline __u32 world_identity(__u8 family)
{
	const struct node_config *node = node_facts();

	if (node && node->router_ip && !address_is_zero(&node->router_ip6))
		return family == FAMILY_IPV4 ? IDENTITY_WORLD_IPV4 : IDENTITY_WORLD_IPV6;
	return IDENTITY_WORLD;
}

/* Return the identity of a destination address, for a pod's packet. */
static __always_inline __u32 identity_at(const struct address *ip, __u8 family)
{
	const struct address_info *local = address_lookup(ip, family);

	return local ? identity_of_local(local) : identity_of(ipcache_lookup(ip, family));
}
