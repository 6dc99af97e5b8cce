/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Garbage collection of NAT entries without a live conntrack entry; included by gc.c.
 *
 * Each of a flow's two entries is deleted when the walk reaches it; both check the same conntrack entry.
 */
#pragma once

#include "nat/maps.h"

/* Return whether the flow of an egress key has a live conntrack entry. */
static __always_inline bool nat4_flow_alive(const struct ct4_key *out)
{
	struct ct4_key key __attribute__((aligned(8))) = *out;
	const struct ct_entry *entry;

	key.daddr = out->saddr;
	key.saddr = out->daddr;
	if (key.tail.protocol == IPPROTO_TCP)
		entry = bpf_map_lookup_elem(&cilium_ct4_global, &key);
	else
		entry = bpf_map_lookup_elem(&cilium_ct_any4_global, &key);
	return entry && !ct_is_expired(entry);
}

static __always_inline bool nat6_flow_alive(const struct ct6_key *out)
{
	struct ct6_key key __attribute__((aligned(8))) = *out;
	const struct ct_entry *entry;

	key.daddr = out->saddr;
	key.saddr = out->daddr;
	if (key.tail.protocol == IPPROTO_TCP)
		entry = bpf_map_lookup_elem(&cilium_ct6_global, &key);
	else
		entry = bpf_map_lookup_elem(&cilium_ct_any6_global, &key);
	return entry && !ct_is_expired(entry);
}

/* Return whether the flow, or the reverse flow (DSR: the backend's replies have the NAT entry), has a live one. */
static __always_inline bool nat4_alive(const struct ct4_key *out)
{
	struct ct4_key answered __attribute__((aligned(8))) = *out;

	answered.saddr = out->daddr;
	answered.daddr = out->saddr;
	answered.tail.dport = out->tail.sport;
	answered.tail.sport = out->tail.dport;
	return nat4_flow_alive(out) || nat4_flow_alive(&answered);
}

static __always_inline bool nat6_alive(const struct ct6_key *out)
{
	struct ct6_key answered __attribute__((aligned(8))) = *out;

	answered.saddr = out->daddr;
	answered.daddr = out->saddr;
	answered.tail.dport = out->tail.sport;
	answered.tail.sport = out->tail.dport;
	return nat6_flow_alive(out) || nat6_flow_alive(&answered);
}

/* Convert a reverse key to the egress key of its flow. */
static __always_inline void nat4_egress_key(struct ct4_key *key, const struct nat4_entry *entry)
{
	struct ct4_key own = *key;

	key->daddr = own.saddr;
	key->saddr = entry->address;
	key->tail.dport = own.tail.sport;
	key->tail.sport = entry->port;
	key->tail.flags = NAT_KEY_OUT;
}

static __always_inline void nat6_egress_key(struct ct6_key *key, const struct nat6_entry *entry)
{
	struct ct6_key own = *key;

	key->daddr = own.saddr;
	key->saddr = entry->address;
	key->tail.dport = own.tail.sport;
	key->tail.sport = entry->port;
	key->tail.flags = NAT_KEY_OUT;
}

static __always_inline bool nat4_is_stale(const struct ct4_key *key, const struct nat4_entry *entry)
{
	struct ct4_key out __attribute__((aligned(8))) = *key;

	if (out.tail.flags != NAT_KEY_OUT)
		nat4_egress_key(&out, entry);
	return !nat4_alive(&out) && entry->created + NAT_MIN_AGE_NS < bpf_ktime_get_ns();
}

static __always_inline bool nat6_is_stale(const struct ct6_key *key, const struct nat6_entry *entry)
{
	struct ct6_key out __attribute__((aligned(8))) = *key;

	if (out.tail.flags != NAT_KEY_OUT)
		nat6_egress_key(&out, entry);
	return !nat6_alive(&out) && entry->created + NAT_MIN_AGE_NS < bpf_ktime_get_ns();
}

/* Up to two lookups in other maps, so each entry counts twice. */
WALKS(hive_nat_gc_v4, cilium_snat_v4_external, ct4_key, nat4_entry, nat4_is_stale, 2)
WALKS(hive_nat_gc_v6, cilium_snat_v6_external, ct6_key, nat6_entry, nat6_is_stale, 2)
