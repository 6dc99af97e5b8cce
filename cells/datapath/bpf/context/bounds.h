/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packet bounds and metadata area, for either context_t. */
#pragma once

/* Assembly, so that the compiler neither narrows these pointers to the declared 32 bits nor reuses them after a pull:
 * the verifier would reject them.
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

/* Return the metadata area in front of the packet, which the XDP program wrote. */
static __always_inline void *packet_meta(const context_t *ctx)
{
	void *meta;

	asm volatile("%0 = *(u32 *)(%1 + %2)" : "=r"(meta) : "r"(ctx), "i"(offsetof(context_t, data_meta)));
	return meta;
}
