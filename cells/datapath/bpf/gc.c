// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Removes from the conntrack tables what has ended, or whose address is nobody's any more.
 *
 * Run by the agent with BPF_PROG_TEST_RUN, in a thread: half a million entries are walked in the kernel, none is
 * copied. An entry that is renewed while it is being removed is lost; the next packet of its flow is a new one.
 */
#include "ct_maps.h"

struct gc_counts {
	__u32 seen;
	__u32 alive;
	__u32 deleted;
	__u32 pad;
};

/* The context, filled in: tables in the order of enum gc_table. */
enum gc_table {
	GC_TCP4,
	GC_ANY4,
	GC_TCP6,
	GC_ANY6,
	GC_TABLES,
};

struct gc_context {
	struct gc_counts counts[GC_TABLES];
};

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

_Static_assert(sizeof(struct gc_context) == 64, "context of hive_ct_gc");
_Static_assert(sizeof(struct forget_context) == 400, "context of hive_ct_forget");

struct gc_walk {
	struct gc_counts counts;
	__u32 now;
};

/* An entry is alive through the second of its lifetime, as for the packet walk, give or take a tick. */
static long collect(void *map, void *key, struct ct_entry *entry, struct gc_walk *walk)
{
	walk->counts.seen++;
	if (entry->lifetime >= walk->now)
		walk->counts.alive++;
	else if (!bpf_map_delete_elem(map, key))
		walk->counts.deleted++;
	return 0;
}

#define COLLECT(table, index)                                                                                      \
	do {                                                                                                       \
		struct gc_walk walk = { .now = bpf_ktime_get_ns() / 1000000000ULL };                               \
		long walked = bpf_for_each_map_elem(&table, collect, &walk, 0);                                    \
		if (walked < 0)                                                                                    \
			return walked;                                                                             \
		context->counts[index] = walk.counts;                                                              \
	} while (0)

/* 0, or the negative error of a walk that could not be made. */
SEC("syscall")
int hive_ct_gc(struct gc_context *context)
{
	COLLECT(cilium_ct4_global, GC_TCP4);
	COLLECT(cilium_ct_any4_global, GC_ANY4);
	COLLECT(cilium_ct6_global, GC_TCP6);
	COLLECT(cilium_ct_any6_global, GC_ANY6);
	return 0;
}

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
