/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What comes before a packet's network header: Ethernet's, but on L3 devices (wireguard, tun, ipip) nothing.
 *
 * What both do is written once; the file that is compiled for the latter defines CONTEXT_L3.
 */
#pragma once

#include <linux/if_ether.h>

#include "lib/bpf.h"

/* As linux/if_ether.h has it, but not declared packed: that means access byte by byte. */
struct ethernet {
	__be16 destination[3];
	__be16 source[3];
	__be16 protocol;
};

/* The Ethernet header, or NULL. */
static __always_inline struct ethernet *packet_eth(const context_t *ctx)
{
	struct ethernet *eth = packet_start(ctx);

	return (void *)(eth + 1) <= packet_end(ctx) ? eth : NULL;
}

#ifdef CONTEXT_L3

#define LINK_HLEN 0

#ifndef l3_protocol
#define l3_protocol(ctx) ((__be16)(ctx)->protocol)
#endif

/* The protocol of the network header. */
static __always_inline __be16 packet_protocol(const context_t *ctx)
{
	return l3_protocol(ctx);
}

/* Give the packet an Ethernet header: what goes to a pod, or by another device, needs one. MACs are zero; of what was
 * read before nothing lies where it did. 0, or an error.
 */
static __always_inline long packet_frame(context_t *ctx)
{
	__be16 protocol = packet_protocol(ctx);
	struct ethernet *eth;

	if (bpf_skb_change_head(ctx, ETH_HLEN, 0))
		return -1;
	eth = packet_eth(ctx);
	if (!eth)
		return -1;
	eth->protocol = protocol;
	return 0;
}

#else

#define LINK_HLEN ETH_HLEN

/* The protocol of the network header, 0 if there is none. */
static __always_inline __be16 packet_protocol(const context_t *ctx)
{
	const struct ethernet *eth = packet_eth(ctx);

	return eth ? eth->protocol : 0;
}

/* It has one. */
static __always_inline long packet_frame(context_t *ctx)
{
	(void)ctx;
	return 0;
}

#endif
