/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Ingress of a native device: packets of external clients to services, replies to masqueraded pods, and replies of
 * remote backends to those clients. Other packets pass to the stack. Compiled for XDP and for tc.
 */
#pragma once

#include "lb/external.h"
#include "lib/network.h"
#include "nat/icmp_error.h"
#include "netdev/maps.h"
#include "nodeport/rev_nat.h"
#include "nodeport/conntrack.h"
#include "nodeport/dsr.h"
#include "nodeport/icmp_error.h"
#include "nodeport/forward.h"
#include "overlay/tunnel.h"
#ifdef CONTEXT_XDP
#include "xdp/ingress.h"
#else
#include "netdev/tc_ingress.h"
#endif

/* Handle a packet to a service, or an ICMP error to one of its backends; returns the verdict, or UNDECIDED for other
 * packets.
 */
static __always_inline int device_load_balance(context_t *ctx, struct flow *flow, const struct nodeport_config *own,
					       __u32 now, __u8 family)
{
	int verdict, refused;

	if (flow->related) {
		verdict = family == FAMILY_IPV4 ? nodeport4_icmp_error(ctx, flow, now)
						: nodeport6_icmp_error(ctx, flow, now);
		if (verdict < 0)
			return DROP(INGRESS, -verdict);
		return verdict ? nodeport_to_backend(ctx, flow, own, now, family) : UNDECIDED;
	}
	if (!lb_can_balance(flow))
		return UNDECIDED;
	if (unlikely(reply_imitates_tunnel(flow)))
		return UNDECIDED;
	verdict = family == FAMILY_IPV4 ? lb4_from_external(ctx, flow, now) : lb6_from_external(ctx, flow, now);
	if (!verdict)
		return from_netdev_dsr(ctx, flow, own, now, family);
	if (verdict != LB_TRANSLATED)
		return verdict;
	if (dsr_is_used(own, flow) && !flow->local_only && !address_lookup(&flow->daddr, family))
		return family == FAMILY_IPV4 ? dsr4_forward(ctx, flow) : dsr6_forward(ctx, flow);
	refused = family == FAMILY_IPV4 ? nodeport4_track(ctx, flow, now) : nodeport6_track(ctx, flow, now);
	return refused ? DROP(INGRESS, refused) : nodeport_to_backend(ctx, flow, own, now, family);
}

/* Return whether the packet is a tunnel packet to this node, which the kernel decapsulates. SNAT never uses its port.
 */
static __always_inline bool is_tunnel_packet(const struct flow *flow)
{
	const struct tunnel_config *tunnel;

	if (flow->protocol != IPPROTO_UDP)
		return false;
	tunnel = tunnel_any();
	return tunnel && flow->dport == tunnel->port && is_tunnel_source(tunnel, &flow->daddr) &&
	       !nat_in_range(bpf_ntohs(tunnel->port));
}

static __always_inline bool in_range(__u16 port, __u16 first, __u16 last)
{
	return port >= first && port <= last;
}

/* Return whether the packet is another node's WireGuard datagram, for the kernel's socket. SNAT never uses its port. */
static __always_inline bool is_wireguard_packet(const struct flow *flow)
{
	const struct encryption_config *encryption;
	__u16 port, last;

	if (flow->protocol != IPPROTO_UDP)
		return false;
	encryption = encryption_facts();
	if (!encryption)
		return false;
	if (likely(!encryption->rotating[0] && !encryption->rotating[1]))
		return flow->sport == flow->dport && flow->dport == encryption->port;
	port = bpf_ntohs(encryption->port);
	last = port + 2;
	return in_range(bpf_ntohs(flow->dport), port, last) && in_range(bpf_ntohs(flow->sport), port, last);
}

static __always_inline int from_netdev_ip(context_t *ctx, struct flow *flow, __u8 family)
{
	const struct nodeport_config *own = nodeport_facts();
	/* Read the metadata area first: it does not survive a pull. */
	__u32 handed = own && own->flags & NODEPORT_XDP ? xdp_handover(ctx) : 0;
	__u32 now = ct_now();
	int verdict;

	/* Packets that cannot be parsed, and fragments without a known first one, pass to the stack. */
	if (parse_network(ctx, flow, family))
		return VERDICT_PASS;
	/* After XDP the source may be the node's; the XDP program checked it before. */
	if (likely(!handed) && unlikely(is_local_source(&flow->saddr, family))) {
		verdict = check_local_source(ctx, flow, own, now, family);
		if (verdict != UNDECIDED)
			return verdict;
	}
	if (parse_payload(ctx, flow, true, family))
		return VERDICT_PASS;
	if (is_tunnel_packet(flow) || is_wireguard_packet(flow))
		return VERDICT_PASS;
	if (own) {
		if (unlikely(handed))
			return resume_xdp(ctx, flow, own, handed, now, family);
		verdict = device_load_balance(ctx, flow, own, now, family);
		if (verdict != UNDECIDED)
			return verdict;
	}
	verdict = deliver_to_pod(ctx, flow, now, family);
	if (verdict != UNDECIDED)
		return verdict;
	verdict = family == FAMILY_IPV4 ? snat4_rev_nat(ctx, flow) : snat6_rev_nat(ctx, flow);
	if (verdict < 0)
		return DROP(INGRESS, -verdict);
	if (!verdict)
		return VERDICT_PASS;
	if (!own)
		return pass_gateway_reply(ctx, flow, now, family);
	flow->source_identity = IDENTITY_HOST; /* its destination was this node */
	verdict = nodeport_send_reply(ctx, flow, INGRESS, now, family);
	return verdict == UNDECIDED ? deliver_translated(ctx, flow, now, family) : verdict;
}

static __always_inline int from_netdev(context_t *ctx, struct flow *flow)
{
	const struct device_config *device;
	__u32 ifindex = packet_ifindex(ctx);
	__be16 protocol;

	device = bpf_map_lookup_elem(&hive_devices, &ifindex);
	if (!device)
		return VERDICT_PASS;
	flow->for_proxies = device->flags & DEVICE_PROXIES;
	protocol = packet_protocol(ctx);
	if (protocol == bpf_htons(ETH_P_IP))
		return from_netdev_ip(ctx, flow, FAMILY_IPV4);
	if (protocol == bpf_htons(ETH_P_IPV6) && !without(WITHOUT_IPV6))
		return from_netdev_ip(ctx, flow, FAMILY_IPV6);
	if (protocol == bpf_htons(ETH_P_ARP))
		return answer_arp(ctx, device);
	return VERDICT_PASS;
}
