/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* On to the next hop of the route. */
#pragma once

#include "lib/fib.h"

/* Address the packet to the next hop, with one hop less to live; false if it has become unreadable. */
static __always_inline bool fib_hop(context_t *ctx, const struct bpf_fib_lookup *fib, __u8 family)
{
	return hop(ctx, fib_mac(fib->smac), fib_mac(fib->dmac), family);
}

/* The verdict on a packet that fib_hop() has prepared: a next hop without a known MAC is for the kernel to ask for. */
static __always_inline int fib_redirect(const struct bpf_fib_lookup *fib, long found, __u8 family)
{
	struct bpf_redir_neigh next = { .nh_family = fib->family };

	if (likely(found == BPF_FIB_LKUP_RET_SUCCESS))
		return bpf_redirect(fib->ifindex, 0);
	if (family == FAMILY_IPV4)
		next.ipv4_nh = fib->ipv4_dst;
	else
		__builtin_memcpy(next.ipv6_nh, fib->ipv6_dst, sizeof(next.ipv6_nh));
	return bpf_redirect_neigh(fib->ifindex, &next, sizeof(next), 0);
}
