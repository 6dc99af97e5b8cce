/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Which service a packet is for, and who serves it. */
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

static __always_inline const struct lb_service *lb_slot(union lb_key *key, __u16 slot, __u8 family)
{
	if (family == FAMILY_IPV4) {
		key->v4.slot = slot;
		return bpf_map_lookup_elem(&cilium_lb4_services_v2, &key->v4);
	}
	key->v6.slot = slot;
	return bpf_map_lookup_elem(&cilium_lb6_services_v2, &key->v6);
}

static __always_inline void lb_key_write(union lb_key *key, const struct flow *flow, __u8 protocol, __u8 scope,
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

/* The service behind the packet's destination, as clients outside see it, or NULL. `key` leads to its slots. */
static __always_inline const struct lb_service *lb_service_outside(union lb_key *key, const struct flow *flow,
								   __u8 family)
{
	const struct lb_service *service;

	lb_key_write(key, flow, flow->protocol, 0, family);
	service = lb_slot(key, 0, family);
	if (service)
		return service;
	lb_key_write(key, flow, 0, 0, family); /* written by a writer that ignores protocols */
	return lb_slot(key, 0, family);
}

/* The same as clients of this node see it. */
static __always_inline const struct lb_service *lb_service_of(union lb_key *key, const struct flow *flow,
							      __u8 family)
{
	const struct lb_service *service = lb_service_outside(key, flow, family);

	if (likely(!service) || !(service->flags2 & LB_TWO_SCOPES))
		return service;
	if (family == FAMILY_IPV4)
		key->v4.scope = LB_SCOPE_INTERNAL;
	else
		key->v6.scope = LB_SCOPE_INTERNAL;
	return lb_slot(key, 0, family);
}

/* Fill in a backend; false if there is none of that number. */
static __always_inline bool lb_backend_of(__u32 number, struct lb_backend *backend, __u8 family)
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

/* The number of any of the service's backends, 0 if it has none. */
static __always_inline __u32 lb_pick(union lb_key *key, const struct lb_service *service, __u8 family)
{
	__u32 count = service->count;
	const struct lb_service *slot;

	if (!count)
		return 0;
	slot = lb_slot(key, bpf_get_prandom_u32() % count + 1, family);
	return slot ? slot->backend : 0;
}
