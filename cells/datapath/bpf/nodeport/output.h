/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Where packets of services end up: in a pod, at another node, back at the client. A program in the driver leaves to the one
 * behind it what it cannot do itself.
 */
#pragma once

#include "lib/identity.h"
#include "overlay/tunnel.h"

#ifdef CONTEXT_XDP
#include "xdp/send.h"
#else
#include "nodeport/deliver.h"
#include "nodeport/send.h"
#endif

/* The node that has the pod which the packet is for, where only the tunnel leads there; else 0. Without a tunnel nothing is
 * looked up: nodeport_sent() does for events.
 */
static __always_inline __be32 nodeport_node(struct flow *flow, __u8 family)
{
	return tunnel_facts() ? tunnel_node(flow, family) : 0;
}

/* The verdict on a packet that was to be sent: an event of a drop has who the packet was for. */
static __always_inline int nodeport_sent(struct flow *flow, int verdict, __u8 family)
{
	if (unlikely(DROPPED(verdict)))
		flow->destination_identity = identity_of(ipcache_lookup(&flow->daddr, family));
	return verdict;
}
