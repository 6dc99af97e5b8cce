// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Removes from the conntrack tables what has ended. Run by the agent with BPF_PROG_TEST_RUN. */
#include "ct_maps.h"

struct gc_counts {
	__u32 seen;
	__u32 alive;
	__u32 deleted;
	__u32 pad;
};

/* The program's context, 32 bytes, filled in by it: cilium_ct4_global, then cilium_ct_any4_global. */
struct gc_context {
	struct gc_counts tcp4;
	struct gc_counts any4;
};

_Static_assert(sizeof(struct gc_context) == 32, "context of hive_ct_gc");

struct gc_walk {
	struct gc_counts counts;
	__u32 now;
};

/* An entry is alive through the second of its lifetime, as for the packet walk. */
static long collect(void *map, struct ct_key *key, struct ct_entry *entry, struct gc_walk *walk)
{
	walk->counts.seen++;
	if (entry->lifetime >= walk->now)
		walk->counts.alive++;
	else if (!bpf_map_delete_elem(map, key))
		walk->counts.deleted++;
	return 0;
}

/* 0, or the negative error of a walk that could not be made. */
SEC("syscall")
int hive_ct_gc(struct gc_context *context)
{
	struct gc_walk walk = { .now = bpf_ktime_get_ns() / 1000000000ULL };
	long walked = bpf_for_each_map_elem(&cilium_ct4_global, collect, &walk, 0);

	if (walked < 0)
		return walked;
	context->tcp4 = walk.counts;
	walk.counts = (struct gc_counts){};
	walked = bpf_for_each_map_elem(&cilium_ct_any4_global, collect, &walk, 0);
	if (walked < 0)
		return walked;
	context->any4 = walk.counts;
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
