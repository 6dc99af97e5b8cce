/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Allocation of SNAT ports, unique per remote address and port. */
#pragma once

#include "ct/conntrack.h"
#include "lib/config.h"
#include "nat/maps.h"

#define NAT_TRIES 128
#define NAT_RECLAIMS 32 /* ports in use to try, if no tried port is free */

static __always_inline bool nat_in_range(__u16 port)
{
	return port >= config.nat_port_min && port <= config.nat_port_max;
}

/* Return the port at this offset in the NAT range, modulo its size. */
static __always_inline __u32 nat_port_at(__u32 number)
{
	__u32 range = config.nat_port_max - config.nat_port_min + 1;

	return config.nat_port_min + number % (range ?: 1);
}

/* Return whether a socket of the node would receive the replies to this port. */
static __always_inline bool nat_node_socket_has_port(context_t *ctx, const struct flow *flow,
						     const struct address *target, __be16 port, __u8 family)
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

/* Insert the reverse entry for this port; false if the port is in use. A flow of the node itself (`needs_ct`) keeps its
 * source port unless a pod's flow has it.
 */
static __always_inline int nat_claim_port(context_t *ctx, struct flow *flow, const struct address *target,
					  __u32 number, bool needs_ct, __u8 family)
{
	const struct nat_entry entry = { .needs_ct = needs_ct, .address = flow->saddr, .port = flow->sport };
	__be16 port = bpf_htons((__u16)number);
	union nat_key key;

	if (!needs_ct && nat_node_socket_has_port(ctx, flow, target, port, family))
		return false;
	nat_fill_key(&key, &flow->daddr, flow->dport, target, port, flow->protocol, NAT_KEY_IN, family);
	return !nat_insert(&key, &entry, BPF_NOEXIST, family);
}

VERIFIED_ALONE nat4_claim_port(context_t *ctx, struct flow *flow, struct address *target, __u32 port,
			       __u32 needs_ct)
{
	return flow && target ? nat_claim_port(ctx, flow, target, port, needs_ct, FAMILY_IPV4) : false;
}

VERIFIED_ALONE nat6_claim_port(context_t *ctx, struct flow *flow, struct address *target, __u32 port,
			       __u32 needs_ct)
{
	return flow && target ? nat_claim_port(ctx, flow, target, port, needs_ct, FAMILY_IPV6) : false;
}

/* Turn a reverse entry's key into the conntrack key of its flow; false if there is no entry, or if it is too new. */
static __always_inline bool nat_find_holder(union nat_key *key, __u8 family)
{
	__u64 latest = bpf_ktime_get_ns() - NAT_MIN_AGE_NS;

	if (family == FAMILY_IPV4) {
		const struct nat4_entry *entry = bpf_map_lookup_elem(&cilium_snat_v4_external, &key->v4);

		if (!entry || entry->created >= latest)
			return false;
		key->v4.daddr = entry->address;
		key->v4.tail.dport = key->v4.tail.sport;
		key->v4.tail.sport = entry->port;
		key->v4.tail.flags = CT_KEY_OUT;
	} else {
		const struct nat6_entry *entry = bpf_map_lookup_elem(&cilium_snat_v6_external, &key->v6);

		if (!entry || entry->created >= latest)
			return false;
		key->v6.daddr = entry->address;
		key->v6.tail.dport = key->v6.tail.sport;
		key->v6.tail.sport = entry->port;
		key->v6.tail.flags = CT_KEY_OUT;
	}
	return true;
}

static __always_inline bool nat_holder_is_alive(const union nat_key *key, bool tcp, __u8 family)
{
	const struct ct_entry *entry;

	if (family == FAMILY_IPV4)
		entry = bpf_map_lookup_elem(tcp ? (void *)&cilium_ct4_global : (void *)&cilium_ct_any4_global,
					    &key->v4);
	else
		entry = bpf_map_lookup_elem(tcp ? (void *)&cilium_ct6_global : (void *)&cilium_ct_any6_global,
					    &key->v6);
	return entry && entry->lifetime >= ct_now();
}

/* Delete the port's reverse entry if its flow has ended; returns whether it did. Garbage collection (nat/collect.h) may
 * be hours away.
 */
static __always_inline bool nat_reclaim_port(const struct flow *flow, const struct address *target, __u32 number,
					     __u8 family)
{
	__be16 port = bpf_htons((__u16)number);
	union nat_key key;

	nat_fill_key(&key, &flow->daddr, flow->dport, target, port, flow->protocol, NAT_KEY_IN, family);
	if (!nat_find_holder(&key, family) || nat_holder_is_alive(&key, flow->protocol == IPPROTO_TCP, family))
		return false;
	nat_fill_key(&key, &flow->daddr, flow->dport, target, port, flow->protocol, NAT_KEY_IN, family);
	nat_delete(&key, family);
	return true;
}

VERIFIED_ALONE nat4_reclaim_port(const struct flow *flow, const struct address *target, __u32 port)
{
	return flow && target ? nat_reclaim_port(flow, target, port, FAMILY_IPV4) : false;
}

VERIFIED_ALONE nat6_reclaim_port(const struct flow *flow, const struct address *target, __u32 port)
{
	return flow && target ? nat_reclaim_port(flow, target, port, FAMILY_IPV6) : false;
}

static __always_inline void nat_release_port(const struct flow *flow, const struct address *target, __be16 port,
					     __u8 family)
{
	union nat_key key;

	nat_fill_key(&key, &flow->daddr, flow->dport, target, port, flow->protocol, NAT_KEY_IN, family);
	nat_delete(&key, family);
}

static __always_inline bool nat_try_port(context_t *ctx, struct flow *flow, struct address *target, __u32 port,
					 bool needs_ct, __u8 family)
{
	return family == FAMILY_IPV4 ? nat4_claim_port(ctx, flow, target, port, needs_ct)
				     : nat6_claim_port(ctx, flow, target, port, needs_ct);
}

static __always_inline bool nat_retry_port(context_t *ctx, struct flow *flow, struct address *target, __u32 port,
					   bool needs_ct, __u8 family)
{
	bool free = family == FAMILY_IPV4 ? nat4_reclaim_port(flow, target, port)
					  : nat6_reclaim_port(flow, target, port);

	return free && nat_try_port(ctx, flow, target, port, needs_ct, family);
}

/* Find and claim a port; 0 if all tried ports are in use. */
static __always_inline __u32 nat_find_port(context_t *ctx, struct flow *flow, struct address *target, bool needs_ct,
					   __u8 family)
{
	__u32 own = bpf_ntohs(flow->sport), first = bpf_get_prandom_u32();
	bool stays = flow->protocol == IPPROTO_SCTP; /* the port cannot change: CRC32c over the whole packet */

	if ((stays || nat_in_range(own)) && nat_try_port(ctx, flow, target, own, needs_ct, family))
		return own;
	if (stays)
		return nat_retry_port(ctx, flow, target, own, needs_ct, family) ? own : 0;
	for (__u32 i = 0; i < NAT_TRIES; i++) {
		__u32 port = nat_port_at(first + i);

		if (nat_try_port(ctx, flow, target, port, needs_ct, family))
			return port;
	}
	for (__u32 i = 0; i < NAT_RECLAIMS; i++) {
		__u32 port = nat_port_at(first + i);

		if (nat_retry_port(ctx, flow, target, port, needs_ct, family))
			return port;
	}
	return 0;
}

/* Create both NAT entries of a flow; returns its SNAT port in host byte order, or 0. */
static __always_inline __u32 nat_allocate_port(context_t *ctx, struct flow *flow, struct address *target,
					       bool needs_ct, __u8 family)
{
	__u32 port = nat_find_port(ctx, flow, target, needs_ct, family);
	struct nat_entry entry = { .needs_ct = needs_ct, .address = *target, .port = bpf_htons((__u16)port) };
	union nat_key key;

	if (!port)
		return 0;
	nat_fill_key(&key, &flow->saddr, flow->sport, &flow->daddr, flow->dport, flow->protocol, NAT_KEY_OUT,
		     family);
	if (!nat_insert(&key, &entry, BPF_ANY, family))
		return port;
	nat_release_port(flow, target, entry.port, family);
	return 0;
}

VERIFIED_ALONE nat4_allocate_port(context_t *ctx, struct flow *flow, struct address *target, __u32 needs_ct)
{
	return flow && target ? nat_allocate_port(ctx, flow, target, needs_ct, FAMILY_IPV4) : 0;
}

VERIFIED_ALONE nat6_allocate_port(context_t *ctx, struct flow *flow, struct address *target, __u32 needs_ct)
{
	return flow && target ? nat_allocate_port(ctx, flow, target, needs_ct, FAMILY_IPV6) : 0;
}
