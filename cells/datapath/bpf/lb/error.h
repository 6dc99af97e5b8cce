/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* ICMP errors about what a client has sent to a service: they name the backend, of which it has never heard. */
#pragma once

#include "ct/maps.h"
#include "lb/pod.h"

/* Read which flow an error is about; where its ports are, or 0 if it does not say. */
static __always_inline __u32 error_about(context_t *ctx, const struct flow *flow, struct flow *about, __u8 family)
{
	__u32 at = flow->l4 + sizeof(struct icmphdr);
	__be16 ports[2];

	if (family == FAMILY_IPV4) {
		struct iphdr ip;

		if (packet_load(ctx, at, &ip, sizeof(ip)) || ip.ihl != 5)
			return 0;
		about->saddr.words[0] = ip.saddr;
		about->daddr.words[0] = ip.daddr;
		about->protocol = ip.protocol;
		at += sizeof(ip);
	} else {
		struct ipv6hdr ip;

		if (packet_load(ctx, at, &ip, sizeof(ip)))
			return 0;
		address_load(&about->saddr, &ip.saddr);
		address_load(&about->daddr, &ip.daddr);
		about->protocol = ip.nexthdr;
		at += sizeof(ip);
	}
	if (packet_load(ctx, at, ports, sizeof(ports)))
		return 0;
	about->sport = ports[0];
	about->dport = ports[1];
	return at;
}

/* Put the service's address and port in the quoted header, and update its checksum and the message's. */
static __always_inline int translate_quote(context_t *ctx, const struct flow *flow, const struct flow *about,
					   __u32 ports, const struct address *service, __be16 port, __u8 family)
{
	__u32 sum_at = flow->l4 + offsetof(struct icmphdr, checksum), ip_at = flow->l4 + sizeof(struct icmphdr);
	struct address old = about->daddr, new = *service;

	if (family == FAMILY_IPV4) {
		/* The change of the address and that of the header's checksum cancel each other in the message's. */
		if (packet_sum3(ctx, ip_at + offsetof(struct iphdr, check), old.words[0], new.words[0], 4) ||
		    packet_store(ctx, ip_at + offsetof(struct iphdr, daddr), &new, 4))
			return DROP_WRITE_ERROR;
	} else {
		__s64 difference = bpf_csum_diff(old.words, 16, new.words, 16, 0);

		if (packet_sum4(ctx, sum_at, 0, difference, 0) ||
		    packet_store(ctx, ip_at + offsetof(struct ipv6hdr, daddr), &new, 16))
			return DROP_WRITE_ERROR;
	}
	if (packet_sum4(ctx, sum_at, about->dport, port, 2) || packet_store(ctx, ports + 2, &port, sizeof(port)))
		return DROP_WRITE_ERROR;
	return 0;
}

/* 0, or the reason to drop. An error about anything but the use of a service is left as it is. */
static __always_inline int lb_error(context_t *ctx, struct flow *flow, __u8 family)
{
	struct flow about = {};
	__u32 ports = error_about(ctx, flow, &about, family);
	const struct ct_entry *entry;
	struct address service;
	__be16 port;
	int refused;

	if (!ports)
		return 0;
	entry = ct_entry_of(&about, EGRESS, false, family);
	if (!entry || !entry->rev_nat_index || !lb_frontend_of(entry->rev_nat_index, &service, &port, family))
		return 0;
	flow->translated = true;
	refused = translate_quote(ctx, flow, &about, ports, &service, port, family);
	if (refused || !address_equals(&flow->saddr, &about.daddr))
		return refused;
	refused = translate_address(ctx, flow, SOURCE, &flow->saddr, &service, family);
	flow->saddr = service;
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
