/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* ICMP errors about what a client has sent to a service: they name the backend, of which it has never heard. */
#pragma once

#include "ct/maps.h"
#include "lb/pod.h"
#include "nat/error.h"

/* Find in `query->entry` the service of a client's flow, which has this conntrack entry; false if it was removed. */
static __always_inline bool lb_asked(const struct flow *asked, const struct ct_entry *entry, union nat_query *query,
				     __u8 family)
{
	if (entry->dsr_internal) {
		nat_key_write(&query->key, &asked->daddr, asked->dport, &asked->saddr, asked->sport,
			      asked->protocol, NAT_KEY_OUT, family);
		return nat_lookup(&query->key, &query->entry, family);
	}
	return entry->rev_nat_index &&
	       lb_frontend_of(entry->rev_nat_index, &query->entry.address, &query->entry.port, family);
}

/* 0, or the reason to drop. An error about anything but the use of a service is left as it is. */
static __always_inline int lb_error(context_t *ctx, struct flow *flow, __u8 family)
{
	const struct ct_entry *entry;
	struct quote quote = {};
	union {
		union ct_key key;
		union nat_query query;
	} found; /* one place for both, as there is little stack */
	const struct nat_entry *service = &found.query.entry;
	int refused;

	if (!quote_read(ctx, flow, &quote, family))
		return 0;
	entry = ct_entry_by(&found.key, &quote.about, EGRESS, false, family);
	if (!entry || !lb_asked(&quote.about, entry, &found.query, family))
		return 0;
	flow->translated = true;
	refused = nat_quote_rewrite(ctx, flow, &quote, DESTINATION, service, family);
	if (refused || !address_equals(&flow->saddr, &quote.about.daddr))
		return refused;
	refused = translate_address(ctx, flow, SOURCE, &flow->saddr, &service->address, family);
	flow->saddr = service->address;
	return refused;
}

VERIFIED_ALONE lb4_error(context_t *ctx, struct flow *flow)
{
	return flow ? lb_error(ctx, flow, FAMILY_IPV4) : DROP_INVALID;
}

VERIFIED_ALONE lb6_error(context_t *ctx, struct flow *flow)
{
	return flow ? lb_error(ctx, flow, FAMILY_IPV6) : DROP_INVALID;
}
