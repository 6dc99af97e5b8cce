/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Session affinity: a client keeps its backend until it is idle for the service's timeout. */
#pragma once

#include "lb/services.h"

static __always_inline bool lb_has_affinity(const struct lb_service *service)
{
	return service->flags & LB_AFFINITY && !(service->flags2 & LB_L7);
}

static __always_inline void lb4_affinity_key(struct lb4_affinity_key *key, const struct flow *flow, __be16 index)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->client = flow->saddr.words[0];
	key->rev_nat_index = index;
}

static __always_inline void lb6_affinity_key(struct lb6_affinity_key *key, const struct flow *flow, __be16 index)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->client = flow->saddr;
	key->rev_nat_index = index;
}

/* Return the backend id of an affinity entry; 0 if it expired or the backend was removed from the service. */
static __always_inline __u32 lb_valid_affinity(const struct lb_service *service, const struct lb_affinity *known,
					       __u64 now)
{
	struct lb_affinity_match match = { .rev_nat_index = service->rev_nat_index };

	if (!known || known->last_used + (service->backend & LB_AFFINITY_TIME) <= now)
		return 0;
	match.backend = known->backend;
	return bpf_map_lookup_elem(&cilium_lb_affinity_match, &match) ? match.backend : 0;
}

/* Return the id of the client's backend; 0 without a valid affinity entry. */
static __always_inline __u32 lb_lookup_affinity(const struct lb_service *service, const struct flow *flow,
						__u32 now, __u8 family)
{
	const struct lb_affinity *known;

	if (!lb_has_affinity(service))
		return 0;
	if (family == FAMILY_IPV4) {
		struct lb4_affinity_key key;

		lb4_affinity_key(&key, flow, service->rev_nat_index);
		known = bpf_map_lookup_elem(&cilium_lb4_affinity, &key);
	} else {
		struct lb6_affinity_key key;

		lb6_affinity_key(&key, flow, service->rev_nat_index);
		known = bpf_map_lookup_elem(&cilium_lb6_affinity, &key);
	}
	return lb_valid_affinity(service, known, now);
}

/* Update the time of an affinity entry; false if there is none, or for another backend. */
static __always_inline bool lb_refresh_affinity(struct lb_affinity *known, __u32 backend, __u64 now)
{
	if (!known || known->backend != backend)
		return false;
	if (known->last_used != now) /* at most once a second, as ct_refresh() */
		known->last_used = now;
	return true;
}

/* Record the client's backend. An existing entry is changed in place: a map update would take the bucket's lock. */
static __always_inline void lb_update_affinity(const struct lb_service *service, const struct flow *flow,
					       __u32 backend, __u32 now, __u8 family)
{
	struct lb_affinity value = { .last_used = now, .backend = backend };

	if (!lb_has_affinity(service))
		return;
	if (family == FAMILY_IPV4) {
		struct lb4_affinity_key key;

		lb4_affinity_key(&key, flow, service->rev_nat_index);
		if (!lb_refresh_affinity(bpf_map_lookup_elem(&cilium_lb4_affinity, &key), backend, now))
			bpf_map_update_elem(&cilium_lb4_affinity, &key, &value, BPF_ANY);
	} else {
		struct lb6_affinity_key key;

		lb6_affinity_key(&key, flow, service->rev_nat_index);
		if (!lb_refresh_affinity(bpf_map_lookup_elem(&cilium_lb6_affinity, &key), backend, now))
			bpf_map_update_elem(&cilium_lb6_affinity, &key, &value, BPF_ANY);
	}
}
