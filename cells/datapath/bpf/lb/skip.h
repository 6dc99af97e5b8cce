/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Exemption from CiliumLocalRedirectPolicies (skipRedirectFromBackend): a policy's own backend pods reach the original
 * destination.
 */
#pragma once

#include "lb/maps.h"

/* cilium_skip_lb4: sockets of this network namespace are not redirected from this address. */
struct skip_lb4_key {
	__u64 netns_cookie;
	__be32 address;
	__be16 port;
	__u16 pad;
};

struct skip_lb6_key {
	__u64 netns_cookie;
	struct address address;
	__u32 pad;
	__u16 port; /* host byte order, as in Cilium 1.17 */
	__u16 pad2;
};

LB_MAP(cilium_skip_lb4, BPF_MAP_TYPE_HASH, BPF_F_NO_PREALLOC, struct skip_lb4_key, __u8);
LB_MAP(cilium_skip_lb6, BPF_MAP_TYPE_HASH, BPF_F_NO_PREALLOC, struct skip_lb6_key, __u8);

_Static_assert(sizeof(struct skip_lb4_key) == 16, "cilium_skip_lb4");
_Static_assert(sizeof(struct skip_lb6_key) == 32, "cilium_skip_lb6");

static __always_inline bool lb_skip_redirect(const struct lb_service *service, __u64 netns_cookie,
					     const struct address *ip, __be16 port, __u8 family)
{
	if (likely(!(service->flags2 & LB_LOCAL_REDIRECT)))
		return false;
	if (family == FAMILY_IPV4) {
		struct skip_lb4_key key = {
			.netns_cookie = netns_cookie,
			.address = ip->words[0],
			.port = port,
		};

		return bpf_map_lookup_elem(&cilium_skip_lb4, &key);
	}

	struct skip_lb6_key key = {
		.netns_cookie = netns_cookie,
		.address = *ip,
		.port = bpf_ntohs(port),
	};

	return bpf_map_lookup_elem(&cilium_skip_lb6, &key);
}
