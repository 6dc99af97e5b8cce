/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* ARP about IPv4 over Ethernet (RFC 826). */
#pragma once

#include "lib/packet.h"
#include "lib/rewrite.h"

#define ARPHRD_ETHER 1 /* RFC 826; linux/if_arp.h needs the C library */
#define ARPOP_REQUEST 1
#define ARPOP_REPLY 2

struct arp_ipv4 {
	struct ethernet eth;
	__be16 hardware;
	__be16 network;
	__u8 hardware_length;
	__u8 network_length;
	__be16 operation;
	__be16 sender_mac[3];
	__be16 sender_ip[2]; /* as halves, because it is not aligned to 4 bytes */
	__be16 target_mac[3];
	__be16 target_ip[2];
};

_Static_assert(sizeof(struct arp_ipv4) == 42, "RFC 826");

static __always_inline bool ip_equals(const __be16 halves[2], __be32 ipv4)
{
	return halves[0] == (__u16)ipv4 && halves[1] == (__u16)(ipv4 >> 16);
}

static __always_inline void move(__be16 *to, const __be16 *from, int halves)
{
	for (int i = 0; i < halves; i++)
		to[i] = from[i];
}

static __always_inline bool arp_is_request(const struct arp_ipv4 *packet)
{
	return packet->hardware == bpf_htons(ARPHRD_ETHER) && packet->network == bpf_htons(ETH_P_IP) &&
	       packet->hardware_length == ETH_ALEN && packet->network_length == 4 &&
	       packet->operation == bpf_htons(ARPOP_REQUEST);
}

/* Turn a request into its reply: the requested address is at this MAC. */
static __always_inline void arp_reply(struct arp_ipv4 *packet, mac_t mac)
{
	__be16 asker[2];

	packet->operation = bpf_htons(ARPOP_REPLY);
	move(packet->eth.destination, packet->sender_mac, 3);
	move(packet->target_mac, packet->sender_mac, 3);
	mac_write(packet->eth.source, mac);
	mac_write(packet->sender_mac, mac);
	move(asker, packet->sender_ip, 2);
	move(packet->sender_ip, packet->target_ip, 2);
	move(packet->target_ip, asker, 2);
}
