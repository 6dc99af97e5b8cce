/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Forwarding to the next hop of a FIB lookup. */
#pragma once

#include "lib/fib.h"

/* Write the next hop's MACs and decrement the hop limit; false if the packet cannot be accessed. */
static __always_inline bool fib_rewrite(context_t *ctx, const struct bpf_fib_lookup *fib, __u8 family)
{
	return hop(ctx, fib_mac(fib->smac), fib_mac(fib->dmac), family);
}

/* Redirect a packet after fib_rewrite(); without a neighbour entry the kernel resolves the MAC. Returns the verdict. */
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
