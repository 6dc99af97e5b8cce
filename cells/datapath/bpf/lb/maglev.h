/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Maglev consistent hashing (NSDI 2016): all nodes select the same backend for a client's connection.
 *
 * The hash is jhash (Bob Jenkins' lookup3, include/linux/jhash.h) over the same fields as Cilium's.
 */
#pragma once

#include "lb/services.h"
#include "nodeport/maps.h"

#define JHASH_INITVAL 0xdeadbeef

static __always_inline __u32 rol32(__u32 word, __u32 bits)
{
	return word << bits | word >> (32 - bits);
}

static __always_inline __u32 jhash_final(__u32 a, __u32 b, __u32 c)
{
	c ^= b;
	c -= rol32(b, 14);
	a ^= c;
	a -= rol32(c, 11);
	b ^= a;
	b -= rol32(a, 25);
	c ^= b;
	c -= rol32(b, 16);
	a ^= c;
	a -= rol32(c, 4);
	b ^= a;
	b -= rol32(a, 14);
	c ^= b;
	c -= rol32(b, 24);
	return c;
}

#define JHASH_MIX(a, b, c)                                                                                         \
	do {                                                                                                       \
		a -= c, a ^= rol32(c, 4), c += b;                                                                  \
		b -= a, b ^= rol32(a, 6), a += c;                                                                  \
		c -= b, c ^= rol32(b, 8), b += a;                                                                  \
		a -= c, a ^= rol32(c, 16), c += b;                                                                 \
		b -= a, b ^= rol32(a, 19), a += c;                                                                 \
		c -= b, c ^= rol32(b, 4), b += a;                                                                  \
	} while (0)

/* The hash excludes the service's address, since all its frontends have the same backends; and with session affinity the
 * client's port (`by_address`).
 */
static __always_inline __u32 maglev_hash(const struct flow *flow, const struct nodeport_config *own,
					 bool by_address, __u8 family)
{
	__u32 ports = (by_address ? 0 : (__u32)flow->sport << 16) | flow->dport;
	__u32 a, b, c, initval;

	if (family == FAMILY_IPV4) {
		initval = own->seed4 + JHASH_INITVAL + (3 << 2);
		return jhash_final(flow->saddr.words[0] + initval, ports + initval, flow->protocol + initval);
	}
	a = flow->saddr.words[0];
	b = flow->saddr.words[1];
	c = flow->saddr.words[2];
	JHASH_MIX(a, b, c);
	a += flow->saddr.words[3];
	b += ports;
	c += flow->protocol;
	JHASH_MIX(a, b, c);
	a += own->seed6;
	return jhash_final(a, b, c);
}

/* Return whether the service uses Maglev: by its own setting, else the node's. */
static __always_inline bool maglev_is_used(const struct lb_service *service, const struct nodeport_config *own)
{
	__u8 algorithm = service->backend >> 24;

	return algorithm == LB_MAGLEV || (!algorithm && own->flags & NODEPORT_MAGLEV);
}

/* Return the backend id for the connection; 0 if the service has no table. */
static __always_inline __u32 maglev_select_backend(const struct lb_service *service, const struct flow *flow,
						   const struct nodeport_config *own, __u8 family)
{
	__u32 zero = 0, size = config.maglev_size, at;
	__be16 index = service->rev_nat_index;
	const __u32 *numbers;
	void *table;

	table = family == FAMILY_IPV4 ? bpf_map_lookup_elem(&cilium_lb4_maglev, &index)
				      : bpf_map_lookup_elem(&cilium_lb6_maglev, &index);
	if (!table || !size)
		return 0;
	numbers = bpf_map_lookup_elem(table, &zero);
	if (!numbers)
		return 0;
	at = maglev_hash(flow, own, service->flags & LB_AFFINITY, family) % size;
	asm volatile("" : "+r"(at)); /* keeps the bounds check below, which the verifier needs */
	return at < size ? numbers[at] : 0;
}
