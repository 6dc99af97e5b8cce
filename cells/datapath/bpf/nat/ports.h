/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Finds the port that a translated flow gets: one by which its answers cannot be mistaken for others'. */
#pragma once

#include "lib/config.h"
#include "nat/maps.h"

#define NAT_TRIES 128

static __always_inline bool nat_in_range(__u16 port)
{
	return port >= config.nat_port_min && port <= config.nat_port_max;
}

/* The port that is `number` ports after the first, in a circle. */
static __always_inline __u32 nat_port_at(__u32 number)
{
	__u32 range = config.nat_port_max - config.nat_port_min + 1;

	return config.nat_port_min + number % (range ?: 1);
}

/* Whether a socket of the node has the port, so that it would miss the answers. */
static __always_inline bool nat_port_of_node(context_t *ctx, const struct flow *flow, const struct address *target,
					     __be16 port, __u8 family)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *socket;
	__u32 size;

	if (family == FAMILY_IPV4) {
		tuple.ipv4.saddr = flow->daddr.words[0];
		tuple.ipv4.daddr = target->words[0];
		tuple.ipv4.sport = flow->dport;
		tuple.ipv4.dport = port;
		size = sizeof(tuple.ipv4);
	} else {
		__builtin_memcpy(tuple.ipv6.saddr, &flow->daddr, sizeof(tuple.ipv6.saddr));
		__builtin_memcpy(tuple.ipv6.daddr, target, sizeof(tuple.ipv6.daddr));
		tuple.ipv6.sport = flow->dport;
		tuple.ipv6.dport = port;
		size = sizeof(tuple.ipv6);
	}
	if (flow->protocol == IPPROTO_TCP)
		socket = bpf_skc_lookup_tcp(ctx, &tuple, size, BPF_F_CURRENT_NETNS, 0);
	else if (flow->protocol == IPPROTO_UDP)
		socket = bpf_sk_lookup_udp(ctx, &tuple, size, BPF_F_CURRENT_NETNS, 0);
	else
		return false;
	if (!socket)
		return false;
	bpf_sk_release(socket);
	return true;
}

/* Take the port for the answers to the flow, unless another has it. The node's own flow has its socket under its own port,
 * which it keeps unless a pod has been given it.
 */
static __always_inline int nat_take(context_t *ctx, struct flow *flow, const struct address *target, __u32 number,
				    bool needs_ct, __u8 family)
{
	const struct nat_entry entry = { .needs_ct = needs_ct, .address = flow->saddr, .port = flow->sport };
	__be16 port = bpf_htons((__u16)number);
	union nat_key key;

	if (!needs_ct && nat_port_of_node(ctx, flow, target, port, family))
		return false;
	nat_key_write(&key, &flow->daddr, flow->dport, target, port, flow->protocol, NAT_KEY_IN, family);
	return !nat_insert(&key, &entry, BPF_NOEXIST, family);
}

VERIFIED_ALONE nat4_take(context_t *ctx, struct flow *flow, struct address *target, __u32 port, __u32 needs_ct)
{
	return flow && target ? nat_take(ctx, flow, target, port, needs_ct, FAMILY_IPV4) : false;
}

VERIFIED_ALONE nat6_take(context_t *ctx, struct flow *flow, struct address *target, __u32 port, __u32 needs_ct)
{
	return flow && target ? nat_take(ctx, flow, target, port, needs_ct, FAMILY_IPV6) : false;
}

static __always_inline void nat_give_back(const struct flow *flow, const struct address *target, __be16 port,
					  __u8 family)
{
	union nat_key key;

	nat_key_write(&key, &flow->daddr, flow->dport, target, port, flow->protocol, NAT_KEY_IN, family);
	nat_delete(&key, family);
}

static __always_inline bool nat_try(context_t *ctx, struct flow *flow, struct address *target, __u32 port,
				    bool needs_ct, __u8 family)
{
	return family == FAMILY_IPV4 ? nat4_take(ctx, flow, target, port, needs_ct)
				     : nat6_take(ctx, flow, target, port, needs_ct);
}

/* Find the flow a port; 0 if all that were tried are taken. */
static __always_inline __u32 nat_find_port(context_t *ctx, struct flow *flow, struct address *target, bool needs_ct,
					   __u8 family)
{
	__u32 own = bpf_ntohs(flow->sport), first = bpf_get_prandom_u32();
	bool stays = flow->protocol == IPPROTO_SCTP; /* its checksum is over the whole packet */

	if ((stays || nat_in_range(own)) && nat_try(ctx, flow, target, own, needs_ct, family))
		return own;
	if (stays)
		return 0;
	for (__u32 i = 0; i < NAT_TRIES; i++) {
		__u32 port = nat_port_at(first + i);

		if (nat_try(ctx, flow, target, port, needs_ct, family))
			return port;
	}
	return 0;
}

/* Enter the flow under a port of its own, which is returned in the host's order; 0 if that fails. */
static __always_inline __u32 nat_allocate(context_t *ctx, struct flow *flow, struct address *target, bool needs_ct,
					  __u8 family)
{
	__u32 port = nat_find_port(ctx, flow, target, needs_ct, family);
	struct nat_entry entry = { .needs_ct = needs_ct, .address = *target, .port = bpf_htons((__u16)port) };
	union nat_key key;

	if (!port)
		return 0;
	nat_key_write(&key, &flow->saddr, flow->sport, &flow->daddr, flow->dport, flow->protocol, NAT_KEY_OUT,
		      family);
	if (!nat_insert(&key, &entry, BPF_ANY, family))
		return port;
	nat_give_back(flow, target, entry.port, family);
	return 0;
}

VERIFIED_ALONE nat4_allocate(context_t *ctx, struct flow *flow, struct address *target, __u32 needs_ct)
{
	return flow && target ? nat_allocate(ctx, flow, target, needs_ct, FAMILY_IPV4) : 0;
}

VERIFIED_ALONE nat6_allocate(context_t *ctx, struct flow *flow, struct address *target, __u32 needs_ct)
{
	return flow && target ? nat_allocate(ctx, flow, target, needs_ct, FAMILY_IPV6) : 0;
}
