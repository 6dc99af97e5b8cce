/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reads a packet's headers, once, into what conntrack and policy need to know. */
#pragma once

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#include "bpf.h"
#include "reasons.h"

#define ETH_TYPE_MIN 0x0600 /* below, the field is an 802.3 length */
/* As linux/if_ether.h has it, but not declared packed: that means access byte by byte. */
struct ethernet {
	__be16 destination[3];
	__be16 source[3];
	__be16 protocol;
};

#define IP_FRAGMENT_OFFSET 0x1fff

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04

#define ICMP_ECHOREPLY 0 /* RFC 792; linux/icmp.h needs the C library */
#define ICMP_DEST_UNREACH 3
#define ICMP_ECHO 8
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETERPROB 12
#define ICMP_FRAG_NEEDED 4

struct icmphdr {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__be16 id; /* of an echo */
	__be16 sequence;
};

struct flow {
	__be32 saddr;
	__be32 daddr;
	__be16 sport; /* ports as conntrack keys them: an ICMP echo has its id on the asking side */
	__be16 dport;
	__be16 policy_port; /* port as policy keys it: for ICMP the type */
	__u8 protocol;
	__u8 tcp_flags;
	__u8 ttl;
	bool related;	    /* an ICMP error */
	bool frag_needed;   /* the ICMP error no policy may stop */
	bool reply_likely;  /* which direction conntrack should try first: a guess, never a verdict */
};

/* In assembly, so that the compiler neither narrows these to the 32 bits they are declared with nor
 * keeps them over a pull: the verifier would no longer know them as pointers.
 */
static __always_inline void *packet_start(const struct __sk_buff *skb)
{
	void *start;

	asm volatile("%0 = *(u32 *)(%1 + %2)" : "=r"(start) : "r"(skb), "i"(offsetof(struct __sk_buff, data)));
	return start;
}

static __always_inline void *packet_end(const struct __sk_buff *skb)
{
	void *end;

	asm volatile("%0 = *(u32 *)(%1 + %2)" : "=r"(end) : "r"(skb), "i"(offsetof(struct __sk_buff, data_end)));
	return end;
}

/* Make the first `length` bytes readable through packet_start(). Earlier pointers may become stale. */
static __always_inline bool packet_pull(struct __sk_buff *skb, __u32 length)
{
	if (likely(packet_start(skb) + length <= packet_end(skb)))
		return true;
	return skb->len >= length && !bpf_skb_pull_data(skb, length);
}

/* The Ethernet header, or NULL. */
static __always_inline struct ethernet *packet_eth(const struct __sk_buff *skb)
{
	struct ethernet *eth = packet_start(skb);

	return (void *)(eth + 1) <= packet_end(skb) ? eth : NULL;
}

/* The IPv4 header without its options, or NULL. */
static __always_inline struct iphdr *packet_ipv4(const struct __sk_buff *skb)
{
	struct iphdr *ip = packet_start(skb) + ETH_HLEN;

	return (void *)(ip + 1) <= packet_end(skb) ? ip : NULL;
}

static __always_inline int parse_tcp(const void *l4, const void *end, struct flow *flow)
{
	const struct tcphdr *tcp = l4;

	if ((void *)(tcp + 1) > end)
		return DROP_CT_INVALID_HEADER;
	flow->sport = tcp->source;
	flow->dport = tcp->dest;
	flow->policy_port = tcp->dest;
	flow->tcp_flags = ((const __u8 *)tcp)[13];
	flow->reply_likely = bpf_ntohs(tcp->source) < bpf_ntohs(tcp->dest);
	return 0;
}

static __always_inline int parse_udp(const void *l4, const void *end, struct flow *flow)
{
	const struct udphdr *udp = l4;

	if ((void *)(udp + 1) > end)
		return DROP_CT_INVALID_HEADER;
	flow->sport = udp->source;
	flow->dport = udp->dest;
	flow->policy_port = udp->dest;
	flow->reply_likely = bpf_ntohs(udp->source) < bpf_ntohs(udp->dest);
	return 0;
}

static __always_inline int parse_icmp(const void *l4, const void *end, struct flow *flow)
{
	const struct icmphdr *icmp = l4;

	if ((void *)(icmp + 1) > end)
		return DROP_CT_INVALID_HEADER;
	flow->policy_port = bpf_htons(icmp->type);
	switch (icmp->type) {
	case ICMP_ECHO:
		flow->sport = icmp->id;
		break;
	case ICMP_ECHOREPLY:
		flow->dport = icmp->id;
		flow->reply_likely = true;
		break;
	case ICMP_DEST_UNREACH:
		flow->frag_needed = icmp->code == ICMP_FRAG_NEEDED;
		/* fall through */
	case ICMP_TIME_EXCEEDED:
	case ICMP_PARAMETERPROB:
		flow->related = true;
		flow->reply_likely = true;
		break;
	}
	return 0;
}

static __always_inline int parse_l4(const void *l4, const void *end, struct flow *flow)
{
	switch (flow->protocol) {
	case IPPROTO_TCP:
		return parse_tcp(l4, end, flow);
	case IPPROTO_UDP:
		return parse_udp(l4, end, flow);
	case IPPROTO_ICMP:
		return parse_icmp(l4, end, flow);
	default:
		return DROP_CT_UNKNOWN_PROTOCOL;
	}
}

/* Whether the header's own lengths fit the packet. A total of 0 marks a GSO packet over 64 KiB. */
static __always_inline bool lengths_fit(const struct iphdr *ip, __u32 header, __u32 packet)
{
	__u32 total = bpf_ntohs(ip->tot_len);

	if (unlikely(!total))
		return packet > 0xffff;
	return total >= header && total + ETH_HLEN <= packet;
}

/* Fill `flow` from an IPv4 packet; 0, or the reason to drop it. Pulls: earlier pointers become stale. */
static __always_inline int parse_ipv4(struct __sk_buff *skb, struct flow *flow)
{
	struct iphdr *ip;
	__u32 header;

	if (!packet_pull(skb, ETH_HLEN + sizeof(*ip)))
		return DROP_INVALID;
	ip = packet_ipv4(skb);
	if (!ip)
		return DROP_INVALID;
	header = ip->ihl * 4;
	if (ip->version != 4 || header < sizeof(*ip) || !lengths_fit(ip, header, skb->len))
		return DROP_INVALID;
	flow->saddr = ip->saddr;
	flow->daddr = ip->daddr;
	flow->protocol = ip->protocol;
	flow->ttl = ip->ttl;
	if (ip->frag_off & bpf_htons(IP_FRAGMENT_OFFSET))
		return DROP_FRAGMENT; /* its ports were in the first one: nothing to look up by */

	/* Most packets have the deepest header, TCP's, at hand; shorter ones may end before. */
	if (skb->len >= ETH_HLEN + header + sizeof(struct tcphdr))
		packet_pull(skb, ETH_HLEN + header + sizeof(struct tcphdr));
	else
		packet_pull(skb, skb->len);
	return parse_l4(packet_start(skb) + ETH_HLEN + header, packet_end(skb), flow);
}
