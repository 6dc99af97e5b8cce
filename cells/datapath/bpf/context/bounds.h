/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Where a packet begins and ends, and what lies before it: the same words of either context_t, which is known here. */
#pragma once

/* In assembly, so that the compiler neither narrows these to the 32 bits they are declared with nor
 * keeps them over a pull: the verifier would no longer know them as pointers.
 */
static __always_inline void *packet_start(const context_t *ctx)
{
	void *start;

	asm volatile("%0 = *(u32 *)(%1 + %2)" : "=r"(start) : "r"(ctx), "i"(offsetof(context_t, data)));
	return start;
}

static __always_inline void *packet_end(const context_t *ctx)
{
	void *end;

	asm volatile("%0 = *(u32 *)(%1 + %2)" : "=r"(end) : "r"(ctx), "i"(offsetof(context_t, data_end)));
	return end;
}

/* The metadata in front of the packet, which an earlier program has written. */
static __always_inline void *packet_meta(const context_t *ctx)
{
	void *meta;

	asm volatile("%0 = *(u32 *)(%1 + %2)" : "=r"(meta) : "r"(ctx), "i"(offsetof(context_t, data_meta)));
	return meta;
}
