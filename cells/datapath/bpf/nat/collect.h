/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* For gc.c: removes translations of flows that conntrack has forgotten.
 *
 * The two entries of a flow go together, each when a walk comes to it: in both cases conntrack is asked about the flow.
 */
#pragma once

#include "nat/maps.h"

#define NAT_YOUNG 1000000000ULL /* one that has just been made is left to the next walk */

/* Whether conntrack knows the flow that an entry of packets on their way out translates. */
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
	return entry && !has_ended(entry);
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
	return entry && !has_ended(entry);
}

/* Whether it does, or knows the flow that such packets answer: as those of a backend that answers a client by itself. */
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

/* The key of the answers becomes that of the packets on their way out. */
static __always_inline void nat4_outward(struct ct4_key *key, const struct nat4_entry *entry)
{
	struct ct4_key own = *key;

	key->daddr = own.saddr;
	key->saddr = entry->address;
	key->tail.dport = own.tail.sport;
	key->tail.sport = entry->port;
	key->tail.flags = NAT_KEY_OUT;
}

static __always_inline void nat6_outward(struct ct6_key *key, const struct nat6_entry *entry)
{
	struct ct6_key own = *key;

	key->daddr = own.saddr;
	key->saddr = entry->address;
	key->tail.dport = own.tail.sport;
	key->tail.sport = entry->port;
	key->tail.flags = NAT_KEY_OUT;
}

static __always_inline bool nat4_over(const struct ct4_key *key, const struct nat4_entry *entry)
{
	struct ct4_key out __attribute__((aligned(8))) = *key;

	if (out.tail.flags != NAT_KEY_OUT)
		nat4_outward(&out, entry);
	return !nat4_alive(&out) && entry->created + NAT_YOUNG < bpf_ktime_get_ns();
}

static __always_inline bool nat6_over(const struct ct6_key *key, const struct nat6_entry *entry)
{
	struct ct6_key out __attribute__((aligned(8))) = *key;

	if (out.tail.flags != NAT_KEY_OUT)
		nat6_outward(&out, entry);
	return !nat6_alive(&out) && entry->created + NAT_YOUNG < bpf_ktime_get_ns();
}

/* Other maps are asked: each counts twice. */
WALKS(hive_nat_gc_v4, cilium_snat_v4_external, ct4_key, nat4_entry, nat4_over, 2)
WALKS(hive_nat_gc_v6, cilium_snat_v6_external, ct6_key, nat6_entry, nat6_over, 2)
