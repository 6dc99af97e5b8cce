/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* ICMP errors on the way to the client of a service, about what a backend has answered: they are the backend's to
 * hear, and name the service where it knows only itself.
 */
#pragma once

#include "ct/service.h"
#include "nat/error.h"
#include "nodeport/maps.h"

#define NODEPORT_ERROR 1

/* The backend that has answered what is quoted; false if no service has. */
static __always_inline bool nodeport_error_backend(const struct flow *about, struct lb_backend *backend, __u32 now,
						   __u8 family)
{
	struct flow asked = {
		.saddr = about->daddr,
		.daddr = about->saddr,
		.sport = about->dport,
		.dport = about->sport,
		.protocol = about->protocol,
	};
	const struct ct_entry *entry = ct_service_find(&asked, now, family);

	return entry && lb_backend_of(entry->backend_id, backend, family);
}

/* Have it go to the backend, about what that has sent: NODEPORT_ERROR, 0 if it is about nothing of a service's, or
 * minus the reason to drop.
 */
static __always_inline int nodeport_error(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	struct lb_backend backend = {};
	struct quote quote = {};
	struct nat_entry own = {};
	int refused;

	if (!quote_read(ctx, flow, &quote, family) || quotes_echo(&quote))
		return 0;
	if (!nodeport_error_backend(&quote.about, &backend, now, family))
		return 0;
	own.address = backend.address;
	own.port = backend.port ? backend.port : quote.about.sport;
	refused = nat_quote_rewrite(ctx, flow, &quote, SOURCE, &own, family);
	if (!refused)
		refused = translate_address(ctx, flow, DESTINATION, &flow->daddr, &own.address, family);
	flow->daddr = own.address;
	return refused ? -refused : NODEPORT_ERROR;
}

VERIFIED_ALONE nodeport4_error(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_error(ctx, flow, now, FAMILY_IPV4) : 0;
}

VERIFIED_ALONE nodeport6_error(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_error(ctx, flow, now, FAMILY_IPV6) : 0;
}
