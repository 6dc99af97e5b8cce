/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the XDP program leaves to the tc program: functions of netdev/tc_ingress.h that pass the packet on to it. */
#pragma once

#include "nodeport/maps.h"
#include "xdp/send.h"

/* No program runs before it. */
static __always_inline __u32 xdp_handover(const context_t *ctx)
{
	(void)ctx;
	return 0;
}

static __always_inline int resume_xdp(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
				      __u32 handed, __u32 now, __u8 family)
{
	(void)ctx, (void)flow, (void)own, (void)handed, (void)now, (void)family;
	return VERDICT_PASS;
}

/* The tc program checks packets with a source address of this node. */
static __always_inline int check_local_source(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
					      __u32 now, __u8 family)
{
	(void)ctx, (void)flow, (void)own, (void)now, (void)family;
	return VERDICT_PASS;
}

/* It delivers to pods, also what another node has forwarded with DSR. */
static __always_inline int from_netdev_dsr(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
					   __u32 now, __u8 family)
{
	(void)ctx, (void)flow, (void)own, (void)now, (void)family;
	return UNDECIDED;
}

static __always_inline int deliver_to_pod(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	(void)ctx, (void)flow, (void)now, (void)family;
	return UNDECIDED;
}

/* Without external clients there is no XDP program. */
static __always_inline int pass_gateway_reply(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	(void)ctx, (void)flow, (void)now, (void)family;
	return VERDICT_PASS;
}

static __always_inline int deliver_translated(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	(void)flow, (void)now, (void)family;
	return hand_over_to_stack(ctx, HANDED_DONE);
}

/* It answers ARP for announced addresses. */
static __always_inline int answer_arp(context_t *ctx, const struct device_config *device)
{
	(void)ctx, (void)device;
	return VERDICT_PASS;
}
