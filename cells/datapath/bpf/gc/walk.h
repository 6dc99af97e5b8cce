/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Walks over the buckets of a hash map in slices; used by gc.c.
 *
 * The kernel's own iterations (iterators, batches, bpf_for_each_map_elem) stop only at entries: they pass over half a
 * million empty buckets at once, and a non-preemptible kernel runs nothing else on that CPU meanwhile. So these
 * programs read the buckets of kernel/bpf/hashtab.c by BTF, and limit the buckets of a run.
 *
 * There is no locking: entries are inserted, deleted and reused during the walk. Each is read as a copy that may be
 * stale, so it is looked up again by its key before it is deleted. Memory of LRU maps' entries is never freed, and
 * bpf_probe_read_kernel() fails for unmapped addresses.
 */
#pragma once

#include <bpf/bpf_core_read.h>
#include <linux/errno.h>

#include "lib/bpf.h"

#define SLICE 512 /* entries per run, checked after each span */
#define SPAN 32 /* buckets per span; their heads are read by one call */
#define SPANS 32 /* spans per subprogram call */
#define STRETCH 32 /* subprogram calls per run: 32,768 buckets */
#define CHAIN 32 /* limit of a bucket's entries: the average is 1, so a longer list continues in another bucket */
#define BUCKET_SIZE 64 /* upper bound of sizeof(struct bucket): 16, more with lock debugging */

/* Kernel structures of kernel/bpf/hashtab.c, relocated by BTF (CO-RE). */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct hlist_nulls_node {
	struct hlist_nulls_node *next;
};

struct hlist_nulls_head {
	struct hlist_nulls_node *first;
};

struct bucket {
	struct hlist_nulls_head head;
};

struct bpf_htab {
	struct bucket *buckets;
	__u32 n_buckets;
};

struct htab_elem {
	struct hlist_nulls_node hash_node;
	char key[0];
};
#pragma clang attribute pop

/* Context of a program: position and results of the walk. */
struct walk {
	__u32 bucket; /* next bucket; 0 starts a walk */
	__u32 buckets; /* of the map; the walk ends after the last one */
	__u32 seen;
	__u32 alive;
	__u32 deleted;
	__u32 now; /* seconds of CLOCK_MONOTONIC at the start of the walk */
	__u32 ingress_alive; /* NAT_KEY_IN entries of a NAT map */
	__u32 ingress_deleted;
};

_Static_assert(sizeof(struct walk) == 32, "the context, as cells/datapath/collector.py packs it");

/* State of the current run; the agent runs one at a time. */
struct walk walk = {};
__u64 walk_buckets;
__u32 walk_entries;
__u8 walk_heads[SPAN * BUCKET_SIZE];

/* Size of a bucket in the running kernel. */
#define BUCKET_STEP bpf_core_field_offset(((struct bucket *)0)[1].head)
#define ELEM_KEY bpf_core_field_offset(struct htab_elem, key)

static __always_inline void walk_begin(const struct walk *context, const void *map)
{
	const struct bpf_htab *table = map;

	walk = *context;
	walk.buckets = table->n_buckets;
	walk_buckets = (__u64)table->buckets;
	walk_entries = 0;
	if (!walk.bucket)
		walk.now = bpf_ktime_get_ns() / 1000000000ULL;
}

/* Read the heads of the next buckets; returns their number or a negative errno. */
VERIFIED_ALONE walk_read_heads(void)
{
	__u32 step = BUCKET_STEP, count = walk.buckets - walk.bucket;
	long failed;

	if (count > SPAN)
		count = SPAN;
	if (step > BUCKET_SIZE)
		return -EINVAL;
	failed =
		bpf_probe_read_kernel(walk_heads, count * step, (void *)(walk_buckets + (__u64)walk.bucket * step));
	return failed ? (int)failed : (int)count;
}

/* Return whether the run or the walk ends. */
static __always_inline int walk_over(void)
{
	return walk.bucket >= walk.buckets || walk_entries >= SLICE;
}

/* The end of a list is an odd number (hlist_nulls) instead of a pointer. */
static __always_inline bool is_end(__u64 node)
{
	return node & 1;
}

static __always_inline void walk_count(bool ingress, bool deleted, __u32 cost)
{
	walk.seen++;
	walk.ingress_alive += ingress && !deleted;
	walk.ingress_deleted += ingress && deleted;
	walk.alive += !deleted;
	walk.deleted += deleted;
	walk_entries += cost;
}

/* Define a program that walks a map and deletes entries for which is_over(key, entry) holds for both the copy and the
 * entry.
 *
 * `cost` counts an entry's is_over() in units of reads.
 */
#define WALKS(program, table, key_type, value_type, is_over, cost)                                                 \
	VERIFIED_ALONE program##_entry(__u64 node)                                                                 \
	{                                                                                                          \
		struct {                                                                                           \
			struct key_type key __attribute__((aligned(8)));                                           \
			struct value_type value __attribute__((aligned(8)));                                       \
		} copy;                                                                                            \
		const struct value_type *entry;                                                                    \
		bool deleted = false;                                                                              \
                                                                                                                   \
		if (bpf_probe_read_kernel(&copy, sizeof(copy), (void *)(node + ELEM_KEY)))                         \
			return 0;                                                                                  \
		if (is_over(&copy.key, &copy.value)) {                                                             \
			entry = bpf_map_lookup_elem(&table, &copy.key);                                            \
			deleted = entry && is_over(&copy.key, entry) && !bpf_map_delete_elem(&table, &copy.key);   \
		}                                                                                                  \
		walk_count(copy.key.tail.flags != NAT_KEY_OUT, deleted, cost);                                     \
		return 0;                                                                                          \
	}                                                                                                          \
                                                                                                                   \
	VERIFIED_ALONE program##_bucket(__u64 node)                                                                \
	{                                                                                                          \
		__u64 next;                                                                                        \
                                                                                                                   \
		for (int n = 0; n < CHAIN && !is_end(node); n++, node = next) {                                    \
			if (bpf_probe_read_kernel(&next, sizeof(next), (void *)node))                              \
				return 0;                                                                          \
			program##_entry(node);                                                                     \
		}                                                                                                  \
		return 0;                                                                                          \
	}                                                                                                          \
                                                                                                                   \
	VERIFIED_ALONE program##_span(void)                                                                        \
	{                                                                                                          \
		int count = walk_read_heads();                                                                     \
                                                                                                                   \
		if (count < 0)                                                                                     \
			return count;                                                                              \
		for (int n = 0; n < SPAN && n < count; n++) {                                                      \
			__u64 first = *(__u64 *)(walk_heads + n * BUCKET_STEP);                                    \
                                                                                                                   \
			if (!is_end(first))                                                                        \
				program##_bucket(first);                                                           \
		}                                                                                                  \
		walk.bucket += SPAN;                                                                               \
		return walk_over();                                                                                \
	}                                                                                                          \
                                                                                                                   \
	/* Nested loops in separate subprograms: inlined, verification would take ten times as long. */            \
	VERIFIED_ALONE program##_spans(void)                                                                       \
	{                                                                                                          \
		int over = 0;                                                                                      \
                                                                                                                   \
		for (int n = 0; n < SPANS && !over; n++)                                                           \
			over = program##_span();                                                                   \
		return over;                                                                                       \
	}                                                                                                          \
                                                                                                                   \
	SEC("syscall")                                                                                             \
	int program(struct walk *context)                                                                          \
	{                                                                                                          \
		int over = 0;                                                                                      \
                                                                                                                   \
		walk_begin(context, &table);                                                                       \
		for (int n = 0; n < STRETCH && !over; n++)                                                         \
			over = program##_spans();                                                                  \
		*context = walk;                                                                                   \
		return over < 0 ? over : 0;                                                                        \
	}
