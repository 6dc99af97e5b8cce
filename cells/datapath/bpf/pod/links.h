/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The endpoint of a link: hive_endpoints, and each processor's memory of it.
 *
 * A hash lookup costs a packet some 25 ns and an address' 50; a remembered link costs 5. It is remembered under
 * the endpoint's epoch, which the agent begins anew after every change of the row. One processor, one packet at a
 * time: no other processor reads what is being written.
 */
#pragma once

#include "lib/maps.h"
#include "lib/packet.h"
#include "policy/verdict.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32); /* ifindex of the host's end of the link */
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

#define KNOWN_LINKS 256 /* by the low bits of the index; two links of one slot take turns */

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

static __always_inline bool link_holds(const struct known_link *link)
{
	return link->epoch == (__u32)epoch_of(link->endpoint.id);
}

/* The link's endpoint, and the epoch of this fact; or NULL. */
static __always_inline const struct endpoint_config *link_owner(__u32 ifindex, __u32 *epoch)
{
	struct known_link *link = link_slot(ifindex);
	struct endpoint_config *row;

	if (likely(link && link->ifindex == ifindex && link_holds(link))) {
		*epoch = link->epoch;
		return &link->endpoint;
	}
	row = bpf_map_lookup_elem(&hive_endpoints, &ifindex);
	if (!row || !link)
		return NULL;
	/* The epoch first, then the row again: a change between the two shows in the epoch. */
	*epoch = epoch_of(row->id);
	row = bpf_map_lookup_elem(&hive_endpoints, &ifindex);
	if (!row)
		return NULL;
	link->ifindex = ifindex;
	link->epoch = *epoch;
	link->endpoint = *row;
	return row;
}

/* The remembered link with these low 16 bits of its index, if it leads to the address; else NULL. */
static __always_inline const struct known_link *link_to(__u16 index, const struct address *ip, __u8 family)
{
	const struct known_link *link = link_slot(index);

	if (!link || (__u16)link->ifindex != index || !link_holds(link))
		return NULL;
	if (family == FAMILY_IPV4 ? link->endpoint.ipv4 != ip->words[0]
				  : !address_equals_aligned(&link->endpoint.ipv6, ip))
		return NULL;
	return link;
}
