/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The conntrack maps and their keys, of either family. */
#pragma once

#include "lib/maps.h"
#include "lib/packet.h"

#define CT_MAP(name, key_type, entries)                                                                            \
	struct {                                                                                                   \
		__uint(type, BPF_MAP_TYPE_LRU_HASH);                                                               \
		__type(key, struct key_type);                                                                      \
		__type(value, struct ct_entry);                                                                    \
		__uint(max_entries, entries);                                                                      \
	} name SEC(".maps")

CT_MAP(cilium_ct4_global, ct4_key, 524288);
CT_MAP(cilium_ct_any4_global, ct4_key, 262144);
CT_MAP(cilium_ct6_global, ct6_key, 524288);
CT_MAP(cilium_ct_any6_global, ct6_key, 262144);

/* Keys are written by the words in which they are hashed: store-to-load forwarding needs a single store per load. All
 * keys are aligned to 8 bytes.
 */
struct ct_tail_words {
	__u32 ports;
	__u16 rest;
};

struct ct4_words {
	__be32 daddr;
	__be32 saddr;
	struct ct_tail_words tail;
} __attribute__((may_alias));

struct ct6_words {
	struct address daddr;
	struct address saddr;
	struct ct_tail_words tail;
} __attribute__((may_alias));

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define JOINED(first, second, bits) ((__u32)(first) | (__u32)(second) << (bits))
#else
#define JOINED(first, second, bits) ((__u32)(first) << (bits) | (__u32)(second))
#endif

/* Fill ports and direction of the flow that this packet starts, or with `reply` of the one that it replies to. */
static __always_inline void ct_fill_tail(struct ct_tail_words *tail, const struct flow *flow,
					 enum direction direction, bool reply)
{
	bool in = (direction == INGRESS) != reply;
	__u8 flags = (in ? CT_KEY_IN : CT_KEY_OUT) | (flow->related ? CT_KEY_RELATED : 0);

	tail->ports = reply ? JOINED(flow->sport, flow->dport, 16) : JOINED(flow->dport, flow->sport, 16);
	tail->rest = JOINED(flow->protocol, flags, 8);
}

static __always_inline void ct_fill_key4(struct ct4_key *key, const struct flow *flow, enum direction direction,
					 bool reply)
{
	/* Load both before selecting: the verifier rejects a load from a computed address. */
	__be32 source = *(volatile const __be32 *)&flow->saddr.words[0];
	__be32 destination = *(volatile const __be32 *)&flow->daddr.words[0];
	struct ct4_words *words = (void *)key;

	words->daddr = reply ? destination : source;
	words->saddr = reply ? source : destination;
	ct_fill_tail(&words->tail, flow, direction, reply);
}

static __always_inline void ct_fill_key6(struct ct6_key *key, const struct flow *flow, enum direction direction,
					 bool reply)
{
	struct ct6_words *words = (void *)key;

	/* Two branches with a barrier: merged, they would be a copy from a computed address, which the verifier
	 * rejects.
	 */
	if (reply) {
		address_load_aligned(&words->daddr, &flow->daddr);
		address_load_aligned(&words->saddr, &flow->saddr);
		barrier();
	} else {
		address_load_aligned(&words->daddr, &flow->saddr);
		address_load_aligned(&words->saddr, &flow->daddr);
	}
	ct_fill_tail(&words->tail, flow, direction, reply);
}

/* A key of either family. */
union ct_key {
	struct ct4_key ipv4;
	struct ct6_key ipv6;
} __attribute__((aligned(8)));

/* Look up the flow's entry, or NULL; its key is written to `key`. One call site per map, because the kernel inlines
 * only lookups of a constant map.
 */
static __always_inline struct ct_entry *ct_entry_by(union ct_key *key, const struct flow *flow,
						    enum direction direction, bool reply, __u8 family)
{
	struct ct_entry *entry;

	if (family == FAMILY_IPV4) {
		ct_fill_key4(&key->ipv4, flow, direction, reply);
		if (flow->protocol == IPPROTO_TCP) {
			entry = bpf_map_lookup_elem(&cilium_ct4_global, &key->ipv4);
			barrier();
		} else {
			entry = bpf_map_lookup_elem(&cilium_ct_any4_global, &key->ipv4);
		}
	} else {
		ct_fill_key6(&key->ipv6, flow, direction, reply);
		if (flow->protocol == IPPROTO_TCP) {
			entry = bpf_map_lookup_elem(&cilium_ct6_global, &key->ipv6);
			barrier();
		} else {
			entry = bpf_map_lookup_elem(&cilium_ct_any6_global, &key->ipv6);
		}
	}
	return entry;
}

static __always_inline struct ct_entry *ct_entry_of(const struct flow *flow, enum direction direction, bool reply,
						    __u8 family)
{
	union ct_key key;

	return ct_entry_by(&key, flow, direction, reply, family);
}

/* Convert a flow's key to the key of its ICMP errors. */
static __always_inline void ct_relate_errors_tail(struct ct_tail *tail, __u8 family)
{
	tail->dport = 0;
	tail->sport = 0;
	tail->protocol = family == FAMILY_IPV4 ? IPPROTO_ICMP : IPPROTO_ICMPV6;
	tail->flags |= CT_KEY_RELATED;
}

/* Create or extend the RELATED entry, which accepts ICMP errors between two addresses for as long as any of their flows
 * may live.
 */
static __always_inline long ct_relate_errors(void *map, const void *key, struct ct_entry *entry, __u32 until)
{
	struct ct_entry *known = bpf_map_lookup_elem(map, key);

	if (known && known->source_identity == entry->source_identity) {
		if (known->through_stack != entry->through_stack)
			known->through_stack = entry->through_stack;
		if (known->rev_nat_index != entry->rev_nat_index) {
			known->rev_nat_index = entry->rev_nat_index;
			known->lb_loopback = entry->lb_loopback;
		}
		if (known->lifetime < until)
			known->lifetime = until;
		return 0;
	}
	entry->lifetime = until;
	return bpf_map_update_elem(map, key, entry, BPF_ANY);
}

/* Insert the entries of a flow and of its ICMP errors; returns 0 or a negative errno. */
static __always_inline long ct_insert(const struct flow *flow, enum direction direction, struct ct_entry *entry,
				      __u32 until, __u8 family)
{
	bool tcp = flow->protocol == IPPROTO_TCP;
	long failed;

	if (family == FAMILY_IPV4) {
		struct ct4_key key __attribute__((aligned(8)));

		ct_fill_key4(&key, flow, direction, false);
		if (tcp) {
			failed = bpf_map_update_elem(&cilium_ct4_global, &key, entry, BPF_ANY);
			barrier();
		} else {
			failed = bpf_map_update_elem(&cilium_ct_any4_global, &key, entry, BPF_ANY);
		}
		ct_relate_errors_tail(&key.tail, family);
		return failed ? failed : ct_relate_errors(&cilium_ct_any4_global, &key, entry, until);
	} else {
		struct ct6_key key __attribute__((aligned(8)));

		ct_fill_key6(&key, flow, direction, false);
		if (tcp) {
			failed = bpf_map_update_elem(&cilium_ct6_global, &key, entry, BPF_ANY);
			barrier();
		} else {
			failed = bpf_map_update_elem(&cilium_ct_any6_global, &key, entry, BPF_ANY);
		}
		ct_relate_errors_tail(&key.tail, family);
		return failed ? failed : ct_relate_errors(&cilium_ct_any6_global, &key, entry, until);
	}
}
