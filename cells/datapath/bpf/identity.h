/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The security identity behind an address. */
#pragma once

#include "maps.h"

#define IDENTITY_HOST 1
#define IDENTITY_WORLD 2

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct ipcache_key);
	__type(value, struct ipcache_info);
	__uint(max_entries, 512000);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} cilium_ipcache SEC(".maps");

/* By the ipcache; an address it does not know belongs to the world. */
static __always_inline __u32 identity_of(__be32 ipv4)
{
	struct ipcache_key key = {
		.prefixlen = IPCACHE_PREFIX_IPV4,
		.family = FAMILY_IPV4,
		.ipv4 = ipv4,
	};
	struct ipcache_info *info = bpf_map_lookup_elem(&cilium_ipcache, &key);

	return info ? info->identity : IDENTITY_WORLD;
}

/* The same for an address of this node, from the entry at hand: its own record saves the search. */
static __always_inline __u32 identity_of_local(const struct address_info *local)
{
	return local->flags & ADDRESS_IS_HOST ? IDENTITY_HOST : local->identity;
}
