/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* struct flow: the parsed headers of a packet, for conntrack, policy and load balancing; and access to headers. */
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

#define ETH_TYPE_MIN 0x0600 /* smaller values are 802.3 lengths */
#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

#define ICMP_ECHOREPLY 0 /* RFC 792; linux/icmp.h needs the C library */
#define ICMP_DEST_UNREACH 3
#define ICMP_ECHO 8
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETERPROB 12
#define ICMP_TIMESTAMP 13 /* these have an identifier like an echo (RFC 792, RFC 950) */
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
	__be16 id; /* identifier of an echo */
	__be16 sequence;
};

/* A packet: its headers, and its source and destination endpoints and identities. */
struct flow {
	struct address saddr __attribute__((aligned(8)));
	struct address daddr;
	__be16 sport; /* ports of conntrack keys; an ICMP echo has its id on the requesting side */
	__be16 dport;
	__be16 policy_port; /* port of policy keys; the type for ICMP */
	__u8 protocol;
	__u8 tcp_flags;
	__u8 ttl; /* or hop limit */
	bool related; /* an ICMP error */
	bool frag_needed; /* ICMP error of path MTU discovery: always allowed for the endpoint's own flow */
	bool reply_likely; /* hint which direction conntrack tries first; exact for ICMP, by its type */
	bool through_stack; /* a local pod's packet that the host's stack handled, and may have translated */
	bool from_tunnel; /* received from another node by tunnel */
	bool translated; /* it was sent to a service, or is a reply of one */
	bool loopback; /* a pod is its own backend */
	bool node_port; /* NodePort: from an external client to a service; replies get reverse NAT */
	bool dsr; /* the same with DSR: forwarded by another node, which does not see the replies */
	bool local_only; /* HostPort: only local backends */
	bool direct; /* the service selects DSR */
	__be16 proxy_port; /* proxy port of a policy redirect; 0: none */
	bool only_by_proxy; /* drop if that proxy does not listen */
	bool from_proxy; /* a proxy sent it for the original source; replies go to the proxy */
	bool by_proxy; /* a proxy sent it with its source's address, and it is not a reply to a client of the proxy */
	bool proxied; /* a reply of a flow that was redirected to a proxy */
	bool dnat; /* the stack did DNAT */
	bool to_proxy_client; /* the proxy connected with the pod's address and waits for this reply */
	bool for_proxies; /* received on a device that may receive replies to proxies */
	__be16 rev_nat_index; /* of the service it was sent to */
	bool fragmented;
	bool later_fragment; /* not the first fragment: it has no ports */
	__u16 l4; /* offset of the transport header */
	__be32 fragment_id;
	__u16 source; /* source endpoint id; 0: not local */
	__u16 destination; /* destination endpoint id; 0: not local */
	__u32 source_identity;
	__u32 destination_identity;
	__u32 lifetime; /* expiry of its conntrack entry before this packet: restored if a reply is dropped */
	__u32 report; /* bytes to capture in trace events; 0: conntrack reports no change */
	__u32 device; /* ifindex of the egress device with host routing; 0: by the stack */
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

/* By words: the compiler assumes that an address in a packet is unaligned, and would copy by bytes. */
static __always_inline void address_load(struct address *to, const void *from)
{
	const __be32 *words = from;

	to->words[0] = words[0];
	to->words[1] = words[1];
	to->words[2] = words[2];
	to->words[3] = words[3];
}

/* By 64-bit halves, for addresses that are aligned to 8 bytes: in struct flow, in packet headers (the kernel aligns the
 * network header), in conntrack keys and in endpoint rows.
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

/* Return whether an IPv6 address is link-local or multicast. */
static __always_inline bool link_scoped(const struct address *ip)
{
	__u32 first = bpf_ntohl(ip->words[0]);

	return first >> 24 == 0xff || first >> 22 == 0xfe80 >> 6;
}
