/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Kernel headers, libbpf's helpers, and common macros. */
#pragma once

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

#ifndef bool
#define bool _Bool
#define true 1
#define false 0
#endif

#ifndef NULL
#define NULL ((void *)0)
#endif

#define likely(condition) __builtin_expect(!!(condition), 1)
#define unlikely(condition) __builtin_expect(!!(condition), 0)

/* A global function, which the verifier checks once, separately from its callers: otherwise it would follow every path
 * through all callers. The verifier assumes that pointer arguments may be NULL, and that it returns a number.
 */
#define VERIFIED_ALONE __attribute__((noinline)) int
#define VERIFIED_ALONE_U64 __attribute__((noinline)) __u64
