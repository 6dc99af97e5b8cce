/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* DNAT of ICMP errors that external hosts send about replies of a service: they go to the backend, and the embedded packet
 * gets the backend's address instead of the frontend's.
 */
#pragma once

#include "ct/service.h"
#include "nat/icmp_error.h"
#include "nodeport/maps.h"

#define NODEPORT_ICMP_TRANSLATED 1

/* Look up the backend that sent the embedded packet; false if it is not a reply of a service. */
static __always_inline bool nodeport_embedded_backend(const struct flow *about, struct lb_backend *backend,
						      __u32 now, __u8 family)
{
	struct flow asked = {
		.saddr = about->daddr,
		.daddr = about->saddr,
		.sport = about->dport,
		.dport = about->sport,
		.protocol = about->protocol,
	};
	const struct ct_entry *entry = ct_service_find(&asked, now, family);

	return entry && lb_lookup_backend(entry->backend_id, backend, family);
}

/* Returns NODEPORT_ICMP_TRANSLATED, 0 if the error is not about a service's reply, or a negative drop reason. */
static __always_inline int nodeport_icmp_error(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	struct lb_backend backend = {};
	struct quote quote = {};
	struct nat_entry own = {};
	int refused;

	if (!quote_read(ctx, flow, &quote, family) || quotes_echo(&quote))
		return 0;
	if (!nodeport_embedded_backend(&quote.about, &backend, now, family))
		return 0;
	own.address = backend.address;
	own.port = backend.port ? backend.port : quote.about.sport;
	refused = nat_rewrite_embedded(ctx, flow, &quote, SOURCE, &own, family);
	if (!refused)
		refused = translate_address(ctx, flow, DESTINATION, &flow->daddr, &own.address, family);
	flow->daddr = own.address;
	return refused ? -refused : NODEPORT_ICMP_TRANSLATED;
}

VERIFIED_ALONE nodeport4_icmp_error(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_icmp_error(ctx, flow, now, FAMILY_IPV4) : 0;
}

VERIFIED_ALONE nodeport6_icmp_error(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_icmp_error(ctx, flow, now, FAMILY_IPV6) : 0;
}
