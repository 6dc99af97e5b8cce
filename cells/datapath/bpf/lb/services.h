/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Lookups of services (frontends), their backend slots, and backends. */
#pragma once

#include "lb/maps.h"
#include "lib/packet.h"

union lb_key {
	struct lb4_key v4;
	struct lb6_key v6;
};

/* A backend of either family. */
struct lb_backend {
	struct address address;
	__be16 port;
	__u8 state;
	__u8 pad;
};

static __always_inline const struct lb_service *lb_lookup_slot(union lb_key *key, __u16 slot, __u8 family)
{
	if (family == FAMILY_IPV4) {
		key->v4.slot = slot;
		return bpf_map_lookup_elem(&cilium_lb4_services_v2, &key->v4);
	}
	key->v6.slot = slot;
	return bpf_map_lookup_elem(&cilium_lb6_services_v2, &key->v6);
}

static __always_inline void lb_fill_key(union lb_key *key, const struct flow *flow, __u8 protocol, __u8 scope,
					__u8 family)
{
	__builtin_memset(key, 0, sizeof(*key));
	if (family == FAMILY_IPV4) {
		key->v4.address = flow->daddr.words[0];
		key->v4.port = flow->dport;
		key->v4.protocol = protocol;
		key->v4.scope = scope;
	} else {
		key->v6.address = flow->daddr;
		key->v6.port = flow->dport;
		key->v6.protocol = protocol;
		key->v6.scope = scope;
	}
}

/* Return the service at the packet's destination in the external scope, or NULL. `key` is set for lb_lookup_slot(). */
static __always_inline const struct lb_service *lb_lookup_service_external(union lb_key *key,
									   const struct flow *flow, __u8 family)
{
	const struct lb_service *service;

	lb_fill_key(key, flow, flow->protocol, 0, family);
	service = lb_lookup_slot(key, 0, family);
	if (service)
		return service;
	lb_fill_key(key, flow, 0, 0, family); /* entries without a protocol */
	return lb_lookup_slot(key, 0, family);
}

/* Return the service at the packet's destination for clients of this node: in the internal scope if it has both. */
static __always_inline const struct lb_service *lb_lookup_service(union lb_key *key, const struct flow *flow,
								  __u8 family)
{
	const struct lb_service *service = lb_lookup_service_external(key, flow, family);

	if (likely(!service) || !(service->flags2 & LB_TWO_SCOPES))
		return service;
	if (family == FAMILY_IPV4)
		key->v4.scope = LB_SCOPE_INTERNAL;
	else
		key->v6.scope = LB_SCOPE_INTERNAL;
	return lb_lookup_slot(key, 0, family);
}

/* Look up a backend by its id; false if there is none. */
static __always_inline bool lb_lookup_backend(__u32 number, struct lb_backend *backend, __u8 family)
{
	if (family == FAMILY_IPV4) {
		const struct lb4_backend *found = bpf_map_lookup_elem(&cilium_lb4_backends_v3, &number);

		if (!found)
			return false;
		backend->address = (struct address){ .words = { found->address } };
		backend->port = found->port;
		backend->state = found->state;
	} else {
		const struct lb6_backend *found = bpf_map_lookup_elem(&cilium_lb6_backends_v3, &number);

		if (!found)
			return false;
		backend->address = found->address;
		backend->port = found->port;
		backend->state = found->state;
	}
	return true;
}

/* Return the id of a random backend of the service; 0 if it has none. */
static __always_inline __u32 lb_select_random_backend(union lb_key *key, const struct lb_service *service,
						      __u8 family)
{
	__u32 count = service->count;
	const struct lb_service *slot;

	if (!count)
		return 0;
	slot = lb_lookup_slot(key, bpf_get_prandom_u32() % count + 1, family);
	return slot ? slot->backend : 0;
}
