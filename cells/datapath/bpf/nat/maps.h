/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* SNAT maps. Layouts are Cilium 1.17's.
 *
 * A flow has two entries. The egress entry (NAT_KEY_OUT) maps the original tuple to the SNAT address and port; the reverse
 * entry (NAT_KEY_IN) maps the tuple of replies to the original source. Unlike in conntrack keys, addresses and ports are those
 * of the packet.
 */
#pragma once

#include "ct/maps.h"
#include "lib/maps.h"
#include "lib/packet.h"

#define NAT_KEY_OUT 0
#define NAT_KEY_IN 1
#define NAT_MIN_AGE_NS 1000000000ULL /* of stale entries: the conntrack entry may not exist yet */

struct nat4_entry {
	__u64 created; /* nanoseconds of CLOCK_MONOTONIC */
	__u64 needs_ct; /* the node is the source; its conntrack entry exists only for garbage collection of this */
	__u64 pad[2];
	__be32 address;
	__be16 port;
	__be16 pad2;
};

struct nat6_entry {
	__u64 created;
	__u64 needs_ct;
	__u64 pad[2];
	struct address address;
	__be16 port;
	__be16 pad2[3];
};

#define NAT_MAP(name, key_type, value_type)                                                                        \
	struct {                                                                                                   \
		__uint(type, BPF_MAP_TYPE_LRU_HASH);                                                               \
		__type(key, struct key_type);                                                                      \
		__type(value, struct value_type);                                                                  \
		__uint(max_entries, 524288);                                                                       \
	} name SEC(".maps")

NAT_MAP(cilium_snat_v4_external, ct4_key, nat4_entry);
NAT_MAP(cilium_snat_v6_external, ct6_key, nat6_entry);

_Static_assert(sizeof(struct nat4_entry) == 40, "cilium_snat_v4_external");
_Static_assert(sizeof(struct nat6_entry) == 56, "cilium_snat_v6_external");

/* An entry of either family. */
struct nat_entry {
	__u64 needs_ct;
	struct address address;
	__be16 port;
};

union nat_key {
	struct ct4_key v4;
	struct ct6_key v6;
};

/* Key and result of a lookup in a union, because the stack is small. */
union nat_query {
	union nat_key key;
	struct nat_entry entry;
};

/* Fill the key with the packet's tuple. */
static __always_inline void nat_fill_key(union nat_key *key, const struct address *saddr, __be16 sport,
					 const struct address *daddr, __be16 dport, __u8 protocol, __u8 flags,
					 __u8 family)
{
	struct ct_tail tail = { .dport = dport, .sport = sport, .protocol = protocol, .flags = flags };

	__builtin_memset(key, 0, sizeof(*key));
	if (family == FAMILY_IPV4) {
		key->v4.daddr = daddr->words[0];
		key->v4.saddr = saddr->words[0];
		key->v4.tail = tail;
	} else {
		key->v6.daddr = *daddr;
		key->v6.saddr = *saddr;
		key->v6.tail = tail;
	}
}

/* Look up an entry; false if there is none. */
static __always_inline bool nat_lookup(const union nat_key *key, struct nat_entry *entry, __u8 family)
{
	if (family == FAMILY_IPV4) {
		const struct nat4_entry *found = bpf_map_lookup_elem(&cilium_snat_v4_external, &key->v4);

		if (!found)
			return false;
		entry->needs_ct = found->needs_ct;
		entry->address = (struct address){ .words = { found->address } };
		entry->port = found->port;
	} else {
		const struct nat6_entry *found = bpf_map_lookup_elem(&cilium_snat_v6_external, &key->v6);

		if (!found)
			return false;
		entry->needs_ct = found->needs_ct;
		entry->address = found->address;
		entry->port = found->port;
	}
	return true;
}

/* Returns 0 or a negative errno. */
static __always_inline long nat_insert(const union nat_key *key, const struct nat_entry *entry, __u64 flags,
				       __u8 family)
{
	if (family == FAMILY_IPV4) {
		struct nat4_entry value = {
			.created = bpf_ktime_get_ns(),
			.needs_ct = entry->needs_ct,
			.address = entry->address.words[0],
			.port = entry->port,
		};

		return bpf_map_update_elem(&cilium_snat_v4_external, &key->v4, &value, flags);
	} else {
		struct nat6_entry value = {
			.created = bpf_ktime_get_ns(),
			.needs_ct = entry->needs_ct,
			.address = entry->address,
			.port = entry->port,
		};

		return bpf_map_update_elem(&cilium_snat_v6_external, &key->v6, &value, flags);
	}
}

static __always_inline void nat_delete(const union nat_key *key, __u8 family)
{
	if (family == FAMILY_IPV4)
		bpf_map_delete_elem(&cilium_snat_v4_external, &key->v4);
	else
		bpf_map_delete_elem(&cilium_snat_v6_external, &key->v6);
}
