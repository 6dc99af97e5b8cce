/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Replies to a pod that are made from its own packet: ICMP errors (RFC 792, RFC 4443), and how any reply is sent back.
 */
#pragma once

#include <linux/if_packet.h>
#include <linux/pkt_cls.h>

#include "lib/packet.h"
#include "lib/reasons.h"
#include "lib/rewrite.h"

/* Fold a sum to the Internet checksum (RFC 1071). */
static __always_inline __be16 fold(__s64 sum)
{
	__u64 folded = (__u32)sum;

	folded = (folded >> 16) + (folded & 0xffff);
	folded += folded >> 16;
	return (__be16)~folded;
}

/* Return the checksum of an ICMPv6 message of `length` bytes after an IPv6 header (RFC 4443, section 2.3). */
static __always_inline __be16 icmp6_checksum(struct ipv6hdr *ip, void *message, __u32 length)
{
	struct {
		__be32 length;
		__u8 zero[3];
		__u8 next;
	} pseudo = { .length = bpf_htonl(length), .next = IPPROTO_ICMPV6 };
	__s64 sum;

	sum = bpf_csum_diff(NULL, 0, (void *)&ip->saddr, 32, 0);
	sum = bpf_csum_diff(NULL, 0, (void *)&pseudo, sizeof(pseudo), sum);
	sum = bpf_csum_diff(NULL, 0, message, length, sum);
	return fold(sum);
}

/* Send the frame back into the pod; works also on a link that has only just come up. */
static __always_inline int answer_pod(struct __sk_buff *skb)
{
	bpf_skb_change_type(skb, PACKET_HOST);
	return bpf_redirect_peer(skb->ifindex, 0);
}

/* Where a reply is sent. */
enum back {
	BACK_TO_POD,
	BACK_TO_DEVICE, /* back through the native device where the packet arrived */
};

static __always_inline int answer(struct __sk_buff *skb, enum back back)
{
	return back == BACK_TO_POD ? answer_pod(skb) : bpf_redirect(skb->ifindex, 0);
}

/* Swap the MACs of the Ethernet header at this offset, if there is one. */
static __always_inline void turn_round(struct ethernet *eth, mac_t host_mac)
{
	if (!LINK_HLEN)
		return;
	__builtin_memcpy(eth->destination, eth->source, ETH_ALEN);
	mac_write(eth->source, host_mac);
}

struct icmp4_error {
	__be32 from;
	__be32 to;
	__u8 code; /* code of destination unreachable */
	__u8 hop_limit;
	__u8 back; /* enum back */
	__u8 too_short; /* the reason to drop a packet that has less than is to be quoted */
	__u16 mtu; /* MTU in fragmentation needed (RFC 1191, section 4) */
};

/* Turn the packet into an ICMP destination unreachable error about itself (RFC 792), and send it back; returns the
 * verdict.
 */
static __always_inline int icmp4_error_send(struct __sk_buff *skb, const struct icmp4_error *error, mac_t host_mac,
					    __u32 quoted)
{
	const __u32 inserted = sizeof(struct iphdr) + sizeof(struct icmphdr);
	const __u32 length = LINK_HLEN + inserted + quoted;
	struct icmphdr *message;
	struct iphdr *ip;
	void *start;

	if (skb->len < LINK_HLEN + quoted)
		return DROP(EGRESS, error->too_short);
	if (bpf_skb_change_tail(skb, LINK_HLEN + quoted, 0) ||
	    bpf_skb_adjust_room(skb, inserted, BPF_ADJ_ROOM_MAC, 0) || bpf_skb_pull_data(skb, length))
		return DROP(EGRESS, DROP_WRITE_ERROR);
	start = packet_start(skb);
	if (start + length > packet_end(skb))
		return DROP(EGRESS, DROP_INVALID);
	turn_round(start, host_mac);
	ip = start + LINK_HLEN;
	message = (void *)(ip + 1);
	__builtin_memset(ip, 0, sizeof(*ip));
	ip->version = 4;
	ip->ihl = 5;
	ip->tot_len = bpf_htons(inserted + quoted);
	ip->ttl = error->hop_limit;
	ip->protocol = IPPROTO_ICMP;
	ip->saddr = error->from;
	ip->daddr = error->to;
	ip->check = fold(bpf_csum_diff(NULL, 0, (void *)ip, sizeof(*ip), 0));
	__builtin_memset(message, 0, sizeof(*message));
	message->type = ICMP_DEST_UNREACH;
	message->code = error->code;
	message->sequence = bpf_htons(error->mtu); /* at the offset of an echo's sequence number */
	message->checksum = fold(bpf_csum_diff(NULL, 0, (void *)message, sizeof(*message) + quoted, 0));
	return answer(skb, error->back);
}

/* Bytes of an IPv4 packet to embed; see below. */
#define QUOTED4 (sizeof(struct iphdr) + 8) /* RFC 792 */
#define QUOTED4_TCP (sizeof(struct iphdr) + sizeof(struct tcphdr))

/* Bytes of the packet to embed: enough for the sender to identify it, and all of a TCP header. The kernel does not
 * allow truncating a header with a checksum that the device fills in.
 */
#define QUOTED (sizeof(struct ipv6hdr) + 8)
#define QUOTED_TCP (sizeof(struct ipv6hdr) + sizeof(struct tcphdr))

struct icmp6_error {
	struct address from;
	struct address to;
	__u8 type;
	__u8 code;
	__u8 hop_limit;
	__u8 back; /* enum back */
	__u8 too_short; /* the reason to drop a packet that has less than is to be quoted */
	__u32 mtu; /* MTU in packet too big */
};

/* Turn the packet into an ICMPv6 error about itself, and send it back; returns the verdict. */
static __always_inline int icmp6_error_send(struct __sk_buff *skb, const struct icmp6_error *error, mac_t host_mac,
					    __u32 quoted)
{
	const __u32 inserted = sizeof(struct ipv6hdr) + sizeof(struct icmphdr);
	const __u32 length = LINK_HLEN + inserted + quoted;
	struct icmphdr *message;
	struct ipv6hdr *ip;
	void *start;

	if (skb->len < LINK_HLEN + quoted)
		return DROP(EGRESS, error->too_short);
	if (bpf_skb_change_tail(skb, LINK_HLEN + quoted, 0) ||
	    bpf_skb_adjust_room(skb, inserted, BPF_ADJ_ROOM_MAC, 0) || bpf_skb_pull_data(skb, length))
		return DROP(EGRESS, DROP_WRITE_ERROR);
	start = packet_start(skb);
	if (start + length > packet_end(skb))
		return DROP(EGRESS, DROP_INVALID);
	turn_round(start, host_mac);
	ip = start + LINK_HLEN;
	message = (void *)(ip + 1);
	__builtin_memset(ip, 0, sizeof(*ip));
	ip->version = 6;
	ip->payload_len = bpf_htons(sizeof(*message) + quoted);
	ip->nexthdr = IPPROTO_ICMPV6;
	ip->hop_limit = error->hop_limit;
	__builtin_memcpy(&ip->saddr, &error->from, sizeof(ip->saddr));
	__builtin_memcpy(&ip->daddr, &error->to, sizeof(ip->daddr));
	__builtin_memset(message, 0, sizeof(*message));
	message->type = error->type;
	message->code = error->code;
	message->id = bpf_htons(error->mtu >> 16);
	message->sequence = bpf_htons(error->mtu);
	message->checksum = icmp6_checksum(ip, message, sizeof(*message) + quoted);
	return answer(skb, error->back);
}
