/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Forwarding by FIB lookups, bypassing the host's stack. */
#pragma once

#include "lib/maps.h"
#include "lib/packet.h"
#include "lib/reasons.h"
#include "lib/rewrite.h"

#define AF_INET 2 /* sys/socket.h needs the C library */
#define AF_INET6 10

/* Look up the next hop from `source` to `destination` for a packet of `length` bytes from the network header on (0: do
 * not check the MTU). Returns BPF_FIB_LKUP_RET_* or a negative errno.
 */
static __always_inline long fib_next_hop_for_length(context_t *ctx, struct bpf_fib_lookup *fib,
						    const struct address *source, const struct address *destination,
						    __u32 length, __u8 family)
{
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->ifindex = packet_ifindex(ctx);
	fib->tot_len = length;
	if (family == FAMILY_IPV4) {
		fib->family = AF_INET;
		fib->ipv4_src = source->words[0];
		fib->ipv4_dst = destination->words[0];
	} else {
		fib->family = AF_INET6;
		__builtin_memcpy(fib->ipv6_src, source, sizeof(fib->ipv6_src));
		__builtin_memcpy(fib->ipv6_dst, destination, sizeof(fib->ipv6_dst));
	}
	return bpf_fib_lookup(ctx, fib, sizeof(*fib), 0);
}

/* Look up with the packet's own length. It is passed explicitly, because the kernel would include an Ethernet header
 * even for devices without one.
 */
static __always_inline long fib_next_hop(context_t *ctx, struct bpf_fib_lookup *fib, const struct address *source,
					 const struct address *destination, __u8 family)
{
	__u32 length = packet_segment(ctx) ? 0 : packet_length(ctx) - LINK_HLEN;

	return fib_next_hop_for_length(ctx, fib, source, destination, length, family);
}

static __always_inline mac_t fib_mac(const __u8 mac[6])
{
	return (mac_t)mac[0] | (mac_t)mac[1] << 8 | (mac_t)mac[2] << 16 | (mac_t)mac[3] << 24 |
	       (mac_t)mac[4] << 32 | (mac_t)mac[5] << 40;
}
