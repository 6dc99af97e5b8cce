/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* How the hosts of one link find each other in IPv6: what passes a pod's link whatever policy says.
 *
 * Neighbour discovery (RFC 4861), which by its hop limit no router has touched, and what is for neighbours
 * only by where it goes: routers (the same), multicast listeners (RFC 2710, 3810), whose hop limit of 1 what
 * comes from afar may have too. In IPv4 that is ARP, which is no IP at all.
 */
#pragma once

#include <linux/in.h>

#include "packet.h"

#define MLD_QUERY 130
#define MLD_DONE 132
#define ND_ROUTER_SOLICIT 133
#define ND_ROUTER_ADVERT 134
#define ND_SOLICIT 135
#define ND_ADVERT 136
#define MLD_REPORT_2 143
#define ND_HOP_LIMIT 255
#define MLD_HOP_LIMIT 1

static __always_inline bool finds_neighbours(const struct flow *flow)
{
	__u16 type = bpf_ntohs(flow->policy_port);

	if (flow->protocol != IPPROTO_ICMPV6)
		return false;
	if (type == ND_SOLICIT || type == ND_ADVERT)
		return flow->ttl == ND_HOP_LIMIT;
	if (!link_scoped(&flow->daddr))
		return false;
	if (type == ND_ROUTER_SOLICIT || type == ND_ROUTER_ADVERT)
		return flow->ttl == ND_HOP_LIMIT;
	return ((type >= MLD_QUERY && type <= MLD_DONE) || type == MLD_REPORT_2) && flow->ttl == MLD_HOP_LIMIT;
}

/* Likewise, from a pod: it is no router, and answers only for what is its own. */
static __always_inline bool pod_finds_neighbours(const struct flow *flow)
{
	__u16 type = bpf_ntohs(flow->policy_port);

	return finds_neighbours(flow) && type != ND_ROUTER_ADVERT && type != MLD_QUERY;
}
