/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* NAT of ICMP errors: both the outer and the embedded packet are rewritten. */
#pragma once

#include "ct/quote.h"
#include "nat/snat.h"

/* Write two bytes of the embedded packet and update the ICMP checksum. */
static __always_inline int nat_store_embedded(context_t *ctx, __u32 sum_at, __u32 at, __be16 from, __be16 to)
{
	if (packet_sum4(ctx, sum_at, from, to, 2))
		return DROP_L4_CHECKSUM;
	return packet_store(ctx, at, &to, sizeof(to)) ? DROP_WRITE_ERROR : 0;
}

/* Update the embedded transport checksum by a difference, and the ICMP checksum accordingly. */
static __always_inline int nat_update_embedded_checksum(context_t *ctx, __u32 sum_at, __u32 at, __s64 difference)
{
	__be16 before, after;

	if (packet_load(ctx, at, &before, sizeof(before)) || packet_sum4(ctx, at, 0, difference, 0) ||
	    packet_load(ctx, at, &after, sizeof(after)))
		return DROP_L4_CHECKSUM;
	return packet_sum4(ctx, sum_at, before, after, 2) ? DROP_L4_CHECKSUM : 0;
}

/* Rewrite source or destination of the embedded packet; returns 0 or a drop reason. */
static __always_inline int nat_rewrite_embedded(context_t *ctx, const struct flow *flow, const struct quote *quote,
						enum end end, const struct nat_entry *entry, __u8 family)
{
	__u32 sum_at = flow->l4 + offsetof(struct icmphdr, checksum), at = quote->ports_at;
	const struct address *own = end == SOURCE ? &quote->about.saddr : &quote->about.daddr;
	__be16 port = end == SOURCE ? quote->about.sport : quote->about.dport;
	__s64 changed, ports = (__u16)~port + entry->port; /* checksum difference, like bpf_csum_diff()'s */
	int refused;

	if (family == FAMILY_IPV4) {
		__be32 old = own->words[0], new = entry->address.words[0];

		/* Address and IP checksum change inversely, so the ICMP checksum stays. */
		at = quote_at(flow) +
		     (end == SOURCE ? offsetof(struct iphdr, saddr) : offsetof(struct iphdr, daddr));
		if (packet_sum3(ctx, quote_at(flow) + offsetof(struct iphdr, check), old, new, 4) ||
		    packet_store(ctx, at, &new, sizeof(new)))
			return DROP_WRITE_ERROR;
		changed = bpf_csum_diff(&old, sizeof(old), &new, sizeof(new), 0);
	} else {
		at = quote_at(flow) +
		     (end == SOURCE ? offsetof(struct ipv6hdr, saddr) : offsetof(struct ipv6hdr, daddr));
		changed = address6_difference(own, &entry->address);
		if (packet_sum4(ctx, sum_at, 0, changed, 0) ||
		    packet_store(ctx, at, &entry->address, sizeof(entry->address)))
			return DROP_WRITE_ERROR;
	}
	/* ICMP has no pseudo-header, ICMPv6 does. */
	if (quote->checksum_at && !(quotes_echo(quote) && family == FAMILY_IPV4)) {
		refused = nat_update_embedded_checksum(ctx, sum_at, quote->checksum_at, changed);
		if (refused)
			return refused;
	}
	if (quote->checksum_at) {
		refused = nat_update_embedded_checksum(ctx, sum_at, quote->checksum_at, ports);
		if (refused)
			return refused;
	}
	at = quote->ports_at + (end == DESTINATION && !quotes_echo(quote) ? 2 : 0);
	return port == entry->port ? 0 : nat_store_embedded(ctx, sum_at, at, port, entry->port);
}

/* Reverse SNAT of an error about a packet with SNAT: as snat_rev_nat(). */
static __always_inline int snat_rev_nat_icmp_error(context_t *ctx, struct flow *flow, __u8 family)
{
	struct quote quote = {};
	const struct flow *about = &quote.about;
	union nat_query query;
	int refused;

	if (!quote_read(ctx, flow, &quote, family))
		return 0;
	nat_fill_key(&query.key, &about->daddr, about->dport, &about->saddr, about->sport, about->protocol,
		     NAT_KEY_IN, family);
	if (!nat_lookup(&query.key, &query.entry, family))
		return 0;
	refused = nat_rewrite_embedded(ctx, flow, &quote, SOURCE, &query.entry, family);
	if (!refused)
		refused = translate_address(ctx, flow, DESTINATION, &flow->daddr, &query.entry.address, family);
	flow->daddr = query.entry.address;
	return refused ? -refused : NAT_TRANSLATED;
}

/* SNAT of an error about a reply, so that the embedded packet matches the remote host's flow; returns 0 or a drop reason. */
static __always_inline int snat_nat_icmp_error(context_t *ctx, struct flow *flow, __u8 family)
{
	struct quote quote = {};
	const struct flow *about = &quote.about;
	union nat_query query;
	int refused;

	if (!quote_read(ctx, flow, &quote, family))
		return DROP_NAT_UNSUPPORTED;
	nat_fill_key(&query.key, &about->daddr, about->dport, &about->saddr, about->sport, about->protocol,
		     NAT_KEY_OUT, family);
	if (!nat_lookup(&query.key, &query.entry, family))
		return DROP_NAT_NO_MAPPING;
	refused = nat_rewrite_embedded(ctx, flow, &quote, DESTINATION, &query.entry, family);
	if (!refused)
		refused = translate_address(ctx, flow, SOURCE, &flow->saddr, &query.entry.address, family);
	flow->saddr = query.entry.address;
	return refused;
}

VERIFIED_ALONE snat4_rev_nat(context_t *ctx, struct flow *flow)
{
	if (!flow)
		return 0;
	return flow->related ? snat_rev_nat_icmp_error(ctx, flow, FAMILY_IPV4)
			     : snat_rev_nat(ctx, flow, FAMILY_IPV4);
}

VERIFIED_ALONE snat6_rev_nat(context_t *ctx, struct flow *flow)
{
	if (!flow)
		return 0;
	return flow->related ? snat_rev_nat_icmp_error(ctx, flow, FAMILY_IPV6)
			     : snat_rev_nat(ctx, flow, FAMILY_IPV6);
}

VERIFIED_ALONE snat4_nat_icmp_error(context_t *ctx, struct flow *flow)
{
	return flow ? snat_nat_icmp_error(ctx, flow, FAMILY_IPV4) : DROP_INVALID;
}

VERIFIED_ALONE snat6_nat_icmp_error(context_t *ctx, struct flow *flow)
{
	return flow ? snat_nat_icmp_error(ctx, flow, FAMILY_IPV6) : DROP_INVALID;
}
