/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reads a packet's headers, once, into what conntrack and policy need to know. */
#pragma once

#include <linux/icmpv6.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#include "context/context.h"
#include "lib/bpf.h"
#include "lib/maps.h"
#include "lib/reasons.h"

#define ETH_TYPE_MIN 0x0600 /* below, the field is an 802.3 length */
#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

#define ICMP_ECHOREPLY 0 /* RFC 792; linux/icmp.h needs the C library */
#define ICMP_DEST_UNREACH 3
#define ICMP_ECHO 8
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETERPROB 12
#define ICMP_TIMESTAMP 13 /* these have an identifier as an echo has (RFC 792, RFC 950) */
#define ICMP_TIMESTAMPREPLY 14
#define ICMP_INFO_REQUEST 15
#define ICMP_INFO_REPLY 16
#define ICMP_ADDRESS 17
#define ICMP_ADDRESSREPLY 18
#define ICMP_FRAG_NEEDED 4

struct icmphdr {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__be16 id; /* of an echo */
	__be16 sequence;
};

/* One packet: what its headers say, and who is known to send and to get it. */
struct flow {
	struct address saddr __attribute__((aligned(8)));
	struct address daddr;
	__be16 sport; /* ports as conntrack keys them: an ICMP echo has its id on the asking side */
	__be16 dport;
	__be16 policy_port; /* port as policy keys it: for ICMP the type */
	__u8 protocol;
	__u8 tcp_flags;
	__u8 ttl; /* or the hop limit */
	bool related; /* an ICMP error */
	bool frag_needed; /* the ICMP error of path MTU discovery: about the endpoint's own flow no policy may stop it */
	bool reply_likely; /* which direction conntrack should try first: a guess; exact for ICMP, by its type */
	bool through_stack; /* a packet of a local pod that the host's stack has handled, and may have translated */
	bool from_tunnel; /* another node has sent it */
	bool translated; /* it was addressed to a service, or answers what was */
	bool loopback; /* from a pod to a service that it serves itself */
	bool node_port; /* from outside to a service: answers leave as its own */
	bool dsr; /* the same, forwarded by another node, which does not get the answers */
	bool local_only; /* no other node may serve it */
	bool direct; /* the service has its backends answer by themselves */
	__be16 proxy_port; /* port of the proxy that the policy redirects to; 0: none */
	bool only_by_proxy; /* not without that one */
	bool from_proxy; /* a proxy sends it for the original source; answers are the proxy's */
	bool by_proxy; /* a proxy has sent it, in the name of its source: it does not answer the proxy */
	bool proxied; /* it answers a flow that was given to a proxy */
	bool dnat; /* the stack has translated its destination */
	bool to_asker; /* which has asked in the pod's name, and waits for it */
	bool for_proxies; /* by a device that may bring answers to proxies */
	__be16 rev_nat_index; /* of the service it was addressed to */
	bool fragmented;
	bool later_fragment; /* not the first: its ports are in another packet */
	__u16 l4; /* where the transport header begins */
	__be32 fragment_id;
	__u16 source; /* endpoint, 0 if it is none of ours */
	__u16 destination; /* the same */
	__u32 source_identity;
	__u32 destination_identity;
	__u32 lifetime; /* of its conntrack entry before this packet: a reply that is dropped does not prolong it */
	__u32 report; /* bytes to capture for an event of the flow; 0: nothing new */
	__u32 device; /* by which it leaves the node; 0: by the stack */
};

/* The IPv4 header without its options, or NULL. */
static __always_inline struct iphdr *packet_ipv4(const context_t *ctx)
{
	struct iphdr *ip = packet_start(ctx) + LINK_HLEN;

	return (void *)(ip + 1) <= packet_end(ctx) ? ip : NULL;
}

/* The IPv6 header without extensions, or NULL. */
static __always_inline struct ipv6hdr *packet_ipv6(const context_t *ctx)
{
	struct ipv6hdr *ip = packet_start(ctx) + LINK_HLEN;

	return (void *)(ip + 1) <= packet_end(ctx) ? ip : NULL;
}

static __always_inline bool address_equals(const struct address *a, const struct address *b)
{
	return a->words[0] == b->words[0] && a->words[1] == b->words[1] && a->words[2] == b->words[2] &&
	       a->words[3] == b->words[3];
}

static __always_inline bool address_is_zero(const struct address *ip)
{
	return !(ip->words[0] | ip->words[1] | ip->words[2] | ip->words[3]);
}

/* By words: to the compiler an address in a packet may lie anywhere, and it would copy byte by byte. */
static __always_inline void address_load(struct address *to, const void *from)
{
	const __be32 *words = from;

	to->words[0] = words[0];
	to->words[1] = words[1];
	to->words[2] = words[2];
	to->words[3] = words[3];
}

/* These two by halves, of addresses that are aligned to 8 bytes: in flows, in headers of packets (of which the kernel aligns
 * the network header), in keys of conntrack and in rows of endpoints.
 */
typedef __u64 __attribute__((may_alias)) half_t;

static __always_inline void address_load_aligned(struct address *to, const void *from)
{
	half_t *halves = (void *)to;
	const half_t *read = from;

	halves[0] = read[0];
	halves[1] = read[1];
}

static __always_inline bool address_equals_aligned(const struct address *a, const struct address *b)
{
	const half_t *halves = (const void *)a, *others = (const void *)b;

	return halves[0] == others[0] && halves[1] == others[1];
}

/* Whether an IPv6 address is one that only neighbours of a link use, or a group. */
static __always_inline bool link_scoped(const struct address *ip)
{
	__u32 first = bpf_ntohl(ip->words[0]);

	return first >> 24 == 0xff || first >> 22 == 0xfe80 >> 6;
}
