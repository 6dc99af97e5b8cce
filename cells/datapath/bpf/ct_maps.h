/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The conntrack tables: for the packet walk and for the garbage collection. */
#pragma once

#include "maps.h"

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct ct_key);
	__type(value, struct ct_entry);
	__uint(max_entries, 524288);
} cilium_ct4_global SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct ct_key);
	__type(value, struct ct_entry);
	__uint(max_entries, 262144);
} cilium_ct_any4_global SEC(".maps");
