// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Removes from the conntrack tables what has ended, or whose address is nobody's any more; and translations
 * of such flows.
 *
 * What has ended goes by iterators over a map: the agent reads from one, in a thread, and each read goes on where the one
 * before ended. So half a million entries are walked in the kernel, none is copied, and no processor is held for longer
 * than a slice takes. Forgetting addresses is one walk over everything, run with BPF_PROG_TEST_RUN, for it may miss none.
 * An entry that is renewed while it is being removed is lost; the next packet of its flow is a new one.
 */
#include "ct/maps.h"

#define SLICE 512 /* entries after which a read may end, and twice as many after which it does */
#define QUIET 8	  /* entries without a deletion, more than a bucket has: to go on here is safe */

/* What a read returns: the walk so far. */
struct gc_counts {
	__u32 seen;
	__u32 alive;
	__u32 deleted;
	__u32 pad;
};

_Static_assert(sizeof(struct gc_counts) == 16, "what is read from an iterator");

/* The kernel's own structures, as far as they are looked into. */
struct seq_file;
struct bpf_map;

struct bpf_iter_meta {
	struct seq_file *seq;
	__u64 session_id;
	__u64 seq_num;
} __attribute__((aligned(8)));

struct bpf_iter__bpf_map_elem {
	struct bpf_iter_meta *meta;
	struct bpf_map *map;
	void *key;
	void *value;
} __attribute__((aligned(8)));

struct walk {
	struct gc_counts counts;
	__u32 now;
	__u32 slice; /* entries since the last read ended */
	__u32 quiet; /* entries since the last deletion */
};

struct walk walk = {}; /* one at a time */

static __always_inline void walk_begin(const struct bpf_iter__bpf_map_elem *context)
{
	if (context->meta->seq_num)
		return;
	__builtin_memset(&walk, 0, sizeof(walk));
	walk.now = bpf_ktime_get_ns() / 1000000000ULL;
}

/* Hand out the counts, so that the read ends: at the end, or when the slice is over.
 *
 * The kernel goes on by counting the entries of a bucket it has seen; those that were deleted it counts too,
 * and would pass over as many others; the next walk finds those.
 */
static __always_inline int walk_end(const struct bpf_iter__bpf_map_elem *context)
{
	bool safe = walk.quiet >= QUIET;

	walk.slice++;
	if (context->key && (walk.slice < SLICE || (!safe && walk.slice < 2 * SLICE)))
		return 0;
	walk.slice = 0;
	bpf_seq_write(context->meta->seq, &walk.counts, sizeof(walk.counts));
	return 0;
}

/* An entry is alive through the second of its lifetime, as for the packet walk, give or take a tick. */
static __always_inline bool has_ended(const struct ct_entry *entry)
{
	return entry->lifetime < walk.now;
}

static __always_inline void judged(bool deleted)
{
	walk.counts.seen++;
	walk.counts.alive += !deleted;
	walk.counts.deleted += deleted;
	walk.quiet = deleted ? 0 : walk.quiet + 1;
}

#define COLLECTS(name, table, key_type)                                                                            \
	SEC("iter/bpf_map_elem")                                                                                   \
	int hive_ct_gc_##name(struct bpf_iter__bpf_map_elem *context)                                              \
	{                                                                                                          \
		const struct ct_entry *entry = context->value;                                                     \
		struct key_type *found = context->key, key;                                                        \
                                                                                                                   \
		walk_begin(context);                                                                               \
		if (!found || !entry)                                                                              \
			return walk_end(context);                                                                  \
		key = *found;                                                                                      \
		judged(has_ended(entry) && !bpf_map_delete_elem(&table, &key));                                    \
		return walk_end(context);                                                                          \
	}

COLLECTS(tcp4, cilium_ct4_global, ct4_key)
COLLECTS(any4, cilium_ct_any4_global, ct4_key)
COLLECTS(tcp6, cilium_ct6_global, ct6_key)
COLLECTS(any6, cilium_ct_any6_global, ct6_key)

#include "nat/collect.h"

/* More at once make fewer walks; they are on the stack, which has 512 bytes. */
#define FORGET_IPV4 48
#define FORGET_IPV6 12

/* The context of forgetting: as many addresses as are given; the others are zero. `deleted` is filled in. */
struct forget_context {
	__u32 count4;
	__u32 count6;
	__u32 deleted;
	__u32 pad;
	__be32 ipv4[FORGET_IPV4];
	struct address ipv6[FORGET_IPV6];
};

_Static_assert(sizeof(struct forget_context) == 400, "context of hive_ct_forget");

/* By value: a walk reads its own stack, not the context. */
struct forget4_walk {
	__u32 count;
	__u32 deleted;
	__be32 addresses[FORGET_IPV4];
};

struct forget6_walk {
	__u32 count;
	__u32 deleted;
	struct address addresses[FORGET_IPV6];
};

static long forget4(void *map, struct ct4_key *key, struct ct_entry *entry, struct forget4_walk *walk)
{
	(void)entry;
#pragma unroll
	for (__u32 i = 0; i < FORGET_IPV4; i++) {
		if (i >= walk->count)
			return 0;
		if (key->daddr != walk->addresses[i] && key->saddr != walk->addresses[i])
			continue;
		if (!bpf_map_delete_elem(map, key))
			walk->deleted++;
		return 0;
	}
	return 0;
}

static long forget6(void *map, struct ct6_key *key, struct ct_entry *entry, struct forget6_walk *walk)
{
	struct address daddr = key->daddr, saddr = key->saddr;

	(void)entry;
#pragma unroll
	for (__u32 i = 0; i < FORGET_IPV6; i++) {
		if (i >= walk->count)
			return 0;
		if (!address_equals(&daddr, &walk->addresses[i]) && !address_equals(&saddr, &walk->addresses[i]))
			continue;
		if (!bpf_map_delete_elem(map, key))
			walk->deleted++;
		return 0;
	}
	return 0;
}

/* Of a translation the packets' entry has the pod in its key, that of the answers in its value. */
static long forget_nat4(void *map, struct ct4_key *key, struct nat4_entry *entry, struct forget4_walk *walk)
{
#pragma unroll
	for (__u32 i = 0; i < FORGET_IPV4; i++) {
		if (i >= walk->count)
			return 0;
		if (key->saddr != walk->addresses[i] && entry->address != walk->addresses[i])
			continue;
		if (!bpf_map_delete_elem(map, key))
			walk->deleted++;
		return 0;
	}
	return 0;
}

static long forget_nat6(void *map, struct ct6_key *key, struct nat6_entry *entry, struct forget6_walk *walk)
{
	struct address saddr = key->saddr, pod = entry->address;

#pragma unroll
	for (__u32 i = 0; i < FORGET_IPV6; i++) {
		if (i >= walk->count)
			return 0;
		if (!address_equals(&saddr, &walk->addresses[i]) && !address_equals(&pod, &walk->addresses[i]))
			continue;
		if (!bpf_map_delete_elem(map, key))
			walk->deleted++;
		return 0;
	}
	return 0;
}

#define FORGET(table, callback)                                                                                    \
	do {                                                                                                       \
		long walked = bpf_for_each_map_elem(&table, callback, &walk, 0);                                   \
		if (walked < 0)                                                                                    \
			return walked;                                                                             \
	} while (0)

static __always_inline long forget_ipv4(struct forget_context *context)
{
	struct forget4_walk walk = { .count = context->count4 };

#pragma unroll
	for (int i = 0; i < FORGET_IPV4; i++)
		walk.addresses[i] = context->ipv4[i];
	FORGET(cilium_ct4_global, forget4);
	FORGET(cilium_ct_any4_global, forget4);
	FORGET(cilium_snat_v4_external, forget_nat4);
	context->deleted += walk.deleted;
	return 0;
}

static __always_inline long forget_ipv6(struct forget_context *context)
{
	struct forget6_walk walk = { .count = context->count6 };

#pragma unroll
	for (int i = 0; i < FORGET_IPV6; i++)
		walk.addresses[i] = context->ipv6[i];
	FORGET(cilium_ct6_global, forget6);
	FORGET(cilium_ct_any6_global, forget6);
	FORGET(cilium_snat_v6_external, forget_nat6);
	context->deleted += walk.deleted;
	return 0;
}

/* Removes all flows from or to the addresses. 0, or the negative error of a walk. */
SEC("syscall")
int hive_ct_forget(struct forget_context *context)
{
	long failed = context->count4 ? forget_ipv4(context) : 0;

	if (!failed && context->count6)
		failed = forget_ipv6(context);
	return failed;
}

char _license[] SEC("license") = "Dual BSD/GPL";
