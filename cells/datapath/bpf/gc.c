// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Removes from the conntrack tables what has ended, or whose address is nobody's any more; and translations
 * of such flows.
 *
 * By iterators over a map: the agent reads from one, in a thread, and each read goes on where the one before ended. So
 * half a million entries are walked in the kernel, none is copied, and no processor is held for longer than a slice
 * takes. Forgetting addresses may miss none, so it is walked again while a walk still finds some.
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

/* The addresses to forget, filled by the agent before a walk. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct address);
	__type(value, __u32);
	__uint(max_entries, 131072);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} hive_ct_gone SEC(".maps");

static __always_inline bool gone4(__be32 ip)
{
	struct address key = { .words = { ip } };

	return bpf_map_lookup_elem(&hive_ct_gone, &key);
}

static __always_inline bool gone6(const struct address *ip)
{
	return bpf_map_lookup_elem(&hive_ct_gone, ip);
}

#define FLOW_GONE4(key, entry) (gone4((key).daddr) || gone4((key).saddr))
#define FLOW_GONE6(key, entry) (gone6(&(key).daddr) || gone6(&(key).saddr))

/* Of a translation the packets' entry has the pod in its key, that of the answers in its value. */
#define NAT_GONE4(key, entry) (gone4((key).saddr) || gone4((entry)->address))

static __always_inline bool nat_gone6(const struct nat6_entry *entry)
{
	struct address pod __attribute__((aligned(8))) = entry->address;

	return gone6(&pod);
}

#define NAT_GONE6(key, entry) (gone6(&(key).saddr) || nat_gone6(entry))

/* Removes the flows from or to these addresses. A walk may pass over a few; one that deletes none has missed none. */
#define FORGETS(name, table, key_type, value_type, is_gone)                                                        \
	SEC("iter/bpf_map_elem")                                                                                   \
	int hive_ct_forget_##name(struct bpf_iter__bpf_map_elem *context)                                          \
	{                                                                                                          \
		const struct value_type *entry = context->value;                                                   \
		struct key_type *found = context->key, key __attribute__((aligned(8)));                            \
                                                                                                                   \
		walk_begin(context);                                                                               \
		if (!found || !entry)                                                                              \
			return walk_end(context);                                                                  \
		key = *found;                                                                                      \
		judged(is_gone(key, entry) && !bpf_map_delete_elem(&table, &key));                                 \
		return walk_end(context);                                                                          \
	}

FORGETS(tcp4, cilium_ct4_global, ct4_key, ct_entry, FLOW_GONE4)
FORGETS(any4, cilium_ct_any4_global, ct4_key, ct_entry, FLOW_GONE4)
FORGETS(tcp6, cilium_ct6_global, ct6_key, ct_entry, FLOW_GONE6)
FORGETS(any6, cilium_ct_any6_global, ct6_key, ct_entry, FLOW_GONE6)
FORGETS(nat4, cilium_snat_v4_external, ct4_key, nat4_entry, NAT_GONE4)
FORGETS(nat6, cilium_snat_v6_external, ct6_key, nat6_entry, NAT_GONE6)

char _license[] SEC("license") = "Dual BSD/GPL";
