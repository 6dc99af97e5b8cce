/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Changes of forwarded packets: MACs and the hop limit. */
#pragma once

#include "lib/maps.h"
#include "lib/packet.h"

static __always_inline void mac_write(__be16 field[3], mac_t mac)
{
	field[0] = mac;
	field[1] = mac >> 16;
	field[2] = mac >> 32;
}

static __always_inline mac_t mac_read(const __be16 field[3])
{
	return field[0] | (mac_t)field[1] << 16 | (mac_t)field[2] << 32;
}

static __always_inline bool mac_equals(const __be16 field[3], mac_t mac)
{
	return field[0] == (__u16)mac && field[1] == (__u16)(mac >> 16) && field[2] == (__u16)(mac >> 32);
}

static __always_inline bool mac_is_broadcast(const __be16 field[3])
{
	return mac_equals(field, 0xffffffffffffULL);
}

/* Decrement the hop limit and update the checksum (RFC 1141). */
static __always_inline void ttl_decrement(struct iphdr *ip)
{
	__u32 check = ip->check + bpf_htons(0x0100);

	ip->check = check + (check >= 0xffff);
	ip->ttl--;
}

/* Decrement the hop limit; false if the packet cannot be accessed. */
static __always_inline bool decrement_hop(context_t *ctx, __u8 family)
{
	if (family == FAMILY_IPV4) {
		struct iphdr *ip = packet_ipv4(ctx);

		if (!ip)
			return false;
		ttl_decrement(ip);
	} else {
		struct ipv6hdr *ip = packet_ipv6(ctx);

		if (!ip)
			return false;
		ip->hop_limit--;
	}
	return true;
}

/* Forward the packet one hop, from `source` to `destination`; false if it cannot be accessed. */
static __always_inline bool hop(context_t *ctx, mac_t source, mac_t destination, __u8 family)
{
	struct ethernet *eth;

	if (!decrement_hop(ctx, family) || packet_frame(ctx))
		return false;
	eth = packet_eth(ctx);
	if (!eth)
		return false;
	mac_write(eth->destination, destination);
	mac_write(eth->source, source);
	return true;
}
