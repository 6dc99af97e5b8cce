/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The verdict cache: a flow that was just let through is let through again without asking, in both directions.
 *
 * The entry of a flow remembers, besides its lifetime, a tag: the policy epochs under which the flow was last
 * evaluated, and the second. A policy change updates the map first and the epoch afterwards, so the next
 * packet is evaluated anew; and every second one packet is, for changes made past the agent. Packets that
 * were let through unasked are counted in the tag's word, and in the policy map at the next evaluation.
 * Only what was allowed is remembered.
 */
#pragma once

#include "lib/maps.h"
#include "lib/packet.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32); /* an endpoint; 0: the node, for changes of identities and addresses */
	__type(value, __u64);
	__uint(max_entries, 65536);
} hive_epoch SEC(".maps");

/* The word: tag (24 bits) | bytes (28) | packets (12). A full count has the flow evaluated, and begins anew. */
#define VERDICT_TAG_SHIFT 40
#define VERDICT_BYTES_SHIFT 12
#define VERDICT_PACKETS_MASK 0xfffULL
#define VERDICT_BYTES_MASK 0xfffffffULL
#define VERDICT_UNCACHED_FLAGS (TCP_SYN | TCP_FIN | TCP_RST)
#define VERDICT_PACKETS_FULL 0xff0 /* below what the field holds: other CPUs may be counting too */
#define VERDICT_BYTES_MOST 0xffff /* of a packet, so that their sum stays in its field */

static __always_inline __u64 epoch_of(__u32 index)
{
	__u64 *epoch = bpf_map_lookup_elem(&hive_epoch, &index);

	return epoch ? *epoch : 0;
}

/* The tag a verdict given now has. `epochs`: the sender's, plus that of the local endpoint that gets the packet.
 *
 * Read before evaluating: a change that comes meanwhile makes the verdict stale from the start.
 */
static __always_inline __u64 verdict_tag(__u32 epochs, __u32 now)
{
	epochs += epoch_of(0);
	/* Never 0, what an entry of an earlier build has. */
	return (__u64)((epochs & 0x7fff) << 8 | (now & 0xff) | 0x800000) << VERDICT_TAG_SHIFT;
}

/* Whether the flow was let through under this tag. Of a flow's own direction, which policy counts, it counts one
 * more packet that was not evaluated; of its replies there is nothing to count.
 */
static __always_inline bool verdict_holds(struct ct_entry *entry, __u64 tag, const struct flow *flow, bool reply,
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

/* Remember that the flow was let through under this tag. Not by the packets that begin or end it: those after
 * them have to be seen by the receiver's conntrack.
 */
static __always_inline void verdict_remember(struct ct_entry *entry, __u64 tag, __u32 ifindex,
					     const struct flow *flow)
{
	if (flow->tcp_flags & VERDICT_UNCACHED_FLAGS)
		return;
	entry->ifindex = ifindex; /* low bits of the link it leaves by; 0: the stack's to say */
	entry->verdict = tag;
}

/* What policy is to count: this packet, and those the flow was spared since. */
struct use {
	__u32 packets;
	__u32 bytes;
};

static __always_inline void verdict_take(struct ct_entry *entry, struct use *use)
{
	__u64 word = __sync_lock_test_and_set(&entry->verdict, 0);

	use->packets += word & VERDICT_PACKETS_MASK;
	use->bytes += word >> VERDICT_BYTES_SHIFT & VERDICT_BYTES_MASK;
}
