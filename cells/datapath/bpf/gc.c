// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Garbage collection of conntrack and NAT entries: expired ones, or those of deleted endpoints' addresses.
 *
 * The agent runs a program repeatedly in a thread; each run walks a slice of a map (gc/walk.h). So half a million
 * entries are walked in the kernel without copying, and no CPU is busy longer than a slice takes. An entry that is
 * extended while it is being deleted is lost; the next packet creates it again. An entry that moves to another bucket
 * may be missed; for deleted addresses the agent repeats the walk until nothing is deleted.
 */
#include "ct/maps.h"
#include "gc/walk.h"
#include "nat/maps.h"

/* An entry is alive until the end of the second of its lifetime, as for packets. */
static __always_inline bool ct_is_expired(const struct ct_entry *entry)
{
	return entry->lifetime < walk.now;
}

#define CT_OVER(key, entry) ct_is_expired(entry)

WALKS(hive_ct_gc_tcp4, cilium_ct4_global, ct4_key, ct_entry, CT_OVER, 1)
WALKS(hive_ct_gc_any4, cilium_ct_any4_global, ct4_key, ct_entry, CT_OVER, 1)
WALKS(hive_ct_gc_tcp6, cilium_ct6_global, ct6_key, ct_entry, CT_OVER, 1)
WALKS(hive_ct_gc_any6, cilium_ct_any6_global, ct6_key, ct_entry, CT_OVER, 1)

#include "nat/collect.h"

/* Addresses of which to delete all entries; the agent fills it before a walk. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct address);
	__type(value, __u32);
	__uint(max_entries, 131072);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} hive_ct_deleted SEC(".maps");

static __always_inline bool pod_removed4(__be32 ip)
{
	struct address key = { .words = { ip } };

	return bpf_map_lookup_elem(&hive_ct_deleted, &key);
}

static __always_inline bool pod_removed6(const struct address *ip)
{
	return bpf_map_lookup_elem(&hive_ct_deleted, ip);
}

#define FLOW_REMOVED4(key, entry) (pod_removed4((key)->daddr) || pod_removed4((key)->saddr))
#define FLOW_REMOVED6(key, entry) (pod_removed6(&(key)->daddr) || pod_removed6(&(key)->saddr))

/* An egress NAT entry has the pod in its key, a reverse entry in its value. */
#define NAT_REMOVED4(key, entry) (pod_removed4((key)->saddr) || pod_removed4((entry)->address))

static __always_inline bool nat_removed6(const struct nat6_entry *entry)
{
	struct address pod __attribute__((aligned(8))) = entry->address;

	return pod_removed6(&pod);
}

#define NAT_REMOVED6(key, entry) (pod_removed6(&(key)->saddr) || nat_removed6(entry))

WALKS(hive_ct_forget_tcp4, cilium_ct4_global, ct4_key, ct_entry, FLOW_REMOVED4, 1)
WALKS(hive_ct_forget_any4, cilium_ct_any4_global, ct4_key, ct_entry, FLOW_REMOVED4, 1)
WALKS(hive_ct_forget_tcp6, cilium_ct6_global, ct6_key, ct_entry, FLOW_REMOVED6, 1)
WALKS(hive_ct_forget_any6, cilium_ct_any6_global, ct6_key, ct_entry, FLOW_REMOVED6, 1)
WALKS(hive_ct_forget_nat4, cilium_snat_v4_external, ct4_key, nat4_entry, NAT_REMOVED4, 1)
WALKS(hive_ct_forget_nat6, cilium_snat_v6_external, ct6_key, nat6_entry, NAT_REMOVED6, 1)

char _license[] SEC("license") = "Dual BSD/GPL";
