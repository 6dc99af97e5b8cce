/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packet counters by reason and direction; each packet is counted once.
 *
 * File and line are zero, since tools would print them as lines of Cilium's sources.
 */
#pragma once

#include "context/context.h"
#include "lib/maps.h"
#include "lib/reasons.h"

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__type(key, struct metrics_key);
	__type(value, struct metrics_value);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} cilium_metrics SEC(".maps");

static __always_inline void count(context_t *ctx, __u8 reason, enum direction direction)
{
	struct metrics_key key = { .reason = reason, .direction = direction };
	struct metrics_value *value = bpf_map_lookup_elem(&cilium_metrics, &key);

	if (likely(value)) { /* per-CPU value; tc programs do not preempt each other */
		value->count++;
		value->bytes += packet_length(ctx);
	} else {
		struct metrics_value first = { .count = 1, .bytes = packet_length(ctx) };

		bpf_map_update_elem(&cilium_metrics, &key, &first, BPF_NOEXIST);
	}
}
