/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* For gc.c: walks the buckets of a hash map, a slice of them a run.
 *
 * The kernel's own walks (iterators, batches, bpf_for_each_map_elem) end at entries alone: they pass over half a million
 * empty buckets at a stretch, and a kernel without preemption runs nothing else on that processor meanwhile. So buckets
 * are read here as the kernel's type information describes them (kernel/bpf/hashtab.c), and a run ends after so many.
 *
 * Nothing is locked: entries come, go and are used again while they are read. What is read is a copy that may be stale,
 * so an entry is looked up again by its key before it is deleted. Entries of these maps (LRU) are never given back to
 * the kernel, and a read of an unmapped address fails.
 */
#pragma once

#include <bpf/bpf_core_read.h>
#include <linux/errno.h>

#include "lib/bpf.h"

#define SLICE 512 /* entries after which a run ends, at the end of a span */
#define SPAN 32 /* buckets; their heads are read at once */
#define SPANS 32 /* spans of a call */
#define STRETCH 32 /* calls after which a run ends: 32,768 buckets */
#define CHAIN 32 /* entries of a bucket: one on average, so more are not its own */
#define BUCKET_SIZE 64 /* bytes at the most: 16, more with the kernel's checks of locks */

/* The kernel's own structures, as far as they are looked into. */
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

/* The context of a program: where the walk is, and what it has found so far. */
struct walk {
	__u32 bucket; /* the next; 0 begins */
	__u32 buckets; /* the map's: the walk is over when all have been seen */
	__u32 seen;
	__u32 alive;
	__u32 deleted;
	__u32 now; /* seconds of CLOCK_MONOTONIC as the walk began */
};

_Static_assert(sizeof(struct walk) == 24, "the context, as cells/datapath/collector.py packs it");

/* Of the run: one at a time. */
struct walk walk = {};
__u64 walk_buckets;
__u32 walk_entries;
__u8 walk_heads[SPAN * BUCKET_SIZE];

/* From one bucket to the next: where the head of the second one is, by the kernel's sizes. */
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

/* Read the heads of the next buckets; how many, or the kernel's error. */
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

/* Whether the run ends here. */
static __always_inline int walk_over(void)
{
	return walk.bucket >= walk.buckets || walk_entries >= SLICE;
}

/* An empty list, and the end of one, is an odd number instead of a pointer. */
static __always_inline bool is_end(__u64 node)
{
	return node & 1;
}

static __always_inline void walk_count(bool deleted, __u32 cost)
{
	walk.seen++;
	walk.alive += !deleted;
	walk.deleted += deleted;
	walk_entries += cost;
}

/* A program that walks a map: deletes the entries that are over, by a copy of them and then by themselves.
 *
 * is_over(key, entry) is asked of both, and costs as much as reading so many entries.
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
		walk_count(deleted, cost);                                                                         \
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
	/* A loop of loops, each verified alone: in one, the verifier would take ten times as long. */             \
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
