/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Output of NodePort packets: to a local pod, another node, or the client. XDP programs pass packets that they cannot handle to
 * the tc program.
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

/* Return the tunnel endpoint of the packet's destination; 0 for native routing. Without a tunnel the ipcache is not looked up;
 * nodeport_sent_verdict() does so for drops.
 */
static __always_inline __be32 nodeport_tunnel_endpoint(struct flow *flow, __u8 family)
{
	return tunnel_facts() ? tunnel_node(flow, family) : 0;
}

/* Return the verdict; for a drop, first set the destination identity for its event. */
static __always_inline int nodeport_sent_verdict(struct flow *flow, int verdict, __u8 family)
{
	if (unlikely(DROPPED(verdict)))
		flow->destination_identity = identity_of(ipcache_lookup(&flow->daddr, family));
	return verdict;
}
