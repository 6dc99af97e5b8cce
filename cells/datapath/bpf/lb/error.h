/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* ICMP errors about what a client has sent to a service: they name the backend, of which it has never heard. */
#pragma once

#include "ct/maps.h"
#include "lb/pod.h"

/* Read which flow an error is about; where its ports are, or 0 if it does not say. */
static __always_inline __u32 error_about(struct __sk_buff *skb, const struct flow *flow, struct flow *about, __u8 family)
{
	__u32 at = flow->l4 + sizeof(struct icmphdr);
	__be16 ports[2];

	if (family == FAMILY_IPV4) {
		struct iphdr ip;

		if (bpf_skb_load_bytes(skb, at, &ip, sizeof(ip)) || ip.ihl != 5)
			return 0;
		about->saddr.words[0] = ip.saddr;
		about->daddr.words[0] = ip.daddr;
		about->protocol = ip.protocol;
		at += sizeof(ip);
	} else {
		struct ipv6hdr ip;

		if (bpf_skb_load_bytes(skb, at, &ip, sizeof(ip)))
			return 0;
		address_load(&about->saddr, &ip.saddr);
		address_load(&about->daddr, &ip.daddr);
		about->protocol = ip.nexthdr;
		at += sizeof(ip);
	}
	if (bpf_skb_load_bytes(skb, at, ports, sizeof(ports)))
		return 0;
	about->sport = ports[0];
	about->dport = ports[1];
	return at;
}

/* Put the service's address and port in the quoted header, whose own checksum is kept true, and the message's. */
static __always_inline int translate_quote(struct __sk_buff *skb, const struct flow *flow, const struct flow *about,
					   __u32 ports, const struct address *service, __be16 port, __u8 family)
{
	__u32 sum_at = flow->l4 + offsetof(struct icmphdr, checksum), ip_at = flow->l4 + sizeof(struct icmphdr);
	struct address old = about->daddr, new = *service;

	if (family == FAMILY_IPV4) {
		/* The change of the address and that of the header's checksum cancel each other in the message's. */
		if (bpf_l3_csum_replace(skb, ip_at + offsetof(struct iphdr, check), old.words[0], new.words[0], 4) ||
		    bpf_skb_store_bytes(skb, ip_at + offsetof(struct iphdr, daddr), &new, 4, 0))
			return DROP_WRITE_ERROR;
	} else {
		__s64 difference = bpf_csum_diff(old.words, 16, new.words, 16, 0);

		if (bpf_l4_csum_replace(skb, sum_at, 0, difference, 0) ||
		    bpf_skb_store_bytes(skb, ip_at + offsetof(struct ipv6hdr, daddr), &new, 16, 0))
			return DROP_WRITE_ERROR;
	}
	if (bpf_l4_csum_replace(skb, sum_at, about->dport, port, 2) ||
	    bpf_skb_store_bytes(skb, ports + 2, &port, sizeof(port), 0))
		return DROP_WRITE_ERROR;
	return 0;
}

/* 0, or the reason to drop. An error about anything but the use of a service is left as it is. */
static __always_inline int lb_error(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	struct flow about = {};
	__u32 ports = error_about(skb, flow, &about, family);
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
	refused = translate_quote(skb, flow, &about, ports, &service, port, family);
	if (refused || !address_equals(&flow->saddr, &about.daddr))
		return refused;
	refused = translate_address(skb, flow, SOURCE, &flow->saddr, &service, family);
	flow->saddr = service;
	return refused;
}

VERIFIED_ALONE lb4_error(struct __sk_buff *skb, struct flow *flow)
{
	return flow ? lb_error(skb, flow, FAMILY_IPV4) : DROP_INVALID;
}

VERIFIED_ALONE lb6_error(struct __sk_buff *skb, struct flow *flow)
{
	return flow ? lb_error(skb, flow, FAMILY_IPV6) : DROP_INVALID;
}
