/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The kernel's own headers, libbpf's helpers, and the few words C lacks. */
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

/* A function that the verifier checks by itself, once, so that it need not follow its callers into it: what costs
 * it time is every path through everything. Its pointers may be NULL as far as it knows; it returns a number.
 */
#define VERIFIED_ALONE __attribute__((noinline)) int
#define VERIFIED_ALONE_U64 __attribute__((noinline)) __u64
