/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Session affinity of sockets, keyed by the netns cookie: the client's address is not known yet. */
#pragma once

#include "sock/peer.h"

static __always_inline __u32 sock_lookup_affinity(const struct lb_service *service, const struct peer *peer,
						  __u64 now)
{
	const struct lb_affinity *known;

	if (!lb_has_affinity(service))
		return 0;
	if (peer->family == FAMILY_IPV4) {
		struct lb4_affinity_key key = {
			.client = peer->netns_cookie,
			.rev_nat_index = service->rev_nat_index,
			.netns_cookie = 1,
		};

		known = bpf_map_lookup_elem(&cilium_lb4_affinity, &key);
	} else {
		struct lb6_affinity_key key = { .rev_nat_index = service->rev_nat_index, .netns_cookie = 1 };

		__builtin_memcpy(&key.client, &peer->netns_cookie, sizeof(peer->netns_cookie));
		known = bpf_map_lookup_elem(&cilium_lb6_affinity, &key);
	}
	return lb_valid_affinity(service, known, now);
}

static __always_inline void sock_update_affinity(const struct lb_service *service, const struct peer *peer,
						 __u32 backend, __u64 now)
{
	struct lb_affinity value = { .last_used = now, .backend = backend };

	if (!lb_has_affinity(service))
		return;
	if (peer->family == FAMILY_IPV4) {
		struct lb4_affinity_key key = {
			.client = peer->netns_cookie,
			.rev_nat_index = service->rev_nat_index,
			.netns_cookie = 1,
		};

		if (!lb_refresh_affinity(bpf_map_lookup_elem(&cilium_lb4_affinity, &key), backend, now))
			bpf_map_update_elem(&cilium_lb4_affinity, &key, &value, BPF_ANY);
	} else {
		struct lb6_affinity_key key = { .rev_nat_index = service->rev_nat_index, .netns_cookie = 1 };

		__builtin_memcpy(&key.client, &peer->netns_cookie, sizeof(peer->netns_cookie));
		if (!lb_refresh_affinity(bpf_map_lookup_elem(&cilium_lb6_affinity, &key), backend, now))
			bpf_map_update_elem(&cilium_lb6_affinity, &key, &value, BPF_ANY);
	}
}
