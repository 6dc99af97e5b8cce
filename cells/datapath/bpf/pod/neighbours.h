/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* IPv6 messages between hosts of a link, which are exempt from policy.
 *
 * Neighbour discovery (RFC 4861), with hop limit 255, which shows that no router forwarded it; and messages by
 * destination: to routers, and multicast listener reports (RFC 2710, 3810), with hop limit 1, which distant senders may
 * have, too. IPv4 has ARP for this, which is not IP.
 */
#pragma once

#include <linux/in.h>

#include "lib/packet.h"

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

/* Return whether an address may send neighbour discovery from a pod although it is not the pod's: unspecified (RFC
 * 4862) or link-local.
 */
static __always_inline bool neighbours_source(const struct address *ip)
{
	return bpf_ntohl(ip->words[0]) >> 22 == 0xfe80 >> 6 || address_is_zero(ip);
}

/* Return whether a neighbour solicitation may reach the host's stack, which creates neighbour entries: from the pod's
 * address, unspecified, or the link-local address of its MAC (RFC 4291, appendix A). Others could fill the neighbour
 * table.
 */
static __always_inline bool neighbours_own_source(const struct address *ip, const struct endpoint_config *self)
{
	mac_t mac = self->pod_mac;

	if (self->flags & ENDPOINT_ANY_SOURCE || address_is_zero(ip) || address_equals(ip, &self->ipv6))
		return true;
	if (ip->words[0] != bpf_htonl(0xfe800000) || ip->words[1])
		return false;
	return !mac || (ip->words[2] == (((__u32)mac & 0xffffff) ^ 0xff000002) &&
			ip->words[3] == (0xfe | (__u32)(mac >> 24) << 8));
}

/* Return whether it is such a message from a pod: a pod is not a router, and may only advertise its own addresses. */
static __always_inline bool pod_finds_neighbours(const struct flow *flow)
{
	__u16 type = bpf_ntohs(flow->policy_port);

	return finds_neighbours(flow) && type != ND_ROUTER_ADVERT && type != MLD_QUERY;
}
