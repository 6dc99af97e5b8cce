/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reverse NAT of ICMP errors to a service's client: the embedded packet has the backend instead of the frontend. */
#pragma once

#include "ct/maps.h"
#include "lb/pod.h"
#include "nat/icmp_error.h"

/* Look up the frontend of a client's flow into `query->entry`, by its conntrack entry; false if it was removed. */
static __always_inline bool lb_lookup_embedded_frontend(const struct flow *asked, const struct ct_entry *entry,
							union nat_query *query, __u8 family)
{
	if (entry->dsr_internal) {
		nat_fill_key(&query->key, &asked->daddr, asked->dport, &asked->saddr, asked->sport, asked->protocol,
			     NAT_KEY_OUT, family);
		return nat_lookup(&query->key, &query->entry, family);
	}
	return entry->rev_nat_index &&
	       lb_lookup_rev_nat(entry->rev_nat_index, &query->entry.address, &query->entry.port, family);
}

/* Returns 0 or a drop reason. Errors about other flows are not changed. */
static __always_inline int lb_rev_nat_icmp_error(context_t *ctx, struct flow *flow, __u8 family)
{
	const struct ct_entry *entry;
	struct quote quote = {};
	union {
		union ct_key key;
		union nat_query query;
	} found; /* a union, because the stack is small */
	const struct nat_entry *service = &found.query.entry;
	int refused;

	if (!quote_read(ctx, flow, &quote, family))
		return 0;
	entry = ct_entry_by(&found.key, &quote.about, EGRESS, false, family);
	if (!entry || !lb_lookup_embedded_frontend(&quote.about, entry, &found.query, family))
		return 0;
	flow->translated = true;
	refused = nat_rewrite_embedded(ctx, flow, &quote, DESTINATION, service, family);
	if (refused || !address_equals(&flow->saddr, &quote.about.daddr))
		return refused;
	refused = translate_address(ctx, flow, SOURCE, &flow->saddr, &service->address, family);
	flow->saddr = service->address;
	return refused;
}

VERIFIED_ALONE lb4_rev_nat_icmp_error(context_t *ctx, struct flow *flow)
{
	return flow ? lb_rev_nat_icmp_error(ctx, flow, FAMILY_IPV4) : DROP_INVALID;
}

VERIFIED_ALONE lb6_rev_nat_icmp_error(context_t *ctx, struct flow *flow)
{
	return flow ? lb_rev_nat_icmp_error(ctx, flow, FAMILY_IPV6) : DROP_INVALID;
}
