/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the program in the driver leaves to the tc program. */
#pragma once

#include "nodeport/maps.h"
#include "xdp/send.h"

/* No program runs before it. */
static __always_inline __u32 device_handed(const context_t *ctx)
{
	(void)ctx;
	return 0;
}

static __always_inline int device_goes_on(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
					  __u32 handed, __u32 now, __u8 family)
{
	(void)ctx, (void)flow, (void)own, (void)handed, (void)now, (void)family;
	return VERDICT_PASS;
}

/* What seems to come from this node is for that program to evaluate. */
static __always_inline int device_gets_local(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
					     __u32 now, __u8 family)
{
	(void)ctx, (void)flow, (void)own, (void)now, (void)family;
	return VERDICT_PASS;
}

/* What another node has passed on for a backend here goes to its pod. */
static __always_inline int from_netdev_dsr(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
					   __u32 now, __u8 family)
{
	(void)ctx, (void)flow, (void)own, (void)now, (void)family;
	return UNDECIDED;
}

static __always_inline int device_delivers(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	(void)ctx, (void)flow, (void)now, (void)family;
	return UNDECIDED;
}

/* The driver's program serves clients outside alone: without those there is none. */
static __always_inline int device_answers_gateway(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	(void)ctx, (void)flow, (void)now, (void)family;
	return VERDICT_PASS;
}

static __always_inline int device_done(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	(void)flow, (void)now, (void)family;
	return hand_over_to_stack(ctx, HANDED_DONE);
}

/* Who asks for addresses of services is answered there. */
static __always_inline int device_gets_arp(context_t *ctx, const struct device_config *device)
{
	(void)ctx, (void)device;
	return VERDICT_PASS;
}
