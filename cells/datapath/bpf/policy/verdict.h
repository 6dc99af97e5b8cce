/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The verdict cache: packets of a flow that was allowed within the same second pass without policy lookups, in both
 * directions.
 *
 * A conntrack entry has a tag: the policy epochs of its last evaluation, and the second. A policy change first updates
 * the map, then advances the epoch, so the next packet is evaluated again. Also one packet per second is evaluated, for
 * changes that bypass the agent. Packets that pass by the cache are counted in the entry, and added to the policy entry
 * at the next evaluation. Only allow verdicts are cached.
 */
#pragma once

#include "lib/maps.h"
#include "lib/packet.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32); /* endpoint id; 0: the node, for changes of identities and addresses */
	__type(value, __u64);
	__uint(max_entries, 65536);
} hive_epoch SEC(".maps");

/* ct_entry.verdict: tag (24 bits) | bytes (28) | packets (12). When a counter is full, the flow is evaluated, and
 * counting restarts.
 */
#define VERDICT_TAG_SHIFT 40
#define VERDICT_BYTES_SHIFT 12
#define VERDICT_PACKETS_MASK 0xfffULL
#define VERDICT_BYTES_MASK 0xfffffffULL
#define VERDICT_UNCACHED_FLAGS (TCP_SYN | TCP_FIN | TCP_RST)
#define VERDICT_PACKETS_FULL 0xff0 /* below the field's maximum: other CPUs may count concurrently */
#define VERDICT_BYTES_MOST 0xffff /* limit per packet, so that the sum fits its field */

static __always_inline __u64 epoch_of(__u32 index)
{
	__u64 *epoch = bpf_map_lookup_elem(&hive_epoch, &index);

	return epoch ? *epoch : 0;
}

/* Return the tag of a verdict at this time. `epochs`: the sender's, plus that of a local destination endpoint.
 *
 * Read it before the evaluation: then a concurrent policy change makes the tag stale.
 */
static __always_inline __u64 verdict_tag(__u32 epochs, __u32 now)
{
	epochs += epoch_of(0);
	/* Never 0, the value in entries of older builds. */
	return (__u64)((epochs & 0x7fff) << 8 | (now & 0xff) | 0x800000) << VERDICT_TAG_SHIFT;
}

/* Return whether the flow has a verdict with this tag. In the flow's own direction it also counts a packet that is not
 * evaluated; replies are not counted.
 */
static __always_inline bool verdict_is_valid(struct ct_entry *entry, __u64 tag, const struct flow *flow, bool reply,
					     __u32 bytes)
{
	__u64 word = entry->verdict;

	if (word >> VERDICT_TAG_SHIFT != tag >> VERDICT_TAG_SHIFT || flow->tcp_flags & VERDICT_UNCACHED_FLAGS)
		return false;
	if (reply)
		return true;
	if ((word & VERDICT_PACKETS_MASK) >= VERDICT_PACKETS_FULL || bytes > VERDICT_BYTES_MOST)
		return false;
	__sync_fetch_and_add(&entry->verdict, 1 | (__u64)bytes << VERDICT_BYTES_SHIFT);
	return true;
}

/* Cache an allow verdict with this tag. Not for packets that start or end a connection: the receiver's conntrack must
 * see the next ones.
 */
static __always_inline void verdict_store(struct ct_entry *entry, __u64 tag, __u32 ifindex, const struct flow *flow)
{
	if (flow->tcp_flags & VERDICT_UNCACHED_FLAGS)
		return;
	entry->ifindex = ifindex; /* low bits of the egress link; 0: the stack decides */
	entry->verdict = tag;
}

/* Get the counters for the policy entry: this packet, and those counted since the last evaluation. */
struct use {
	__u32 packets;
	__u32 bytes;
};

static __always_inline void verdict_take_counts(struct ct_entry *entry, struct use *use)
{
	__u64 word = __sync_lock_test_and_set(&entry->verdict, 0);

	use->packets += word & VERDICT_PACKETS_MASK;
	use->bytes += word >> VERDICT_BYTES_SHIFT & VERDICT_BYTES_MASK;
}
