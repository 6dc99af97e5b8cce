/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Endpoints by link: hive_endpoints, and a per-CPU cache of it.
 *
 * A hash lookup takes some 25 ns, one of an address 50, a cached link 5. The cache is valid for the endpoint's policy
 * epoch, which the agent advances after each change of the row. Only this CPU reads and writes its slots, one packet at
 * a time.
 */
#pragma once

#include "lib/maps.h"
#include "lib/packet.h"
#include "policy/verdict.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32); /* ifindex of the host side */
	__type(value, struct endpoint_config);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} hive_endpoints SEC(".maps");

struct known_link {
	__u32 ifindex;
	__u32 epoch;
	struct endpoint_config endpoint;
};

_Static_assert(sizeof(struct known_link) == 72, "hive_links");

#define KNOWN_LINKS 256 /* slots, by the low bits of the ifindex */

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct known_link);
	__uint(max_entries, KNOWN_LINKS);
} hive_links SEC(".maps");

static __always_inline struct known_link *link_slot(__u32 ifindex)
{
	__u32 slot = ifindex % KNOWN_LINKS;

	return bpf_map_lookup_elem(&hive_links, &slot);
}

static __always_inline bool link_is_current(const struct known_link *link)
{
	return link->epoch == (__u32)epoch_of(link->endpoint.id);
}

/* Return the link's endpoint and its epoch, or NULL. */
static __always_inline const struct endpoint_config *link_endpoint(__u32 ifindex, __u32 *epoch)
{
	struct known_link *link = link_slot(ifindex);
	struct endpoint_config *row;

	if (likely(link && link->ifindex == ifindex && link_is_current(link))) {
		*epoch = link->epoch;
		return &link->endpoint;
	}
	row = bpf_map_lookup_elem(&hive_endpoints, &ifindex);
	if (!row || !link)
		return NULL;
	/* Read the epoch before the row: a concurrent change shows in the epoch. */
	*epoch = epoch_of(row->id);
	row = bpf_map_lookup_elem(&hive_endpoints, &ifindex);
	if (!row)
		return NULL;
	link->ifindex = ifindex;
	link->epoch = *epoch;
	link->endpoint = *row;
	return row;
}

/* Return the cached link with these low 16 bits of its ifindex if its endpoint has the address, else NULL. */
static __always_inline const struct known_link *link_to(__u16 index, const struct address *ip, __u8 family)
{
	const struct known_link *link = link_slot(index);

	if (!link || (__u16)link->ifindex != index || !link_is_current(link))
		return NULL;
	if (family == FAMILY_IPV4 ? link->endpoint.ipv4 != ip->words[0]
				  : !address_equals_aligned(&link->endpoint.ipv6, ip))
		return NULL;
	return link;
}
