/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Counters of socket load balancing in cilium_metrics, without bytes. */
#pragma once

#include "lib/metrics.h"

#define REASON_LB_NO_BACKEND_SLOT 5
#define REASON_LB_NO_BACKEND 6
#define REASON_LB_REVNAT_UPDATE 7
#define REASON_LB_REVNAT_STALE 8

static __always_inline void sock_count(__u8 reason, enum direction direction)
{
	struct metrics_key key = { .reason = reason, .direction = direction };
	struct metrics_value *value = bpf_map_lookup_elem(&cilium_metrics, &key);

	if (value) {
		value->count++;
	} else {
		struct metrics_value first = { .count = 1 };

		bpf_map_update_elem(&cilium_metrics, &key, &first, BPF_NOEXIST);
	}
}
